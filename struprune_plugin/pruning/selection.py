"""Selection of the units that a group keeps. The layer is not changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from struprune_plugin.layerwise.statistics import GroupMoments
from struprune_plugin.linalg.elimination import RankedUnits, keep_last
from struprune_plugin.linalg.rotation import find_directions
from struprune_plugin.linalg.second_moments import stack
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.storage.manifest import GroupRecord, SolveRecord

_TOGETHER = 1 << 24  # entries of the systems of experts that are worked on together: 128 MB in float64
Result = TypeVar("Result")


def list_together(groups: Sequence[UnitGroup], kept: Mapping[str, object] | None = None) -> list[list[UnitGroup]]:
    """Return the groups in runs that are ranked and solved together: experts of one list and shape, every other group alone.

    :param kept: number of kept units, or several such numbers, by group, the same in a run
    """

    def describe(group: UnitGroup) -> tuple[object, ...]:
        return group.experts or group.name, group.num_units, group.columns_per_unit, (kept or {}).get(group.name)

    runs = []
    for _, run in itertools.groupby(groups, describe):
        alike = list(run)
        step = max(_TOGETHER // (alike[0].num_columns + 1) ** 2, 1)
        runs += [alike[start : start + step] for start in range(0, len(alike), step)]
    return runs


def compute_alike(
    compute: Callable[..., Sequence[Result]],
    device: torch.device,
    moments: Sequence[GroupMoments],
    *arguments: Sequence[Any],
) -> list[Result]:
    """Return one result for each group of one shape, computed together where all have, or all lack, held-out tokens and as many as
    a solve needs; on a CPU, whose caches hold the matrices of one, each alone.

    :param arguments: sequences over the groups, of which ``compute`` gets the parts of those that are computed together
    """
    alone, results = device.type == "cpu", dict[int, Result]()
    kinds = [(own.determines, own.held is None, alone and place) for place, own in enumerate(moments)]
    for kind in dict.fromkeys(kinds):
        alike = [place for place, own in enumerate(kinds) if own == kind]
        found = compute(*([own[place] for place in alike] for own in arguments))
        results.update(zip(alike, found, strict=True))
    return [results[place] for place in range(len(kinds))]


def rank_units(problems: Sequence[GroupProblem], config: PruningConfig, num_remove: int) -> list[RankedUnits]:
    """Return the order of removal of the units of every group.

    :param problems: of one group, or of experts of one shape
    :param num_remove: minimum number of units in the orders
    """
    group = problems[0].group
    if not (config.rotate_values and group.rotates and config.importance.eliminates and config.weight_update.solves):
        return [RankedUnits(*found) for found in config.importance.rank(problems, num_remove)]
    return [
        find_directions(problem.weighed, group.num_blocks, group.columns_per_unit, problem.group.name)
        for problem in problems
    ]


def select_units(
    problems: Sequence[GroupProblem], num_keep: int, config: PruningConfig
) -> tuple[Sequence[Tensor], Sequence[RankedUnits | None]]:
    """Return the sorted kept units of every group, shape [kept], int64, and its ranking; None where all are kept."""
    num_units = problems[0].group.num_units
    if num_keep == num_units:
        return [torch.arange(num_keep, device=problems[0].dense.device)] * len(problems), [None] * len(problems)
    ranked = rank_units(problems, config, num_units - num_keep)
    return keep_last(stack([units.order for units in ranked]), num_units, num_keep).unbind(), ranked


def describe_group(group: UnitGroup, keep: Tensor, scores: Tensor | None, solve: SolveRecord) -> GroupRecord:
    """Return the manifest's record of a group, from tensors on the host."""
    return GroupRecord(
        name=group.name,
        layer=group.layer_index,
        kind=group.kind,
        num_units=group.num_units,
        num_blocks=group.num_blocks,
        unit_cost=group.unit_cost,
        kept=len(keep),
        sparsity=1 - len(keep) / group.num_units,
        scores=summarize_scores(scores, keep),
        keep=keep.tolist(),
        **vars(solve),
    )


def summarize_scores(scores: Tensor | None, keep: Tensor) -> dict[str, float | None] | None:
    """Return the minimum, mean and maximum score of kept and of removed units; ``obs`` scores only removed ones."""
    if scores is None:
        return None
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept[keep] = True
    known = scores.isfinite()
    parts = {"kept": scores[known & kept], "removed": scores[known & ~kept]}
    return {
        f"{extreme}_{name}": float(getattr(part, extreme)()) if len(part) else None
        for name, part in parts.items()
        for extreme in ("min", "mean", "max")
    }
