"""How many units every group keeps: uniform, an allocator stage's allocation, or that of passes inside the pruning stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.cache import MeasurementCache
from struprune_plugin.allocation.candidates import Fit, Trial
from struprune_plugin.allocation.curves import CurveMeasurer, can_keep_moments, hold_batches, take_batches
from struprune_plugin.allocation.measurements import measure_sensitivity
from struprune_plugin.allocation.rules.rule import tie_statistics
from struprune_plugin.allocation.rules.uniform import allocate_uniformly
from struprune_plugin.linalg.rounding import check_budget, expand_counts
from struprune_plugin.linalg.ties import argmin_with_ties
from struprune_plugin.modifiers.allocator import Allocated
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.host_pipeline import calibrating
from struprune_plugin.modifiers.setup import RunSetup, place_run
from struprune_plugin.modifiers.widths import check_widths
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.resume import keep_allocation, take_allocation
from struprune_plugin.pruning.signals import Sensitivity
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import count_ranks
from struprune_plugin.storage.resume_store import ResumeStore


def plan_early(
    recipe: StructuredModifier, setup: RunSetup, allowed: Callable[[str, int], bool] | None
) -> UnitAllocation | None:
    """Return the kept counts where they need no calibration data.

    :param allowed: where all layers must be of one size: whether a kind of modules may keep n units
    :raises ValueError: the budget cannot be met
    """
    rule = recipe.allocation
    if rule.measures and rule.sequences is None:
        return None
    if rule.measures or allowed is not None:
        plan = allocate_uniformly(setup.sizes, setup.share, allowed)
    else:
        plan = rule.decide(setup.sizes, {}, recipe.make_budget(setup.num_prunable, setup.share))
    check_widths(setup.groups, plan.kept, setup.roundings)  # what uniform counts cannot meet, no curves mend
    return None if rule.measures else plan


@dataclass(frozen=True)
class Planner:
    """Measures the dense model and makes the plan, on calibration data.

    :param recipe: the pruning stage's fields
    :param batches: of calibration data
    :param cache: what runs of other sparsities have measured, and shall not measure again
    """

    recipe: StructuredModifier
    setup: RunSetup
    model: PreTrainedModel
    batches: list[dict[str, Tensor]]
    context: DeviceContext
    cache: MeasurementCache | None = None

    def decide(
        self, early: UnitAllocation | None, allocated: Allocated | None, store: ResumeStore | None
    ) -> tuple[UnitAllocation, Sensitivity]:
        """Return the plan, and what was measured for it, unless an earlier process has made them.

        :param early: a plan that is made already
        :param allocated: what an allocator stage left
        """
        if done := take_allocation(store, "allocation"):
            plan, sensitivity = done
            made = plan or early
            assert made is not None
            return made, sensitivity
        sensitivity = self._measure_sensitivity(allocated)
        plan = early or self._plan(allocated, sensitivity)
        if early is None:
            check_widths(self.setup.groups, plan.kept, self.setup.roundings)
        if store is not None:
            keep_allocation(store, "allocation", None if early else plan, sensitivity)
        return plan, sensitivity

    def _measure_sensitivity(self, allocated: Allocated | None) -> Sensitivity:
        """Measure what the methods ask of the dense model, unless an allocator stage has, or another run."""
        measure = partial(
            measure_sensitivity,
            self.model,
            self.batches,
            self.setup.groups,
            self.context,
            self.recipe.asked,
            allocated.sensitivity if allocated is not None else None,
        )
        if self.cache is None:
            return measure()
        return self.cache.share_signals({**self.recipe.dump_fields(), "samples": self.recipe.asked.samples}, measure)

    def _plan(self, allocated: Allocated | None, sensitivity: Sensitivity) -> UnitAllocation:
        """Return the kept counts that an allocator stage left, or those of an allocation pass of our own."""
        if allocated is not None:
            self.context.stages["allocate"] = allocated.measured
            return allocated.plan
        logger.info(f"allocation pass ({self.recipe.allocation.rule}) over the dense model")
        with self.context.stage("allocate"):
            return self._allocate(sensitivity)

    def _allocate(self, sensitivity: Sensitivity) -> UnitAllocation:
        """Make the allocation from curves measured on the dense model, and try it against others."""
        recipe, setup, model, fit, held = self.recipe, self.setup, self.model, self.batches, list[dict[str, Tensor]]()
        rule = recipe.allocation
        if rule.sequences is not None:
            if count_ranks() == 1:
                fit, held = hold_batches(fit, getattr(rule, "trial_samples", 0))
            fit = take_batches(fit, setup.groups, rule.sequences)
        context = self.context.replace(place_run(recipe, model, setup.groups, fit, together=True))
        keeps = bool(held) and can_keep_moments(setup.groups, model.config.get_text_config(decoder=True).hidden_size)
        config = recipe.make_config(model)
        measurer = CurveMeasurer(rule, config, sensitivity, context, keeps)
        cache = None if recipe.importance.aims else self.cache  # what is measured is the same at other sparsities
        measured = None if cache is None else cache.take_curves(recipe.dump_fields())
        if measured is None:
            with calibrating(model):
                measured = measurer.measure(model, fit, setup.groups)
            if cache is not None:
                cache.keep_curves(recipe.dump_fields(), measured)
        tied = tie_statistics(setup.sizes, measured)
        own = rule.decide(setup.sizes, tied, recipe.make_budget(setup.num_prunable, setup.share))
        proposed = {rule.rule: own.kept, **self._propose(own)} if held else {}
        if len(proposed) < 2:
            return own
        moments = measurer.moments
        trial = Trial(model, setup.groups, list(proposed.values()), config, Fit(measured, len(fit), moments), context)
        with calibrating(model):
            trial.run(held if moments else [*fit, *held])
        with context.stage("trials"):
            return _take_best(own, dict(zip(proposed, trial.measure(held), strict=True)), proposed)

    def _propose(self, own: UnitAllocation) -> dict[str, Mapping[str, int]]:
        """Return a rule's other allocations that meet the budget and fit the widths that were asked for."""
        setup, found = self.setup, dict[str, Mapping[str, int]]()
        for name, counts in self.recipe.allocation.propose(setup.sizes, own, setup.share).items():
            kept = expand_counts(setup.sizes, counts)
            with suppress(ValueError):
                check_budget(setup.sizes, counts, setup.share)
                check_widths(setup.groups, kept, setup.roundings)
                if kept != own.kept and kept not in found.values():
                    found[name] = kept
        return found


def _take_best(
    own: UnitAllocation, divergences: Mapping[str, float], proposed: Mapping[str, Mapping[str, int]]
) -> UnitAllocation:
    """Return the allocation that moves the model's output least on the batches held out; the first of those that tie.

    :param divergences: by what an allocation is called
    :param proposed: kept units by group, the same
    """
    tried = {name: divergence for name, divergence in divergences.items() if math.isfinite(divergence)}
    if not tried:
        return own
    taken = list(tried)[argmin_with_ties(list(tried.values()))]
    logger.info(f"plans tried, KL divergence: {tried}; taken: {taken}")
    return replace(own, kept=proposed[taken], record=replace(own.record, tried=tried, taken=taken))
