"""Streams of one decoder layer in a forward pass, captured by hooks."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from compressed_tensors.utils import patch_attrs
from torch import Tensor, nn

from struprune_plugin.layerwise.calls import LayerCall, list_parts, list_tensors, map_tensors, split_call
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext

_EPS = 1e-6  # of most norms
_FAINT = 0.1  # of the RMS of a norm's factors: what lies below is not divided by


class Stopped(Exception):
    """Signal, not an error, that ends a forward pass once all that is wanted of it is known."""


@dataclass(frozen=True)
class ModuleTensors:
    """What modules of a decoder layer got and returned in its last forward pass, by name; tokens flattened, padding included.

    :param inputs: shape [tokens, features]
    :param outputs: copies, shape [tokens, features]
    :param arguments: all positional arguments
    :param gains: of norms behind consumers: what they return for a token of ones, shape [d]
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    arguments: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)

    def find_source(self, group: UnitGroup) -> Tensor:
        """Return the inputs of a group's producing linears, shape [tokens, d]."""
        return self.inputs[next(iter(group.producers))]

    def read_residual(self, group: UnitGroup) -> Tensor:
        """Return the residual stream that a group's output is added to, in units of it, shape [tokens, d], float32."""
        residual, scale = self.inputs[group.join.residual], group.join.scale
        if group.join.parallel:
            residual = residual + scale * self.outputs[group.join.parallel]
        return residual.float() if scale == 1 else residual.float() / scale

    def read_added(self, group: UnitGroup) -> Tensor:
        """Return what a group adds to the residual stream, its output or what the norm behind it returns, [tokens, d], float32."""
        return self.outputs[group.join.normalizer or group.consumer].float()

    def read_gain(self, group: UnitGroup) -> Tensor:
        """Return the factor of the norm behind a group on every channel, shape [d], float32; infinite where it is nearly 0."""
        gain = self.gains[group.join.normalizer].float()
        return gain.masked_fill(gain.abs() < _FAINT * gain.square().mean().sqrt(), torch.inf)

    def read_factors(self, group: UnitGroup) -> Tensor | None:
        """Return the inverse RMS of every token's output that a norm rescales, shape [tokens], float32; None without a norm.

        An error of that output reaches the residual stream divided by its RMS.
        """
        return measure_rms(self.outputs[group.join.norm]).reciprocal() if group.join.norm else None

    def read_sum(self, group: UnitGroup) -> Tensor:
        """Return the residual stream after the sum of a group's experts, in units of the sum, shape [tokens, d], float32.

        A layer's own output is rounded to its dtype, which hides small errors where some channels of the stream are large.
        """
        return self.inputs[group.join.residual].float() / group.join.scale + self.outputs[group.join.block].float()


def measure_rms(output: Tensor) -> Tensor:
    """Return what a norm divides a token by, the RMS, at least that of its eps, shapes [tokens, d] -> [tokens], float32."""
    return (output.float().square().mean(-1) + _EPS).sqrt()


@contextmanager
def record(layer: nn.Module, groups: Sequence[UnitGroup], stop: bool = False) -> Iterator[ModuleTensors]:
    """Record what the modules around groups get and return in a decoder layer's forward passes.

    :param stop: end a pass with :class:`Stopped` where a single group is known once its consumer, and a norm behind it, have run
    """
    tensors, consumers = ModuleTensors(), {group.consumer for group in groups}
    stop = stop and len(groups) == 1 and not (groups[0].join.parallel or groups[0].join.block)
    stop = stop and groups[0].join.norm in ("", groups[0].consumer)
    norms = {g.join.normalizer for g in groups}
    last = groups[0].join.normalizer or groups[0].consumer if stop else ""
    inputs = {name for g in groups for name in (g.join.residual, next(iter(g.producers)), g.consumer)}
    inputs |= {group.mixture for group in groups if group.mixture}
    outputs = consumers | {
        name for g in groups for name in (g.join.parallel, g.join.block, g.join.norm, g.join.normalizer) if name
    }

    def forget(_layer: nn.Module, _args: tuple) -> None:
        for part in vars(tensors).values():
            part.clear()

    def see_input(name: str, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tensors.inputs[name], tensors.arguments[name] = _flatten(split_call(args, kwargs)[1]), args

    def see_output(name: str, module: nn.Module, _args: tuple, output: Any) -> None:
        tensors.outputs[name] = _flatten(list_parts(output)[0]).clone()  # later code may write into it
        if name in norms:
            tensors.gains[name] = module.forward(output.new_ones(1, 1, output.shape[-1]))[0, 0].detach()
        if name == last:
            raise Stopped

    with ExitStack() as stack:
        stack.callback(layer.register_forward_pre_hook(forget, prepend=True).remove)
        for name in inputs:
            see = partial(see_input, name)
            stack.callback(layer.get_submodule(name).register_forward_pre_hook(see, with_kwargs=True).remove)
        for name in outputs:
            stack.callback(layer.get_submodule(name).register_forward_hook(partial(see_output, name)).remove)
        yield tensors


@contextmanager
def keep_outputs(layer: nn.Module, names: Iterable[str], call: LayerCall, context: DeviceContext) -> Iterator[None]:
    """Record what modules return in a run of a call, for :func:`replay`; nothing where the layer may fill mappings. Where layers
    compute in float32, it waits in the dtype of the hidden states."""
    call.known.clear()
    dtype = call.hidden.dtype

    def store(part: Tensor) -> Tensor:
        is_wide = dtype in context.widened and part.dtype is torch.float32
        return context.offload(part.to(dtype) if is_wide else part.clone())

    def keep(name: str, _module: nn.Module, _args: tuple, output: Any) -> None:
        if len(list_tensors(output)) == 1:  # attention maps are large, and no layer reads them
            call.known.setdefault(name, []).append(map_tensors(store, output))

    with ExitStack() as stack:
        for name in () if any(isinstance(value, MutableMapping) for value in call.arguments.values()) else names:
            stack.callback(layer.get_submodule(name).register_forward_hook(partial(keep, name)).remove)
        yield


@contextmanager
def replay(layer: nn.Module, call: LayerCall, context: DeviceContext) -> Iterator[None]:
    """Let modules return what :func:`keep_outputs` recorded, once, in place of running."""

    def send(part: Tensor) -> Tensor:
        part = context.to_device(part, call.device)
        return part.float() if part.dtype in context.widened else part

    def forward(outputs: list[Any], /, *_args: Any, **_kwargs: Any) -> Any:
        return map_tensors(send, outputs.pop(0))

    held = list_tensors(list(call.known.values()))
    forwards = [partial(forward, outputs) for outputs in call.known.values()]
    with patch_attrs(map(layer.get_submodule, call.known), "forward", forwards):
        yield
    for part in held:
        context.discard(part)
    call.known.clear()


@contextmanager
def replace_weights(layer: nn.Module, weights: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Run linears of a layer with other (weight, bias), by name; their parameters do not change."""

    def forward(linear: nn.Linear, weight: Tensor, bias: Tensor, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, weight.to(inputs), None if linear.bias is None else bias.to(inputs))

    linears = [find_linear(layer, name) for name in weights]
    forwards = [partial(forward, linear, *new) for linear, new in zip(linears, weights.values(), strict=True)]
    with patch_attrs(linears, "forward", forwards):
        yield


def _flatten(hidden: Tensor) -> Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1])


def split_tokens(call: LayerCall) -> list[slice]:
    """Return the rows of one sequence after the other of a micro-batch's tokens, without padding, which is behind them.

    Sums accumulated sequence by sequence do not depend on how sequences are split into batches.
    """
    starts = range(0, call.tokens.numel(), call.tokens.shape[1])
    return [slice(start, start + count) for start, count in zip(starts, call.tokens.sum(1).tolist(), strict=True)]


def join_rows(parts: Iterable[slice], device: torch.device) -> list[slice]:
    """Return rows as they are added: on a CPU sequence by sequence, so that sums do not depend on the batches; elsewhere those that
    follow one another are joined, because larger products keep a GPU busy."""
    joined: list[slice] = []
    for part in parts:
        if joined and device.type != "cpu" and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


@dataclass(frozen=True)
class ConsumerBatch:
    """Inputs of one group's consumer on one micro-batch, and its target.

    :param source: inputs of the producing linears, shape [tokens, d]; empty for an expert
    :param inputs: inputs of the consuming linear, shape [tokens, n], in the module's order, see :meth:`UnitGroup.to_unit_order`
    :param target: target output of the consumer, shape [tokens, d], float32
    :param call: the layer's call: batch shape, attention mask, tokens that are not padding
    :param counts: for an expert, the number of rows of every sequence; its rows are tokens that count, in their order
    :param factors: factors on errors, shape [rows], for an expert including the router's weights; None for ones
    """

    source: Tensor
    inputs: Tensor
    target: Tensor
    call: LayerCall
    counts: Sequence[int] | None = None
    factors: Tensor | None = None

    def split(self) -> list[slice]:
        """Return the rows that count of one sequence after the other, as :func:`split_tokens` does."""
        if self.counts is None:
            return split_tokens(self.call)
        stops = list(itertools.accumulate(self.counts))
        return [slice(stop - count, stop) for stop, count in zip(stops, self.counts, strict=True)]
