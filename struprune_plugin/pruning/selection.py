"""Selection of the units that a group keeps. The layer is not changed."""

from __future__ import annotations

import torch
from torch import Tensor

from struprune_plugin.layerwise.statistics import ModuleView
from struprune_plugin.linalg.elimination import keep_last
from struprune_plugin.linalg.rotation import find_directions, order_directions
from struprune_plugin.linalg.second_moments import SecondMoments
from struprune_plugin.linalg.solve import weigh_outputs
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.pruning.importance import Ranking, Sensitivity
from struprune_plugin.storage.records import GroupRecord, SolveRecord


def weigh_moments(module: ModuleView, damped: SecondMoments, dense: Tensor, sensitivity: Sensitivity) -> SecondMoments:
    """Return the moments with errors weighted by the sensitivity, or unchanged if none was measured."""
    root = sensitivity.fisher_sqrt.get(module.group.output_name)
    return damped if root is None else weigh_outputs(damped, module.context.place(root, damped.gram), dense)


def rank_units(ranking: Ranking, config: PruningConfig, num_remove: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the removal order of the units, every unit's score, and the basis of the units; None without rotation.

    :param num_remove: minimum number of units in the order
    """
    group = ranking.group
    if not config.rotates(group):
        return *config.importance.rank(ranking, num_remove), None
    rotation = find_directions(ranking.damped, group.num_blocks, group.columns_per_unit, group.name)
    return *order_directions(rotation), rotation.basis


def select_units(ranking: Ranking, num_keep: int, config: PruningConfig) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the sorted kept units of a group, chosen by the recipe's importance, shape [kept], int64; every unit's score; and the
    basis to which the heads' units are rotated first. Without a ranking, the latter two are None; without rotation, the basis."""
    group = ranking.group
    if num_keep == group.num_units:
        return torch.arange(num_keep, device=ranking.damped.gram.device), None, None
    order, scores, basis = rank_units(ranking, config, group.num_units - num_keep)
    return keep_last(order, group.num_units, num_keep), scores, basis


def describe_group(group: UnitGroup, keep: Tensor, scores: Tensor | None, solve: SolveRecord) -> GroupRecord:
    """Return the manifest's record of a group."""
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
