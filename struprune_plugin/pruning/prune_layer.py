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
from struprune_plugin.model import surgery
from struprune_plugin.model.unit_kind import UnitGroup, select_groups
from struprune_plugin.pruning.config import PruningConfig, UnitAllocation
from struprune_plugin.pruning.problem import GroupProblem, Sensitivity
from struprune_plugin.pruning.reconstruction import describe_group, refine_group, solve_groups
from struprune_plugin.pruning.selection import list_together, select_units, split_alike
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0, count_before
from struprune_plugin.storage.manifest import GroupRecord
from struprune_plugin.storage.resume_store import ResumeStore


@dataclass(frozen=True)
class Decision:
    """Kept units and new weights of one group.

    :param keep: sorted kept units, shape [kept], int64, on the host
    :param weight: the consumer's weights on them, in unit order, bias last, shape [d, kept columns + 1], float64
    :param basis: rotation of the heads' units before selection, shape [blocks, width, width]; None without one
    :param producers: by name, the kept rows of a linear that the rotation changes, bias last; processes may share the weights
    :param record: record for the manifest
    """

    keep: Tensor
    weight: Tensor
    basis: Tensor | None
    producers: dict[str, Tensor]
    record: GroupRecord


@dataclass(frozen=True)
class LayerOutcome:
    """Records of one decoder layer, whether anything was removed up to it, and for a store a copy of it if so."""

    groups: list[GroupRecord]
    changed: bool
    copy: surgery.LayerCopy | None = None


@dataclass(frozen=True)
class Pruner:
    """Pruner of a model; the plan holds the number of units that every group keeps."""

    config: PruningConfig
    plan: UnitAllocation
    sensitivity: Sensitivity
    context: DeviceContext

    def prune_model(
        self,
        model: PreTrainedModel,
        batches: Sequence[dict[str, Tensor]],
        groups: Sequence[UnitGroup],
        store: ResumeStore | None = None,
    ) -> list[GroupRecord]:
        """Prune every decoder layer in place, each on inputs from the pruned layers before it; return the groups' records.

        :param groups: groups of all layers, in the order in which the model computes them
        :param store: store of the finished layers; those of an earlier process are restored from it
        """
        config = self.config
        statistics = LayerStatistics(
            config.reconstruct,
            self.context,
            changes=True,
            hold_out=config.chooses_dampening,
            num_before=count_before(sum(len(batch["input_ids"]) for batch in batches)),
            revisits=config.weight_update.refines or config.importance.revisits,
        )
        records, changed, resumes = list[GroupRecord](), False, store is not None
        for step in stream_layers(model, batches, self.context, "pruning", propagates=True):
            own, part = select_groups(groups, step.name), f"layer-{step.index:05d}"
            outcome = store.read(part, LayerOutcome) if store and resumes else None
            resumes = outcome is not None  # from the first missing layer on, all are pruned anew
            with self.context.stage("statistics"):
                step.observe(statistics, [] if resumes else own)  # a finished layer needs only the dense path
            if outcome is None:
                outcome = self.prune_layer(step.layer, own, statistics, changed, step.progress)
                if store is not None:
                    with self.context.stage("checkpoint"):
                        copy = surgery.copy_layer(step.layer, self.plan.list_left(own)) if outcome.changed else None
                        store.write(part, replace(outcome, copy=copy))
            elif outcome.copy is not None:
                self.drop_experts(step.layer, own)
                surgery.restore_layer(step.layer, outcome.copy)
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
        :param changed: whether anything was removed from a layer before this one
        """
        records, kept, left = list[GroupRecord](), self.plan.kept, self.drop_experts(layer, groups)
        if len(left) < len(groups):
            statistics.keep_groups(left)
            changed = True
        for together in list_together(left, kept):
            changed = changed or any(kept[group.name] < group.num_units for group in together)
            modules = [ModuleView(layer, group, statistics) for group in together]
            decisions = self.decide(modules, progress, changed)
            with self.context.stage("admm" if self.config.weight_update.can_refine(together[0]) else "surgery"):
                for module, decision in zip(modules, decisions, strict=True):
                    records.append(self.apply(module, decision) if changed else decision.record)
        return LayerOutcome(records, changed)

    def drop_experts(self, layer: nn.Module, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        """Remove whole experts from a dense layer; return the remaining groups."""
        experts = self.plan.experts
        if experts is not None:
            for group in {group.mixture: group for group in groups if group.mixture}.values():
                with self.context.stage("surgery"):
                    experts.routing.drop(layer, group.mixture, experts.keep[group.output_name])
        return self.plan.list_left(groups)

    def decide(self, modules: Sequence[ModuleView], progress: str, updates: bool) -> list[Decision]:
        """Return the kept units and new weights of a group, or of experts of one shape. The layer is not changed.

        :param updates: whether the remaining weights are re-solved
        """
        context, layer, statistics = self.context, modules[0].layer, modules[0].statistics
        with context.stage("statistics"):
            told = f"{progress}{modules[0].group.consumer.split('.')[-1]} statistics"
            gathered = statistics.collect_moments(layer, [module.group for module in modules], told)
        decided = dict[str, Decision]()
        for alike, moments in split_alike(modules, gathered):
            with context.stage("select and solve"), context.solving():
                found = compute_on_rank0(partial(self.solve, alike, moments, updates), context.solve_device)
            decided.update(zip((module.group.name for module in alike), found, strict=True))
        return [decided[module.group.name] for module in modules]

    def solve(self, modules: Sequence[ModuleView], moments: Sequence[GroupMoments], updates: bool) -> list[Decision]:
        """Damp the moments, rank the units, keep the last and solve the weights anew; parameters as in :meth:`decide`."""
        config, num_keep = self.config, self.plan.kept[modules[0].group.name]  # the same for all
        problems = GroupProblem.pose(modules, moments, config.dampening_frac, self.sensitivity, config.sparsity)
        keep, basis = select_units(problems, num_keep, config)
        kept, producers = self.context.to_host(keep), dict[str, Tensor]()
        if basis is not None:  # of heads, which are solved one module at a time
            layer, group = modules[0].layer, modules[0].group
            (name,), rotated = group.producers, surgery.rotate_producer(layer, group, basis, self.context.to_solver)
            producers[name] = rotated[group.find_kept_rows(name, kept[0]).to(rotated.device)]
            problems = [problem.rotate(basis) for problem in problems]
        solved = solve_groups(problems, keep, config, updates)
        return [
            Decision(own, weight, basis, producers, describe_group(problem.group, own, record))
            for problem, own, (weight, record) in zip(problems, kept, solved, strict=True)
        ]

    def apply(self, module: ModuleView, decision: Decision) -> GroupRecord:
        """Remove units from the layer, with the weight update's refinement if it has one; return the group's record."""
        layer, group, record = module.layer, module.group, decision.record
        if not self.config.weight_update.can_refine(group):
            surgery.slice_group(layer, group, decision.keep, decision.weight, decision.producers)
            return record
        if decision.basis is not None:
            surgery.rotate_group(layer, group, decision.basis)
        objective, closing = refine_group(module, decision.keep, decision.weight, self.config)
        solved = {name: getattr(closing, name) for name in ("error_after", "damping", "condition_number")}
        return replace(record, admm=objective, **solved)
