"""The contract of an allocation rule: how a budget is spread over the groups. A file in this folder is one rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from struprune_plugin.linalg.knapsack import Limit
from struprune_plugin.linalg.rounding import GroupSize, expand_counts
from struprune_plugin.linalg.second_moments import SecondMoments
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.records import AllocationRecord
from struprune_plugin.storage.registry import Config, Registry


@dataclass(frozen=True)
class Budget:
    """What is to go.

    :param sparsity: asked, of all prunable parameters
    :param num_prunable: how many these are
    :param share: the mean sparsity that the groups to prune need for it
    :param sensitivity: what errors are weighed by, for the record
    :param limits: all budgets, in the order of the sizes; none where parameters alone are given
    """

    sparsity: float
    num_prunable: int
    share: float
    sensitivity: str
    limits: Sequence[Limit] = ()


@dataclass(frozen=True)
class GroupStatistics:
    """What the allocation pass has measured of one group.

    :param importance: as the rule weighs it
    :param curve: error with k = 0 ... num_units units kept, on the host
    :param scores: of every unit, on the host
    :param order: in which units go, the first to go first, on the host, shape [num_units], int64
    :param basis: that heads' units are rotated to first, on the host; None where they are not
    """

    importance: float
    curve: Tensor
    scores: Tensor
    order: Tensor
    basis: Tensor | None = None


@dataclass(frozen=True)
class Subject:
    """What a rule may look at to weigh one group.

    :param scores: of every unit
    :param moments: of the consumer's inputs, in unit order
    :param dense: the consumer's weights, in unit order, bias last, shape [d, n + 1]
    :param influence: one minus the mean cosine of the layer's inputs and outputs, where the rule compares them
    """

    model: nn.Module
    layer: nn.Module
    group: UnitGroup
    scores: Tensor
    moments: SecondMoments
    dense: Tensor
    influence: float


Sizes = Sequence[GroupSize]


class AllocationRule(Config):
    """How many units every group keeps.

    :cvar measures: whether it needs an allocation pass over the dense model
    :cvar weighs_errors: whether it compares errors of different modules, so that a sensitivity is needed
    :cvar compares_layers: whether it asks for :attr:`Subject.influence`
    :cvar empties: whether it may leave a module nothing
    :cvar takes_layers: whether layers go whole, and all others stay alike
    :cvar keeps_limits: whether it takes budgets other than parameters (:attr:`Budget.limits`)
    """

    measures: ClassVar[bool] = True
    weighs_errors: ClassVar[bool] = False
    compares_layers: ClassVar[bool] = False
    empties: ClassVar[bool] = False
    takes_layers: ClassVar[bool] = False
    keeps_limits: ClassVar[bool] = False
    rule: str

    @property
    def most(self) -> float | None:
        """The most that a module may lose; None where the rule sets no bound."""
        return getattr(self, "max_sparsity", None)

    @property
    def sequences(self) -> int | None:
        """Sequences that are enough for the rule; None where it takes all."""
        return getattr(self, "samples", None)

    def weigh(self, subject: Subject) -> float:
        """Return the importance of a group."""
        return float(subject.scores.sum())

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        """Return the allocation, from the groups' sizes and what was measured of them.

        :raises ValueError: the budget cannot be met
        """
        raise NotImplementedError

    def decide_by_parameters(
        self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget
    ) -> Sequence[int] | None:
        """Return the kept units of a budget of parameters alone, the most that meet all budgets, to try beside the rule's own; None
        where there is nothing to try."""
        return None

    def propose(self, sizes: Sizes, own: UnitAllocation, share: float) -> Mapping[str, Sequence[int]]:
        """Return kept units of allocations to try beside the rule's own, by their names; none where it is taken untried."""
        return {}

    def measure_slack(self, sizes: Sizes) -> int | None:
        """Return the parameters by which a plan may miss the budget; None for one step of the largest kind."""
        return None

    def check(self, importance: str) -> None:
        """Refuse an importance that the rule is not defined for.

        :raises ValueError: the same
        """


RULES: Registry[AllocationRule] = Registry(AllocationRule, "rule")


def make_allocation(sizes: Sizes, counts: Sequence[int], record: AllocationRecord) -> UnitAllocation:
    """Return kept counts, in the order of the groups, as an allocation."""
    return UnitAllocation(expand_counts(sizes, counts), record)


def tie_statistics(sizes: Sizes, statistics: Mapping[str, GroupStatistics]) -> dict[str, GroupStatistics]:
    """Return what was measured by the name of every size: of groups that keep the same number, importance and errors added up."""
    tied = {}
    for size in sizes:
        members = [(statistics[name], factor) for name, factor in size.members or ((size.name, 1),)]
        tied[size.name] = replace(
            members[0][0],
            importance=sum(member.importance for member, _ in members),
            curve=torch.stack([member.curve[::factor] for member, factor in members]).sum(0),
        )
    return tied
