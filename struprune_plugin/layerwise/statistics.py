"""Statistics of one decoder layer after the other: its calls, the moments of its groups, and the dense path beside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor, nn
from tqdm import trange

from struprune_plugin.layerwise.calls import LayerCall, States
from struprune_plugin.layerwise.capture import ConsumerBatch, ModuleTensors, Stopped, keep_outputs, record
from struprune_plugin.layerwise.dense_reference import DenseReference, Target
from struprune_plugin.layerwise.moments import Moments, add_batch, assemble_moments, make_sums
from struprune_plugin.linalg.second_moments import MomentSums, stack
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_consumer
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext


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
        self._is_own = not (changes or target.is_dense)  # whether targets are the consumers' own outputs
        self._sums: dict[str, list[MomentSums]] = {}  # of groups whose moments are being gathered

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
        """Add groups to the moments, from one batch; return output states as :meth:`run_groups` does."""
        output, batches = self.run_groups(layer, groups, index)
        num_before = self._num_before + sum(len(call.tokens) for call in self.calls[:index])
        for group, batch in batches:
            if group.name not in self._sums:
                device = batch.inputs.device
                self._sums[group.name] = make_sums(layer, group, device, self.context, self._hold_out, self._is_own)
            add_batch(self._sums[group.name], batch, self.context, num_before)
        return output

    def run_groups(
        self, layer: nn.Module, groups: Sequence[UnitGroup], index: int
    ) -> tuple[States | None, Iterator[tuple[UnitGroup, ConsumerBatch]]]:
        """Run the present layer on a recorded batch of the pruned path, as far as needed if layers change.

        :return: output states, None where the run was stopped; every group's inputs and target
        """
        output, call = None, self.calls[index]
        # what the other groups' modules return before the last one is pruned is what they return afterwards
        is_last = self._changes and groups[-1] is self._groups[-1]
        same = {group.module for group in self._groups} - {"", groups[-1].module} if is_last else ()
        keeping = keep_outputs(layer, same, call, self.context)
        with keeping, record(layer, groups, stop=self._changes) as tensors, suppress(Stopped):
            output = call.run(layer, self.context)
        return output, self._list_batches(layer, groups, tensors, index)

    def _list_batches(
        self, layer: nn.Module, groups: Sequence[UnitGroup], tensors: ModuleTensors, index: int
    ) -> Iterator[tuple[UnitGroup, ConsumerBatch]]:
        call, mixture = self.calls[index], [group for group in groups if group.mixture]
        for group in groups:
            if not group.mixture:
                target, factors = self.dense.find_target(group, tensors, index)
                source, inputs = tensors.find_source(group), tensors.inputs[group.consumer]
                yield group, ConsumerBatch(source, inputs, target, call, factors=factors)
        if mixture:
            missing = self.dense.find_missing(mixture[0], tensors, index)
            yield from mixture[0].unit.visit_mixture(layer, mixture, tensors, call, missing)

    def keep_groups(self, groups: Sequence[UnitGroup]) -> None:
        """Continue with the groups left after entries of a mixture were removed, which changes the tokens of the remaining ones."""
        if len(groups) == len(self._groups):
            return
        for group in self._groups:
            if group.mixture:
                self._sums.pop(group.name, None)
        self.dense.repair_all(self._groups)
        self._groups = groups

    def collect_moments(self, layer: nn.Module, groups: Sequence[UnitGroup], progress: str) -> Moments:
        """Return the moments of the next groups: already gathered for a layer's first group, gathered by a pass for the others.

        :param groups: one group, or experts of one shape
        """
        if groups[0].name not in self._sums:
            for index in trange(len(self.calls), desc=progress, leave=False):
                self._gather(layer, self._list_visited(groups[0]), index)
        return assemble_moments(layer, groups, [self._sums.pop(group.name) for group in groups], self.context)

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

    def visit_batches(self) -> Iterator[ConsumerBatch]:
        """Run the present layer on every batch and yield the inputs and targets of a single group."""
        for index in trange(len(self.statistics.calls), desc=f"{self.group.name} inputs", leave=False):
            ((_, batch),) = self.statistics.run_groups(self.layer, self.groups, index)[1]
            yield batch
