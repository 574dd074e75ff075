"""What flows through one decoder layer during calibration, seen by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from compressed_tensors.utils import patch_attr
from llmcompressor.modifiers.utils.hooks import HooksMixin
from torch import Tensor, nn
from tqdm import tqdm

from struprune_plugin.modifiers.budget import WHOLE, Placement
from struprune_plugin.modifiers.distributed import count_ranks, reduce_sums
from struprune_plugin.modifiers.memory import to_device, to_host, work_on_host
from struprune_plugin.statistics import Moments, MomentSums, add_moments, reorder_moments
from struprune_plugin.topology import UnitGroup, find_linear

_HOLD_EVERY = 4  # sequences


@dataclass
class Stream:
    """The last forward pass of one group's module, tokens flattened, padding included.

    :param residual: residual stream that the output is added to, shape [tokens, d]
    :param source: inputs of the producing linears, shape [tokens, d]
    :param inputs: inputs of the consuming linear, shape [tokens, n]
    :param output: its outputs, shape [tokens, d]; None where the pass stopped before it
    """

    residual: Tensor
    source: Tensor
    inputs: Tensor
    output: Tensor | None


class _Stopped(Exception):
    """No error: ends a forward pass that has shown all that was asked."""


@contextmanager
def capture_streams(
    layer: nn.Module, groups: Sequence[UnitGroup], stop: bool = False
) -> Iterator[Callable[[UnitGroup], Stream]]:
    """Watch a decoder layer's forward passes; the function given returns, once, what the last one showed of a group.

    :param stop: end a pass with an exception once a consumer is reached
    """
    seen: dict[tuple[str, str], Tensor] = {}
    handles = []
    for group in groups:

        def see(part: str, name: str = group.name) -> Callable[[nn.Module, tuple, dict], None]:
            def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
                seen[name, part] = _flatten(_first(args, kwargs))

            return hook

        def see_inputs(_module: nn.Module, args: tuple, name: str = group.name) -> None:
            seen[name, "inputs"] = _flatten(args[0])
            if stop:
                raise _Stopped

        def see_output(_module: nn.Module, _args: tuple, output: Tensor, name: str = group.name) -> None:
            seen[name, "output"] = _flatten(output)

        def see_parallel(_module: nn.Module, args: tuple, output: Tensor, name: str = group.name) -> None:
            seen[name, "parallel"] = _flatten(output)

        for part, module in (("residual", group.residual), ("source", next(iter(group.producers)))):
            handles.append(layer.get_submodule(module).register_forward_pre_hook(see(part), with_kwargs=True))
        if group.parallel:
            handles.append(find_linear(layer, group.parallel).register_forward_hook(see_parallel))
        handles.append(find_linear(layer, group.consumer).register_forward_pre_hook(see_inputs))
        handles.append(find_linear(layer, group.consumer).register_forward_hook(see_output))

    def take(group: UnitGroup) -> Stream:
        residual, source, inputs = (seen.pop((group.name, part)) for part in ("residual", "source", "inputs"))
        stream = Stream(residual, source, inputs, seen.pop((group.name, "output"), None))
        if group.parallel:
            stream.residual = stream.residual + seen.pop((group.name, "parallel"))
        return stream

    try:
        yield take
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _skip_linears(layer: nn.Module, groups: Sequence[UnitGroup]) -> Iterator[None]:
    """Let the linears of groups give zeros at once, in a pass whose output nobody reads."""

    def answer(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda hidden: hidden.new_zeros(()).expand(*hidden.shape[:-1], linear.out_features)

    with ExitStack() as stack:
        for group in groups:
            for name in (*group.producers, group.consumer):
                linear = find_linear(layer, name)
                stack.enter_context(patch_attr(linear, "forward", answer(linear)))
        yield


def _first(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _flatten(hidden: Tensor) -> Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1])


@dataclass
class LayerCall:
    """One call of a decoder layer, kept on the host so that it can be repeated.

    :param hidden: hidden states, shape [batch, sequence, d]
    :param args: the other positional arguments; equal tensors of successive batches are held once
    :param kwargs: the other named arguments, the same
    :param tokens: indices of the tokens that are no padding, shape [kept]; None where all are
    """

    hidden: Tensor
    args: tuple
    kwargs: dict[str, Any]
    tokens: Tensor | None
    device: torch.device

    @classmethod
    def record(cls, args: tuple, kwargs: dict[str, Any], previous: LayerCall | None) -> LayerCall:
        hidden = _first(args, kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        known = previous or cls(hidden, (), {}, None, hidden.device)
        held = {name: _hold(value, known.kwargs.get(name)) for name, value in rest.items()}
        return cls(
            to_host(hidden),
            _hold(args[1:], known.args),
            held,
            find_tokens(rest.get("attention_mask")),
            hidden.device,
        )

    def repeat(self, layer: nn.Module, hidden: Tensor | None = None) -> Tensor:
        """Run the layer again, on other hidden states where given; return its output on the device."""
        kwargs = {name: _send(value, self.device) for name, value in self.kwargs.items()}
        hidden = to_device(self.hidden if hidden is None else hidden, self.device)
        output = layer(hidden, *_send(self.args, self.device), **kwargs)
        return output[0] if isinstance(output, tuple) else output


def _hold(value: Any, known: Any) -> Any:
    """Move a tensor, or a tuple of them, to the host, or reuse the equal one that is there already."""
    if isinstance(value, tuple):
        others = known if isinstance(known, tuple) and len(known) == len(value) else (None,) * len(value)
        return tuple(_hold(part, other) for part, other in zip(value, others, strict=True))
    if not isinstance(value, Tensor):
        return value
    value = to_host(value)
    same = isinstance(known, Tensor) and known.shape == value.shape and known.dtype == value.dtype
    return known if same and torch.equal(known, value) else value


def _send(value: Any, device: torch.device) -> Any:
    """Move a tensor, or a tuple of them, to a device."""
    if isinstance(value, tuple):
        return tuple(_send(part, device) for part in value)
    return to_device(value, device) if isinstance(value, Tensor) else value


def find_tokens(mask: Tensor | None) -> Tensor | None:
    """Return the flat indices of the tokens that are no padding, read off the layer's attention mask.

    A token that may not attend to itself is padding.

    :param mask: additive or boolean, shape [batch, 1, sequence, sequence]; None where nothing is padded
    :return: shape [kept], int64, on the host; None where all tokens count
    """
    if mask is None:
        return None
    diagonal = mask[:, 0].diagonal(dim1=1, dim2=2)
    valid = diagonal if mask.dtype == torch.bool else diagonal == 0
    return None if valid.all() else to_host(valid.reshape(-1).nonzero().flatten())


def _reorder(moments: Moments, group: UnitGroup) -> Moments:
    """Bring the inputs of moments gathered in the module's order to unit order."""
    if group.repeats == 1:
        return moments
    order = torch.arange(group.num_columns, device=moments.gram.device)
    return reorder_moments(moments, group.to_unit_order(order))


def make_group_sums(
    layer: nn.Module, group: UnitGroup, device: torch.device, placement: Placement = WHOLE, apart: bool = False
) -> MomentSums:
    """Return empty float32 sums for a group's consumer, on a device or, where the placement says so, on the host.

    :param device: where its inputs are
    :param apart: of sequences held out
    """
    consumer = find_linear(layer, group.consumer)
    sizes = consumer.in_features, consumer.out_features
    if not (placement.hold_on_host if apart else placement.gather_on_host):
        return MomentSums(*sizes, device, torch.float32, placement.tokens)
    with work_on_host() as host:
        return MomentSums(*sizes, host, torch.float32, placement.tokens, placement.rows, to_host)


def accumulate_tokens(
    sums: MomentSums, inputs: Tensor, targets: Tensor, tokens: Tensor | None, group: UnitGroup
) -> None:
    """Add the tokens of one micro-batch that are no padding, and refuse what is not finite.

    :raises ValueError: NaN or Inf among the activations; the message names the linear
    """
    targets = to_device(targets, inputs.device)
    if tokens is not None:
        tokens = to_device(tokens, inputs.device)
        inputs, targets = inputs[tokens], targets[tokens]
    sums.add(inputs, targets)
    if not sums.is_finite():
        raise ValueError(
            f"{group.name}: activations must be finite, got NaN or Inf in its inputs or targets. "
            "Load the model in a wider dtype (bfloat16 or float32), or repair the checkpoint."
        )


@dataclass(frozen=True)
class Visit:
    """One micro-batch of one group: what its module sees, and what its consumer should give.

    :param source: inputs of the producing linears, shape [tokens, d]
    :param inputs: inputs of the consuming linear, shape [tokens, n]
    :param target: wanted output of the consumer, shape [tokens, d], float32
    :param call: the layer's call: batch shape, attention mask, tokens that are no padding
    """

    source: Tensor
    inputs: Tensor
    target: Tensor
    call: LayerCall


class LayerObserver:
    """Statistics of one decoder layer after the other, with the dense path propagated beside the pruned one.

    While the host runs a layer on the pruned path's inputs, the statistics of its first group are gathered, and the
    dense layer runs on the dense hidden states. Once that group is pruned, the layer runs again for the next.
    Hidden states live on the host; a micro-batch at a time visits the device.

    :param target: ``residual``, ``block`` or ``local``, see method.md section 2
    :param hold_out: gather the moments of every fourth sequence apart, too
    :param placement: where the moments live
    :param all_groups: gather the statistics of all groups at once, for a pass that changes nothing
    :param num_before: sequences of the processes before this one, so that every fourth is counted through all
    """

    def __init__(
        self,
        target: Literal["residual", "block", "local"],
        all_groups: bool = False,
        hold_out: bool = False,
        placement: Placement = WHOLE,
        num_before: int = 0,
    ):
        self.placement = placement
        self.target = target
        self._num_before = num_before
        self.all_groups = all_groups
        self.hold_out = hold_out
        self._held: dict[str, MomentSums] = {}
        self._held_moments: dict[str, Moments] = {}
        self._visits: dict[str, int] = {}  # sequences seen, by group
        self._dense: list[Tensor] = []  # dense hidden states that enter the current layer, by batch
        self._next_dense: list[Tensor] = []
        self._calls: list[LayerCall] = []
        self._targets: dict[str, list[Tensor]] = {}  # by group and batch; without the residual still to subtract
        self._sums: dict[str, MomentSums] = {}
        self._propagates = False
        self._notice = ExitStack()
        self._watch = ExitStack()
        self._count: Callable[[Tensor], None] = lambda _output: None  # takes in what the watch saw

    def before_layer(self, layer: nn.Module, groups: Sequence[UnitGroup], args: tuple, kwargs: dict[str, Any]) -> None:
        """Take the arguments of a layer's call; run the dense path; watch the call for the first group.

        In the first layer the two paths are one, which is run once.
        """
        call = LayerCall.record(args, kwargs, self._calls[-1] if self._calls else None)
        self._calls.append(call)
        counted = groups if self.all_groups else groups[:1]
        is_dense = self.target != "local" and not self._dense
        if self._dense:
            self._run_dense(layer, groups, call)
        watched = groups if is_dense else counted
        take = self._watch.enter_context(capture_streams(layer, watched))
        if self._propagates and not any(group.parallel for group in watched):
            self._watch.enter_context(_skip_linears(layer, groups[len(watched) :]))

        def count(output: Tensor) -> None:
            streams = {group.name: take(group) for group in watched}
            if is_dense:
                self._keep_targets(groups, streams, output)
            for group in counted:
                self._accumulate(layer, group, self._make_visit(group, streams[group.name], call))

        self._count = count

    def after_layer(self, output: Any) -> None:
        """Close the watch that :meth:`before_layer` opened, and count what it saw."""
        self._watch.close()
        self._count(output[0] if isinstance(output, tuple) else output)

    def collect_moments(self, layer: nn.Module, group: UnitGroup, progress: str) -> Moments:
        """Return the moments of the next group: gathered already for a layer's first, by a pass for the others.

        :return: of all processes' batches, whole in the first; inputs in unit order
        """
        if group.name not in self._sums:
            for visit in self.visit_batches(layer, group, progress):
                self._accumulate(layer, group, visit)
        sums, held = self._sums.pop(group.name), self._held.pop(group.name, None)
        moments = self._finish(sums, group)
        if held is not None:
            self._held_moments[group.name] = self._finish(held, group)
            add_moments(moments, self._held_moments[group.name])
        return moments

    def _finish(self, sums: MomentSums, group: UnitGroup) -> Moments:
        """Return sums as moments, on the host where its systems are solved there; those of other processes added."""
        reduce_sums(sums.list_parts())
        with work_on_host() if self.placement.solve_on_host else nullcontext():
            return _reorder(sums.gather(to_host if self.placement.solve_on_host else None), group)

    def visit_batches(self, layer: nn.Module, group: UnitGroup, progress: str) -> Iterator[Visit]:
        """Run the layer, as it now is, on every recorded batch of the pruned path."""
        known = len(self._targets.get(group.name, ())) == len(self._calls)
        with HooksMixin.disable_hooks(), capture_streams(layer, [group], known and not group.parallel) as take:
            for index, call in enumerate(tqdm(self._calls, desc=progress)):
                with suppress(_Stopped):
                    call.repeat(layer)
                yield self._make_visit(group, take(group), call, index)

    def take_held(self, group: UnitGroup) -> Moments | None:
        """Return the moments of a group's held-out sequences, inputs in unit order, once; None where there are none."""
        held = self._held_moments.pop(group.name, None)
        return held if held is not None and held.num_tokens else None

    def list_block_pairs(self) -> tuple[list[LayerCall], list[Tensor]]:
        """Return the layer's calls on the pruned path, and its dense outputs on the dense path, by batch, on the host."""
        return self._calls, self._next_dense

    def finish_layer(self) -> None:
        """Forget the layer; its dense outputs become the next layer's dense inputs."""
        self._dense, self._next_dense = self._next_dense, []
        self._calls.clear()
        self._targets.clear()
        self._sums.clear()
        self._held.clear()
        self._held_moments.clear()
        self._visits.clear()

    def watch_propagation(self, layer: nn.Module) -> None:
        """Notice that a finished layer runs again: the host then reads no outputs of its calibration passes."""
        self._notice.close()

        def see(_module: nn.Module, _args: tuple) -> None:
            self._propagates = True

        if not self._propagates:
            self._notice.callback(layer.register_forward_pre_hook(see).remove)

    def close(self) -> None:
        """Take all hooks off."""
        self._watch.close()
        self._notice.close()

    def _run_dense(self, layer: nn.Module, groups: Sequence[UnitGroup], call: LayerCall) -> None:
        """Run the still dense layer on the dense hidden states."""
        with HooksMixin.disable_hooks(), capture_streams(layer, groups) as take:
            output = call.repeat(layer, self._dense[len(self._next_dense)])
            self._keep_targets(groups, {group.name: take(group) for group in groups}, output)

    def _keep_targets(self, groups: Sequence[UnitGroup], streams: Mapping[str, Stream], output: Tensor) -> None:
        """Keep what a dense forward pass showed of the targets, and its output, on the host."""
        self._next_dense.append(to_host(output))
        for group in groups:
            stream = streams[group.name]
            assert stream.output is not None
            wanted = stream.output.float() + (stream.residual.float() if self._is_residual(group) else 0)
            self._targets.setdefault(group.name, []).append(to_host(wanted))

    def _make_visit(self, group: UnitGroup, stream: Stream, call: LayerCall, index: int = -1) -> Visit:
        """Complete a target; ``local`` ones are what the consumer gave when the group was first visited."""
        stored = self._targets.setdefault(group.name, [])
        if self.target == "local" and (index == -1 or index >= len(stored)):
            assert stream.output is not None
            stored.append(to_host(stream.output.float()))
        target = to_device(stored[index], stream.inputs.device)
        if self._is_residual(group):
            target = target - stream.residual.float()
        return Visit(stream.source, stream.inputs, target, call)

    def _is_residual(self, group: UnitGroup) -> bool:
        """Tell whether a group's target is the residual stream; past a norm, the dense output is all that can be asked."""
        return self.target == "residual" and not group.normed_output

    def _accumulate(self, layer: nn.Module, group: UnitGroup, visit: Visit) -> None:
        """Count every token once: with the rest or, in sequences held out, apart; the two are added when all are counted."""

        def add(store: dict[str, MomentSums], tokens: Tensor | None, apart: bool) -> None:
            if group.name not in store:
                store[group.name] = make_group_sums(layer, group, visit.inputs.device, self.placement, apart)
            accumulate_tokens(store[group.name], visit.inputs, visit.target, tokens, group)

        tokens = visit.call.tokens
        if self.hold_out:
            first = self._visits.get(group.name, self._num_before)
            self._visits[group.name] = first + len(visit.call.hidden)
            rest, apart = _split_tokens(visit.call, first)
            tokens = rest if len(apart) else tokens
            if len(apart) or count_ranks() > 1:  # with several processes empty ones are sent too
                add(self._held, apart, apart=True)
        add(self._sums, tokens, apart=False)


def _split_tokens(call: LayerCall, first: int) -> tuple[Tensor, Tensor]:
    """Return the flat indices of the tokens that are no padding, int64: those to count, and those of every fourth sequence.

    :param first: sequences before this batch
    """
    batch, length = call.hidden.shape[:2]
    apart = (torch.arange(first + 1, first + batch + 1) % _HOLD_EVERY == 0).repeat_interleave(length)
    valid = torch.ones_like(apart)
    if call.tokens is not None:
        valid = torch.zeros_like(apart).index_fill(0, call.tokens.cpu(), True)
    return (valid & ~apart).nonzero().flatten(), (valid & apart).nonzero().flatten()
