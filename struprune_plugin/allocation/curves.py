"""Measurement of every module's importance and error curve on the dense model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.rules import AllocationRule, GroupStatistics, Subject
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.layerwise.statistics import GroupMoments, LayerStatistics, ModuleView
from struprune_plugin.linalg.error_curves import (
    measure_deletion_curve,
    measure_restored_curve,
    sum_increases,
)
from struprune_plugin.linalg.second_moments import count_sums, move_moments
from struprune_plugin.model.units.group import UnitGroup, select_groups
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.pruning.problem import GroupProblem, Sensitivity
from struprune_plugin.pruning.selection import RankedUnits, list_together, pose_problems, rank_units
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0, count_ranks

_KEPT = 0.25  # share of the host's free memory for moments


class CurveMeasurer:
    """Measurer of every module's importance and error curve on the dense model, which is not changed.

    One decoder layer is on the device at a time; of each module only its group statistics are stored.

    :param config: methods by which units are ranked and errors measured
    :param keeps_moments: whether every group's moments are stored, too, for trials on the same batches
    :ivar moments: moments of every group, by name; None if they are not stored
    """

    def __init__(
        self,
        rule: AllocationRule,
        config: PruningConfig,
        sensitivity: Sensitivity,
        context: DeviceContext,
        keeps_moments: bool = False,
    ):
        self._rule, self._config, self._sensitivity, self._context = rule, config, sensitivity, context
        self._statistics = LayerStatistics(TARGETS["local"], context)
        self.moments: dict[str, GroupMoments] | None = {} if keeps_moments else None

    def measure(
        self,
        model: PreTrainedModel,
        batches: Sequence[dict[str, Tensor]],
        groups: Sequence[UnitGroup],
    ) -> dict[str, GroupStatistics]:
        """Return the statistics of every group, by name."""
        measured = dict[str, GroupStatistics]()
        for step in stream_layers(model, batches, self._context, "error curves"):
            own = select_groups(groups, step.name)
            step.observe(self._statistics, own)
            for together in list_together(own):
                modules = [ModuleView(step.layer, group, self._statistics) for group in together]
                found = self._measure_groups(model, modules)
                measured.update(zip((group.name for group in together), found, strict=True))
            self._statistics.finish_layer()
        return measured

    def _gather(self, module: ModuleView) -> GroupMoments:
        """Return the moments of a group, and store them where they are kept."""
        gathered = module.collect_moments("statistics")
        if self.moments is not None:
            stored = move_moments(gathered.all, partial(self._context.park, what="moments"))
            self.moments[module.group.name] = replace(gathered, all=stored)
        return gathered

    def _measure_groups(self, model: PreTrainedModel, modules: Sequence[ModuleView]) -> list[GroupStatistics]:
        """Return the statistics of a group, or of experts of one shape, computed on rank 0."""
        moments = [self._gather(module) for module in modules]
        with self._context.solving():
            return compute_on_rank0(lambda: self._measure(model, modules, moments), torch.device("cpu"))

    def _measure(
        self, model: PreTrainedModel, modules: Sequence[ModuleView], moments: Sequence[GroupMoments]
    ) -> list[GroupStatistics]:
        problems = pose_problems(modules, moments, self._config, self._sensitivity)
        ranked = rank_units(problems, self._config, modules[0].group.num_units)
        return [self._describe(model, *pair) for pair in zip(problems, ranked, strict=True)]

    def _describe(self, model: PreTrainedModel, problem: GroupProblem, ranked: RankedUnits) -> GroupStatistics:
        """Return a group's importance, error curve, and the scores, order and basis of its units."""
        config, group, weighed = self._config, problem.group, problem.weighed
        if config.weight_update.solves and config.importance.eliminates:
            curve = sum_increases(ranked.scores[ranked.order])
        elif config.weight_update.solves:  # ADMM, too, starts from and ends with the least-squares solve
            curve = measure_restored_curve(weighed, ranked.order, group.columns_per_unit, group.name)
        else:
            root = self._sensitivity.fisher_sqrt.get(group.output_name)
            moved = problem.dense if root is None else self._context.to_solver(root) @ problem.dense
            curve = measure_deletion_curve(weighed, moved, ranked.order, group.columns_per_unit)
        subject = Subject(model, problem.module.layer, group, ranked.scores)
        parts = (curve, ranked.scores, ranked.order, ranked.basis)
        weight, host = self._rule.weigh(subject), self._context.to_host
        return GroupStatistics(weight, *(None if part is None else host(part) for part in parts))  # type: ignore[arg-type]


def take_batches(
    batches: Sequence[dict[str, Tensor]], groups: Sequence[UnitGroup], samples: int
) -> list[dict[str, Tensor]]:
    """Return the first sequences, in their batches, that provide ``samples`` and four tokens per input of the widest module.

    With several processes, this is the share of one process. The number of sequences does not depend on the batches.
    """
    ranks = count_ranks()
    needed = 4 * max(group.num_columns for group in groups) / ranks
    sequences = tokens = 0
    for batch in batches:
        mask = batch.get("attention_mask")
        for length in (torch.ones_like(batch["input_ids"]) if mask is None else mask).sum(1).tolist():
            if sequences < samples / ranks or tokens < needed:
                sequences, tokens = sequences + 1, tokens + length
    return split_batches(batches, sequences)[0]


def can_keep_moments(groups: Sequence[UnitGroup], hidden_size: int) -> bool:
    """Return whether all groups' moments fit in a fixed share of the host's free memory."""
    return count_moment_bytes(groups, hidden_size) <= _KEPT * psutil.virtual_memory().available


def count_moment_bytes(groups: Sequence[UnitGroup], hidden_size: int) -> int:
    """Return the bytes of all groups' moments."""
    return 8 * sum(count_sums(group.num_columns, hidden_size) for group in groups)  # sums are triangles, moments whole


def hold_batches(
    batches: Sequence[dict[str, Tensor]], samples: int
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return (the batches without their last sequences, those sequences), at most a quarter of all."""
    total = sum(len(batch["input_ids"]) for batch in batches)
    return split_batches(batches, total - min(samples, total // 4))


def split_batches(
    batches: Sequence[dict[str, Tensor]], count: int
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return (the first ``count`` sequences, the others), in their batches."""
    parts: tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]] = ([], [])
    for batch in batches:
        here = min(count, len(batch["input_ids"]))
        count -= here
        for part, store in zip((slice(here), slice(here, None)), parts, strict=True):
            if len(batch["input_ids"][part]):
                store.append({name: tensor[part] for name, tensor in batch.items()})
    return parts
