"""Setup and checks of a run before any calibration, from the recipe, the model and the data, and its manifest at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from llmcompressor.modifiers import Modifier
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.rules import Budget, allocate_uniformly
from struprune_plugin.allocation.whole_experts import Mixture
from struprune_plugin.export.convert import finish_model
from struprune_plugin.export.rehearsal import rehearse, rehearse_with_experts
from struprune_plugin.export.stock_config import can_hold_heads
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.model.layers import count_parameters, count_weight_bytes
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.routing import find_routing
from struprune_plugin.model.surgery import check_sliceable
from struprune_plugin.model.units import find_groups, sort_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.budgets import (
    Rounding,
    check_widths,
    describe_limit,
    describe_roundings,
    find_budget,
    find_mixture,
    find_roundings,
)
from struprune_plugin.modifiers.checks import (
    check_cache_quantisation,
    check_calibration,
    check_layers,
    check_stage,
    check_uniform,
    read_batches,
)
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.problem import Sensitivity
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.storage.manifest import (
    AllocationRecord,
    BudgetRecord,
    CalibrationRecord,
    GroupRecord,
    Manifest,
    ModelRecord,
    StageEntry,
)


@dataclass(frozen=True)
class RunSetup:
    """Facts about a run that are known before it starts.

    :param groups: groups to prune, in the order in which the model computes them
    :param whole: groups that keep all units and are re-solved
    :param roundings: rounding of kept counts, by group name
    :param sizes: sizes of the groups for the budget, beside whole experts
    :param budget: the budget on this model
    :param mixture: whole experts that may be removed; None if none may
    :param batches: calibration batches
    :param calibration: record of them
    :param num_parameters: parameters of the model
    :param early: plan, if it needs no calibration data
    :param uniform: whether all layers get one size, for stock classes
    """

    groups: Sequence[UnitGroup]
    whole: Sequence[UnitGroup]
    roundings: dict[str, Rounding]
    sizes: Sequence[GroupSize]
    budget: Budget
    mixture: Mixture | None
    batches: list[dict[str, Tensor]]
    calibration: CalibrationRecord
    num_parameters: int
    early: UnitAllocation | None
    uniform: bool

    @property
    def all_groups(self) -> list[UnitGroup]:
        """Groups that are re-solved, in the order in which the model computes them."""
        return sort_groups([*self.groups, *self.whole])

    def finish(
        self,
        recipe: StructuredModifier,
        plan: UnitAllocation,
        groups: list[GroupRecord],
        sensitivity: Sensitivity,
        context: DeviceContext,
        model: PreTrainedModel,
    ) -> Manifest:
        """Give the pruned model its configuration and class; return the manifest of the run.

        :param sensitivity: measurements of the dense model
        :param context: context of the run, which has counted its seconds and bytes
        """
        _tell_lost_experts(model, self.groups)
        finish_model(model, self.uniform)
        experts = self.mixture.describe(plan.experts) if self.mixture and plan.experts else []
        removed = sum(r.removed_parameters for r in groups) + sum(r.removed_parameters for r in experts)
        return Manifest(
            model=ModelRecord(
                base=model.config._name_or_path,
                type=model.config.model_type,
                parameters_before=self.num_parameters,
                parameters_after=count_parameters(model),
                left_out=getattr(model, "left_out", []),
            ),
            settings=recipe.dump_fields(),
            seed=torch.initial_seed(),
            calibration=self.calibration,
            budget=BudgetRecord(
                prunable_parameters=self.budget.num_prunable,
                asked_sparsity=self.budget.sparsity,
                removed_parameters=removed,
                met_sparsity=removed / self.budget.num_prunable,
                rounding=describe_roundings(plan.list_left(self.groups), self.roundings),
                limit=describe_limit(recipe, self.budget, count_weight_bytes(model), self.sizes, plan.kept),
            ),
            allocation=plan.record,
            memory_measure=context.measure,
            stages=[StageEntry(name, round(s.seconds, 3), s.peak_bytes) for name, s in context.stages.items()],
            groups=groups,
            experts=experts,
            sensitivity=sensitivity.summarize_fisher(),
        )


def prepare_run(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    loader: Any,
    stages: tuple[Sequence[Modifier], Sequence[Modifier]],
    uniform: bool,
) -> RunSetup:
    """Find the groups of the model as it is now, check recipe, model and calibration data, and return the setup of the run.

    Experts whose removal fails in the rehearsal stay whole: ``modifier.experts`` is then set to None.

    :param loader: calibration data; None if none was given
    :param stages: modifiers before this one in the recipe, and those behind it
    :param uniform: whether all layers must have one size, for stock classes
    """
    before, later = stages
    check_layers(model)
    units = modifier.attention_unit, modifier.prune_ffn
    if modifier.experts is None or modifier.experts.drops:
        rehearse(model, *units, prune_experts=modifier.experts is not None)
    elif not rehearse_with_experts(model, *units):
        modifier.experts = None
    if modifier.sparsity is None and modifier.budget is None:
        raise ValueError(
            "StruPruneModifier: the recipe gives neither sparsity nor budget, and no SparsityAllocatorModifier stage comes before. "
            "Add sparsity to the recipe."
        )
    groups = modifier.find_groups(model)
    if uniform:
        check_uniform(modifier, model, groups, later)
    whole = _find_whole(modifier, model, groups)
    check_stage(modifier, model, before, later)
    _check_methods(modifier, model, groups, later)
    roundings = find_roundings(model, groups, later, modifier.width_multiple)
    for group in groups:
        check_sliceable(model.get_submodule(group.layer_name), group)
        if (rounding := roundings[group.name]).step > group.num_units:
            raise ValueError(
                f"{group.name}: kept widths must be multiples of {rounding.width} ({', '.join(rounding.because)}), more than the "
                f"width {group.num_columns}. Choose a smaller multiple or group size."
            )
    mixture = find_mixture(modifier, model, groups, [*before, *later])
    sizes, budget = find_budget(modifier, model, groups, roundings, mixture, later)
    most = getattr(modifier.allocation, "max_sparsity", 1.0)
    if budget.share > most:
        raise ValueError(
            f"max_sparsity: must be at least {budget.share:.4f}, the mean over the modules to prune at "
            f"sparsity={budget.sparsity:g}, got {most}. Lower sparsity, raise max_sparsity, or prune more kinds of units."
        )
    batches = read_batches(loader)
    calibration = check_calibration(model, batches, *find_widest_solve(modifier, [*groups, *whole]))
    early = _plan_early(modifier, model, sizes, budget, uniform)
    if early is not None:
        check_widths(groups, early.kept, roundings)  # if uniform counts do not fit, no others do
    if sizes and modifier.allocation.measures:
        early = None
    count = count_parameters(model)
    return RunSetup(groups, whole, roundings, sizes, budget, mixture, batches, calibration, count, early, uniform)


def find_widest_solve(modifier: StructuredModifier, groups: Sequence[UnitGroup]) -> tuple[str, int]:
    """Return the name of the widest module, and the tokens that its solve needs: one per input and one for the bias."""
    widest = max(groups, key=lambda group: group.num_columns)
    solves = modifier.importance.eliminates or modifier.weight_update.solves
    return widest.name, widest.num_columns + 1 if solves else 1


def _find_whole(recipe: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    """Return the shared experts that keep all channels and are re-solved after the routed experts beside them."""
    update, lists = recipe.weight_update, {(g.layer_name, g.join.block) for g in groups if g.experts}
    if not lists or not update.solves or update.refines:
        return []
    chosen = {group.name for group in groups}
    found = find_groups(model, recipe.attention_unit, True, recipe.targets, recipe.ignore, True)
    beside = [group for group in found if group.join.block and not group.experts and group.name not in chosen]
    return [group for group in beside if (group.layer_name, group.join.block) in lists]


def _tell_lost_experts(model: PreTrainedModel, groups: Sequence[UnitGroup]) -> None:
    """Set the configuration's number of experts to those that are left: the pruned class is built with it. A later modifier (REAP)
    sets the number itself only afterwards.
    """
    before = dict(Counter(group.output_name for group in groups if group.experts))
    left = {name: cast(Any, model.get_submodule(name)).num_experts for name in before}
    if left != before and len({*left.values()}) == 1:
        setattr(model.config.get_text_config(decoder=True), find_routing(model).key, next(iter(left.values())))


def _plan_early(
    recipe: StructuredModifier, model: PreTrainedModel, sizes: Sequence[GroupSize], budget: Budget, uniform: bool
) -> UnitAllocation | None:
    """Return the plan of a rule that needs no calibration data; of one that does, uniform counts, which must fit, too."""
    rule = recipe.allocation
    if not sizes:  # whole experts alone
        return UnitAllocation({}, AllocationRecord(rule.rule))
    if uniform:
        return allocate_uniformly(
            sizes, budget, lambda kind, count: kind != "attention" or can_hold_heads(model, count)
        )
    if not rule.measures:
        return rule.decide(sizes, {}, budget)
    return allocate_uniformly(sizes, budget) if hasattr(rule, "samples") else None


def _check_methods(
    modifier: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup], later: Sequence[Modifier]
) -> None:
    """Raise if a method is not defined for the model, the chosen modules, or another field."""
    importance, update, experts = modifier.importance, modifier.weight_update, modifier.experts
    asked = f"importance: {importance.method}", f"weight_update: {update.method}"
    check_cache_quantisation(model.config, later, modifier.attention_unit == "head")
    importance.check(model, modifier.attention_unit, modifier.prune_ffn)
    if experts is not None and not importance.takes_experts and find_structure(model).has_experts:
        raise ValueError(
            f"`{asked[0]}` is not defined for the experts of a mixture. Set `experts: none`, or another importance."
        )
    update.check(model, modifier.attention_unit, modifier.prune_ffn)
    modifier.allocation.check(importance.method)
    for name, is_on_device in zip(asked, (not importance.takes_offload, update.refines), strict=True):
        if modifier.offload and is_on_device:
            raise ValueError(f"offload: must be false with `{name}`, which runs on the device. Remove one of the two.")
    unused = ""
    if modifier.width_multiple not in ("auto", 1) and not any(group.unit.is_ffn for group in groups):
        unused = f"width_multiple: {modifier.width_multiple}"
    elif update.refines and not any(map(update.can_refine, groups)):
        unused = asked[1]
    if unused:
        raise ValueError(
            f"`{unused}` has no effect on the chosen modules, none of which it covers. Remove it, or prune other modules."
        )
