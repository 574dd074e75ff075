"""Statistics of one decoder layer after the other: second moments, those of held-out sequences separately."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor, nn
from tqdm import trange

from struprune_plugin.layerwise.calls import LayerCall, States
from struprune_plugin.layerwise.capture import Seen, Stopped, Visit, keep_outputs, place_rows, record
from struprune_plugin.layerwise.dense_reference import DenseReference, Target
from struprune_plugin.linalg.second_moments import (
    MomentSums,
    SecondMoments,
    move_moments,
    select_inputs,
    stack,
    sum_energies,
)
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_consumer
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import gather, sum_over_ranks

_FAINT = 1e-12
_HOLD_EVERY = 4  # sequences


@dataclass(frozen=True)
class Moments:
    """Second moments of the consumers of a stack, inputs in unit order; the first dimension of every tensor is the linears.

    :param all: of all sequences
    :param held: of the held-out ones among them; None where there are none
    :param num_rows: number of tokens that each expert saw; None elsewhere
    :param holds: for each linear, whether it has held-out tokens
    """

    all: SecondMoments
    held: SecondMoments | None = None
    num_rows: Sequence[int] | None = None
    holds: Sequence[bool] = ()

    @property
    def determines(self) -> bool:
        """True if every linear has at least as many tokens as inputs, so that a solve is determined."""
        return self.num_rows is None or min(self.num_rows) >= self.all.gram.shape[-1] - 1

    def select(self, linear: int) -> Moments:
        """Return the moments of one linear, without the first dimension, as views."""
        pick = itemgetter(linear)
        held = None if self.held is None else move_moments(self.held, pick)
        rows = None if self.num_rows is None else [self.num_rows[linear]]
        return Moments(move_moments(self.all, pick), held, rows)

    def take(self, linears: Sequence[int]) -> Moments:
        """Return the moments of some linears; of neighbours as views."""
        pick = pick_linears(linears)
        rows = None if self.num_rows is None else [self.num_rows[index] for index in linears]
        held = None if self.held is None else move_moments(self.held, pick)
        return Moments(move_moments(self.all, pick), held, rows, [self.holds[index] for index in linears])

    def split(self, alone: bool) -> Iterator[tuple[list[int], Moments]]:
        """Yield linears in parts that are solved together, and their moments: those that all have, or all lack, held-out tokens and
        as many tokens as a solve needs.

        :param alone: each linear alone
        """
        parts = dict[object, list[int]]()
        for index, holds in enumerate(self.holds):
            determined = self.num_rows is None or self.num_rows[index] >= self.all.gram.shape[-1] - 1
            parts.setdefault((determined, holds, alone and index), []).append(index)
        for linears in parts.values():
            part = self.take(linears)
            yield linears, part if all(part.holds) else replace(part, held=None)


def pick_linears(linears: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return a function that takes some linears of a stacked tensor; neighbours as a view."""
    first, count = linears[0], len(linears)
    if linears == list(range(first, first + count)):
        return itemgetter(slice(first, first + count))
    return lambda tensor: tensor[torch.tensor(linears, device=tensor.device)]


class GroupSums:
    """Sums of one group's consumer while batches are visited; every fourth sequence is summed apart, if it is held out.

    :param device: device of the consumer's inputs; with ``offload`` the sums are on the host
    :param num_before: number of sequences of the processes before this one, so that sequences are numbered over all processes
    """

    def __init__(
        self,
        layer: nn.Module,
        group: UnitGroup,
        device: torch.device,
        context: DeviceContext,
        hold_out: bool = False,
        num_before: int = 0,
    ):
        self._group, self._context, self._num_sequences, self._num_rows = group, context, num_before, 0
        consumer, fetch = find_linear(layer, group.consumer), context.to_solver if context.offload else None
        sizes, device = (consumer.in_features, consumer.out_features), context.solve_device if fetch else device
        with context.solving():  # the last sums are of all sequences but those held out
            self._sums = [MomentSums(sizes, device, torch.float32, fetch) for _ in range(1 + hold_out)]

    def add(self, visit: Visit) -> None:
        """Add every sequence of a visit once: to the sums, or every fourth to separate ones; :meth:`finish` adds the two."""
        parts: list[list[slice | Tensor]] = [[] for _ in self._sums]
        for part in visit.split():
            self._num_sequences += 1
            parts[0 if self._num_sequences % _HOLD_EVERY else -1].append(part)
        self._num_rows += sum(visit.counts or ())
        for sums, own in zip(self._sums, parts, strict=True):
            add_visit(sums, visit, own, self._context)

    @staticmethod
    def finish(together: Sequence[GroupSums]) -> Moments:
        """Return the moments of a stack over the batches of all processes, once, in unit order.

        :raises ValueError: NaN or Inf among the activations; the message names the linear
        """
        group, context = together[0]._group, together[0]._context
        for part in (part for own in together for sums in own._sums for part in sums.list_parts()):
            sum_over_ranks(part)
        ranks = gather([own._num_rows for own in together])
        rows = [sum(own) for own in zip(*ranks, strict=True)] if group.mixture else None
        with context.solving():
            alike = zip(*(own._sums for own in together), strict=True)
            parts = [MomentSums.assemble(sums, context.to_solver) for sums in alike]
            for apart in parts[1:]:
                for total, other in zip(vars(parts[0]).values(), vars(apart).values(), strict=True):
                    total.add_(other)
            if group.repeats > 1:
                columns = group.to_unit_order(torch.arange(group.num_columns, device=parts[0].gram.device))
                parts = [select_inputs(part, columns.expand(len(together), -1)) for part in parts]
            # not checked earlier, because the check waits for the device
            energies, counts = torch.stack([sum_energies(parts[0]), parts[-1].gram[:, -1, -1]]).tolist()
        for own, energy in zip(together, energies, strict=True):
            if not math.isfinite(energy):
                raise ValueError(
                    f"{own._group.name}: activations must be finite, got NaN or Inf in its inputs or targets. "
                    "Load the model in a wider dtype (bfloat16 or float32), or repair the checkpoint."
                )
        every, *held = parts
        return Moments(every, held[0] if held else None, rows, [bool(held and count) for count in counts])


class LayerStatistics:
    """Statistics of one decoder layer after the other: calls, moments of groups, and the dense path.

    In a pass that changes layers, a layer's first group is gathered in the layer's first run on the pruned path; once that group
    is pruned, the layer runs again for the next. In a pass that changes nothing, one run gathers all groups.
    """

    def __init__(
        self,
        target: Target,
        context: DeviceContext,
        changes: bool = False,
        hold_out: bool = False,
        num_before: int = 0,
        revisits: bool = False,
    ):
        self.dense, self.context = DenseReference(target, context, revisits), context
        self.calls: list[LayerCall] = []
        self._groups: Sequence[UnitGroup] = ()  # of the layer
        self._changes, self._hold_out, self._num_before = changes, hold_out, num_before
        self._sums: dict[str, GroupSums] = {}  # of groups whose moments are being gathered

    def run_layer(self, layer: nn.Module, groups: Sequence[UnitGroup], call: LayerCall) -> States | None:
        """Run a layer on one batch, on the dense path, too, and add its first group to the moments; all, if layers do not change.

        :return: output states; None where the layer runs again once it is changed
        """
        self._groups = groups
        self.dense.run(layer, groups, call, len(self.calls))
        self.calls.append(call)
        if not self._changes:
            return self._gather(layer, groups, len(self.calls) - 1)
        if groups:
            self._gather(layer, self._list_visited(groups[0]), len(self.calls) - 1)
        return None

    def _list_visited(self, group: UnitGroup) -> list[UnitGroup]:
        """Return the groups whose moments are gathered together with a group's: for an expert, those of all experts of its list."""
        return [other for other in self._groups if other.mixture == group.mixture] if group.mixture else [group]

    def _gather(self, layer: nn.Module, groups: Sequence[UnitGroup], index: int) -> States | None:
        """Add groups to the moments, from one batch; return output states as :meth:`visit` does."""
        output, visits = self.visit(layer, groups, index)
        for group, visit in visits:
            if group.name not in self._sums:
                device = visit.inputs.device
                self._sums[group.name] = GroupSums(layer, group, device, self.context, self._hold_out, self._num_before)
            self._sums[group.name].add(visit)
        return output

    def visit(
        self, layer: nn.Module, groups: Sequence[UnitGroup], index: int
    ) -> tuple[States | None, Iterator[tuple[UnitGroup, Visit]]]:
        """Run the present layer on a recorded batch of the pruned path, as far as needed if layers change.

        :return: output states, None where the run was stopped; every group's visit
        """
        output, call = None, self.calls[index]
        # what the other groups' modules return before the last one is pruned is what they return afterwards
        is_last = self._changes and groups[-1] is self._groups[-1]
        same = {group.module for group in self._groups} - {"", groups[-1].module} if is_last else ()
        keeping = keep_outputs(layer, same, call, self.context)
        with keeping, record(layer, groups, stop=self._changes) as seen, suppress(Stopped):
            output = call.run(layer, self.context)
        return output, self._list_visits(layer, groups, seen, index)

    def _list_visits(
        self, layer: nn.Module, groups: Sequence[UnitGroup], seen: Seen, index: int
    ) -> Iterator[tuple[UnitGroup, Visit]]:
        call, mixture = self.calls[index], [group for group in groups if group.mixture]
        for group in groups:
            if group.mixture:
                continue
            stream, repair = seen.read(group), self.dense.find_repair(group, seen, index)
            if repair is None:
                target, weights = self.dense.find_target(group, stream, index), seen.read_factors(group)
            else:
                target, weights = stream.output.float() + repair.error, repair.factors
            yield group, Visit(stream.source, stream.inputs, target, call, weights=weights)
        if mixture:
            repair = self.dense.find_repair(mixture[0], seen, index)
            yield from mixture[0].unit.visit_mixture(layer, mixture, seen, call, repair)

    def keep_groups(self, groups: Sequence[UnitGroup]) -> None:
        """Continue with the groups left after whole experts were removed, which changes the tokens of the remaining experts."""
        for group in self._groups:
            if group.mixture:
                self._sums.pop(group.name, None)
        self.dense.repair_all(self._groups)
        self._groups = groups

    def collect_moments(self, layer: nn.Module, groups: Sequence[UnitGroup], progress: str) -> Moments:
        """Return the moments of the next groups: already gathered for a layer's first group, gathered by a pass for the others.

        An expert that saw no token has those of uncorrelated inputs, negligible beside other modules' errors.

        :param groups: one group, or experts of one shape
        """
        if groups[0].name not in self._sums:
            for index in trange(len(self.calls), desc=progress, leave=False):
                self._gather(layer, self._list_visited(groups[0]), index)
        found = GroupSums.finish([self._sums.pop(group.name) for group in groups])
        for index, (rows, group) in enumerate(zip(found.num_rows or (), groups, strict=False)):
            if rows == 0:
                dense = read_consumer(layer, group)
                found.all.gram[index].diagonal().fill_(_FAINT)
                found.all.cross[index].copy_(_FAINT * dense)
                found.all.target_energy[index].copy_(_FAINT * dense.square().sum())
        return found

    def finish_layer(self) -> None:
        """Drop the layer's statistics; its dense outputs become the next layer's dense inputs."""
        self.dense.finish_layer()
        self.calls.clear()
        self._sums.clear()


@dataclass(frozen=True)
class Stack:
    """Consumers of one decoder layer that are ranked and solved together, with the statistics of the calibration data.

    :param groups: one group, or experts of one shape, at their present sizes
    """

    layer: nn.Module
    groups: Sequence[UnitGroup]
    statistics: LayerStatistics

    @property
    def group(self) -> UnitGroup:
        """The first group, for all that is the same in the others."""
        return self.groups[0]

    @property
    def names(self) -> list[str]:
        return [group.name for group in self.groups]

    @property
    def context(self) -> DeviceContext:
        return self.statistics.context

    @property
    def has_bias(self) -> bool:
        """True if the consumers have a bias."""
        return find_linear(self.layer, self.group.consumer).bias is not None

    def read_weights(self) -> Tensor:
        """Return :func:`~struprune_plugin.model.surgery.read_consumer` of every group, on the device where systems are solved,
        shape [linears, d, n + 1], float64."""
        return stack([read_consumer(self.layer, group, self.context.to_solver) for group in self.groups])

    def take(self, linears: Sequence[int]) -> Stack:
        """Return the stack of some groups."""
        return replace(self, groups=[self.groups[index] for index in linears])

    def collect_moments(self, progress: str) -> Moments:
        """Return :meth:`LayerStatistics.collect_moments` of the groups."""
        return self.statistics.collect_moments(self.layer, self.groups, progress)

    def split(self, moments: Moments) -> Iterator[tuple[Stack, Moments]]:
        """Yield the parts that are solved together; on a CPU, whose caches hold the matrices of one linear, each alone."""
        for linears, part in moments.split(self.context.solve_device.type == "cpu"):
            yield self.take(linears), part

    def visit_batches(self) -> Iterator[Visit]:
        """Run the present layer on every batch and yield the visits of a single group."""
        for index in trange(len(self.statistics.calls), desc=f"{self.group.name} inputs", leave=False):
            yield next(self.statistics.visit(self.layer, self.groups, index)[1])[1]


def add_visit(sums: MomentSums, visit: Visit, parts: Sequence[slice | Tensor], context: DeviceContext) -> None:
    """Add some sequences of one micro-batch to sums, each by its rows."""
    device = visit.inputs.device
    values = [own for own in (visit.inputs, context.to_device(visit.target, device), visit.weights) if own is not None]
    placed = place_rows(parts, device, context)
    pieces: Iterable[list[Tensor]] = ([own[rows] for own in values] for rows in placed)
    if visit.counts and len(placed) > 1 and device.type != "cpu":  # few rows of an expert in one product
        pieces = [[torch.cat(own) for own in zip(*pieces, strict=True)]]
    for inputs, *others in pieces:
        if len(inputs):
            sums.add(inputs, *others)
