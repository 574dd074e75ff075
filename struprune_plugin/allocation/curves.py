"""Measurement of every module's importance and error curve on the dense model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.rules import AllocationRule, GroupStatistics
from struprune_plugin.layerwise.calls import mark_tokens
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.moments import Moments
from struprune_plugin.layerwise.passes import calibrating, stream_layers
from struprune_plugin.layerwise.statistics import LayerStatistics, Stack
from struprune_plugin.linalg.error_curves import measure_deletion_curve, measure_restored_curve, sum_increases
from struprune_plugin.linalg.second_moments import count_sums, move_moments
from struprune_plugin.model.unit_kind import UnitGroup, select_groups
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.pruning.problem import GroupProblem, Sensitivity
from struprune_plugin.pruning.selection import list_stacks, rank_units
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0, count_ranks

_KEPT = 0.25  # share of the host's free memory for moments
Batches = list[dict[str, Tensor]]


@dataclass(frozen=True)
class DenseMeasurements:
    """Measurements of an allocation pass over the dense model.

    :param statistics: statistics of every group, by name
    :param moments: moments over the batches, and the group's place in them, by the name of a group; None if they are not stored
    """

    statistics: Mapping[str, GroupStatistics]
    moments: Mapping[str, tuple[Moments, int]] | None = None


@dataclass(frozen=True)
class CurveMeasurer:
    """Measurer of every module's importance and error curve on the dense model, which is not changed.

    :param config: methods by which units are ranked and errors measured
    """

    model: PreTrainedModel
    rule: AllocationRule
    config: PruningConfig
    sensitivity: Sensitivity
    context: DeviceContext

    def measure(self, batches: Batches, groups: Sequence[UnitGroup], keeps_moments: bool) -> DenseMeasurements:
        """Return the statistics of every group and, for trials on the same batches, its moments, if they are kept."""
        measured, stored = dict[str, GroupStatistics](), dict[str, tuple[Moments, int]]()
        statistics = LayerStatistics(TARGETS["local"], self.context)
        offload = partial(self.context.offload, what="moments")
        with calibrating(self.model):
            for step in stream_layers(self.model, batches, self.context, "error curves"):
                selected = select_groups(groups, step.name)
                step.observe(statistics, selected)
                for stack in list_stacks(step.layer, selected, statistics):
                    moments = stack.collect_moments("statistics")
                    if keeps_moments:
                        offloaded = replace(moments, all=move_moments(moments.all, offload))
                        stored |= {name: (offloaded, index) for index, name in enumerate(stack.names)}
                    describe = partial(self._describe, stack, moments)
                    described = compute_on_rank0(describe, list[GroupStatistics], torch.device("cpu"))
                    measured.update(zip(stack.names, described, strict=True))
                    del moments, describe  # before the next are assembled
                statistics.finish_layer()
        return DenseMeasurements(measured, stored if keeps_moments else None)

    def _describe(self, stack: Stack, moments: Moments) -> list[GroupStatistics]:
        """Return the statistics of a stack's groups, with one transfer to the host for all."""
        config, host = self.config, self.context.to_host
        problem = GroupProblem.pose(stack, moments, config.dampening_frac, self.sensitivity, config.sparsity)
        ranked = rank_units(problem, config, stack.group.num_units)
        if config.weight_update.solves and config.importance.eliminates:
            curves = sum_increases(ranked.scores.gather(1, ranked.order))
        else:
            linears = enumerate(ranked.order)
            curves = torch.stack([self._measure_curve(problem.select(index), order) for index, order in linears])
        scores, order, curves = host(ranked.scores), host(ranked.order), host(curves)
        weights = [self.rule.weigh(self.model, *pair) for pair in zip(stack.groups, scores, strict=True)]
        bases = [None] * len(weights) if ranked.basis is None else host(ranked.basis)
        return [GroupStatistics(*values) for values in zip(weights, curves, scores, order, bases, strict=True)]

    def _measure_curve(self, problem: GroupProblem, order: Tensor) -> Tensor:
        """Return the error curve of an importance whose scores are no increases of the error."""
        group, weighed, moved = problem.group, problem.weighed, problem.weight
        if (root := self.sensitivity.fisher_sqrt.get(group.output_name)) is not None:
            moved = self.context.to_solver(root) @ moved  # its output is the target here
            weighed = replace(weighed, target_energy=(weighed.cross * moved).sum())
        if self.config.weight_update.solves:  # ADMM, too, starts from and ends with the least-squares solve
            return measure_restored_curve(weighed, order, group.columns_per_unit, group.name)
        return measure_deletion_curve(weighed, moved, order, group.columns_per_unit)


def can_keep_moments(groups: Sequence[UnitGroup], hidden_size: int) -> bool:
    """Return whether all groups' moments fit in a share of the host's free memory."""
    return count_moment_bytes(groups, hidden_size) <= _KEPT * psutil.virtual_memory().available


def count_moment_bytes(groups: Sequence[UnitGroup], hidden_size: int) -> int:
    """Return the bytes of all groups' moments."""
    return 8 * sum(count_sums(group.num_columns, hidden_size) for group in groups)  # sums are triangles, moments whole


def take_batches(batches: Batches, groups: Sequence[UnitGroup], samples: int) -> Batches:
    """Return the first sequences, in their batches, that provide ``samples`` and four tokens per input of the widest module.

    With several processes, this is the share of one process. The number of sequences does not depend on the batches.
    """
    ranks = count_ranks()
    needed = 4 * max(group.num_columns for group in groups) / ranks
    sequences = tokens = 0
    for batch in batches:
        for length in mark_tokens(batch).sum(1).tolist():
            if sequences < samples / ranks or tokens < needed:
                sequences, tokens = sequences + 1, tokens + length
    return split_batches(batches, sequences)[0]


def hold_batches(batches: Batches, samples: int) -> tuple[Batches, Batches]:
    """Return (the batches without their last sequences, those sequences), at most a quarter of all."""
    total = sum(len(batch["input_ids"]) for batch in batches)
    return split_batches(batches, total - min(samples, total // 4))


def split_batches(batches: Sequence[dict[str, Tensor]], count: int) -> tuple[Batches, Batches]:
    """Return (the first ``count`` sequences, the others), in their batches."""
    parts: tuple[Batches, Batches] = ([], [])
    for batch in batches:
        here = min(count, len(batch["input_ids"]))
        count -= here
        for part, store in zip((slice(here), slice(here, None)), parts, strict=True):
            if len(batch["input_ids"][part]):
                store.append({name: tensor[part] for name, tensor in batch.items()})
    return parts
