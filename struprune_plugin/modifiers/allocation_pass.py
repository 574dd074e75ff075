"""Plan of how many units each group keeps: uniform, or from passes over the calibration data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from loguru import logger
from transformers import PreTrainedModel

from struprune_plugin.allocation import curves
from struprune_plugin.allocation.candidates import (
    Trial,
    bend_curves,
    describe_doubt,
    list_blocks,
    propose_blocks,
    take_best,
)
from struprune_plugin.allocation.rounding import expand_counts
from struprune_plugin.allocation.rules import tie_statistics
from struprune_plugin.allocation.sensitivity import measure_sensitivity
from struprune_plugin.model.layers import read_hidden_size
from struprune_plugin.modifiers.budgets import check_widths
from struprune_plugin.modifiers.setup import RunSetup
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.problem import Sensitivity
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import count_ranks, gather
from struprune_plugin.storage.resume_store import ResumeStore

_PART = "allocation"  # name in the store


@dataclass(frozen=True)
class AllocationPass:
    """AllocationPass that measures the dense model on calibration data and makes the plan of the pruning stage."""

    setup: RunSetup
    model: PreTrainedModel
    context: DeviceContext

    def decide(self, store: ResumeStore | None) -> tuple[UnitAllocation, Sensitivity]:
        """Return the plan and the measured sensitivity, from the store if an earlier process has made them."""
        if store is not None and (done := store.read(_PART, tuple[UnitAllocation, Sensitivity])):
            return done
        setup, recipe, groups = self.setup, self.setup.recipe, self.setup.groups
        samples = recipe.sensitivity_samples
        sensitivity = measure_sensitivity(self.model, setup.batches, groups, self.context, recipe.importance, samples)
        plan = setup.early or self._allocate(sensitivity)
        if setup.entries is not None:
            with self.context.stage(setup.entries.label):
                num_keep = setup.budget.num_entries
                keep = setup.entries.choose(self.model, setup.batches, num_keep, self.context)
            plan = replace(plan, entries=keep)
        left = plan.list_left(groups)
        if setup.early is None:
            check_widths(left, plan.kept, setup.roundings)
        every = {group.name: group.num_units for group in (*left, *setup.resolve_only)}
        plan = replace(plan, kept={**every, **plan.kept})
        if store is not None:
            store.write(_PART, (plan, sensitivity))
        return plan, sensitivity

    def _allocate(self, sensitivity: Sensitivity) -> UnitAllocation:
        """Return the allocation: measure error curves, propose plans, judge them on held-out text, take the best."""
        rule, setup, budget = self.setup.recipe.allocation, self.setup, self.setup.budget
        logger.info(f"measuring the dense model for allocation: {rule.rule}")
        with self.context.stage("allocate"):
            fit, probes, judges = self._divide_batches()
            measured = self._measure_curves(fit, sensitivity, keeps=bool(judges))
            tied = tie_statistics(setup.sizes, measured.measured)
            own = rule.decide(setup.sizes, tied, budget)
            if not judges:
                return own
            decided = {rule.rule: own}
            if blocks := list_blocks(setup.sizes, {group.name: group.layer_index for group in setup.groups}):
                found = self._try(propose_blocks(setup.sizes, own.kept, blocks), measured, fit, probes)
                bent = bend_curves(tied, setup.sizes, own.kept, dict(zip(blocks, found, strict=True)))
                decided["probed"] = rule.decide(setup.sizes, bent, budget)
            even = {
                name: expand_counts(setup.sizes, counts)
                for name, counts in rule.propose(setup.sizes, own, budget).items()
            }
            plans = self._vary(decided, even)
            kept = [plan.kept for plan in plans.values()]
            plan = take_best(plans, self._try(kept, measured, fit, judges)) if len(plans) > 1 else own
        if tried := plan.record.tried:
            told = ", ".join(f"{name} {value:.4g}" for name, value in tried.items())
            logger.info(f"KL divergence in nats of each candidate allocation: {told}; selected: {plan.record.taken}")
            if doubt := describe_doubt(tried, rule.rule, even):
                logger.warning(f"allocation: {doubt}")
                plan = replace(plan, record=replace(plan.record, doubt=doubt))
        return plan

    def _divide_batches(self) -> tuple[curves.Batches, curves.Batches, curves.Batches]:
        """Return (batches for the curves, to try blocks of modules, to try plans); none to try if a process would hold out fewer
        than two sequences."""
        rule = self.setup.recipe.allocation
        if not hasattr(rule, "samples"):
            return self.setup.batches, [], []
        samples = -(-getattr(rule, "trial_samples", 0) // count_ranks())  # an equal share per process
        fit, held = curves.hold_batches(self.setup.batches, 2 * samples)
        count = sum(len(batch["input_ids"]) for batch in held)
        if min(gather(count)) < 2:
            fit, held = self.setup.batches, []
        return curves.take_batches(fit, self.setup.groups, rule.samples), *curves.split_batches(held, count // 2)

    def _measure_curves(self, fit: curves.Batches, sensitivity: Sensitivity, keeps: bool) -> curves.Fit:
        """Return the statistics of every group whose units may go and, for trials, their moments if they fit in memory."""
        recipe, context = self.setup.recipe, self.context
        hidden_size = read_hidden_size(self.model)
        groups = [group for group in self.setup.groups if not group.unit.drops_entries]
        keeps = keeps and all(gather("moments" in context.resident or curves.can_keep_moments(groups, hidden_size)))
        measurer = curves.CurveMeasurer(self.model, recipe.allocation, recipe.make_config(), sensitivity, context)
        return measurer.measure(fit, groups, keeps)

    def _try(
        self, plans: Sequence[Mapping[str, int]], measured: curves.Fit, fit: curves.Batches, held: curves.Batches
    ) -> list[float]:
        """Return the divergence of every plan on held-out batches, in nats."""
        config = self.setup.recipe.make_config()
        return Trial(self.model, self.setup.groups, plans, config, measured, self.context).measure(fit, held)

    def _vary(
        self, decided: Mapping[str, UnitAllocation], varied: Mapping[str, Mapping[str, int]]
    ) -> dict[str, UnitAllocation]:
        """Return different plans by name: those decided, and variants of the rule's own that have the required widths."""
        setup, rule, found = self.setup, self.setup.recipe.allocation, dict[str, UnitAllocation]()
        own = decided[rule.rule]
        plans = {rule.rule: own.kept, **varied, **{name: plan.kept for name, plan in decided.items()}}
        for name, kept in plans.items():
            with suppress(ValueError):
                if name in varied:
                    check_widths(setup.groups, kept, setup.roundings)
                if all(kept != other.kept for other in found.values()):
                    found[name] = replace(own, kept=kept)
        return found
