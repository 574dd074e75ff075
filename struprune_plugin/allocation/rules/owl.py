"""``owl``: modules with many outlying weights lose less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor

from struprune_plugin.allocation.rules.rule import (
    RULES,
    AllocationRule,
    Budget,
    GroupStatistics,
    Sizes,
    Subject,
    make_allocation,
)
from struprune_plugin.linalg.budget import MAX_SPARSITY, spread_by_kind, spread_sparsity
from struprune_plugin.linalg.rounding import check_budget, round_kept_counts
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.records import AllocationRecord


@RULES.register
class OWL(AllocationRule):
    """Outlier-weighed sparsity: the share of weights whose ``|W_oi| ||x_i||_2`` exceeds ``threshold`` times the mean.

    Sparsities lie within ``spread`` of their mean, the least where outliers are most. Source: OWL (Yin et al. 2024), Eq. 1 and
    section 3.2. Differs from the source: shares are of one consuming linear, not of a whole layer's linears, and each kind of
    modules is allocated separately, as in the softmax rules.

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

        def spread(ratios: Tensor, parameters: Tensor) -> Tensor:
            width = (ratios.max() - ratios.min()).clamp(min=1e-12)
            lean = 1 - 2 * (ratios - ratios.min()) / width  # 1 where outliers are fewest, -1 where they are most
            wanted = (budget.share + self.spread * (lean - lean.mean())).clamp(min=0)
            return spread_sparsity(wanted, parameters, budget.share, self.max_sparsity)

        kept = round_kept_counts(sizes, spread_by_kind(sizes, list(importance.values()), spread))
        check_budget(sizes, kept, budget.share)
        return make_allocation(sizes, kept, AllocationRecord(self.rule, importance=importance))
