"""``owl``: modules with many outlying weights lose less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field

from struprune_plugin.allocation.rules.rule import (
    RULES,
    AllocationRule,
    Budget,
    GroupStatistics,
    Sizes,
    Subject,
    make_allocation,
)
from struprune_plugin.linalg.budget import MAX_SPARSITY, spread_sparsity
from struprune_plugin.linalg.rounding import check_budget, round_kept_counts
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.records import AllocationRecord


@RULES.register
class OWL(AllocationRule):
    """Outlier-weighed sparsity: the share of weights whose ``|W_oi| ||x_i||_2`` exceeds ``threshold`` times the mean.

    Sparsities lie within ``spread`` of their mean, the least where outliers are most. Source: OWL (Yin et al. 2024), Eq. 1 and
    section 3.2. Differs from the source: shares are of one consuming linear, not of a whole layer's, and each kind of modules
    is spread on its own, as in the softmax rules.

    :param threshold: M
    :param spread: lambda, half the width of the range of sparsities
    """

    rule: Literal["owl"] = "owl"
    threshold: float = Field(default=5.0, gt=1, allow_inf_nan=False)
    spread: float = Field(default=0.08, ge=0, lt=1)
    max_sparsity: float = Field(default=MAX_SPARSITY, gt=0, lt=1)

    def weigh(self, subject: Subject) -> float:
        norms = subject.moments.gram.diagonal()[:-1].double().sqrt()
        scores = subject.dense[:, :-1].double().abs() * norms
        return float((scores > self.threshold * scores.mean()).double().mean())

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        importance = {size.name: statistics[size.name].importance for size in sizes}
        shares: dict[str, float] = {}
        for kind in dict.fromkeys(size.kind for size in sizes):
            members = [size for size in sizes if size.kind == kind]
            ratios = torch.tensor([importance[size.name] for size in members], dtype=torch.float64)
            width = (ratios.max() - ratios.min()).clamp(min=1e-12)
            lean = 1 - 2 * (ratios - ratios.min()) / width  # 1 where outliers are fewest, -1 where they are most
            wanted = (budget.share + self.spread * (lean - lean.mean())).clamp(min=0)
            costs = torch.tensor([size.num_parameters for size in members])
            spread = spread_sparsity(wanted, costs, budget.share, self.max_sparsity)
            shares |= dict(zip((size.name for size in members), spread.tolist(), strict=True))
        kept = round_kept_counts(sizes, [shares[size.name] for size in sizes])
        check_budget(sizes, kept, budget.share)
        return make_allocation(sizes, kept, AllocationRecord(self.rule, importance=importance))
