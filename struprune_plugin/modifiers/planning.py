"""How many units every group keeps: uniform, an allocator stage's plan, or that of passes inside the pruning stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llmcompressor.core import State
from loguru import logger
from torch import Tensor

from struprune_plugin.device.ranks import count_ranks
from struprune_plugin.device.room import Room
from struprune_plugin.export import adopt_attention
from struprune_plugin.layer.criteria import CRITERIA
from struprune_plugin.layer.methods import Methods, Plan
from struprune_plugin.layer.signals import Signals
from struprune_plugin.maths.rounding import check_budget
from struprune_plugin.maths.ties import find_least
from struprune_plugin.modifiers.allocator import Allocated
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.job import Job, place_run
from struprune_plugin.modifiers.session import run_pass
from struprune_plugin.modifiers.widths import check_widths
from struprune_plugin.passes.allocation import (
    AllocationPass,
    can_keep_moments,
    hold_batches,
    make_uniform_plan,
    take_batches,
)
from struprune_plugin.passes.evidence import EvidenceStore
from struprune_plugin.passes.journal import Journal
from struprune_plugin.passes.pruning import PruningPass
from struprune_plugin.passes.resume import keep_allocation, take_allocation
from struprune_plugin.passes.rules import RULES, Propose
from struprune_plugin.passes.search import search_fully
from struprune_plugin.passes.signals import measure_signals
from struprune_plugin.passes.trials import TrialPass


def plan_early(recipe: StructuredModifier, job: Job, allowed: Callable[[str, int], bool] | None) -> Plan | None:
    """Return the kept counts where they need no calibration data: uniform ones.

    :param allowed: where all layers must be of one size: whether a kind of modules may keep so many units
    :raises ValueError: the budget cannot be met
    """
    rule = RULES.get(recipe.allocation)
    if rule is not None and not rule.few_samples:
        return None
    plan = make_uniform_plan(job.sizes, job.share, allowed)
    check_widths(job.groups, plan.kept, job.roundings)  # what uniform counts cannot meet, no curves mend
    return plan if rule is None else None


def _can_share(recipe: StructuredModifier) -> bool:
    """Tell whether what a recipe's allocation pass measures is the same at other sparsities."""
    return not CRITERIA[recipe.importance].aims


@dataclass(frozen=True)
class Planner:
    """Measures the dense model and makes the plan, on calibration data.

    :param recipe: the pruning stage's fields
    :param methods: its methods
    :param options: the caller's, of the host's pipeline
    :param trial_samples: sequences to try plans on
    :param evidence: what runs of other sparsities have measured, and shall not measure again
    """

    recipe: StructuredModifier
    job: Job
    methods: Methods
    state: State
    room: Room
    options: dict[str, Any]
    trial_samples: int = 0
    evidence: EvidenceStore | None = None

    def decide(self, early: Plan | None, allocated: Allocated | None, journal: Journal | None) -> tuple[Plan, Signals]:
        """Return the plan, and what was measured for it, unless an earlier process has made them.

        :param early: a plan that is made already
        :param allocated: what an allocator stage left
        """
        if done := take_allocation(journal, "allocation"):
            plan, signals = done
            made = plan or early
            assert made is not None
            return made, signals
        signals = self._measure_signals(allocated)
        plan = early or self._plan(allocated, signals)
        if early is None:
            check_widths(self.job.groups, plan.kept, self.job.roundings)
        if journal is not None:
            keep_allocation(journal, "allocation", None if early else plan, signals)
        return plan, signals

    def _measure_signals(self, allocated: Allocated | None) -> Signals:
        """Measure what the methods ask of the dense model, unless an allocator stage has, or another run."""
        measure = partial(
            measure_signals,
            self.state.model,
            self.state.data.calib,
            self.job.groups,
            self.room,
            CRITERIA[self.recipe.importance].gradients,
            self.recipe.sensitivity_samples,
            allocated.signals if allocated is not None else None,
        )
        if self.evidence is None:
            return measure()
        asked = {**self.recipe.dump_fields(), "samples": self.recipe.sensitivity_samples}
        return self.evidence.share_signals(asked, measure)

    def _plan(self, allocated: Allocated | None, signals: Signals) -> Plan:
        """Return the kept counts that an allocator stage left, or those of an allocation pass of our own."""
        if allocated is not None:
            self.room.stages["allocate"] = allocated.measured
            return allocated.plan
        logger.info(f"allocation pass ({self.recipe.allocation}) over the dense model")
        with self.room.stage("allocate"):
            plan = self._allocate(signals)
        if self.recipe.search == "moments":
            return plan
        with self.room.stage("search"):
            return search_fully(plan, lambda candidate: self._rehearse(signals, candidate))

    def _allocate(self, signals: Signals) -> Plan:
        """Make the plan in an allocation pass over the dense model, and try it against others in one more."""
        recipe, job, loader = self.recipe, self.job, self.state.data.calib
        rule, held = RULES[recipe.allocation], list[dict[str, Tensor]]()
        if rule.few_samples:
            if rule.propose is not None and count_ranks() == 1:
                loader, held = hold_batches(loader, self.trial_samples)
            loader = take_batches(loader, job.groups, recipe.allocation_samples)
        room = self.room.replace(place_run(recipe, self.state.model, job.groups, loader, together=True))
        settings = recipe.make_allocation_settings(job.num_prunable)
        keeps = bool(held) and can_keep_moments(job.groups, self.state.model.config.hidden_size)
        methods = recipe.make_methods()
        allocation = AllocationPass(job.groups, job.sizes, settings, methods, signals, room, keeps_moments=keeps)
        fields = recipe.dump_fields()
        known = self.evidence.take_curves(fields) if self.evidence is not None and _can_share(recipe) else None
        if known is not None:
            allocation.adopt(known)
        else:
            run_pass(self.state, allocation, room, self.options, propagate_error=False, calibration=loader)
            if self.evidence is not None and _can_share(recipe):
                self.evidence.keep_curves(fields, allocation.evidence)
        assert allocation.plan is not None
        if not held or rule.propose is None:
            return allocation.plan
        proposed = {self.recipe.allocation: allocation.plan.kept, **self._propose(rule.propose, allocation.plan)}
        return self._try(proposed, allocation, loader, held, room)

    def _propose(self, propose: Propose, plan: Plan) -> dict[str, Mapping[str, int]]:
        """Return a rule's other plans that meet the budget and fit the widths that were asked for."""
        job, found = self.job, dict[str, Mapping[str, int]]()
        for name, counts in propose(job.sizes, plan, job.share).items():
            kept = {size.name: count for size, count in zip(job.sizes, counts, strict=True)}
            with suppress(ValueError):
                check_budget(job.sizes, counts, job.share)
                check_widths(job.groups, kept, job.roundings)
                if kept != plan.kept and kept not in found.values():
                    found[name] = kept
        return found

    def _try(
        self,
        proposed: Mapping[str, Mapping[str, int]],
        allocation: AllocationPass,
        loader: Sequence[dict[str, Tensor]],
        held: Sequence[dict[str, Tensor]],
        room: Room,
    ) -> Plan:
        """Return the plan that moves the model's output least on the batches held out; the first of those that tie.

        :param proposed: kept units by group, by what a plan is called; the allocation's own comes first
        """
        own = allocation.plan
        assert own is not None
        if len(proposed) == 1:
            return own
        known = allocation.moments
        args = (list(proposed.values()), allocation.evidence, self.recipe.make_methods(), room, len(loader), known)
        trials = TrialPass(self.job.groups, *args)
        batches = held if known else [*loader, *held]
        run_pass(self.state, trials, room, self.options, propagate_error=False, calibration=batches)
        with room.stage("trials"):
            measured = dict(zip(proposed, trials.measure(), strict=True))
        tried = {name: divergence for name, divergence in measured.items() if math.isfinite(divergence)}
        if not tried:
            return own
        taken = list(tried)[find_least(list(tried.values()))]
        logger.info(f"plans tried, KL divergence: {tried}; taken: {taken}")
        return replace(own, kept=proposed[taken], record=replace(own.record, tried=tried, taken=taken))

    def _rehearse(self, signals: Signals, plan: Plan) -> float:
        """Prune after a plan, a layer at a time, giving each layer its weights back once the next has seen its outputs;
        return the squared error summed over groups."""
        adopt_attention(self.state.model)
        methods = replace(self.methods, tuning=None)  # a search by the solves' errors
        room = self.room.replace(self.room.placement)
        rehearsal = PruningPass(self.job.groups, plan, methods, signals, room, keeps=False)
        run_pass(self.state, rehearsal, room, self.options, propagate_error=True)
        return sum(record.solve.error_after * record.solve.target_energy for record in rehearsal.records)
