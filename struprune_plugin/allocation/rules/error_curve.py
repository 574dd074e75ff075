"""``error_curve``: the least sum of all modules' errors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar, Literal

from pydantic import Field

from struprune_plugin.allocation.rules.rule import (
    RULES,
    AllocationRule,
    Budget,
    GroupStatistics,
    Sizes,
    make_allocation,
)
from struprune_plugin.linalg.budget import MAX_SPARSITY, allocate_error_curves, meet_budget
from struprune_plugin.linalg.rounding import check_budget
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.manifest import AllocationRecord


@RULES.register
class ErrorCurve(AllocationRule):
    """Least sum of all modules' errors, each by the number of kept units, weighted by the sensitivity
    (:func:`~struprune_plugin.linalg.budget.allocate_error_curves`). Blocks of modules are then tried alone, and the curves scaled
    to the measured divergences (:mod:`struprune_plugin.allocation.probes`). The allocations of both are tried against some nearer
    to uniform.

    :param samples: calibration sequences for the curves, in a pruning stage's own pass; at least four tokens per input of the
        widest module are used
    :param trial_samples: calibration sequences, the last ones, on which allocations are compared by the KL divergence of the
        model's own output; the best one is used. As many before them are for blocks of modules. Both are at most a quarter of
        all; 0 uses the allocation of the curves alone
    :param max_sparsity: the maximum sparsity of a module, to within one step
    """

    weighs_errors: ClassVar[bool] = True
    rule: Literal["error_curve"] = "error_curve"
    samples: int = Field(default=16, ge=1)
    trial_samples: int = Field(default=4, ge=0)
    max_sparsity: float = Field(default=MAX_SPARSITY, gt=0, lt=1)

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        curves = [statistics[size.name].curve for size in sizes]
        parameters = (1 - budget.share) * sum(size.num_parameters for size in sizes)
        kept = allocate_error_curves(sizes, curves, budget.limit or parameters, self.max_sparsity)
        if budget.limit is None:
            check_budget(sizes, kept, budget.share)
        elif not budget.limit.fits(kept):
            raise ValueError(
                f"max_sparsity: {self.max_sparsity} is too low for the budget. Raise it, or relax the budget."
            )
        loss = sum(float(curve[count]) for curve, count in zip(curves, kept, strict=True))
        return make_allocation(sizes, kept, AllocationRecord(self.rule, error=loss, sensitivity=budget.sensitivity))

    def propose(self, sizes: Sizes, own: UnitAllocation, budget: Budget) -> dict[str, list[int]]:
        """Return allocations halfway between the rule's own and uniform, and uniform itself, where they meet the budget.

        Curves are used at errors of any size; where they are wrong, it is where a module would lose much more than others.
        """
        taken, found = [1 - own.kept[size.name] / size.num_units for size in sizes], dict[str, list[int]]()
        for name, part in (("half uniform", 0.5), ("uniform", 1.0)):
            shares = [(1 - part) * sparsity + part * budget.share for sparsity in taken]
            with suppress(ValueError):
                found[name] = meet_budget(sizes, shares, budget.share, budget.limit)
        return found
