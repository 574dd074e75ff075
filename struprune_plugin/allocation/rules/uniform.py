"""``uniform``: the same sparsity in every group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from struprune_plugin.allocation.rules.rule import (
    RULES,
    AllocationRule,
    Budget,
    GroupStatistics,
    Sizes,
    make_allocation,
)
from struprune_plugin.linalg.rounding import (
    check_budget,
    measure_uniform_slack,
    round_kept_counts,
    round_uniform_counts,
)
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.records import AllocationRecord


@RULES.register
class Uniform(AllocationRule):
    """Every group loses the same share."""

    measures: ClassVar[bool] = False
    rule: Literal["uniform"] = "uniform"

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        return allocate_uniformly(sizes, budget.share)


def allocate_uniformly(sizes: Sizes, share: float, allowed: Callable[[str, int], bool] | None = None) -> UnitAllocation:
    """Give every group the same sparsity, rounded so that the budget is met.

    :param share: sparsity over the groups' own parameters
    :param allowed: where all layers must be of one size: whether a kind of modules may keep n units
    :raises ValueError: rounding misses the budget
    """
    if allowed is None:
        counts = round_kept_counts(sizes, [share] * len(sizes))
        check_budget(sizes, counts, share)
    else:
        counts = round_uniform_counts(sizes, share, allowed)
        check_budget(sizes, counts, share, measure_uniform_slack(sizes))
    return make_allocation(sizes, counts, AllocationRecord("uniform"))
