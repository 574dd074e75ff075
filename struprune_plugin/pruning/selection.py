"""Selection of the units that a group keeps. The layer is not changed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from struprune_plugin.layerwise.statistics import GroupMoments, ModuleView
from struprune_plugin.linalg.elimination import RankedUnits, keep_last
from struprune_plugin.linalg.rotation import find_directions
from struprune_plugin.linalg.second_moments import stack
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.pruning.problem import GroupProblem

_TOGETHER = 1 << 24  # entries of the systems of experts that are worked on together: 128 MB in float64


def list_together(groups: Sequence[UnitGroup], kept: Mapping[str, object] | None = None) -> list[list[UnitGroup]]:
    """Return the groups in runs that are ranked and solved together: experts of one list and shape, every other group alone.

    :param kept: number of kept units, or several such numbers, by group, the same in a run
    """

    def describe(group: UnitGroup) -> tuple[object, ...]:
        return group.mixture or group.name, group.num_units, group.columns_per_unit, (kept or {}).get(group.name)

    runs = []
    for _, run in itertools.groupby(groups, describe):
        alike = list(run)
        step = max(_TOGETHER // (alike[0].num_columns + 1) ** 2, 1)
        runs += [alike[start : start + step] for start in range(0, len(alike), step)]
    return runs


def split_alike(
    modules: Sequence[ModuleView], moments: Sequence[GroupMoments]
) -> list[tuple[list[ModuleView], list[GroupMoments]]]:
    """Return groups of one shape in parts that are solved together: those that all have, or all lack, held-out tokens and as many
    tokens as a solve needs; on a CPU, whose caches hold the matrices of one, each alone."""
    alone, parts = modules[0].context.solve_device.type == "cpu", dict[object, list[tuple[ModuleView, GroupMoments]]]()
    for module, own in zip(modules, moments, strict=True):
        parts.setdefault((own.determines, own.held is None, alone and module.group.name), []).append((module, own))
    return [([module for module, _ in part], [own for _, own in part]) for part in parts.values()]


def rank_units(problems: Sequence[GroupProblem], config: PruningConfig, num_remove: int) -> list[RankedUnits]:
    """Return the order of removal of at least ``num_remove`` units of every group: of one, or of experts of one shape."""
    group = problems[0].group
    if not (config.rotate_values and group.rotates and config.importance.eliminates and config.weight_update.solves):
        return config.importance.rank(problems, num_remove)
    return [
        find_directions(problem.weighed, group.num_blocks, group.columns_per_unit, problem.group.name)
        for problem in problems
    ]


def select_units(
    problems: Sequence[GroupProblem], num_keep: int, config: PruningConfig
) -> tuple[Tensor, Tensor | None]:
    """Return the sorted kept units, shape [groups, kept], int64, and the basis to which they refer; None without rotation."""
    num_units = problems[0].group.num_units
    if num_keep == num_units:
        return torch.arange(num_keep, device=problems[0].weight.device).expand(len(problems), -1), None
    ranked = rank_units(problems, config, num_units - num_keep)
    return keep_last(stack([units.order for units in ranked]), num_units, num_keep), ranked[0].basis
