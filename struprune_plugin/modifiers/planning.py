"""Plan of how many units each group keeps: uniform, from an allocator stage, or from passes inside the pruning stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.cache import MeasurementCache
from struprune_plugin.allocation.candidates import Trial, take_best
from struprune_plugin.allocation.curves import (
    CurveMeasurer,
    can_keep_moments,
    hold_batches,
    split_batches,
    take_batches,
)
from struprune_plugin.allocation.measurements import measure_sensitivity
from struprune_plugin.allocation.probes import Block, bend_curves, list_blocks, propose_blocks
from struprune_plugin.allocation.rules import Budget, GroupStatistics
from struprune_plugin.allocation.rules.rule import take_unrotated, tie_statistics
from struprune_plugin.allocation.rules.uniform import allocate_uniformly
from struprune_plugin.allocation.trial_weights import Fit
from struprune_plugin.allocation.whole_experts import DropMeasurer, Mixture
from struprune_plugin.linalg.knapsack import fit_shares
from struprune_plugin.linalg.rounding import check_budget, expand_counts
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.allocator import Allocated
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.host_pipeline import calibrating
from struprune_plugin.modifiers.mixture_plans import MixturePlanner, settle_experts
from struprune_plugin.modifiers.setup import RunSetup, place_run
from struprune_plugin.modifiers.widths import check_widths
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.resume import keep_allocation, take_allocation
from struprune_plugin.pruning.signals import Sensitivity
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import count_ranks, gather
from struprune_plugin.storage.resume_store import ResumeStore

Batches = list[dict[str, Tensor]]
Curves = Mapping[str, Mapping[str, GroupStatistics]]  # statistics by the name of a size, by name
Measure = Callable[[Sequence[UnitAllocation]], list[float]]  # divergence of every plan, in nats
_SEQUENCES = 16  # calibration sequences for choosing whole experts, if the rule sets no number


def plan_early(
    recipe: StructuredModifier, setup: RunSetup, allowed: Callable[[str, int], bool] | None
) -> UnitAllocation | None:
    """Return the kept counts if they need no calibration data, else None.

    :param allowed: if all layers must have one size: whether a kind of modules may keep n units
    :raises ValueError: the budget cannot be met
    """
    rule = recipe.allocation
    if (rule.measures and rule.sequences is None) or setup.mixture is not None:
        return None
    if rule.measures or allowed is not None:
        plan = allocate_uniformly(setup.sizes, setup.share, None if rule.takes_layers else allowed, setup.limits)
    else:
        plan = rule.decide(setup.sizes, {}, recipe.make_budget(setup.num_prunable, setup.share, setup.limits))
    check_widths(setup.groups, plan.kept, setup.roundings)  # if uniform counts do not fit, no others do
    return None if rule.measures else plan


@dataclass(frozen=True)
class Planner:
    """Planner that measures the dense model on calibration data and makes the plan.

    :param recipe: fields of the pruning stage
    :param batches: calibration batches
    :param cache: measurements shared with runs at other sparsities, which are not repeated
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
        """Return the plan and the measured sensitivity, from the store if an earlier process has made them.

        :param early: plan made before calibration
        :param allocated: result of an allocator stage
        """
        if done := take_allocation(store, "allocation"):
            plan, sensitivity = done
            made = plan or early
            assert made is not None
            return made, sensitivity
        groups, sensitivity = self.setup.groups, self._measure_sensitivity(allocated)
        plan = early or self._plan(allocated, sensitivity)
        if early is None:
            check_widths(plan.list_left(groups), plan.kept, self.setup.roundings)
        if plan.experts is not None:
            sensitivity = replace(sensitivity, saliency=plan.experts.rename(groups, sensitivity.saliency))
        if store is not None:
            keep_allocation(store, "allocation", None if early else plan, sensitivity)
        return plan, sensitivity

    def _measure_sensitivity(self, allocated: Allocated | None) -> Sensitivity:
        """Measure what the methods need of the dense model, unless an allocator stage or another run has done so."""
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
        """Return the plan of an allocator stage or, without one, that of this stage's own allocation pass."""
        if allocated is not None:
            self.context.stages["allocate"] = allocated.measured
            return allocated.plan
        logger.info(f"measuring the dense model for allocation: {self.recipe.allocation.rule}")
        with self.context.stage("allocate"):
            return self._allocate(sensitivity)

    def _allocate(self, sensitivity: Sensitivity) -> UnitAllocation:
        """Return the allocation from measurements of the dense model, after comparing it with others."""
        recipe, setup, model, held = self.recipe, self.setup, self.model, list[dict[str, Tensor]]()
        rule, fit = recipe.allocation, self.batches
        sequences = rule.sequences or (_SEQUENCES if setup.mixture is not None else None)
        if sequences is not None:
            fit, held = _hold_back(fit, getattr(rule, "trial_samples", 0))
            fit = take_batches(fit, setup.groups, sequences)
        context = self.context.replace(place_run(recipe, model, setup.groups, fit, together=True))
        hidden_size, groups = model.config.get_text_config(decoder=True).hidden_size, self._list_measured()
        keeps = bool(held) and setup.mixture is None and all(gather(can_keep_moments(groups, hidden_size)))
        config = recipe.make_config(model)
        measurer = CurveMeasurer(rule, config, sensitivity, context, keeps)
        cache = None if recipe.importance.aims else self.cache  # the same at other sparsities otherwise
        measured = None if cache is None else cache.take_curves(recipe.dump_fields())
        if measured is None:
            with calibrating(model):
                measured = measurer.measure(model, fit, groups) if groups else {}
            if cache is not None:
                cache.keep_curves(recipe.dump_fields(), measured)
        found = Fit(measured, len(fit), measurer.moments)

        def measure_plans(plans: Sequence[UnitAllocation], batches: list[dict[str, Tensor]]) -> list[float]:
            trial = Trial(model, setup.groups, plans, config, found, context)
            with calibrating(model):
                trial.run(batches if found.moments else [*fit, *batches])
            with context.stage("trials"):
                return trial.measure(batches)

        if setup.mixture is not None:
            plans, judges = self._propose_whole(setup.mixture, measured, fit, sensitivity, context), held
        else:
            budget = recipe.make_budget(setup.num_prunable, setup.share, setup.limits)
            tied = tie_statistics(setup.sizes, measured)
            probes, judges = split_batches(held, sum(len(batch["input_ids"]) for batch in held) // 2)
            plans = self._decide({rule.rule: tied}, budget)
            if held:
                plans = self._propose(tied, plans, budget, partial(measure_plans, batches=probes))
        if len(plans) > 1 and judges:
            plans = {"": take_best(plans, measure_plans(list(plans.values()), judges))}
        taken = next(iter(plans.values()))
        return taken if setup.mixture is None else settle_experts(taken, setup.mixture, setup.groups)

    def _list_measured(self) -> list[UnitGroup]:
        """Return the groups whose curves the rule needs; groups of experts only if their channels may be pruned."""
        experts = self.recipe.experts
        if not self.recipe.allocation.measures:
            return []
        return [g for g in self.setup.groups if not (g.experts and experts is not None and experts.units == "whole")]

    def _propose_whole(
        self,
        mixture: Mixture,
        measured: Mapping[str, GroupStatistics],
        fit: Batches,
        sensitivity: Sensitivity,
        context: DeviceContext,
    ) -> dict[str, UnitAllocation]:
        """Return plans that remove whole experts, by name, the one of least error first."""
        recipe = self.recipe
        assert recipe.experts is not None
        solves = recipe.weight_update.solves
        drops = DropMeasurer(mixture, recipe.experts.criterion, sensitivity, context, solves)
        with calibrating(self.model), context.stage("experts"):
            orders = drops.measure(self.model, fit)
        return MixturePlanner(recipe, self.setup, mixture, orders, measured).propose()

    def _decide(self, curves: Curves, budget: Budget) -> dict[str, UnitAllocation]:
        """Return the rule's plans and, where they remove whole sublayers, its plans that keep all sublayers, by name.

        :param curves: statistics by name
        :raises ValueError: the budget cannot be met
        """
        rule, sizes = self.recipe.allocation, self.setup.sizes
        plans = {}
        for name, statistics in curves.items():
            plans[name] = own = rule.decide(sizes, statistics, budget)
            if not all(own.kept.values()):
                with suppress(ValueError):  # the budget can only be met with fewer sublayers
                    whole = [replace(size, rest=None) for size in sizes]
                    plans[f"{name}, all sublayers"] = rule.decide(whole, statistics, budget)
        return plans

    def _propose(
        self,
        tied: Mapping[str, GroupStatistics],
        own: Mapping[str, UnitAllocation],
        budget: Budget,
        measure: Measure,
    ) -> dict[str, UnitAllocation]:
        """Return plans to try, by name: the rule's own, first, those of corrected curves and of unrotated units, and variants.

        :param tied: statistics by the name of a size
        :param own: the rule's plans from them; the last one keeps all sublayers
        """
        others = {}
        if told := self._probe(list(own.values())[-1], measure):
            others["probed"] = bend_curves(tied, self.setup.sizes, *told)
        if unrotated := take_unrotated(tied):
            others["unrotated"] = unrotated
        return self._spread({**own, **self._decide(others, budget)}, others.get("probed", tied), budget)

    def _probe(self, own: UnitAllocation, measure: Measure) -> tuple[list[int], dict[Block, float]] | None:
        """Return a plan's kept units by size, and the divergence of every block of modules pruned alone; None if there are not
        two blocks."""
        sizes, layers = self.setup.sizes, {group.name: group.layer_index for group in self.setup.groups}
        blocks = list_blocks(sizes, [layers.get(size.name, -1) for size in sizes], max(layers.values()) + 1)
        if not blocks:
            return None
        members = [(size.members or ((size.name, 1),))[0] for size in sizes]
        counts = [own.kept[name] // factor for name, factor in members]
        found = measure([replace(own, kept=kept) for kept in propose_blocks(sizes, counts, blocks)])
        logger.debug(
            f"KL divergence in nats of each block of modules pruned alone: {', '.join(f'{value:.3g}' for value in found)}"
        )
        return counts, dict(zip(blocks, found, strict=True))

    def _spread(
        self, proposed: Mapping[str, UnitAllocation], told: Mapping[str, GroupStatistics], budget: Budget
    ) -> dict[str, UnitAllocation]:
        """Return plans and the rule's variants of them that meet the budget and the required widths, by name.

        :param told: most accurate statistics known, by size
        """
        setup, found = self.setup, dict[str, UnitAllocation]()
        slack, first = self.recipe.allocation.measure_slack(setup.sizes), next(iter(proposed.values()))

        def add(name: str, kept: Mapping[str, int]) -> None:
            if all(kept != other.kept for other in found.values()):
                found[name] = replace(first, kept=kept)

        def add_fitting(name: str, counts: Sequence[int]) -> None:
            with suppress(ValueError):
                kept = expand_counts(setup.sizes, self._fit(counts, slack))
                check_widths(setup.groups, kept, setup.roundings)
                add(name, kept)

        for label, own in proposed.items():
            add(label, own.kept)
            for name, counts in self.recipe.allocation.propose(setup.sizes, own, setup.share).items():
                add_fitting(name if label == self.recipe.allocation.rule else f"{label}, {name}", counts)
        if (others := self.recipe.allocation.decide_by_parameters(setup.sizes, told, budget)) is not None:
            add_fitting("by parameters", others)
        return found

    def _fit(self, counts: Sequence[int], slack: int | None) -> Sequence[int]:
        """Return kept counts moved until they meet every budget; if parameters alone are budgeted, only check them.

        :param slack: parameters by which they may miss that budget
        :raises ValueError: they miss it by more
        """
        sizes, limits = self.setup.sizes, self.setup.limits
        if not limits:
            check_budget(sizes, counts, self.setup.share, slack)
            return counts
        shares = [1 - count / size.num_units for count, size in zip(counts, sizes, strict=True)]
        return fit_shares(sizes, shares, limits, self.recipe.allocation.most or 1.0)


def _hold_back(batches: Batches, samples: int) -> tuple[Batches, Batches]:
    """Return (batches without their last sequences, these sequences): ``samples`` to try blocks of modules and as many to try
    plans, an equal share per process; none are held out if a process would hold fewer than two."""
    rest, held = hold_batches(batches, 2 * -(-samples // count_ranks()))
    counts = gather(sum(len(batch["input_ids"]) for batch in held))
    return (rest, held) if min(counts) >= 2 else (batches, [])
