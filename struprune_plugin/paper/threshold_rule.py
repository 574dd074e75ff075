"""``global_threshold``: Algorithm 1's threshold over all units' scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from struprune_plugin.allocation.rules import (
    RULES,
    AllocationRule,
    Budget,
    GroupStatistics,
    Sizes,
    make_allocation,
)
from struprune_plugin.linalg.budget import meet_budget
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.linalg.ties import order_scores
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.manifest import AllocationRecord


@RULES.register
class GlobalThreshold(AllocationRule):
    """Threshold on the scores of the units of all groups (paper, Algorithm 1); requires ``importance: closed_form``."""

    rule: Literal["global_threshold"] = "global_threshold"

    def check(self, importance: str) -> None:
        if importance != "closed_form":
            raise ValueError(
                f"importance: must be closed_form for allocation: global_threshold (Algorithm 1), got {importance!r}. Set "
                "`importance: closed_form`."
            )

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        scores = [statistics[size.name].scores for size in sizes]
        kept = meet_budget(sizes, allocate_global_threshold(sizes, scores, budget.share), budget.share)
        retention = {s.name: min(max(float(part.mean()), 0.0), 1.0) for s, part in zip(sizes, scores, strict=True)}
        return make_allocation(sizes, kept, AllocationRecord(self.rule, retention=retention))


def allocate_global_threshold(groups: Sequence[GroupSize], scores: Sequence[Tensor], sparsity: float) -> list[float]:
    """Return every group's sparsity when units of highest score are kept until the retained parameters are used up.

    Source: paper, Lemma 1 and Algorithm 1 (the threshold tau), K counting retained units weighted by their cost (R5).

    :param scores: score of every unit, one tensor of shape [units] per group; ties go to the earlier group and unit
    :param sparsity: sparsity of the groups' own parameters, from :func:`find_group_sparsity`
    :return: sparsity of every group
    """
    costs = torch.cat([torch.full((len(s),), g.unit_cost) for g, s in zip(groups, scores, strict=True)])
    owner = torch.cat([torch.full((len(s),), i) for i, s in enumerate(scores)])
    order = order_scores(torch.cat([s.double().cpu() for s in scores]), descending=True)
    most = (1 - sparsity) * float(costs.sum())
    # float64: int64 is compared with a Python float in float32
    kept = owner[order[costs[order].cumsum(0).double() <= most]]
    counts = torch.bincount(kept, minlength=len(groups)).tolist()
    return [1 - count / group.num_units for count, group in zip(counts, groups, strict=True)]
