"""What flows through one decoder layer during calibration, seen by hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from llmcompressor.modifiers.utils.hooks import HooksMixin
from torch import Tensor, nn
from tqdm import tqdm

from struprune_plugin.statistics import Moments, accumulate_moments, is_finite, make_moments
from struprune_plugin.surgery import read_weight
from struprune_plugin.topology import UnitGroup, find_linear


@dataclass
class Stream:
    """The last forward pass of one group's module, tokens flattened.

    :param residual: residual stream before the module, shape [tokens, d]
    :param inputs: inputs of the consuming linear, shape [tokens, n]
    :param output: its outputs, shape [tokens, d]
    """

    residual: Tensor | None = None
    inputs: Tensor | None = None
    output: Tensor | None = None

    def select(self, tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (residual, inputs, output) of the given tokens (all where None), and forget them."""
        residual, inputs, output = (_pick(part, tokens) for part in (self.residual, self.inputs, self.output))
        self.residual = self.inputs = self.output = None
        return residual, inputs, output


@contextmanager
def capture_streams(layer: nn.Module, groups: Sequence[UnitGroup]) -> Iterator[dict[str, Stream]]:
    """Watch a decoder layer's forward passes; the dictionary, by group name, holds what the last one showed."""
    streams = {group.name: Stream() for group in groups}
    handles = []
    for group in groups:
        stream = streams[group.name]

        def see_residual(_module: nn.Module, args: tuple, kwargs: dict, stream: Stream = stream) -> None:
            stream.residual = _flatten(_first(args, kwargs))

        def see_consumer(_module: nn.Module, args: tuple, output: Tensor, stream: Stream = stream) -> None:
            stream.inputs, stream.output = _flatten(args[0]), _flatten(output)

        residual = layer.get_submodule(group.residual)
        handles.append(residual.register_forward_pre_hook(see_residual, with_kwargs=True))
        handles.append(find_linear(layer, group.consumer).register_forward_hook(see_consumer))
    try:
        yield streams
    finally:
        for handle in handles:
            handle.remove()


def _pick(part: Tensor | None, tokens: Tensor | None) -> Tensor:
    assert part is not None, "the layer has not run"
    return part if tokens is None else part[tokens.to(part.device)]


def _first(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _flatten(hidden: Tensor) -> Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1])


@dataclass
class LayerCall:
    """One call of a decoder layer, kept on the host so that it can be repeated.

    :param hidden: hidden states, shape [batch, sequence, d]
    :param kwargs: the other arguments; equal tensors of successive batches are held once
    :param tokens: indices of the tokens that are no padding, shape [kept]; None where all are
    """

    hidden: Tensor
    kwargs: dict[str, Any]
    tokens: Tensor | None
    device: torch.device

    @classmethod
    def record(cls, args: tuple, kwargs: dict[str, Any], previous: LayerCall | None) -> LayerCall:
        hidden = _first(args, kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        known = previous.kwargs if previous else {}
        held = {name: _hold(value, known.get(name)) for name, value in rest.items()}
        return cls(hidden.detach().cpu(), held, find_tokens(rest.get("attention_mask")), hidden.device)

    def repeat(self, layer: nn.Module, hidden: Tensor | None = None) -> Tensor:
        """Run the layer again, on other hidden states where given; return its output on the device."""
        kwargs = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in self.kwargs.items()}
        output = layer((self.hidden if hidden is None else hidden).to(self.device), **kwargs)
        return output[0] if isinstance(output, tuple) else output


def _hold(value: Any, known: Any) -> Any:
    """Move a tensor to the host, or reuse the equal one that is there already."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    same = isinstance(known, Tensor) and known.shape == value.shape and known.dtype == value.dtype
    return known if same and torch.equal(known, value) else value


def find_tokens(mask: Tensor | None) -> Tensor | None:
    """Return the flat indices of the tokens that are no padding, read off the layer's attention mask.

    A token that may not attend to itself is padding.

    :param mask: additive or boolean, shape [batch, 1, sequence, sequence]; None where nothing is padded
    :return: shape [kept], int64; None where all tokens count
    """
    if mask is None:
        return None
    diagonal = mask[:, 0].diagonal(dim1=1, dim2=2)
    valid = diagonal if mask.dtype == torch.bool else diagonal == 0
    return None if valid.all() else valid.reshape(-1).nonzero().flatten()


def make_group_moments(layer: nn.Module, group: UnitGroup) -> Moments:
    """Return empty float32 moments for a group's consumer, on the device of its weights."""
    weight, _ = read_weight(find_linear(layer, group.consumer))
    return make_moments(weight.shape[1], weight.shape[0], weight.device, torch.float32)


def accumulate_stream(moments: Moments, inputs: Tensor, targets: Tensor, group: UnitGroup) -> None:
    """Add one micro-batch and refuse what is not finite.

    :raises ValueError: NaN or Inf among the activations; the message names the linear
    """
    accumulate_moments(moments, inputs, targets.to(inputs.device))
    if not is_finite(moments):
        raise ValueError(
            f"{group.name}: activations must be finite, got NaN or Inf in its inputs or targets. "
            "Load the model in a wider dtype (bfloat16 or float32), or repair the checkpoint."
        )


class LayerObserver:
    """Statistics of one decoder layer after the other, with the dense path propagated beside the pruned one.

    While the host runs a layer on the pruned path's inputs, the statistics of its first group are gathered, and the
    dense layer runs on the dense hidden states. Once that group is pruned, :meth:`collect_moments` runs the layer again
    for the next. Hidden states live on the host; a micro-batch at a time visits the device.

    :param target: ``residual``, ``block`` or ``local``, see method.md section 2
    """

    def __init__(self, target: Literal["residual", "block", "local"]):
        self.target = target
        self._dense: list[Tensor] = []  # dense hidden states that enter the current layer, by batch
        self._next_dense: list[Tensor] = []
        self._calls: list[LayerCall] = []
        self._targets: dict[str, list[Tensor]] = {}  # of the groups after the first, by batch
        self._moments: Moments | None = None
        self._watch = ExitStack()

    def before_layer(self, layer: nn.Module, groups: Sequence[UnitGroup], args: tuple, kwargs: dict[str, Any]) -> None:
        """Take the arguments of a layer's call; run the dense path; watch the call for the first group."""
        call = LayerCall.record(args, kwargs, self._calls[-1] if self._calls else None)
        self._calls.append(call)
        targets = self._run_dense(layer, groups, call)
        if not groups:
            return
        first = groups[0]
        for group in groups[1:]:
            self._targets.setdefault(group.name, []).append(targets[group.name].cpu())
        moments = self._moments = self._moments or make_group_moments(layer, first)
        stream = self._watch.enter_context(capture_streams(layer, [first]))[first.name]
        self._watch.callback(lambda: self._accumulate(moments, first, stream, call.tokens, targets[first.name]))

    def after_layer(self) -> None:
        """Close the watch that :meth:`before_layer` opened, and count what it saw."""
        self._watch.close()

    def collect_moments(self, layer: nn.Module, group: UnitGroup, progress: str) -> Moments:
        """Return the moments of the next group: gathered already for a layer's first, by a pass for the others."""
        if self._moments is not None:
            moments, self._moments = self._moments, None
            return moments
        moments = make_group_moments(layer, group)
        with HooksMixin.disable_hooks(), capture_streams(layer, [group]) as streams:
            for index, call in enumerate(tqdm(self._calls, desc=progress)):
                call.repeat(layer)
                target = self._targets[group.name][index]
                self._accumulate(moments, group, streams[group.name], call.tokens, target)
        return moments

    def finish_layer(self) -> None:
        """Forget the layer; its dense outputs become the next layer's dense inputs."""
        self._dense, self._next_dense = self._next_dense, []
        self._calls.clear()
        self._targets.clear()
        self._moments = None

    def close(self) -> None:
        self._watch.pop_all()
        self.__init__(self.target)  # type: ignore[misc]

    def _run_dense(self, layer: nn.Module, groups: Sequence[UnitGroup], call: LayerCall) -> dict[str, Tensor]:
        """Run the still dense layer on the dense hidden states; return every group's target, [tokens, d], float32."""
        if self.target == "local":
            return {group.name: call.hidden.new_empty(0) for group in groups}
        dense = self._dense[len(self._next_dense)] if self._dense else call.hidden
        targets = {}
        with HooksMixin.disable_hooks(), capture_streams(layer, groups) as streams:
            self._next_dense.append(call.repeat(layer, dense).cpu())
            for group in groups:
                residual, _, output = streams[group.name].select(call.tokens)
                targets[group.name] = output.float() + (residual.float() if self.target == "residual" else 0)
        return targets

    def _accumulate(
        self, moments: Moments, group: UnitGroup, stream: Stream, tokens: Tensor | None, target: Tensor
    ) -> None:
        residual, inputs, output = stream.select(tokens)
        if self.target == "local":
            target = output
        elif self.target == "residual":
            target = target.to(residual.device) - residual.float()
        accumulate_stream(moments, inputs, target, group)
