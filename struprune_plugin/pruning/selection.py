"""Which units of a group stay. The layer stays as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from struprune_plugin.layerwise.module_view import ModuleView
from struprune_plugin.linalg.elimination import keep_last
from struprune_plugin.linalg.rotation import Rotation, eliminate_directions, order_directions
from struprune_plugin.linalg.second_moments import SecondMoments
from struprune_plugin.linalg.solve import weigh_outputs
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.config import PruningConfig, UnitAllocation
from struprune_plugin.pruning.importance import Ranking
from struprune_plugin.pruning.signals import Sensitivity
from struprune_plugin.storage.records import GroupRecord, SolveRecord


@dataclass(frozen=True)
class SelectedUnits:
    """The units of one group that stay.

    :param keep: sorted, shape [kept], int64
    :param scores: of every unit; None where nothing had to be ranked
    :param rotation: that they are units of; None where nothing is rotated
    """

    keep: Tensor
    scores: Tensor | None = None
    rotation: Rotation | None = None


def weigh_moments(module: ModuleView, damped: SecondMoments, dense: Tensor, sensitivity: Sensitivity) -> SecondMoments:
    """Return the moments that count errors by the sensitivity, or the same ones where none was measured."""
    root = sensitivity.fisher_sqrt.get(module.group.name)
    return damped if root is None else weigh_outputs(damped, module.context.place(root, damped.gram), dense)


def select_units(ranking: Ranking, allocation: UnitAllocation, config: PruningConfig) -> SelectedUnits:
    """Return the units that an allocation leaves, by the importance that the recipe names."""
    group, weighed = ranking.group, ranking.damped
    num_keep, device = allocation.kept[group.name], weighed.gram.device
    rotation = None
    if config.rotates(group) and num_keep < group.num_units:
        gone = (group.num_units - num_keep) // group.num_blocks
        rotation = eliminate_directions(weighed, group.num_blocks, group.columns_per_unit, group.name, gone)
    if allocation.units is not None:
        return SelectedUnits(torch.tensor(allocation.units[group.name], device=device), rotation=rotation)
    if num_keep == group.num_units:
        return SelectedUnits(torch.arange(num_keep, device=device), rotation=rotation)
    if rotation:
        order, scores = order_directions(rotation)
    else:
        order, scores = config.importance.rank(ranking, group.num_units - num_keep)
    return SelectedUnits(keep_last(order, group.num_units, num_keep), scores, rotation)


def describe_group(group: UnitGroup, keep: Tensor, scores: Tensor | None, solve: SolveRecord) -> GroupRecord:
    """Return what the manifest tells of a group."""
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
    """Return the extremes of a group's scores and where the cut lies; ``obs`` scores only what it removed."""
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
