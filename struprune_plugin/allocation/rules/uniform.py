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
from struprune_plugin.linalg.budget import MAX_SPARSITY, Limit, find_least_share, meet_budget
from struprune_plugin.linalg.rounding import (
    check_budget,
    measure_uniform_slack,
    round_uniform_counts,
)
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.manifest import AllocationRecord


@RULES.register
class Uniform(AllocationRule):
    """Equal sparsity of every group."""

    measures: ClassVar[bool] = False
    rule: Literal["uniform"] = "uniform"

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        return allocate_uniformly(sizes, budget.share, limit=budget.limit)


def allocate_uniformly(
    sizes: Sizes,
    share: float,
    allowed: Callable[[str, int], bool] | None = None,
    limit: Limit | None = None,
) -> UnitAllocation:
    """Return an allocation of equal sparsity in every group, rounded so that the budget is met.

    :param share: sparsity over the groups' own parameters
    :param allowed: function that returns whether a kind of modules may keep n units, where all layers must be of one size
    :param limit: seconds to meet in place of the share
    :raises ValueError: rounding misses the budget
    """
    if allowed is None:
        counts = meet_budget(sizes, [share] * len(sizes), share, limit)
    elif limit is not None:
        counts = find_least_share(lambda one: round_uniform_counts(sizes, one, allowed), limit, 0.0, MAX_SPARSITY)
    else:
        counts = round_uniform_counts(sizes, share, allowed)
        check_budget(sizes, counts, share, measure_uniform_slack(sizes))
    return make_allocation(sizes, counts, AllocationRecord("uniform"))
