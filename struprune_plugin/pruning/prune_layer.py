"""Pruning of a model, layer by layer. Read this file first: everything else in this package serves it.

For each group of coupled units of a layer, in the order of computation, with W the weights of the linear that reads the units
(the consumer), P its inputs and Y its targets on the calibration data:

1. second moments of P and Y, as the groups and layers before have left them (``layerwise/statistics.py``)
2. order of the units: first those whose loss the others make up best (``importance/``, ``linalg/elimination.py``); the last ones
   of the order stay, as many as the allocation says
3. new weights W_S on the kept inputs, ``argmin ||Y - W_S P_S||^2 + lambda ||W_S - W||^2`` (``linalg/solve.py``)
4. the linears that produce the units lose rows, the consumer gets its new weights (``model/surgery.py``)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.moments import Moments
from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.layerwise.statistics import Stack
from struprune_plugin.model.surgery import copy_layer, restore_layer
from struprune_plugin.model.unit_kind import ListEntries, UnitGroup, select_groups
from struprune_plugin.pruning.config import PruningConfig, UnitAllocation
from struprune_plugin.pruning.problem import GroupProblem, Sensitivity
from struprune_plugin.pruning.reconstruction import FinishedLayer, Solution, cut_group, rotate_producers, solve_weights
from struprune_plugin.pruning.selection import list_stacks, select_units
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0
from struprune_plugin.storage.manifest import GroupRecord
from struprune_plugin.storage.resume_store import ResumeStore


@dataclass(frozen=True)
class Pruner:
    """Pruner of a model; the allocation holds the number of units that every group keeps.

    :param entries: entries of lists of modules of which the allocation drops some
    """

    config: PruningConfig
    allocation: UnitAllocation
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
        statistics, num_keep = self.config.make_statistics(batches, groups, self.context), self.allocation.num_keep
        records, changed, resumes = list[GroupRecord](), False, store is not None
        for step in stream_layers(model, batches, self.context, "pruning", propagates=True):
            of_layer, part = select_groups(groups, step.name), f"layer-{step.index:05d}"
            finished = store.read(part, FinishedLayer) if store and resumes else None
            resumes = finished is not None  # from the first missing layer on, all are pruned anew
            with self.context.stage("statistics"):
                step.observe(statistics, [] if resumes else of_layer)  # a finished layer needs only the dense path
            left = self.drop_entries(step.layer, of_layer)
            if finished is None:
                statistics.keep_groups(left)
                changed, done = changed or len(left) < len(of_layer), list[GroupRecord]()
                for stack in list_stacks(step.layer, left, statistics, num_keep):
                    changed = changed or any(num_keep[group.name] < group.num_units for group in stack.groups)
                    done += self.prune_stack(stack, changed, step.progress)
                finished = FinishedLayer(done, changed)
                if store is not None:
                    with self.context.stage("checkpoint"):
                        copy = copy_layer(step.layer, left) if changed else None
                        store.write(part, replace(finished, copy=copy))
            elif finished.copy is not None:
                restore_layer(step.layer, finished.copy)
            records += finished.groups
            changed = finished.changed
            statistics.finish_layer()
        return records

    def drop_entries(self, layer: nn.Module, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        """Remove entries from the lists of a dense layer; return the remaining groups."""
        if self.entries is not None:
            for name, mixture in {group.output_name: group.mixture for group in groups}.items():
                if name in self.allocation.entries:
                    with self.context.stage("surgery"):
                        self.entries.drop(layer, mixture, self.allocation.entries[name])
        return self.allocation.list_left(groups)

    def prune_stack(self, stack: Stack, updates: bool, progress: str) -> list[GroupRecord]:
        """Remove units from the groups of a stack, in place, and update the remaining weights; return the groups' records.

        :param updates: whether anything was removed up to this stack; else the layer stays as it is: its inputs are the dense ones
        """
        records = dict[str, GroupRecord]()
        with self.context.stage("statistics"):
            moments = stack.collect_moments(f"{progress}{stack.group.consumer.split('.')[-1]} statistics")
        for part, of_part in stack.split(moments):
            with self.context.stage("select and solve"):
                solve = partial(self.solve, part, of_part, updates)
                solution = compute_on_rank0(solve, Solution, self.context.solve_device)
            refines = self.config.weight_update.can_refine(part.group)
            with self.context.stage("admm" if refines else "surgery"):
                for index, group in enumerate(part.groups):
                    records[group.name] = cut_group(part.take([index]), solution.take(index), self.config, updates)
        return [records[name] for name in stack.names]

    def solve(self, stack: Stack, moments: Moments, updates: bool) -> Solution:
        """Damp the moments, rank the units, keep the last and solve the weights anew. The layer is not changed."""
        config, num_keep = self.config, self.allocation.num_keep[stack.group.name]  # the same number for all
        problem = GroupProblem.pose(stack, moments, config.dampening_frac, self.sensitivity, config.sparsity)
        keep, basis = select_units(problem, num_keep, config)
        on_host, producers = self.context.to_host(keep), dict[str, Tensor]()
        if basis is not None:
            problem, producers = problem.rotate(basis), rotate_producers(stack, on_host, basis)
        weight, records = solve_weights(problem, keep, config, updates)
        return Solution(on_host, weight, basis, producers, records)
