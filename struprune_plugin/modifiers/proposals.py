"""Plans that the trials compare: the rule's own, those of corrected error curves, and variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from loguru import logger

from struprune_plugin.allocation.probes import Block, bend_curves, list_blocks, propose_blocks
from struprune_plugin.allocation.rules import Budget, GroupStatistics
from struprune_plugin.linalg.budget import find_least_share
from struprune_plugin.linalg.rounding import check_budget, expand_counts, round_kept_counts
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.setup import RunSetup
from struprune_plugin.modifiers.widths import check_widths
from struprune_plugin.pruning.config import UnitAllocation

Curves = Mapping[str, Mapping[str, GroupStatistics]]  # statistics by the name of a size, by name
Measure = Callable[[Sequence[UnitAllocation]], list[float]]  # divergence of every plan, in nats


@dataclass(frozen=True)
class Proposer:
    """Proposer of plans for one budget.

    :param tied: statistics by the name of a size
    """

    recipe: StructuredModifier
    setup: RunSetup
    budget: Budget
    tied: Mapping[str, GroupStatistics]

    def propose(self, measure: Measure | None) -> dict[str, UnitAllocation]:
        """Return plans by name: the rule's own, first; with trials, those of corrected curves and variants.

        :param measure: None without trials
        :raises ValueError: the budget cannot be met
        """
        own, others = self._decide({self.recipe.allocation.rule: self.tied}), {}
        if measure is None:
            return own
        if blocks := self._list_blocks():
            plan = next(iter(own.values()))
            found = self._probe(plan, blocks, measure)
            others["probed"] = bend_curves(self.tied, self.setup.sizes, self._count(plan), found)
        return self._spread({**own, **self._decide(others)})

    def _decide(self, curves: Curves) -> dict[str, UnitAllocation]:
        """Return the rule's plans by name.

        :param curves: statistics by name
        :raises ValueError: the budget cannot be met
        """
        rule, sizes = self.recipe.allocation, self.setup.sizes
        return {name: rule.decide(sizes, statistics, self.budget) for name, statistics in curves.items()}

    def _probe(self, own: UnitAllocation, blocks: Sequence[Block], measure: Measure) -> dict[Block, float]:
        """Return the divergence of every block of modules pruned alone."""
        plans = [replace(own, kept=kept) for kept in propose_blocks(self.setup.sizes, self._count(own), blocks)]
        found = measure(plans)
        logger.debug(
            f"KL divergence in nats of each block of modules pruned alone: {', '.join(f'{value:.3g}' for value in found)}"
        )
        return dict(zip(blocks, found, strict=True))

    def _list_blocks(self) -> list[Block]:
        sizes, layers = self.setup.sizes, {group.name: group.layer_index for group in self.setup.groups}
        return list_blocks(sizes, [layers.get(size.name, -1) for size in sizes], max(layers.values()) + 1)

    def _count(self, plan: UnitAllocation) -> list[int]:
        """Return a plan's kept units by size."""
        members = [(size.members or ((size.name, 1),))[0] for size in self.setup.sizes]
        return [plan.kept[name] // factor for name, factor in members]

    def _spread(self, proposed: Mapping[str, UnitAllocation]) -> dict[str, UnitAllocation]:
        """Return plans and the rule's variants of them that meet the budget and the required widths, by name."""
        setup, found, first = self.setup, dict[str, UnitAllocation](), next(iter(proposed.values()))

        def add(name: str, kept: Mapping[str, int]) -> None:
            if all(kept != other.kept for other in found.values()):
                found[name] = replace(first, kept=kept)

        def add_fitting(name: str, counts: Sequence[int]) -> None:
            with suppress(ValueError):
                add(name, self._fit(counts))

        for label, own in proposed.items():
            add(label, own.kept)
            for name, counts in self.recipe.allocation.propose(setup.sizes, own, setup.share).items():
                add_fitting(name if label == self.recipe.allocation.rule else f"{label}, {name}", counts)
        return found

    def _fit(self, counts: Sequence[int]) -> dict[str, int]:
        """Return kept units by group, from counts moved until they meet a limit of seconds; under one of parameters, they are only
        checked.

        :raises ValueError: they do not meet the budget or the required widths
        """
        setup, sizes = self.setup, self.setup.sizes
        most = self.recipe.allocation.most or 1.0
        taken = [1 - count / size.num_units for count, size in zip(counts, sizes, strict=True)]

        def move(shift: float) -> list[int]:
            """Return counts nearer to all units (-1) or to none (1)."""
            moved = [share + shift * (1 - share if shift > 0 else share) for share in taken]
            return round_kept_counts(sizes, [min(share, most) for share in moved])

        if self.budget.limit is None:
            check_budget(sizes, counts, setup.share)
        else:
            counts = find_least_share(move, self.budget.limit, -1.0, 1.0)
        kept = expand_counts(sizes, counts)
        check_widths(setup.groups, kept, setup.roundings)
        return kept
