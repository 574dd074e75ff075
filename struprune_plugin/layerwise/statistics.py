"""Statistics of one decoder layer after the other: second moments, those of held-out sequences separately."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from tqdm import tqdm, trange

from struprune_plugin.layerwise.calls import LayerCall, States
from struprune_plugin.layerwise.capture import Seen, Stopped, Visit, join_neighbours, record
from struprune_plugin.layerwise.dense_reference import DenseReference, Target
from struprune_plugin.layerwise.expert_streams import visit_experts
from struprune_plugin.linalg.second_moments import MomentSums, SecondMoments, add_moments, select_inputs
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_consumer
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import gather, sum_over_ranks

_OFFLOADED_TOKENS, _OFFLOADED_ROWS = 256, 256  # tokens converted, and rows of a product, on the device at once
_FAINT = 1e-12
_HOLD_EVERY = 4  # sequences


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


@dataclass
class _Running:
    """Sums of one group while batches are visited.

    :param sums: of the sequences that are not held out
    :param held: of the held-out ones; None where none are held out
    :param num_sequences: sequences seen, with those of the processes before this one
    :param num_rows: tokens that an expert saw
    """

    sums: MomentSums
    held: MomentSums | None
    num_sequences: int
    num_rows: int = 0


class MomentGatherer:
    """Accumulator of the moments of groups.

    :param hold_out: gather every fourth sequence separately
    :param num_before: number of sequences of the processes before this one, so that sequences are numbered over all processes
    """

    def __init__(self, context: DeviceContext, hold_out: bool = False, num_before: int = 0):
        self._context, self._hold_out, self._num_before = context, hold_out, num_before
        self._running: dict[str, _Running] = {}  # by group

    def has(self, group: UnitGroup) -> bool:
        """Return whether a group's moments have been gathered."""
        return group.name in self._running

    def add(self, layer: nn.Module, group: UnitGroup, visit: Visit) -> None:
        """Add every sequence of a visit once: to the sums, or every fourth to separate sums; :meth:`finish` adds the two."""
        if group.name not in self._running:
            some = [
                make_group_sums(layer, group, visit.inputs.device, self._context) for _ in range(1 + self._hold_out)
            ]
            self._running[group.name] = _Running(some[0], some[1] if self._hold_out else None, self._num_before)
        running, own, apart = self._running[group.name], list[slice | Tensor](), list[slice | Tensor]()
        for part in visit.split():
            running.num_sequences += 1
            (apart if self._hold_out and running.num_sequences % _HOLD_EVERY == 0 else own).append(part)
        running.num_rows += sum(visit.counts or ())
        accumulate_visit(running.sums, visit, own, self._context)
        if running.held is not None:
            accumulate_visit(running.held, visit, apart, self._context)

    def finish(self, group: UnitGroup) -> GroupMoments:
        """Return a group's moments over the batches of all processes, once."""
        running = self._running.pop(group.name)
        moments, rows = self._close(running.sums, group), sum(gather(running.num_rows)) if group.experts else None
        if running.held is None:
            return GroupMoments(moments, None, rows)
        held = self._close(running.held, group)
        add_moments(moments, held)
        return GroupMoments(moments, held if float(held.gram[-1, -1]) else None, rows)

    def _close(self, sums: MomentSums, group: UnitGroup) -> SecondMoments:
        """Return sums, reduced over processes, as moments on the device where systems are solved."""
        check_finite(sums, group)
        for part in sums.list_parts():
            sum_over_ranks(part)
        with self._context.solving():
            return _reorder(sums.gather(self._context.to_solver), group)

    def forget(self, groups: Iterable[UnitGroup]) -> None:
        """Drop the sums of some groups."""
        for group in groups:
            self._running.pop(group.name, None)


class LayerStatistics:
    """Statistics of one decoder layer after the other: calls, moments of groups, and the dense path.

    While a layer runs on the pruned path's inputs, the statistics of its first group are gathered, and the dense layer
    runs on the dense hidden states. Once that group is pruned, the layer runs again for the next.

    :param all_groups: gather the statistics of all groups at the same time, for a pass that changes nothing
    :param propagates: whether a finished layer runs again, so that the outputs of earlier runs are not read
    :param revisits: as in :class:`~struprune_plugin.layerwise.dense_reference.DenseReference`
    """

    def __init__(
        self,
        target: Target,
        context: DeviceContext,
        all_groups: bool = False,
        hold_out: bool = False,
        num_before: int = 0,
        propagates: bool = False,
        revisits: bool = False,
    ):
        self.dense = DenseReference(target, context, revisits)
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
        with record(layer, groups, stop and can_stop(groups)) as seen, suppress(Stopped):
            output = call.run(layer, self.context)
        experts = [group for group in groups if group.experts]
        for group in groups:
            if not group.experts:
                self._moments.add(layer, group, self._make_visit(group, seen, index))
        if experts:
            repair = self.dense.find_repair(experts[0], seen, index)
            for group, visit in visit_experts(layer, experts, seen, call, repair):
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
        with record(layer, [group], can_stop([group])) as seen:
            for index, call in enumerate(tqdm(self.calls, desc=progress, leave=False)):
                with suppress(Stopped):
                    call.run(layer, self.context)
                yield self._make_visit(group, seen, index)

    def _make_visit(self, group: UnitGroup, seen: Seen, index: int) -> Visit:
        """Return the visit of a group outside the lists of experts.

        :param index: index of the batch
        """
        stream, call, repair = seen.read(group), self.calls[index], self.dense.find_repair(group, seen, index)
        if repair is None:
            return Visit(stream.source, stream.inputs, self.dense.find_target(group, stream, index), call)
        return Visit(stream.source, stream.inputs, stream.output.float() + repair.error, call, weights=repair.factors)

    def finish_layer(self) -> None:
        """Drop the layer's statistics; its dense outputs become the next layer's dense inputs."""
        self.dense.finish_layer()
        self.calls.clear()
        self._moments.forget(self._groups)


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
        return read_consumer(self.layer, self.group, self.context.to_solver)

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
    with context.solving():
        return MomentSums(
            sizes, context.solve_device, torch.float32, _OFFLOADED_TOKENS, _OFFLOADED_ROWS, context.to_solver
        )


def accumulate_visit(sums: MomentSums, visit: Visit, parts: Sequence[slice | Tensor], context: DeviceContext) -> None:
    """Add some sequences of one micro-batch to sums: on a CPU one by one, so that the sums do not depend on the batches.

    :param parts: rows of each sequence
    """
    device = visit.inputs.device
    targets = context.to_device(visit.target, device)
    for part in parts if device.type == "cpu" else join_neighbours(parts):
        rows = part if isinstance(part, slice) else context.to_device(part, device)
        if len(inputs := visit.inputs[rows]):
            sums.add(inputs, targets[rows], None if visit.weights is None else visit.weights[rows])


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
