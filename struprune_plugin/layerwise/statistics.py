"""The statistics of one decoder layer after the other: moments, those of held-out sequences apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from struprune_plugin.layerwise.calls import LayerCall, States
from struprune_plugin.layerwise.capture import Stopped, Stream, Visit, capture_streams, hold_tokens, skip_linears
from struprune_plugin.layerwise.dense_reference import DenseReference, Target
from struprune_plugin.layerwise.expert_streams import capture_experts, capture_sum
from struprune_plugin.linalg.second_moments import MomentSums, SecondMoments, add_moments, select_inputs
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_consumer
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import count_ranks, gather, reduce_sums

_FAINT = 1e-12


@dataclass(frozen=True)
class GroupMoments:
    """The statistics of one group's consumer, inputs in unit order.

    :param all: of all sequences
    :param held: of those held out, which are a part of them; None where there are none
    :param num_rows: tokens that an expert saw; None elsewhere
    """

    all: SecondMoments
    held: SecondMoments | None = None
    num_rows: int | None = None

    @property
    def determines(self) -> bool:
        """True if there are at least as many tokens as inputs, so that a solve is determined."""
        return self.num_rows is None or self.num_rows >= len(self.all.gram) - 1


class MomentGatherer:
    """Sums of the moments of groups while they grow.

    :param hold_out: gather every fourth sequence apart
    :param num_before: sequences of the processes before this one, so that every fourth is counted through all
    """

    def __init__(self, context: DeviceContext, hold_out: bool = False, num_before: int = 0):
        self._context, self._hold_out, self._num_before = context, hold_out, num_before
        self._sums: dict[str, MomentSums] = {}
        self._held: dict[str, MomentSums] = {}
        self._visits: dict[str, int] = {}  # sequences seen, by group
        self._rows: dict[str, int] = {}  # tokens seen, by group of an expert
        self._device = torch.device("cpu")  # that the inputs are on

    def has(self, group: UnitGroup) -> bool:
        """Return whether a group's moments have been gathered."""
        return group.name in self._sums

    def add(self, layer: nn.Module, group: UnitGroup, visit: Visit) -> None:
        """Count every token once: with the rest or, in sequences held out, apart; the two are added when all are counted."""

        def count(store: dict[str, MomentSums], tokens: Tensor | None, apart: bool) -> None:
            if group.name not in store:
                store[group.name] = make_group_sums(layer, group, visit.inputs.device, self._context, apart)
            rows = accumulate_visit(store[group.name], visit, tokens, self._context)
            if visit.rows is not None:
                self._rows[group.name] = self._rows.get(group.name, 0) + rows

        tokens, self._device = visit.call.tokens, visit.inputs.device
        if self._hold_out:
            first = self._visits.get(group.name, self._num_before)
            self._visits[group.name] = first + visit.call.batch_shape[0]
            rest, apart = hold_tokens(visit.call, first)
            tokens = rest if len(apart) else tokens
            if len(apart) or count_ranks() > 1:  # with several processes empty ones are sent too
                count(self._held, apart, apart=True)
        count(self._sums, tokens, apart=False)

    def finish(self, group: UnitGroup) -> GroupMoments:
        """Return a group's moments, of all processes' batches, whole in the first process, once."""
        moments, sums = self._close(self._sums.pop(group.name), group), self._held.pop(group.name, None)
        self._visits.pop(group.name, None)
        rows = self._rows.pop(group.name, 0) if group.experts else None
        rows = None if rows is None else sum(gather(rows))
        if sums is None:
            return GroupMoments(moments, None, rows)
        held = self._close(sums, group)
        add_moments(moments, held)
        return GroupMoments(moments, held if float(held.gram[-1, -1]) else None, rows)

    def _close(self, sums: MomentSums, group: UnitGroup) -> SecondMoments:
        """Return sums as moments where their systems are solved; those of other processes added."""
        check_finite(sums, group)
        reduce_sums(sums.list_parts())
        with self._context.solving():
            return _reorder(sums.gather(self._context.fetch or self._lift), group)

    def _lift(self, part: Tensor) -> Tensor:
        """Bring a sum to the device, from the host where it has grown there."""
        return self._context.to_device(part, self._device)

    def clear(self) -> None:
        """Forget a layer."""
        for store in (self._sums, self._held, self._visits, self._rows):
            store.clear()


class LayerStatistics:
    """Statistics of one decoder layer after the other: calls, moments of groups, and the dense path.

    While a layer runs on the pruned path's inputs, the statistics of its first group are gathered, and the dense layer
    runs on the dense hidden states. Once that group is pruned, the layer runs again for the next. Hidden states live on the
    host; a micro-batch at a time visits the device.

    :param all_groups: gather the statistics of all groups at once, for a pass that changes nothing
    :param propagates: whether a finished layer runs again: nobody then reads the outputs of the runs before
    """

    def __init__(
        self,
        target: Target,
        context: DeviceContext,
        all_groups: bool = False,
        hold_out: bool = False,
        num_before: int = 0,
        propagates: bool = False,
    ):
        self.dense = DenseReference(target, context)
        self.calls: list[LayerCall] = []
        self._groups: Sequence[UnitGroup] = ()  # of the layer
        self.context = context
        self._all_groups = all_groups
        self._moments = MomentGatherer(context, hold_out, num_before)
        self._propagates = propagates

    def run_layer(self, layer: nn.Module, groups: Sequence[UnitGroup], call: LayerCall) -> States:
        """Run a layer on one batch, count what its first group shows, and run the dense path; return what it leaves.

        In the first layer the two paths are one, which is run once.
        """
        self.calls.append(call)
        self._groups = groups
        plain = [group for group in groups if not group.experts]
        counted = groups if self._all_groups else self._list_together(groups[0]) if groups else groups
        experts = [group for group in counted if group.experts]
        is_dense = self.dense.is_pruned_path
        one = next((group for group in groups if group.join.block), None)
        self.dense.run(layer, plain, one, call)
        watched = plain if is_dense else [group for group in counted if not group.experts]
        skips = self._propagates and not is_dense and not any(group.join.parallel for group in watched)
        later = [group for group in groups if group not in counted] if skips else []
        with (
            capture_streams(layer, watched) as take,
            capture_experts(layer, experts) as take_experts,
            capture_sum(layer, one if is_dense or any(g.join.block for g in counted) else None) as take_sum,
            skip_linears(layer, [] if experts else later),
        ):
            output = call.run(layer, self.context)
        streams = {group.name: take(group) for group in watched}
        if is_dense:
            self.dense.keep(plain, streams, output)
            self.dense.keep_sum(one, take_sum)
        for group in counted:
            if not group.experts:
                self._moments.add(layer, group, self._make_visit(group, streams[group.name], call, -1, take_sum))
        if experts:
            for group, visit in take_experts(call, self.dense.find_repair(experts[0], take_sum, -1)):
                self._moments.add(layer, group, visit)
        return output

    def _list_together(self, group: UnitGroup) -> list[UnitGroup]:
        """Return the groups whose moments are gathered together with a group's: of an expert, those of all experts beside it."""
        return [other for other in self._groups if other.experts == group.experts] if group.experts else [group]

    def keep_groups(self, groups: Sequence[UnitGroup]) -> None:
        """Go on with the groups of a layer that are left once whole experts have gone, whose tokens are others now."""
        if self._groups[0].experts:
            self._moments.clear()
        self._groups = groups

    def collect_moments(self, layer: nn.Module, group: UnitGroup, progress: str) -> GroupMoments:
        """Return the moments of the next group: gathered already for a layer's first, by a pass for the others."""
        if not self._moments.has(group) and group.experts:
            self._visit_experts(layer, self._list_together(group), progress)
        elif not self._moments.has(group):
            for visit in self.visit_batches(layer, group, progress):
                self._moments.add(layer, group, visit)
        found = self._moments.finish(group)
        return _imagine(found, layer, group) if found.num_rows == 0 else found

    def _visit_experts(self, layer: nn.Module, groups: Sequence[UnitGroup], progress: str) -> None:
        """Run the layer, as it now is, on every recorded batch of the pruned path, and count what the experts show."""
        with capture_experts(layer, groups) as take, capture_sum(layer, groups[0]) as take_sum:
            for index, call in enumerate(tqdm(self.calls, desc=progress, leave=False)):
                call.repeat(layer, self.context)
                for group, visit in take(call, self.dense.find_repair(groups[0], take_sum, index)):
                    self._moments.add(layer, group, visit)

    def visit_batches(self, layer: nn.Module, group: UnitGroup, progress: str) -> Iterator[Visit]:
        """Run the layer, as it now is, on every recorded batch of the pruned path."""
        stop = self.dense.knows(group, len(self.calls)) and not group.join.parallel
        beside = group if self.dense.repairs(group) else None
        with capture_streams(layer, [group], stop) as take, capture_sum(layer, beside) as take_sum:
            for index, call in enumerate(tqdm(self.calls, desc=progress, leave=False)):
                with suppress(Stopped):
                    call.repeat(layer, self.context)
                yield self._make_visit(group, take(group), call, index, take_sum)

    def _make_visit(
        self, group: UnitGroup, stream: Stream, call: LayerCall, index: int, take_sum: Callable[[], Tensor]
    ) -> Visit:
        """Return inputs and target of a group outside the lists of experts.

        :param index: of the batch; -1 for the one that came last
        :param take_sum: gives the stream behind the experts that it is beside, if it is
        """
        repair = self.dense.find_repair(group, take_sum, index)
        if repair is None:
            return Visit(stream.source, stream.inputs, self.dense.find_target(group, stream, index), call)
        assert stream.output is not None
        return Visit(stream.source, stream.inputs, stream.output.float() + repair.error, call, weights=repair.factors)

    def finish_layer(self) -> None:
        """Forget the layer; its dense outputs become the next layer's dense inputs."""
        self.dense.finish_layer()
        self.calls.clear()
        self._moments.clear()


def make_group_sums(
    layer: nn.Module, group: UnitGroup, device: torch.device, context: DeviceContext, apart: bool = False
) -> MomentSums:
    """Return empty float32 sums for a group's consumer, on a device or, where the room's placement says so, on the host.

    :param device: where its inputs are
    :param apart: of sequences held out
    """
    consumer, placement = find_linear(layer, group.consumer), context.placement
    sizes = consumer.in_features, consumer.out_features
    if not (placement.hold_on_host if apart else placement.gather_on_host):
        return MomentSums(sizes, device, torch.float32, placement.tokens)
    with context.on_host() as host:
        return MomentSums(sizes, host, torch.float32, placement.tokens, placement.rows, context.to_host)


def accumulate_visit(sums: MomentSums, visit: Visit, tokens: Tensor | None, context: DeviceContext) -> int:
    """Add the tokens of one micro-batch that count, sequence by sequence; return how many rows they have.

    :param tokens: flat indices of those that count, sorted, shape [counted], int64; None where all do
    """
    device, count = visit.inputs.device, 0
    targets = context.to_device(visit.target, device)
    tokens = None if tokens is None else context.to_device(tokens, device)
    for part in visit.split(tokens):
        inputs = visit.inputs[part]
        sums.add(inputs, targets[part], None if visit.weights is None else visit.weights[part])
        count += len(inputs)
    return count


def _imagine(found: GroupMoments, layer: nn.Module, group: UnitGroup) -> GroupMoments:
    """Return moments of an expert that saw no token: of inputs of one size, so small that no other module's errors look less."""
    moments, dense = found.all, read_consumer(layer, group)
    moments.gram.diagonal().fill_(_FAINT)
    moments.cross.copy_(_FAINT * dense)
    moments.target_energy.fill_(_FAINT * float(dense.square().sum()))
    return found


def check_finite(sums: MomentSums, group: UnitGroup) -> None:
    """Refuse sums of what is not finite; once they are complete, for a card must be waited for to know.

    :raises ValueError: NaN or Inf among the activations; the message names the linear
    """
    if not sums.is_finite():
        raise ValueError(
            f"{group.name}: activations must be finite, got NaN or Inf in its inputs or targets. "
            "Load the model in a wider dtype (bfloat16 or float32), or repair the checkpoint."
        )


def _reorder(moments: SecondMoments, group: UnitGroup) -> SecondMoments:
    """Bring the inputs of moments gathered in the module's order to unit order."""
    if group.repeats == 1:
        return moments
    order = torch.arange(group.num_columns, device=moments.gram.device)
    return select_inputs(moments, group.to_unit_order(order))
