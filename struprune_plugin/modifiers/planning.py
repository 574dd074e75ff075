"""Plan of how many units each group keeps: uniform, or from passes over the calibration data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.candidates import Fit, Trial, describe_trials, take_best
from struprune_plugin.allocation.curves import (
    CurveMeasurer,
    can_keep_moments,
    hold_batches,
    split_batches,
    take_batches,
)
from struprune_plugin.allocation.probes import bend_curves, list_blocks, propose_blocks
from struprune_plugin.allocation.rules.rule import tie_statistics
from struprune_plugin.allocation.sensitivity import measure_sensitivity
from struprune_plugin.allocation.whole_experts import score_experts
from struprune_plugin.layerwise.passes import calibrating
from struprune_plugin.linalg.rounding import expand_counts
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.setup import RunSetup
from struprune_plugin.modifiers.widths import check_widths
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.problem import Sensitivity
from struprune_plugin.pruning.resume import keep_allocation, take_allocation
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import count_ranks, gather
from struprune_plugin.storage.resume_store import ResumeStore

Batches = list[dict[str, Tensor]]


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

    def decide(self, store: ResumeStore | None) -> tuple[UnitAllocation, Sensitivity]:
        """Return the plan and the measured sensitivity, from the store if an earlier process has made them."""
        if done := take_allocation(store):
            return done
        groups = self.setup.groups
        recipe, samples = self.recipe, self.recipe.sensitivity_samples
        sensitivity = measure_sensitivity(self.model, self.batches, groups, self.context, recipe.importance, samples)
        plan = self.setup.early or self._plan(sensitivity)
        if self.setup.mixture is not None and plan.experts is None:
            plan = self._add_experts(plan)
        if self.setup.early is None:
            check_widths(plan.list_left(groups), plan.kept, self.setup.roundings)
        if plan.experts is not None:
            sensitivity = replace(sensitivity, saliency=plan.experts.rename(groups, sensitivity.saliency))
        whole = {group.name: group.num_units for group in self.setup.whole}
        plan = replace(plan, kept={**plan.kept, **whole})
        if store is not None:
            keep_allocation(store, plan, sensitivity)
        return plan, sensitivity

    def _plan(self, sensitivity: Sensitivity) -> UnitAllocation:
        """Return the plan of an allocation pass."""
        logger.info(f"measuring the dense model for allocation: {self.recipe.allocation.rule}")
        with self.context.stage("allocate"):
            plan = self._allocate(sensitivity)
        if plan.record.tried:
            logger.info(describe_trials(plan.record))
        return plan

    def _allocate(self, sensitivity: Sensitivity) -> UnitAllocation:
        """Return the allocation: measure error curves, propose plans, judge them on held-out text, take the best."""
        rule, setup = self.recipe.allocation, self.setup
        fit, probes, judges = self._divide_batches()
        measured = self._measure_curves(fit, sensitivity, keeps=bool(judges))
        curves, budget = tie_statistics(setup.sizes, measured.measured), setup.budget
        own = rule.decide(setup.sizes, curves, budget)
        if not judges:
            return own

        def try_plans(plans: Sequence[UnitAllocation], held: Batches) -> list[float]:
            """Return the divergence of every plan on held-out batches, in nats."""
            trial = Trial(self.model, setup.groups, plans, self.recipe.make_config(), measured, self.context)
            with calibrating(self.model):
                trial.run(held if measured.moments else [*fit, *held])
            return trial.measure(held)

        decided = {rule.rule: own}
        if blocks := list_blocks(setup.sizes, {group.name: group.layer_index for group in setup.groups}):
            alone = propose_blocks(setup.sizes, own.kept, blocks)
            found = try_plans([replace(own, kept=kept) for kept in alone], probes)
            logger.debug(f"KL divergence in nats of each block of modules pruned alone: {', '.join(map(str, found))}")
            bent = bend_curves(curves, setup.sizes, own.kept, dict(zip(blocks, found, strict=True)))
            decided["probed"] = rule.decide(setup.sizes, bent, budget)
        plans = self._vary(decided)
        return take_best(plans, try_plans(list(plans.values()), judges) if len(plans) > 1 else [])

    def _divide_batches(self) -> tuple[Batches, Batches, Batches]:
        """Return (batches for the curves, to try blocks of modules, to try plans); none to try if a process would hold out fewer
        than two sequences."""
        rule = self.recipe.allocation
        if rule.sequences is None:
            return self.batches, [], []
        samples = -(-getattr(rule, "trial_samples", 0) // count_ranks())  # an equal share per process
        fit, held = hold_batches(self.batches, 2 * samples)
        counts = gather(sum(len(batch["input_ids"]) for batch in held))
        if min(counts) < 2:
            fit, held = self.batches, []
        probes, judges = split_batches(held, sum(len(batch["input_ids"]) for batch in held) // 2)
        return take_batches(fit, self.setup.groups, rule.sequences), probes, judges

    def _measure_curves(self, fit: Batches, sensitivity: Sensitivity, keeps: bool) -> Fit:
        """Return the statistics of every group but those of whole experts and, for trials, their moments if they fit in memory."""
        hidden_size = self.model.config.get_text_config(decoder=True).hidden_size
        groups = [group for group in self.setup.groups if self.setup.mixture is None or not group.experts]
        keeps = keeps and all(gather("moments" in self.context.kept or can_keep_moments(groups, hidden_size)))
        measurer = CurveMeasurer(self.recipe.allocation, self.recipe.make_config(), sensitivity, self.context, keeps)
        with calibrating(self.model):
            measured = measurer.measure(self.model, fit, groups)
        return Fit(measured, len(fit), measurer.moments)

    def _vary(self, decided: Mapping[str, UnitAllocation]) -> dict[str, UnitAllocation]:
        """Return different plans by name: those decided and, of each, the rule's variants that have the required widths."""
        setup, rule, found = self.setup, self.recipe.allocation, dict[str, UnitAllocation]()
        for label, own in decided.items():
            variants = {label: own.kept}
            for name, counts in rule.propose(setup.sizes, own, setup.budget).items():
                variants[name if label == rule.rule else f"{label}, {name}"] = expand_counts(setup.sizes, counts)
            for name, kept in variants.items():
                with suppress(ValueError):
                    if name != label:
                        check_widths(setup.groups, kept, setup.roundings)
                    if all(kept != other.kept for other in found.values()):
                        found[name] = replace(decided[rule.rule], kept=kept)
        return found

    def _add_experts(self, plan: UnitAllocation) -> UnitAllocation:
        """Return a plan of the other groups with the whole experts that stay, which keep all channels."""
        mixture, left, groups = self.setup.mixture, self.setup.budget.num_experts, self.setup.groups
        assert mixture is not None
        if left is None:
            return replace(plan, kept={**{group.name: group.num_units for group in groups}, **plan.kept})
        with self.context.stage("experts"), calibrating(self.model):
            experts = mixture.keep_best(score_experts(self.model, self.batches, mixture, self.context), left)
        whole = {group.name: group.num_units for group in experts.list_left(groups)}
        return replace(plan, kept={**whole, **plan.kept}, experts=experts)
