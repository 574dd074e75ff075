"""Selection of the units that a group keeps. The layer is not changed."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from struprune_plugin.layerwise.statistics import LayerStatistics, Stack
from struprune_plugin.linalg.elimination import RankedUnits, keep_last
from struprune_plugin.linalg.rotation import find_directions
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
        members = list(run)
        step = max(_TOGETHER // (members[0].num_columns + 1) ** 2, 1)
        runs += [members[start : start + step] for start in range(0, len(members), step)]
    return runs


def list_stacks(
    layer: nn.Module, groups: Sequence[UnitGroup], statistics: LayerStatistics, kept: Mapping[str, object] | None = None
) -> list[Stack]:
    """Return the groups of a layer in stacks, see :func:`list_together`."""
    return [Stack(layer, run, statistics) for run in list_together(groups, kept)]


def rank_units(problem: GroupProblem, config: PruningConfig, num_remove: int) -> RankedUnits:
    """Return the order of removal of at least ``num_remove`` units of every group of a stack."""
    group = problem.group
    if not (config.rotate_values and group.rotates and config.importance.eliminates and config.weight_update.solves):
        return config.importance.rank(problem, num_remove)
    return find_directions(problem.weighed, group.num_blocks, group.columns_per_unit, problem.module.names)


def select_units(problem: GroupProblem, num_keep: int, config: PruningConfig) -> tuple[Tensor, Tensor | None]:
    """Return the sorted kept units, shape [linears, kept], int64, and the basis to which they refer; None without rotation."""
    num_units = problem.group.num_units
    if num_keep == num_units:
        return torch.arange(num_keep, device=problem.weight.device).expand(len(problem.weight), -1), None
    ranked = rank_units(problem, config, num_units - num_keep)
    return keep_last(ranked.order, num_units, num_keep), ranked.basis
