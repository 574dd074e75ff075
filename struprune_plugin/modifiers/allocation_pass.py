"""Allocation of the units that each group keeps: uniform, or from passes over the calibration data."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from loguru import logger
from transformers import PreTrainedModel

from struprune_plugin.allocation import curves
from struprune_plugin.allocation.candidates import (
    Trial,
    describe_doubt,
    list_blocks,
    propose_blocks,
    scale_curves,
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
    """AllocationPass that measures the dense model on calibration data and allocates the units of the pruning stage."""

    setup: RunSetup
    model: PreTrainedModel
    context: DeviceContext

    def decide(self, store: ResumeStore | None) -> tuple[UnitAllocation, Sensitivity]:
        """Return the allocation and the measured sensitivity, from the store if an earlier process has measured them."""
        if store is not None and (done := store.read(_PART, tuple[UnitAllocation, Sensitivity])):
            return done
        setup, recipe, groups = self.setup, self.setup.recipe, self.setup.groups
        samples = recipe.sensitivity_samples
        sensitivity = measure_sensitivity(self.model, setup.batches, groups, self.context, recipe.importance, samples)
        allocation = setup.early or self._allocate(sensitivity)
        met, asked = setup.count_removed(allocation) / setup.budget.num_prunable, setup.budget.sparsity
        if abs(met - asked) > 0.01:
            logger.warning(f"sparsity: {met:.1%} go in place of {asked:.1%}: the units' steps reach no nearer size.")
        if setup.entries is not None:
            with self.context.stage(setup.entries.label):
                keep = setup.entries.choose(self.model, setup.batches, setup.budget.num_entries, self.context)
            allocation = replace(allocation, entries=keep)
        left = allocation.list_left(groups)
        if setup.early is None:
            check_widths(left, allocation.num_keep, setup.roundings)
        every = {group.name: group.num_units for group in (*left, *setup.resolve_only)}
        allocation = replace(allocation, num_keep={**every, **allocation.num_keep})
        if store is not None:
            store.write(_PART, (allocation, sensitivity))
        return allocation, sensitivity

    def _allocate(self, sensitivity: Sensitivity) -> UnitAllocation:
        """Return the allocation: measure error curves, propose candidates, try them on held-out text, take the best."""
        rule, setup, budget = self.setup.recipe.allocation, self.setup, self.setup.budget
        logger.info(f"measuring the dense model for allocation: {rule.rule}")
        with self.context.stage("allocate"):
            batches, probe_batches, trial_batches = self._divide_batches()
            measured = self._measure_curves(batches, sensitivity, keeps_moments=bool(trial_batches))
            tied = tie_statistics(setup.sizes, measured.statistics)
            decided = {rule.rule: (first := rule.decide(setup.sizes, tied, budget))}
            if not trial_batches:
                return first
            if blocks := list_blocks(setup.sizes, {group.name: group.layer_index for group in setup.groups}):
                alone = propose_blocks(setup.sizes, first.num_keep, blocks)
                divergences = dict(zip(blocks, self._try(alone, measured, batches, probe_batches), strict=True))
                scaled = scale_curves(tied, setup.sizes, first.num_keep, divergences)
                decided["probed"] = rule.decide(setup.sizes, scaled, budget)
            proposed = rule.propose(setup.sizes, first, budget)
            even = {name: expand_counts(setup.sizes, counts) for name, counts in proposed.items()}
            candidates = self._list_candidates(decided, even)
            if len(candidates) == 1:
                return first
            counts = [candidate.num_keep for candidate in candidates.values()]
            best = take_best(candidates, self._try(counts, measured, batches, trial_batches))
        tried: Mapping[str, float] = best.record.tried or {}
        values = ", ".join(f"{name} {value:.4g}" for name, value in tried.items())
        logger.info(f"KL divergence in nats of each candidate allocation: {values}; selected: {best.record.taken}")
        if doubt := describe_doubt(tried, rule.rule, even):
            logger.warning(f"allocation: {doubt}")
        return replace(best, record=replace(best.record, doubt=doubt))

    def _divide_batches(self) -> tuple[curves.Batches, curves.Batches, curves.Batches]:
        """Return (batches for the curves, to try blocks of modules, to try candidates); none to try if a process would hold out
        fewer than two sequences."""
        rule = self.setup.recipe.allocation
        if not hasattr(rule, "samples"):
            return self.setup.batches, [], []
        samples = -(-getattr(rule, "trial_samples", 0) // count_ranks())  # an equal share per process
        batches, held = curves.hold_batches(self.setup.batches, 2 * samples)
        count = sum(len(batch["input_ids"]) for batch in held)
        if min(gather(count)) < 2:
            batches, held = self.setup.batches, []
        return curves.take_batches(batches, self.setup.groups, rule.samples), *curves.split_batches(held, count // 2)

    def _measure_curves(
        self, batches: curves.Batches, sensitivity: Sensitivity, keeps_moments: bool
    ) -> curves.DenseMeasurements:
        """Return the statistics of every group whose units may go and, for trials, their moments if memory has room."""
        recipe, context = self.setup.recipe, self.context
        hidden_size = read_hidden_size(self.model)
        groups = [group for group in self.setup.groups if not group.unit.drops_entries]
        if keeps_moments:
            has_room = "moments" in context.on_device or curves.can_keep_moments(groups, hidden_size)
            keeps_moments = all(gather(has_room))
        measurer = curves.CurveMeasurer(self.model, recipe.allocation, recipe.make_config(), sensitivity, context)
        return measurer.measure(batches, groups, keeps_moments)

    def _try(
        self,
        candidates: Sequence[Mapping[str, int]],
        measured: curves.DenseMeasurements,
        batches: curves.Batches,
        held: curves.Batches,
    ) -> list[float]:
        """Return the divergence of every candidate on held-out batches, in nats."""
        config = self.setup.recipe.make_config()
        return Trial(self.model, self.setup.groups, candidates, config, measured, self.context).measure(batches, held)

    def _list_candidates(
        self, decided: Mapping[str, UnitAllocation], even: Mapping[str, Mapping[str, int]]
    ) -> dict[str, UnitAllocation]:
        """Return different candidates by name: the rule's, those nearer to uniform that have the required widths, and the probed.

        :param decided: the rule's allocations
        :param even: numbers of kept units nearer to uniform
        """
        setup, rule = self.setup, self.setup.recipe.allocation.rule
        first = decided[rule]
        counts = {rule: first.num_keep, **even} | {name: one.num_keep for name, one in decided.items()}
        candidates = dict[str, UnitAllocation]()
        for name, num_keep in counts.items():
            with suppress(ValueError):
                if name in even:
                    check_widths(setup.groups, num_keep, setup.roundings)
                if all(num_keep != other.num_keep for other in candidates.values()):
                    candidates[name] = replace(first, num_keep=num_keep)
        return candidates
