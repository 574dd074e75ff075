"""Statistics of one decoder layer after the other: second moments, those of held-out sequences separately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm, trange

from struprune_plugin.layerwise.calls import LayerCall, States
from struprune_plugin.layerwise.capture import Stopped, Stream, Visit, capture_streams, hold_tokens
from struprune_plugin.layerwise.dense_reference import DenseReference, Target
from struprune_plugin.layerwise.expert_streams import capture_experts, capture_sum
from struprune_plugin.linalg.second_moments import MomentSums, SecondMoments, add_moments, select_inputs
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_consumer
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import count_ranks, gather, reduce_sums

_OFFLOADED_TOKENS, _OFFLOADED_ROWS = 256, 256  # tokens converted, and rows of a product, on the device at once
_FAINT = 1e-12


@dataclass(frozen=True)
class GroupMoments:
    """Second moments of one group's consumer, inputs in unit order.

    :param all: moments of all sequences
    :param held: moments of the held-out sequences, which are included in ``all``; None where there are none
    :param num_rows: number of tokens that an expert saw; None elsewhere
    """

    all: SecondMoments
    held: SecondMoments | None = None
    num_rows: int | None = None

    @property
    def determines(self) -> bool:
        """True if there are at least as many tokens as inputs, so that a solve is determined."""
        return self.num_rows is None or self.num_rows >= len(self.all.gram) - 1


class MomentGatherer:
    """Accumulator of the moments of groups.

    :param hold_out: gather every fourth sequence separately
    :param num_before: number of sequences of the processes before this one, so that sequences are numbered over all processes
    """

    def __init__(self, context: DeviceContext, hold_out: bool = False, num_before: int = 0):
        self._context, self._hold_out, self._num_before = context, hold_out, num_before
        self._sums: dict[str, MomentSums] = {}
        self._held: dict[str, MomentSums] = {}
        self._visits: dict[str, int] = {}  # sequences seen, by group
        self._rows: dict[str, int] = {}  # tokens seen, by group of an expert
        self._device = torch.device("cpu")  # device of the inputs

    def has(self, group: UnitGroup) -> bool:
        """Return whether a group's moments have been gathered."""
        return group.name in self._sums

    def add(self, layer: nn.Module, group: UnitGroup, visit: Visit) -> None:
        """Add every token of a visit once: to the sums, or for held-out sequences to separate sums; :meth:`finish` adds the two."""

        def count(store: dict[str, MomentSums], tokens: Tensor | None, apart: bool) -> None:
            if group.name not in store:
                store[group.name] = make_group_sums(layer, group, visit.inputs.device, self._context)
            rows = accumulate_visit(store[group.name], visit, tokens, self._context)
            if visit.rows is not None:
                self._rows[group.name] = self._rows.get(group.name, 0) + rows

        tokens, self._device = visit.call.tokens, visit.inputs.device
        if self._hold_out:
            first = self._visits.get(group.name, self._num_before)
            self._visits[group.name] = first + visit.call.batch_shape[0]
            rest, apart = hold_tokens(visit.call, first)
            tokens = rest if len(apart) else tokens
            if len(apart) or count_ranks() > 1:  # several processes also send empty sums
                count(self._held, apart, apart=True)
        count(self._sums, tokens, apart=False)

    def finish(self, group: UnitGroup) -> GroupMoments:
        """Return a group's moments over the batches of all processes, once; they are complete only in the first process."""
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
        """Return sums, reduced over processes, as moments on the device where systems are solved."""
        check_finite(sums, group)
        reduce_sums(sums.list_parts())
        with self._context.solving():
            return _reorder(sums.gather(self._context.fetch or self._lift), group)

    def _lift(self, part: Tensor) -> Tensor:
        """Return a sum on the device, moved from the host where it was accumulated there."""
        return self._context.to_device(part, self._device)

    def forget(self, groups: Iterable[UnitGroup]) -> None:
        """Drop the sums of some groups."""
        stores: list[dict[str, Any]] = [self._sums, self._held, self._visits, self._rows]
        for group in groups:
            for store in stores:
                store.pop(group.name, None)

    def clear(self) -> None:
        """Drop the sums of a layer."""
        for store in (self._sums, self._held, self._visits, self._rows):
            store.clear()


class LayerStatistics:
    """Statistics of one decoder layer after the other: calls, moments of groups, and the dense path.

    While a layer runs on the pruned path's inputs, the statistics of its first group are gathered, and the dense layer
    runs on the dense hidden states. Once that group is pruned, the layer runs again for the next. Hidden states are stored on the
    host; one micro-batch at a time is on the device.

    :param all_groups: gather the statistics of all groups at the same time, for a pass that changes nothing
    :param propagates: whether a finished layer runs again, so that the outputs of earlier runs are not read
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

    def run_layer(self, layer: nn.Module, groups: Sequence[UnitGroup], call: LayerCall) -> States | None:
        """Run a layer on one batch, on the dense path, too, and add its first group to the moments.

        :return: output states; None where a later run gives them
        """
        self._groups = groups
        self.dense.run(layer, groups, call)
        self.calls.append(call)
        counted = groups if self._all_groups else self._list_together(groups[0]) if groups else groups
        if self._propagates and not groups:
            return None
        return self._count(layer, counted, len(self.calls) - 1, stop=self._propagates)

    def _count(self, layer: nn.Module, groups: Sequence[UnitGroup], index: int, stop: bool) -> States | None:
        """Run the present layer on a recorded batch of the pruned path, and add groups to the moments.

        :param stop: end the pass once a single group's consumer has run
        :return: output states; None where the pass was stopped
        """
        call, output = self.calls[index], None
        plain, experts = [g for g in groups if not g.experts], [g for g in groups if g.experts]
        beside = next((group for group in groups if group.join.block), None)
        with (
            capture_streams(layer, plain, stop and can_stop(groups)) as take,
            capture_experts(layer, experts) as take_experts,
            capture_sum(layer, beside) as take_sum,
            suppress(Stopped),
        ):
            output = call.run(layer, self.context)
        for group in plain:
            self._moments.add(layer, group, self._make_visit(group, take(group), index, take_sum))
        if experts:
            for group, visit in take_experts(call, self.dense.find_repair(experts[0], take_sum, index)):
                self._moments.add(layer, group, visit)
        return output

    def _list_together(self, group: UnitGroup) -> list[UnitGroup]:
        """Return the groups whose moments are gathered together with a group's: for an expert, those of all experts of its list."""
        return [other for other in self._groups if other.experts == group.experts] if group.experts else [group]

    def keep_groups(self, groups: Sequence[UnitGroup]) -> None:
        """Continue with the groups left after whole experts were removed, which changes the tokens of the remaining experts."""
        self._moments.forget(group for group in self._groups if group.experts)
        self.dense.repair_all(self._groups)
        self._groups = groups

    def collect_moments(self, layer: nn.Module, group: UnitGroup, progress: str) -> GroupMoments:
        """Return the moments of the next group: already gathered for a layer's first group, gathered by a pass for the others."""
        if not self._moments.has(group):
            for index in trange(len(self.calls), desc=progress, leave=False):
                self._count(layer, self._list_together(group), index, stop=True)
        found = self._moments.finish(group)
        return _imagine(found, layer, group) if found.num_rows == 0 else found

    def visit_batches(self, layer: nn.Module, group: UnitGroup, progress: str) -> Iterator[Visit]:
        """Run the present layer on every recorded batch of the pruned path, and yield the group's visits."""
        beside = group if group.join.block else None
        with capture_streams(layer, [group], can_stop([group])) as take, capture_sum(layer, beside) as take_sum:
            for index, call in enumerate(tqdm(self.calls, desc=progress, leave=False)):
                with suppress(Stopped):
                    call.run(layer, self.context)
                yield self._make_visit(group, take(group), index, take_sum)

    def _make_visit(self, group: UnitGroup, stream: Stream, index: int, take_sum: Callable[[], Tensor]) -> Visit:
        """Return the visit of a group outside the lists of experts.

        :param index: index of the batch
        :param take_sum: for a group beside experts, returns the stream after the experts' sum
        """
        call, repair = self.calls[index], self.dense.find_repair(group, take_sum, index)
        if repair is None:
            return Visit(stream.source, stream.inputs, self.dense.find_target(group, stream, index), call)
        return Visit(stream.source, stream.inputs, stream.output.float() + repair.error, call, weights=repair.factors)

    def finish_layer(self) -> None:
        """Drop the layer's statistics; its dense outputs become the next layer's dense inputs."""
        self.dense.finish_layer()
        self.calls.clear()
        self._moments.clear()


@dataclass(frozen=True)
class ModuleView:
    """Group of units in its layer, with its weights and the statistics of the calibration data.

    :param layer: the decoder layer
    :param group: the group at the layer's present sizes
    :param statistics: statistics of the layer
    """

    layer: nn.Module
    group: UnitGroup
    statistics: LayerStatistics

    @property
    def context(self) -> DeviceContext:
        return self.statistics.context

    @property
    def has_bias(self) -> bool:
        """True if the consumer has a bias."""
        return find_linear(self.layer, self.group.consumer).bias is not None

    def read_dense(self) -> Tensor:
        """Return :func:`~struprune_plugin.model.surgery.read_consumer` of the group, on the device where systems are solved."""
        return read_consumer(self.layer, self.group, self.context.fetch)

    def collect_moments(self, progress: str) -> GroupMoments:
        """Return the moments of the consumer's inputs and targets, see :class:`LayerStatistics`."""
        return self.statistics.collect_moments(self.layer, self.group, progress)

    def visit_batches(self) -> Iterator[Visit]:
        """Run the present layer on every batch and yield the visits."""
        return self.statistics.visit_batches(self.layer, self.group, f"{self.group.name} inputs")

    def resize(self, num_units: int) -> ModuleView:
        """Return the view of the same module after slicing to ``num_units`` units."""
        return replace(self, group=self.group.resize(num_units))


def can_stop(groups: Sequence[UnitGroup]) -> bool:
    """Return whether all that is seen of groups is known once the first of them has run."""
    return len(groups) == 1 and not (groups[0].join.parallel or groups[0].join.block)


def make_group_sums(layer: nn.Module, group: UnitGroup, device: torch.device, context: DeviceContext) -> MomentSums:
    """Return empty float32 sums for a group's consumer, on a device or, with ``offload``, on the host.

    :param device: device of the consumer's inputs
    """
    consumer = find_linear(layer, group.consumer)
    sizes = consumer.in_features, consumer.out_features
    if not context.offload:
        return MomentSums(sizes, device, torch.float32)
    with context.on_host() as host:
        return MomentSums(sizes, host, torch.float32, _OFFLOADED_TOKENS, _OFFLOADED_ROWS, context.to_host)


def accumulate_visit(sums: MomentSums, visit: Visit, tokens: Tensor | None, context: DeviceContext) -> int:
    """Add the counted tokens of one micro-batch to sums, sequence by sequence; return their number of rows.

    :param tokens: flat indices of the counted tokens, sorted, shape [counted], int64; None where all count
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
    """Set the moments of an expert that saw no token to those of uncorrelated inputs, negligible beside other modules' errors."""
    moments, dense = found.all, read_consumer(layer, group)
    moments.gram.diagonal().fill_(_FAINT)
    moments.cross.copy_(_FAINT * dense)
    moments.target_energy.fill_(_FAINT * float(dense.square().sum()))
    return found


def check_finite(sums: MomentSums, group: UnitGroup) -> None:
    """Raise where complete sums are not finite; not checked earlier, because the check waits for the device.

    :raises ValueError: NaN or Inf among the activations; the message names the linear
    """
    if not sums.is_finite():
        raise ValueError(
            f"{group.name}: activations must be finite, got NaN or Inf in its inputs or targets. "
            "Load the model in a wider dtype (bfloat16 or float32), or repair the checkpoint."
        )


def _reorder(moments: SecondMoments, group: UnitGroup) -> SecondMoments:
    """Return moments gathered in the module's order with their inputs in unit order."""
    if group.repeats == 1:
        return moments
    return select_inputs(moments, group.to_unit_order(torch.arange(group.num_columns, device=moments.gram.device)))
