"""Plan of how many units each group keeps: uniform, from an allocator stage, or from passes inside the pruning stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.candidates import Trial, describe_trials, take_best
from struprune_plugin.allocation.curves import (
    CurveMeasurer,
    can_keep_moments,
    hold_batches,
    split_batches,
    take_batches,
)
from struprune_plugin.allocation.measurements import measure_sensitivity
from struprune_plugin.allocation.rules.rule import tie_statistics
from struprune_plugin.allocation.rules.uniform import allocate_uniformly
from struprune_plugin.allocation.trial_weights import Fit
from struprune_plugin.allocation.whole_experts import score_experts
from struprune_plugin.modifiers.allocator import Allocated
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.host_pipeline import calibrating
from struprune_plugin.modifiers.proposals import Proposer
from struprune_plugin.modifiers.setup import RunSetup, place_run
from struprune_plugin.modifiers.widths import check_widths
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.resume import keep_allocation, take_allocation
from struprune_plugin.pruning.signals import Sensitivity
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import count_ranks, gather
from struprune_plugin.storage.records import AllocationRecord
from struprune_plugin.storage.resume_store import ResumeStore

Batches = list[dict[str, Tensor]]


def plan_early(
    recipe: StructuredModifier, setup: RunSetup, allowed: Callable[[str, int], bool] | None
) -> UnitAllocation | None:
    """Return the kept counts if they need no calibration data, else None.

    :param allowed: if all layers must have one size: whether a kind of modules may keep n units
    :raises ValueError: the budget cannot be met
    """
    rule = recipe.allocation
    if not setup.sizes:  # whole experts alone
        return UnitAllocation({}, AllocationRecord(rule.rule))
    if rule.measures and rule.sequences is None:
        return None
    if rule.measures or allowed is not None:
        plan = allocate_uniformly(setup.sizes, setup.share, allowed, setup.target.limit)
    else:
        plan = rule.decide(setup.sizes, {}, setup.make_budget(recipe))
    check_widths(setup.groups, plan.kept, setup.roundings)  # if uniform counts do not fit, no others do
    return None if rule.measures else plan


@dataclass(frozen=True)
class Planner:
    """Planner that measures the dense model on calibration data and makes the plan.

    :param recipe: fields of the pruning stage
    :param batches: calibration batches
    """

    recipe: StructuredModifier
    setup: RunSetup
    model: PreTrainedModel
    batches: list[dict[str, Tensor]]
    context: DeviceContext

    def decide(
        self, early: UnitAllocation | None, allocated: Allocated | None, store: ResumeStore | None
    ) -> tuple[UnitAllocation, Sensitivity]:
        """Return the plan and the measured sensitivity, from the store if an earlier process has made them.

        :param early: plan made before calibration
        :param allocated: result of an allocator stage
        """
        if done := take_allocation(store, "allocation"):
            return done  # speeds that were timed anew would give another plan
        groups, sensitivity = self.setup.groups, self._measure_sensitivity(allocated)
        plan = early or self._plan(allocated, sensitivity)
        if self.setup.mixture is not None and plan.experts is None:
            plan = self._add_experts(plan)
        if early is None:
            check_widths(plan.list_left(groups), plan.kept, self.setup.roundings)
        if plan.experts is not None:
            sensitivity = replace(sensitivity, saliency=plan.experts.rename(groups, sensitivity.saliency))
        if store is not None:
            keep_allocation(store, "allocation", plan, sensitivity)
        return plan, sensitivity

    def _measure_sensitivity(self, allocated: Allocated | None) -> Sensitivity:
        """Measure what the methods need of the dense model, unless an allocator stage has done so."""
        known = allocated.sensitivity if allocated is not None else None
        return measure_sensitivity(self.model, self.batches, self.setup.groups, self.context, self.recipe.asked, known)

    def _plan(self, allocated: Allocated | None, sensitivity: Sensitivity) -> UnitAllocation:
        """Return the plan of an allocator stage or, without one, that of this stage's own allocation pass."""
        if allocated is not None:
            self.context.stages["allocate"] = allocated.measured
            return allocated.plan
        logger.info(f"measuring the dense model for allocation: {self.recipe.allocation.rule}")
        with self.context.stage("allocate"):
            plan = self._allocate(sensitivity)
        if plan.record.tried:
            logger.info(describe_trials(plan.record))
        return plan

    def _allocate(self, sensitivity: Sensitivity) -> UnitAllocation:
        """Return the allocation from measurements of the dense model, after comparing it with others."""
        recipe, setup, model, held = self.recipe, self.setup, self.model, list[dict[str, Tensor]]()
        rule, fit = recipe.allocation, self.batches
        if rule.sequences is not None:
            fit, held = _hold_back(fit, getattr(rule, "trial_samples", 0))
            fit = take_batches(fit, setup.groups, rule.sequences)
        context = self.context.replace(place_run(recipe, model, setup.groups, fit, together=True))
        hidden_size = model.config.get_text_config(decoder=True).hidden_size
        groups = [group for group in setup.groups if setup.mixture is None or not group.experts]
        keeps = bool(held) and all(gather(can_keep_moments(groups, hidden_size)))
        config = recipe.make_config()
        measurer = CurveMeasurer(rule, config, sensitivity, context, keeps)
        with calibrating(model):
            measured = measurer.measure(model, fit, groups)
        found = Fit(measured, len(fit), measurer.moments)

        def measure_plans(plans: Sequence[UnitAllocation], batches: list[dict[str, Tensor]]) -> list[float]:
            trial = Trial(model, setup.groups, plans, config, found, context)
            with calibrating(model):
                trial.run(batches if found.moments else [*fit, *batches])
            with context.stage("trials"):
                return trial.measure(batches)

        probes, judges = split_batches(held, sum(len(batch["input_ids"]) for batch in held) // 2)
        probe, judge = (partial(measure_plans, batches=part) for part in (probes, judges))
        budget = setup.make_budget(recipe)
        proposer = Proposer(recipe, setup, budget, tie_statistics(setup.sizes, measured))
        plans = proposer.propose(probe if held else None)
        values = judge(list(plans.values())) if len(plans) > 1 and held else []
        return take_best(plans, values)

    def _add_experts(self, plan: UnitAllocation) -> UnitAllocation:
        """Return a plan of the other groups with the whole experts that stay, which keep all channels."""
        mixture, left, groups = self.setup.mixture, self.setup.target.num_experts, self.setup.groups
        assert mixture is not None
        if left is None:
            return replace(plan, kept={**{group.name: group.num_units for group in groups}, **plan.kept})
        with self.context.stage("experts"), calibrating(self.model):
            experts = mixture.keep_best(score_experts(self.model, self.batches, mixture, self.context), left)
        whole = {group.name: group.num_units for group in experts.list_left(groups)}
        return replace(plan, kept={**whole, **plan.kept}, experts=experts)


def _hold_back(batches: Batches, samples: int) -> tuple[Batches, Batches]:
    """Return (batches without their last sequences, these sequences): ``samples`` to try blocks of modules and as many to try
    plans, an equal share per process; none are held out if a process would hold fewer than two."""
    rest, held = hold_batches(batches, 2 * -(-samples // count_ranks()))
    counts = gather(sum(len(batch["input_ids"]) for batch in held))
    return (rest, held) if min(counts) >= 2 else (batches, [])
