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

from struprune_plugin.layerwise.moments import Moments
from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.layerwise.statistics import LayerStatistics, Stack
from struprune_plugin.model import surgery
from struprune_plugin.model.unit_kind import ListEntries, UnitGroup, select_groups
from struprune_plugin.pruning.config import PruningConfig, UnitAllocation
from struprune_plugin.pruning.problem import GroupProblem, Sensitivity
from struprune_plugin.pruning.reconstruction import describe_group, refine_group, solve_sliced, solve_weights
from struprune_plugin.pruning.selection import list_stacks, select_units
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0, count_before
from struprune_plugin.storage.manifest import GroupRecord, SolveRecord
from struprune_plugin.storage.resume_store import ResumeStore

_SOLVED = "error_after", "damping", "condition_number"  # of a record, by the closing solve


@dataclass(frozen=True)
class Solution:
    """Kept units and new weights of a stack, in unit order, the bias last; the first dimension is the linears.

    :param keep: sorted kept units, shape [linears, kept], int64, on the host
    :param weight: the consumers' weights on them, shape [linears, d, kept columns + 1], float64
    :param basis: rotation of the units before selection, shape [linears, blocks, width, width]; None without one
    :param producers: by name, the kept rows of a linear that the rotation changes, bias last; processes may share the weights
    """

    keep: Tensor
    weight: Tensor
    basis: Tensor | None
    producers: dict[str, Tensor]
    records: list[SolveRecord]


@dataclass(frozen=True)
class LayerOutcome:
    """Records of one decoder layer, whether anything was removed up to it, and for a store a copy of it if so."""

    groups: list[GroupRecord]
    changed: bool
    copy: surgery.LayerCopy | None = None


@dataclass(frozen=True)
class Pruner:
    """Pruner of a model; the plan holds the number of units that every group keeps.

    :param entries: entries of lists of modules of which the plan drops some
    """

    config: PruningConfig
    plan: UnitAllocation
    sensitivity: Sensitivity
    context: DeviceContext
    entries: ListEntries | None = None

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
            revisits=config.weight_update.refines
            or config.importance.revisits
            or any(group.is_coupled for group in groups),
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
                self.drop_entries(step.layer, own)
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
        """Remove entries from the lists of a decoder layer, then units from every group, in place, and update the other weights.

        A layer stays unchanged as long as nothing was removed: its inputs are the dense ones.

        :param groups: of this layer, in the order in which the model computes them
        :param changed: whether anything was removed from a layer before this one
        """
        records, kept, left = list[GroupRecord](), self.plan.kept, self.drop_entries(layer, groups)
        if len(left) < len(groups):
            statistics.keep_groups(left)
            changed = True
        for stack in list_stacks(layer, left, statistics, kept):
            changed = changed or any(kept[group.name] < group.num_units for group in stack.groups)
            records += self.prune_stack(stack, changed, progress)
        return LayerOutcome(records, changed)

    def drop_entries(self, layer: nn.Module, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        """Remove entries from the lists of a dense layer; return the remaining groups."""
        if self.entries is not None:
            for name, mixture in {group.output_name: group.mixture for group in groups}.items():
                if name in self.plan.entries:
                    with self.context.stage("surgery"):
                        self.entries.drop(layer, mixture, self.plan.entries[name])
        return self.plan.list_left(groups)

    def prune_stack(self, stack: Stack, updates: bool, progress: str) -> list[GroupRecord]:
        """Remove units from the groups of a stack, in place, and update the remaining weights; return the groups' records.

        :param updates: whether anything was removed up to this stack; else the layer stays as it is
        """
        records = dict[str, GroupRecord]()
        with self.context.stage("statistics"):
            moments = stack.collect_moments(f"{progress}{stack.group.consumer.split('.')[-1]} statistics")
        for part, own in stack.split(moments):
            with self.context.stage("select and solve"), self.context.solving():
                solve = partial(self.solve, part, own, updates)
                solution = compute_on_rank0(solve, Solution, self.context.solve_device)
            refines = self.config.weight_update.can_refine(part.group)
            with self.context.stage("admm" if refines else "surgery"):
                for index, group in enumerate(part.groups):
                    record = describe_group(group, solution.keep[index], solution.records[index])
                    records[group.name] = self.apply(part, index, solution, record) if updates else record
        return [records[name] for name in stack.names]

    def solve(self, stack: Stack, moments: Moments, updates: bool) -> Solution:
        """Damp the moments, rank the units, keep the last and solve the weights anew. The layer is not changed."""
        config, layer, group = self.config, stack.layer, stack.group
        problem = GroupProblem.pose(stack, moments, config.dampening_frac, self.sensitivity, config.sparsity)
        keep, basis = select_units(problem, self.plan.kept[group.name], config)  # the same number for all
        kept, producers = self.context.to_host(keep), dict[str, Tensor]()
        if basis is not None:  # of blocks, whose stack is one group
            ((name,), (rows,), (own,)) = group.producers, kept, basis
            rotated = surgery.rotate_producer(layer, group, own, self.context.to_solver)
            producers[name] = rotated[group.find_kept_rows(name, rows).to(rotated.device)]
            problem = problem.rotate(basis)
        weight, records = solve_weights(problem, keep, config, updates)
        return Solution(kept, weight, basis, producers, records)

    def apply(self, stack: Stack, index: int, solution: Solution, record: GroupRecord) -> GroupRecord:
        """Remove units of one group from the layer, with the weight update's refinement if it has one; return its record."""
        layer, group, keep, weight = stack.layer, stack.groups[index], solution.keep[index], solution.weight[index]
        if not self.config.weight_update.can_refine(group):
            surgery.slice_group(layer, group, keep, weight, solution.producers)
            if not (group.is_coupled and self.config.weight_update.solves and len(keep) < group.num_units):
                return record
            closing = solve_sliced(stack.take([index]), len(keep), self.config)
            return replace(record, **{name: getattr(closing, name) for name in _SOLVED})
        if solution.basis is not None:
            surgery.rotate_group(layer, group, solution.basis[index])
        objective, closing = refine_group(stack.take([index]), keep, weight, self.config)
        return replace(record, admm=objective, **{name: getattr(closing, name) for name in _SOLVED})
