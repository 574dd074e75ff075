"""Streams of one decoder layer in a forward pass, captured by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor, nn

from struprune_plugin.layerwise.calls import LayerCall, split_call
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.units.group import UnitGroup

_HOLD_EVERY = 4  # sequences


@dataclass
class Stream:
    """Tensors of one group's module in the last forward pass, tokens flattened, padding included.

    :param residual: residual stream that the output is added to, shape [tokens, d]
    :param source: inputs of the producing linears, shape [tokens, d]
    :param inputs: inputs of the consuming linear, shape [tokens, n]
    :param output: outputs of the consuming linear, shape [tokens, d]
    """

    residual: Tensor
    source: Tensor
    inputs: Tensor
    output: Tensor


class Stopped(Exception):
    """Signal, not an error, that ends a forward pass once all wanted tensors are captured."""


@contextmanager
def capture_streams(
    layer: nn.Module, groups: Sequence[UnitGroup], stop: bool = False
) -> Iterator[Callable[[UnitGroup], Stream]]:
    """Capture streams in a decoder layer's forward passes; yield a function that returns a group's stream of the last pass, once.

    :param stop: end a pass with :class:`Stopped` once a consumer has run
    """
    seen: dict[tuple[str, str], Tensor] = {}
    handles = []

    def see_input(module: nn.Module, key: tuple[str, str]) -> None:
        def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            seen[key] = _flatten(split_call(args, kwargs)[1])

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def see_output(module: nn.Module, key: tuple[str, str]) -> None:
        def hook(_module: nn.Module, _args: tuple, output: Tensor) -> None:
            seen[key] = _flatten(output).clone()  # later code may write into it
            if stop and key[1] == "output":
                raise Stopped

        handles.append(module.register_forward_hook(hook))

    for group in groups:
        consumer = find_linear(layer, group.consumer)
        see_input(layer.get_submodule(group.join.residual), (group.name, "residual"))
        see_input(layer.get_submodule(next(iter(group.producers))), (group.name, "source"))
        see_input(consumer, (group.name, "inputs"))
        see_output(consumer, (group.name, "output"))
        if group.join.parallel:
            see_output(find_linear(layer, group.join.parallel), (group.name, "parallel"))

    def take(group: UnitGroup) -> Stream:
        stream = Stream(*(seen.pop((group.name, part)) for part in ("residual", "source", "inputs", "output")))
        if group.join.parallel:
            stream.residual = stream.residual + group.join.scale * seen.pop((group.name, "parallel"))
        return stream

    try:
        yield take
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replace_weights(layer: nn.Module, weights: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Run linears of a layer with other weights; the linears' parameters do not change.

    :param weights: (weight, bias) by the linear's name in the layer; the bias is used where the linear has one
    """

    def answer(linear: nn.Linear, weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
        def forward(inputs: Tensor) -> Tensor:
            own = None if linear.bias is None else bias.to(inputs)
            return nn.functional.linear(inputs, weight.to(inputs), own)

        return forward

    with ExitStack() as stack:
        for name, (weight, bias) in weights.items():
            linear = find_linear(layer, name)
            stack.enter_context(patch_attr(linear, "forward", answer(linear, weight, bias)))
        yield


def _flatten(hidden: Tensor) -> Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1])


def split_tokens(tokens: Tensor | None, num_tokens: int, length: int) -> list[Any]:
    """Return one slice or index tensor per sequence that selects the counted tokens of a micro-batch.

    Sums accumulated sequence by sequence do not depend on how sequences are split into batches.

    :param tokens: flat indices of the counted tokens, sorted, shape [counted]; None where all count
    :param num_tokens: tokens of the micro-batch, padding included
    :param length: tokens per sequence, padding included
    """
    if tokens is None:
        return [slice(start, start + length) for start in range(0, num_tokens, length)]
    return list(tokens.split(torch.bincount(tokens // length, minlength=num_tokens // length).tolist()))


def hold_tokens(call: LayerCall, first: int) -> tuple[Tensor, Tensor]:
    """Return the flat indices of the tokens that are not padding, int64: those of counted sequences, those of held-out ones.

    Every fourth sequence is held out.

    :param first: number of sequences before this batch
    """
    batch, length = call.batch_shape
    apart = (torch.arange(first + 1, first + batch + 1) % _HOLD_EVERY == 0).repeat_interleave(length)
    valid = torch.ones_like(apart)
    if call.tokens is not None:
        valid = torch.zeros_like(apart).index_fill(0, call.tokens.cpu(), True)
    return (valid & ~apart).nonzero().flatten(), (valid & apart).nonzero().flatten()


@dataclass(frozen=True)
class Visit:
    """Inputs of one group's module on one micro-batch, and the target of its consumer.

    :param source: inputs of the producing linears, shape [tokens, d]
    :param inputs: inputs of the consuming linear, shape [tokens, n]
    :param target: target output of the consumer, shape [tokens, d], float32
    :param call: the layer's call: batch shape, attention mask, tokens that are not padding
    :param rows: for an expert, the token of every row, sorted, shape [rows], int64; None where every token has one row
    :param weights: factors on errors, shape [rows], for an expert including the router's weights; None for ones
    """

    source: Tensor
    inputs: Tensor
    target: Tensor
    call: LayerCall
    rows: Tensor | None = None
    weights: Tensor | None = None

    def split(self, tokens: Tensor | None) -> list[Any]:
        """Return one selector per sequence of the counted tokens' rows, as :func:`split_tokens` does.

        :param tokens: flat indices of the counted tokens, sorted, shape [counted], int64; None where all count
        """
        batch, length = self.call.batch_shape
        if self.rows is None:
            return split_tokens(tokens, len(self.inputs), length)
        picked = torch.arange(len(self.rows), device=self.rows.device)
        if tokens is not None:
            counts = torch.zeros(batch * length, dtype=torch.bool, device=self.rows.device)
            counts[tokens] = True
            picked = counts[self.rows].nonzero().flatten()
        return list(picked.split(torch.bincount(self.rows[picked] // length, minlength=batch).tolist()))
