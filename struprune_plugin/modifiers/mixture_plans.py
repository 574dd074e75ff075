"""Plans that remove whole experts: one per number of kept experts, with the error of that and of the rest of the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from struprune_plugin.allocation.rules import GroupStatistics
from struprune_plugin.allocation.rules.rule import tie_statistics
from struprune_plugin.allocation.whole_experts import DropOrder, Mixture
from struprune_plugin.linalg.rounding import GroupSize, check_budget, expand_counts
from struprune_plugin.linalg.ties import argmin_with_ties
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.mixtures import Split, list_splits, measure_others, pick_even
from struprune_plugin.modifiers.setup import RunSetup
from struprune_plugin.pruning.config import KeptExperts, UnitAllocation
from struprune_plugin.storage.records import AllocationRecord

_SPREAD = 5  # numbers of kept experts to try


@dataclass(frozen=True)
class _Candidate:
    """One plan, with kept units under the group names of the dense model.

    :param sizes: sizes of the groups beside whole experts
    :param error: total error of removed experts and other units
    """

    split: Split
    plan: UnitAllocation
    sizes: Sequence[GroupSize]
    error: float


def settle_experts(plan: UnitAllocation, mixture: Mixture, groups: Sequence[UnitGroup]) -> UnitAllocation:
    """Return a plan under the group names that hold after experts are removed; ``experts`` is None if all are kept.

    :param groups: groups of the dense model
    """
    assert plan.experts is not None
    gone = any(len(keep) < mixture.counts[0] for keep in plan.experts.keep.values())
    return replace(plan, kept=plan.experts.rename(groups, plan.kept), experts=plan.experts if gone else None)


@dataclass(frozen=True)
class MixturePlanner:
    """Planner that spreads a budget over whole experts and other units.

    :param setup: setup of a run with a mixture
    :param orders: order in which experts are removed, by the full name of their list
    :param measured: statistics of every group; empty if the rule measures nothing
    """

    recipe: StructuredModifier
    setup: RunSetup
    mixture: Mixture
    orders: Mapping[str, DropOrder]
    measured: Mapping[str, GroupStatistics]

    def propose(self) -> dict[str, UnitAllocation]:
        """Return plans to try by name, the one of least error first; kept units are under the dense model's group names.

        These are the best plan that keeps all experts, the best that removes some, and variants of both nearer to uniform; then
        plans of other numbers of experts, evenly spread, since errors of whole experts are rough.

        :raises ValueError: the budget cannot be met
        """
        found = self._list_candidates()
        errors = {str(candidate.split.left): candidate.error for candidate in found}
        kept = [[c for c in found if (c.split.left == self._total) == every] for every in (True, False)]
        chosen = [part[argmin_with_ties([candidate.error for candidate in part])] for part in kept if part]
        steps = sorted({round(place * (len(found) - 1) / (_SPREAD - 1)) for place in range(_SPREAD)})
        proposed: dict[str, UnitAllocation] = {}
        for candidate in [*sorted(chosen, key=lambda candidate: candidate.error), *(found[step] for step in steps)]:
            name = f"{candidate.split.left} experts"
            if name in proposed:
                continue
            record = replace(candidate.plan.record, error=candidate.error, experts=errors)
            proposed[name] = replace(candidate.plan, record=record)
            if candidate in chosen:
                proposed |= {f"{name}, {how}": plan for how, plan in self._vary(candidate, record).items()}
        return proposed

    @property
    def _total(self) -> int:
        return self.mixture.counts[0]

    def _list_candidates(self) -> list[_Candidate]:
        """Return one plan per number of kept experts, the most first; only the most even one if the rule compares no errors.

        :raises ValueError: the budget cannot be met
        """
        recipe, setup = self.recipe, self.setup
        splits = list_splits(
            self.mixture,
            lambda left: measure_others(recipe, setup.groups, setup.roundings, left),
            setup.target.sparsity * setup.num_prunable,
        )
        if not recipe.allocation.weighs_errors:
            splits = [pick_even(self.mixture, splits, setup.share)]
        found, problem = list[_Candidate](), ValueError()
        for split in splits:
            try:
                found.append(self._plan(split))
            except ValueError as error:  # for instance if a module would lose more than the rule allows
                problem = error
        if not found:
            raise problem
        return found

    def _plan(self, split: Split) -> _Candidate:
        recipe, setup = self.recipe, self.setup
        steps = (self._total - split.left) // self.mixture.num_groups
        experts = KeptExperts(
            self.mixture.routing, {name: order.list_kept(steps) for name, order in self.orders.items()}
        )
        sizes = measure_others(recipe, setup.groups, setup.roundings, experts.keep)
        error = sum(order.errors[steps] for order in self.orders.values())
        plan = UnitAllocation({}, AllocationRecord(recipe.allocation.rule))
        if sizes:
            statistics = tie_statistics(sizes, self._scale(experts)) if self.measured else {}
            plan = recipe.allocation.decide(sizes, statistics, replace(setup.make_budget(recipe), share=split.share))
        return _Candidate(split, self._complete(plan, experts), sizes, error + (plan.record.error or 0.0))

    def _complete(self, plan: UnitAllocation, experts: KeptExperts) -> UnitAllocation:
        """Return a plan with its kept experts added; experts that the plan does not mention keep all channels."""
        whole = {
            group.name: group.num_units
            for group in self.setup.groups
            if group.experts and group.expert_index in experts.keep[group.output_name]
        }
        return replace(plan, kept={**whole, **plan.kept}, experts=experts)

    def _scale(self, experts: KeptExperts) -> dict[str, GroupStatistics]:
        """Return the measured statistics with the errors of kept experts scaled up for the tokens that they take over.

        Tokens of removed experts go to the kept ones, so the errors of a list at 0 kept units keep their sum.
        """
        scaled = dict(self.measured)
        for name, members in self.mixture.lists.items():
            if members[0].name not in scaled:  # their channels are not pruned
                continue
            given: list[Tensor] = [self.measured[group.name].curve[0] for group in members]
            factor = float(sum(given) / max(sum(given[index] for index in experts.keep[name]), 1e-300))
            for group in members:
                scaled[group.name] = replace(scaled[group.name], curve=factor * scaled[group.name].curve)
        return scaled

    def _vary(self, candidate: _Candidate, record: AllocationRecord) -> dict[str, UnitAllocation]:
        """Return the rule's other allocations for the same kept experts that meet the budget, by name."""
        found: dict[str, UnitAllocation] = {}
        rule, sizes, share = self.recipe.allocation, candidate.sizes, candidate.split.share
        if not sizes:
            return found
        for name, counts in rule.propose(sizes, candidate.plan, share).items():
            try:
                check_budget(sizes, counts, share)
            except ValueError:
                continue
            kept = {**candidate.plan.kept, **expand_counts(sizes, counts)}
            if kept != candidate.plan.kept and all(kept != plan.kept for plan in found.values()):
                found[name] = replace(candidate.plan, kept=kept, record=record)
        return found
