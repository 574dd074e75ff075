"""Pruning of a model, layer by layer. Read this file first: everything else in this package serves it.

For each group of coupled units of a layer, in the order of computation, with W the weights of the linear that reads the units
(the consumer), P its inputs and Y its targets on the calibration data:

1. second moments of P and Y, as the groups and layers before have left them (``layerwise/statistics.py``)
2. order of the units: first those whose loss the others make up best (``importance/``, ``linalg/elimination.py``); the last ones
   of the order stay, as many as the plan says
3. new weights W_S on the kept inputs, ``argmin ||Y - W_S P_S||^2 + lambda ||W_S - W||^2`` (``linalg/solve.py``)
4. the linears that produce the units lose rows, the consumer gets its new weights (``model/surgery.py``)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.layerwise.statistics import GroupMoments, LayerStatistics, ModuleView
from struprune_plugin.linalg.elimination import RankedUnits
from struprune_plugin.linalg.second_moments import stack
from struprune_plugin.model.surgery import copy_layer, restore_layer, rotate_group, rotate_producer, slice_group
from struprune_plugin.model.units.group import UnitGroup, select_groups
from struprune_plugin.pruning.config import PruningConfig, UnitAllocation
from struprune_plugin.pruning.problem import GroupProblem, Sensitivity
from struprune_plugin.pruning.reconstruction import refine_group, solve_groups
from struprune_plugin.pruning.resume import LayerLog, LayerOutcome
from struprune_plugin.pruning.selection import compute_alike, describe_group, list_together, select_units
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0, count_before
from struprune_plugin.storage.manifest import GroupRecord


@dataclass(frozen=True)
class Decision:
    """Kept units and new weights of one group.

    :param keep: sorted kept units, shape [kept], int64, on the host
    :param weight: the consumer's weights on them, in unit order, bias last, shape [d, kept columns + 1], float64
    :param basis: rotation of the heads' units before selection, shape [blocks, width, width]; None without one
    :param producers: by name, the kept rows of a linear that the rotation changes, bias last
    :param record: record for the manifest
    """

    keep: Tensor
    weight: Tensor
    basis: Tensor | None
    producers: dict[str, Tensor]
    record: GroupRecord


@dataclass(frozen=True)
class Pruner:
    """Pruner of a model.

    :param config: methods of the recipe
    :param plan: number of units that every group keeps
    :param sensitivity: measurements of the dense model
    """

    config: PruningConfig
    plan: UnitAllocation
    sensitivity: Sensitivity
    context: DeviceContext

    def prune_model(
        self,
        model: PreTrainedModel,
        batches: Sequence[dict[str, Tensor]],
        groups: Sequence[UnitGroup],
        log: LayerLog | None = None,
    ) -> list[GroupRecord]:
        """Prune every decoder layer in place, each on inputs from the pruned layers before it; return the groups' records.

        :param groups: groups of all layers, in the order in which the model computes them
        :param log: log of the finished layers; those of an earlier process are restored from it
        """
        config = self.config
        statistics = LayerStatistics(
            config.reconstruct,
            self.context,
            changes=True,
            hold_out=config.chooses_dampening,
            num_before=count_before(sum(len(batch["input_ids"]) for batch in batches)),
            revisits=config.weight_update.refines or config.importance.aims,
        )
        records, changed = list[GroupRecord](), False
        for step in stream_layers(model, batches, self.context, "pruning", propagates=True):
            own = select_groups(groups, step.name)
            done = None if log is None else log.take(step.index)
            with self.context.stage("statistics"):
                step.observe(statistics, [] if done else own)  # a finished layer needs only the dense path
            outcome = done or self.prune_layer(step.layer, own, statistics, changed, step.progress)
            if done is not None and done.copy is not None:
                self.drop_experts(step.layer, own)
                restore_layer(step.layer, done.copy)
            elif done is None and log is not None:
                with self.context.stage("checkpoint"):
                    copy = copy_layer(step.layer, self.plan.list_left(own)) if outcome.changed else None
                    log.keep(step.index, replace(outcome, copy=copy))
            records += outcome.groups
            changed = outcome.changed
            statistics.finish_layer()
        return records

    def prune_layer(
        self,
        layer: nn.Module,
        groups: Sequence[UnitGroup],
        statistics: LayerStatistics,
        changed: bool = False,
        progress: str = "",
    ) -> LayerOutcome:
        """Remove whole experts from a decoder layer, then units from every group, in place, and update the remaining weights.

        A layer stays unchanged as long as nothing was removed: its inputs are the dense ones.

        :param groups: of this layer, in the order in which the model computes them
        :param statistics: statistics of the layer on the calibration data, which can be gathered again
        :param changed: whether anything was removed from a layer before this one
        :param progress: position of the run, for progress bars
        """
        records, left = [], self.drop_experts(layer, groups)
        if len(left) < len(groups):
            statistics.keep_groups(left)
            changed = True
        for together in list_together(left, self.plan.kept):
            modules = [ModuleView(layer, group, statistics) for group in together]
            with self.context.stage("statistics"):
                told = f"{progress}{together[0].consumer.split('.')[-1]} statistics"
                moments = statistics.collect_moments(layer, together, told)
            changed = changed or any(self.plan.kept[group.name] < group.num_units for group in together)
            with self.context.stage("select and solve"):
                decisions = self.decide(modules, moments, updates=changed)
            del moments
            if not changed:
                records += [decision.record for decision in decisions]
                continue
            with self.context.stage("admm" if self.config.weight_update.can_refine(together[0]) else "surgery"):
                records += [self._slice(*pair) for pair in zip(modules, decisions, strict=True)]
        return LayerOutcome(records, changed)

    def drop_experts(self, layer: nn.Module, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        """Remove whole experts from a layer; return the remaining groups.

        :param groups: groups of the dense layer
        """
        experts = self.plan.experts
        if experts is not None:
            for group in {group.experts: group for group in groups if group.experts}.values():
                with self.context.stage("surgery"):
                    experts.routing.drop(layer, group.experts, experts.keep[group.output_name])
        return self.plan.list_left(groups)

    def decide(
        self, modules: Sequence[ModuleView], moments: Sequence[GroupMoments], updates: bool = True
    ) -> list[Decision]:
        """Return the kept units and new weights of a group, or of experts of one shape; rank 0 decides for all processes.

        The layer is not changed.

        :param moments: moments of each group's consumer
        :param updates: whether the remaining weights are re-solved
        """

        def solve() -> list[Decision]:
            config = self.config
            problems = GroupProblem.pose(modules, moments, config.dampening_frac, self.sensitivity, config.sparsity)
            (num_keep,) = {self.plan.kept[module.group.name] for module in modules}
            found = select_units(problems, num_keep, config)
            return compute_alike(partial(self._solve, updates), self.context.solve_device, moments, problems, *found)

        with self.context.solving():
            return compute_on_rank0(solve, self.context.solve_device)

    def _solve(
        self,
        updates: bool,
        problems: Sequence[GroupProblem],
        keep: Sequence[Tensor],
        ranked: Sequence[RankedUnits | None],
    ) -> list[Decision]:
        """Return the new weights of groups on their kept units, with one transfer to the host for all."""
        host, groups, basis = self.context.to_host(stack(keep)), [problem.group for problem in problems], None
        scores: Sequence[Tensor | None] = [None] * len(groups)
        producers = [dict[str, Tensor]() for _ in groups]
        if ranked[0] is not None:
            basis, scores = ranked[0].basis, [*self.context.to_host(stack([units.scores for units in ranked if units]))]
        if basis is not None:  # of heads, which are solved one module at a time
            (problem,), name = problems, next(iter(groups[0].producers))
            rotated = rotate_producer(problem.module.layer, groups[0], basis, self.context.to_solver)
            producers[0][name] = rotated[groups[0].find_kept_rows(name, host[0]).to(rotated.device)]
            problems = [problem.rotate(basis)]
        weights, solves = zip(*solve_groups(problems, stack(keep), self.config, updates), strict=True)
        records = map(describe_group, groups, host, scores, solves)
        return [Decision(*own) for own in zip(host, weights, [basis] * len(groups), producers, records, strict=True)]

    def _slice(self, module: ModuleView, decision: Decision) -> GroupRecord:
        """Remove units from the layer, with the weight update's refinement if it has one; return the group's record."""
        layer, group, record = module.layer, module.group, decision.record
        if not self.config.weight_update.can_refine(group):
            slice_group(layer, group, decision.keep, decision.weight, decision.producers)
            return record
        if decision.basis is not None:
            rotate_group(layer, group, decision.basis)
        admm = refine_group(module, decision.keep, decision.weight, self.config)
        return replace(record, admm=admm, error_after=admm.error_after)
