"""``uniform``: the same sparsity in every group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

from struprune_plugin.allocation.rules.rule import (
    RULES,
    AllocationRule,
    Budget,
    GroupStatistics,
    Sizes,
    make_allocation,
)
from struprune_plugin.linalg.knapsack import Limit, fit_shares
from struprune_plugin.linalg.rounding import (
    check_budget,
    measure_uniform_slack,
    round_kept_counts,
    round_uniform_counts,
)
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.records import AllocationRecord

_HALVINGS = 20


@RULES.register
class Uniform(AllocationRule):
    """Equal sparsity of every group."""

    measures: ClassVar[bool] = False
    keeps_limits: ClassVar[bool] = True
    rule: Literal["uniform"] = "uniform"

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        return allocate_uniformly(sizes, budget.share, limits=budget.limits)


def allocate_uniformly(
    sizes: Sizes,
    share: float,
    allowed: Callable[[str, int], bool] | None = None,
    limits: Sequence[Limit] = (),
) -> UnitAllocation:
    """Return an allocation of equal sparsity in every group, rounded so that the budget is met.

    :param share: sparsity over the groups' own parameters
    :param allowed: function that returns whether a kind of modules may keep n units, where all layers must be of one size
    :param limits: budgets to meet in place of the share
    :raises ValueError: rounding misses the budget
    """
    if limits:
        counts = fit_shares(sizes, [0.0] * len(sizes), limits, 1.0)
        if allowed is not None:
            counts = _fit_alike(sizes, allowed, limits)
    elif allowed is None:
        counts = round_kept_counts(sizes, [share] * len(sizes))
        check_budget(sizes, counts, share)
    else:
        counts = round_uniform_counts(sizes, share, allowed)
        check_budget(sizes, counts, share, measure_uniform_slack(sizes))
    return make_allocation(sizes, counts, AllocationRecord("uniform"))


def _fit_alike(sizes: Sizes, allowed: Callable[[str, int], bool], limits: Sequence[Limit]) -> list[int]:
    """Return counts that are equal for all groups of one kind and meet every budget, at the least sparsity found.

    :raises ValueError: no counts meet them
    """
    low, high = 0.0, 1 - 1e-6
    counts = round_uniform_counts(sizes, high, allowed)
    if not all(limit.fits(counts) for limit in limits):
        raise ValueError(
            f"budget: no size that all layers share meets {', '.join(limit.name for limit in limits)}. Relax the budget, or set "
            "`output: per_layer`."
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = round_uniform_counts(sizes, middle, allowed)
        if all(limit.fits(found) for limit in limits):
            high, counts = middle, found
        else:
            low = middle
    for kind in dict.fromkeys(size.kind for size in sizes):  # units that save nothing stay
        size, present = next(pair for pair in zip(sizes, counts, strict=True) if pair[0].kind == kind)
        for count in range(size.num_units // size.step * size.step, present, -size.step):
            more = [count if other.kind == kind else n for other, n in zip(sizes, counts, strict=True)]
            if allowed(kind, count) and all(limit.fits(more) for limit in limits):
                counts = more
                break
    return counts
