"""Pruning of one decoder layer. Read this file first: everything else in this package serves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from struprune_plugin.layerwise.module_view import ModuleView
from struprune_plugin.layerwise.statistics import GroupMoments, LayerStatistics
from struprune_plugin.model.surgery import rotate_group, rotate_producer, slice_group
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.config import PruningConfig, UnitAllocation
from struprune_plugin.pruning.importance import Ranking
from struprune_plugin.pruning.reconstruction import LeastSquaresProblem, refine_group, solve_group
from struprune_plugin.pruning.selection import describe_group, select_units, weigh_moments
from struprune_plugin.pruning.signals import Sensitivity
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0
from struprune_plugin.storage.records import GroupRecord


@dataclass(frozen=True)
class SelectionResult:
    """Kept units and new weights of one group.

    :param keep: sorted kept units, shape [kept], int64
    :param weight: the consumer's weights on them, in unit order, bias last, shape [d, kept columns + 1], float64
    :param basis: rotation of the heads' units before selection, shape [blocks, width, width]; None without one
    :param rows: the producer's kept rows after the rotation, bias last; None without one
    :param record: record for the manifest
    """

    keep: Tensor
    weight: Tensor
    basis: Tensor | None
    rows: Tensor | None
    record: GroupRecord


@dataclass(frozen=True)
class LayerOutcome:
    """Outcome of the pruning of one decoder layer.

    :param groups: one record per group, in order
    :param changed: whether anything was removed from this layer or from one before it
    """

    groups: list[GroupRecord]
    changed: bool


@dataclass(frozen=True)
class LayerPruner:
    """Pruner of decoder layers according to an allocation."""

    config: PruningConfig
    allocation: UnitAllocation
    sensitivity: Sensitivity
    context: DeviceContext

    def prune(
        self,
        layer: nn.Module,
        groups: Sequence[UnitGroup],
        statistics: LayerStatistics,
        changed: bool = False,
        progress: str = "",
    ) -> LayerOutcome:
        """Remove units from every group of a decoder layer, in place, and update the remaining weights.

        Whole experts are removed first. Each group then goes through the same steps: statistics of its consumer's inputs, as
        the groups before it left them; selection of the kept units and of the weights on them; and surgery. A layer
        stays unchanged as long as nothing was removed: its inputs are the dense ones.

        :param groups: of this layer, in the order in which the model computes them
        :param statistics: statistics of the layer on the calibration data, which can be gathered again
        :param changed: whether anything was removed from a layer before this one
        :param progress: position of the run, for progress bars
        """
        records = []
        left = self.drop_experts(layer, groups)
        if len(left) < len(groups):
            statistics.keep_groups(left)
            changed = True
        for group in left:
            module = ModuleView(layer, group, statistics)
            with self.context.stage("statistics"):
                moments = module.collect_moments(f"{progress}{group.consumer.split('.')[-1]} statistics")
            changed = changed or self.allocation.kept[group.name] < group.num_units
            with self.context.stage("select and solve"):
                result = self.decide(module, moments, updates=changed)
            del moments
            records.append(self._slice(module, result) if changed else result.record)
        return LayerOutcome(records, changed)

    def drop_experts(self, layer: nn.Module, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        """Remove whole experts from a layer; return the remaining groups.

        :param groups: groups of the dense layer
        """
        experts = self.allocation.experts
        if experts is not None:
            for group in {group.experts: group for group in groups if group.experts}.values():
                with self.context.stage("surgery"):
                    experts.routing.drop(layer, group.experts, experts.keep[group.output_name])
                    self.context.release(layer)
        return self.allocation.list_left(groups)

    def decide(self, module: ModuleView, moments: GroupMoments, updates: bool = True) -> SelectionResult:
        """Return the kept units and new weights of one group; rank 0 decides for all processes. The layer is not changed.

        :param moments: moments of the group's consumer
        :param updates: whether the remaining weights are re-solved
        """
        group, config = module.group, self.config

        def decide() -> SelectionResult:
            problem = LeastSquaresProblem.pose(module, moments, config.dampening_frac)
            weighed = problem.damped
            if config.importance.eliminates:
                weighed = weigh_moments(module, weighed, problem.dense, self.sensitivity)
            ranking = Ranking(module, moments.all, weighed, self.sensitivity, config.sparsity, config.dampening_frac)
            selected = select_units(ranking, self.allocation, config)
            keep, basis, rows = selected.keep, selected.basis, None
            if basis is not None:
                problem = problem.rotate(basis)
                rows = _rotate_kept_rows(module, keep, basis)
            weight, solve = solve_group(problem, keep, config, updates)
            return SelectionResult(keep, weight, basis, rows, describe_group(group, keep, selected.scores, solve))

        with self.context.solving():
            return compute_on_rank0(decide, SelectionResult, moments.all.gram.device)

    def _slice(self, module: ModuleView, result: SelectionResult) -> GroupRecord:
        """Remove units from the layer, with the weight update's refinement if it has one; return the group's record."""
        layer, group, record = module.layer, module.group, result.record
        if not self.config.weight_update.can_refine(group):
            with self.context.stage("surgery"):
                producers = {} if result.rows is None else {next(iter(group.producers)): result.rows}
                slice_group(layer, group, result.keep, result.weight, producers)
                self.context.release(layer)
            return record
        if result.basis is not None:
            rotate_group(layer, group, result.basis)
        with self.context.stage("admm"):
            admm = refine_group(module, result.keep, result.weight, self.config)
        return replace(record, admm=admm, error_after=admm.error_after)


def _rotate_kept_rows(module: ModuleView, keep: Tensor, basis: Tensor) -> Tensor:
    """Return the kept rows of the linear that produces the values, after rotation, bias last."""
    rows = module.group.find_kept_rows(next(iter(module.group.producers)), keep.cpu())
    producer = rotate_producer(module.layer, module.group, basis, module.context.fetch)
    return producer[rows.to(producer.device)]
