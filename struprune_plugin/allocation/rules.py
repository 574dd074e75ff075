"""Allocation rules, which spread a budget over the groups: registered settings objects."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.budget import MAX_SPARSITY, allocate_error_curves, meet_budget
from struprune_plugin.allocation.rounding import (
    GroupSize,
    check_budget,
    expand_counts,
    measure_uniform_slack,
    round_uniform_counts,
)
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.settings.registry import Config, Registry
from struprune_plugin.storage.manifest import AllocationRecord

Sizes = Sequence[GroupSize]


@dataclass(frozen=True)
class Budget:
    """Budget of a recipe on a model.

    :param sparsity: fraction of all prunable parameters to remove
    :param share: mean sparsity of the groups to prune that meets it
    :param sensitivity: name of the sensitivity that weights errors, for the record
    :param num_entries: entries of every list of modules that stay; 0 where all do
    """

    sparsity: float
    num_prunable: int
    share: float
    sensitivity: str
    num_entries: int = 0


@dataclass(frozen=True)
class GroupStatistics:
    """Measurements of one group in the allocation pass, on the host.

    :param importance: as the rule weighs it
    :param curve: error with k = 0 ... num_units units kept
    :param scores: score of every unit
    :param order: removal order of the units, first removed first, int64
    :param basis: basis to which the heads' units are rotated first; None without rotation
    """

    importance: float
    curve: Tensor
    scores: Tensor
    order: Tensor
    basis: Tensor | None = None


class AllocationRule(Config):
    """Base class of a rule that sets how many units every group keeps.

    A rule may have the fields ``samples``, sequences that it needs in place of all, ``trial_samples``, see
    :class:`ErrorCurve`, and ``max_sparsity``, the maximum sparsity of a module.

    :cvar measures: whether it needs an allocation pass over the dense model
    :cvar weighs_errors: whether it compares errors of different modules, so that a sensitivity is needed
    """

    measures: ClassVar[bool] = True
    weighs_errors: ClassVar[bool] = False
    rule: str

    def weigh(self, model: PreTrainedModel, group: UnitGroup, scores: Tensor) -> float:
        """Return the importance of a group of the dense model, by default the sum of its units' scores."""
        return float(scores.sum())

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        """Return the allocation, from the groups' sizes and statistics.

        :raises ValueError: the budget cannot be met
        """
        raise NotImplementedError

    def propose(self, sizes: Sizes, decided: UnitAllocation, budget: Budget) -> Mapping[str, Sequence[int]]:
        """Return kept units of allocations to try beside the rule's own, by name; none if the rule's own is used untried."""
        return {}

    def check(self, importance: str) -> None:
        """Raise if the rule is not defined for an importance."""


RULES: Registry[AllocationRule] = Registry(AllocationRule, "rule")


def tie_statistics(sizes: Sizes, statistics: Mapping[str, GroupStatistics]) -> dict[str, GroupStatistics]:
    """Return the statistics by the name of every size; importance and errors of tied groups are summed."""
    tied = {}
    for size in sizes:
        members = [(statistics[name], factor) for name, factor in size.members]
        tied[size.name] = replace(
            members[0][0],
            importance=sum(member.importance for member, _ in members),
            curve=torch.stack([member.curve[::factor] for member, factor in members]).sum(0),
        )
    return tied


@RULES.register
class Uniform(AllocationRule):
    """Equal sparsity of every group."""

    measures: ClassVar[bool] = False
    rule: Literal["uniform"] = "uniform"

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        return allocate_uniformly(sizes, budget)


def allocate_uniformly(
    sizes: Sizes, budget: Budget, allowed: Callable[[str, int], bool] | None = None
) -> UnitAllocation:
    """Return an allocation of equal sparsity in every group, rounded so that the budget is met.

    :param allowed: whether modules of a pool may keep n units, where all layers must be of one size
    """
    share = budget.share
    if allowed is None:
        counts = meet_budget(sizes, [share] * len(sizes), share)
    else:
        counts = round_uniform_counts(sizes, share, allowed)
        check_budget(sizes, counts, share, measure_uniform_slack(sizes))
    return UnitAllocation(expand_counts(sizes, counts), AllocationRecord("uniform"))


@RULES.register
class ErrorCurve(AllocationRule):
    """Least sum of all modules' errors, each by the number of kept units, weighted by the sensitivity
    (:func:`~struprune_plugin.allocation.budget.allocate_error_curves`). Blocks of modules are then tried alone, and the curves
    scaled to the measured divergences. The allocations of both are tried against some nearer to uniform (method.md section 5).

    :param samples: calibration sequences for the curves; at least four tokens per input of the widest module are used
    :param trial_samples: calibration sequences, the last ones, on which allocations are compared by the KL divergence of the
        model's own output. As many before them are for blocks of modules. Both are at most a quarter of all; 0 tries nothing
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
        num_keep = allocate_error_curves(sizes, curves, parameters, self.max_sparsity)
        check_budget(sizes, num_keep, budget.share)
        loss = sum(float(curve[count]) for curve, count in zip(curves, num_keep, strict=True))
        record = AllocationRecord(self.rule, error=loss, sensitivity=budget.sensitivity)
        return UnitAllocation(expand_counts(sizes, num_keep), record)

    def propose(self, sizes: Sizes, decided: UnitAllocation, budget: Budget) -> dict[str, list[int]]:
        """Return allocations halfway between the rule's own and uniform, and uniform itself, where they meet the budget."""
        sparsities = [1 - decided.num_keep[size.name] / size.num_units for size in sizes]
        proposed = dict[str, list[int]]()
        for name, part in (("half uniform", 0.5), ("uniform", 1.0)):
            shares = [(1 - part) * sparsity + part * budget.share for sparsity in sparsities]
            with suppress(ValueError):
                proposed[name] = meet_budget(sizes, shares, budget.share)
        return proposed
