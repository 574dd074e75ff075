"""Base class of an allocation rule, which spreads a budget over the groups. A file in this folder is one rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from struprune_plugin.linalg.budget import Limit
from struprune_plugin.linalg.rounding import GroupSize, expand_counts
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.manifest import AllocationRecord
from struprune_plugin.storage.registry import Config, Registry


@dataclass(frozen=True)
class Budget:
    """Budget of an allocation.

    :param sparsity: fraction of all prunable parameters to remove
    :param num_prunable: number of prunable parameters
    :param share: mean sparsity of the groups to prune that meets it
    :param sensitivity: name of the sensitivity that weights errors, for the record
    :param limit: seconds that may remain, in the order of the sizes, in place of the share
    """

    sparsity: float
    num_prunable: int
    share: float
    sensitivity: str
    limit: Limit | None = None


@dataclass(frozen=True)
class GroupStatistics:
    """Measurements of one group in the allocation pass.

    :param importance: importance, as the rule weighs it
    :param curve: error with k = 0 ... num_units units kept, on the host
    :param scores: score of every unit, on the host
    :param order: removal order of the units, first removed first, on the host, shape [num_units], int64
    :param basis: basis to which the heads' units are rotated first, on the host; None without rotation
    """

    importance: float
    curve: Tensor
    scores: Tensor
    order: Tensor
    basis: Tensor | None = None


@dataclass(frozen=True)
class Subject:
    """Inputs from which a rule weighs one group.

    :param scores: score of every unit
    """

    model: nn.Module
    layer: nn.Module
    group: UnitGroup
    scores: Tensor


Sizes = Sequence[GroupSize]


class AllocationRule(Config):
    """Base class of a rule that sets how many units every group keeps.

    :cvar measures: whether it needs an allocation pass over the dense model
    :cvar weighs_errors: whether it compares errors of different modules, so that a sensitivity is needed
    """

    measures: ClassVar[bool] = True
    weighs_errors: ClassVar[bool] = False
    rule: str

    @property
    def most(self) -> float | None:
        """Maximum sparsity of a module; None if the rule sets no bound."""
        return getattr(self, "max_sparsity", None)

    @property
    def sequences(self) -> int | None:
        """Number of sequences that the rule needs; None if it uses all."""
        return getattr(self, "samples", None)

    def weigh(self, subject: Subject) -> float:
        """Return the importance of a group."""
        return float(subject.scores.sum())

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        """Return the allocation, from the groups' sizes and statistics.

        :raises ValueError: the budget cannot be met
        """
        raise NotImplementedError

    def propose(self, sizes: Sizes, own: UnitAllocation, budget: Budget) -> Mapping[str, Sequence[int]]:
        """Return kept units of allocations to try beside the rule's own, by name; none if the rule's own is used untried."""
        return {}

    def check(self, importance: str) -> None:
        """Raise if the rule is not defined for an importance.

        :raises ValueError: the rule is not defined for it
        """


RULES: Registry[AllocationRule] = Registry(AllocationRule, "rule")


def make_allocation(sizes: Sizes, counts: Sequence[int], record: AllocationRecord) -> UnitAllocation:
    """Return kept counts, in the order of the groups, as an allocation."""
    return UnitAllocation(expand_counts(sizes, counts), record)


def tie_statistics(sizes: Sizes, statistics: Mapping[str, GroupStatistics]) -> dict[str, GroupStatistics]:
    """Return the statistics by the name of every size; importance and errors of tied groups are summed."""
    tied = {}
    for size in sizes:
        members = [(statistics[name], factor) for name, factor in size.members or ((size.name, 1),)]
        tied[size.name] = replace(
            members[0][0],
            importance=sum(member.importance for member, _ in members),
            curve=torch.stack([member.curve[::factor] for member, factor in members]).sum(0),
        )
    return tied
