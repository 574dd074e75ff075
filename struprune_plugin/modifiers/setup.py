"""Setup and checks of a run before any calibration, from the recipe, the model and the data, and its manifest at the end."""

from __future__ import annotations

import os
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
from struprune_plugin.export.convert import adopt_config, adopt_stock
from struprune_plugin.export.rehearsal import rehearse, rehearse_with_experts
from struprune_plugin.export.stock_config import can_hold_heads, make_uniform_config
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.model.layers import count_parameters, count_weight_bytes
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.routing import find_routing
from struprune_plugin.model.surgery import check_sliceable
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers import budgets, checks
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.storage import manifest


@dataclass(frozen=True)
class RunSetup:
    """Facts about a run that are known before it starts."""

    groups: Sequence[UnitGroup]  # to prune, in the order in which the model computes them
    whole: Sequence[UnitGroup]  # they keep all units and are re-solved
    roundings: dict[str, budgets.Rounding]  # of kept counts, by group name
    sizes: Sequence[GroupSize]  # of the groups beside whole experts
    budget: Budget
    mixture: Mixture | None  # whole experts that may be removed
    batches: list[dict[str, Tensor]]
    calibration: manifest.CalibrationRecord
    num_parameters: int
    early: UnitAllocation | None  # plan of a rule that needs no calibration data
    uniform: bool  # all layers get one size, for stock classes

    def finish(
        self,
        recipe: StructuredModifier,
        plan: UnitAllocation,
        groups: list[manifest.GroupRecord],
        context: DeviceContext,
        model: PreTrainedModel,
    ) -> manifest.Manifest:
        """Give the pruned model its configuration and class; return the manifest of the run."""
        _set_num_experts(model, self.groups)
        if self.uniform:
            adopt_stock(model, make_uniform_config(model))
        else:
            adopt_config(model)
        experts = self.mixture.describe(plan.experts) if self.mixture and plan.experts else []
        removed = sum(r.removed_parameters for r in groups) + sum(r.removed_parameters for r in experts)
        return manifest.Manifest(
            model=manifest.ModelRecord(
                base=os.path.abspath(source) if os.path.isdir(source := model.config._name_or_path) else source,
                type=model.config.model_type,
                parameters_before=self.num_parameters,
                parameters_after=count_parameters(model),
                left_out=getattr(model, "left_out", []),
            ),
            settings=recipe.dump_fields(),
            seed=torch.initial_seed(),
            calibration=self.calibration,
            budget=manifest.BudgetRecord(
                prunable_parameters=self.budget.num_prunable,
                asked_sparsity=self.budget.sparsity,
                removed_parameters=removed,
                met_sparsity=removed / self.budget.num_prunable,
                rounding=budgets.describe_roundings(plan.list_left(self.groups), self.roundings),
                limit=budgets.describe_limit(recipe, count_weight_bytes(model)),
            ),
            allocation=plan.record,
            memory_measure=context.measure,
            stages=[manifest.StageEntry(name, round(s.seconds, 3), s.peak_bytes) for name, s in context.stages.items()],
            groups=groups,
            experts=experts,
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

    :param stages: modifiers before this one in the recipe, and those behind it
    """
    before, later = stages
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
    groups = modifier.prepare_groups(model)
    if uniform:
        checks.check_uniform(modifier, model, groups, later)
    whole = _find_whole(modifier, model, groups)
    checks.check_order(modifier, before)
    checks.check_weights(model)
    _check_methods(modifier, model, groups, later)
    roundings = budgets.find_roundings(model, groups, later, modifier.width_multiple)
    for group in groups:
        check_sliceable(model.get_submodule(group.layer_name), group)
        if (rounding := roundings[group.name]).step > group.num_units:
            raise ValueError(
                f"{group.name}: kept widths must be multiples of {rounding.width} ({', '.join(rounding.because)}), more than the "
                f"width {group.num_columns}. Choose a smaller multiple or group size."
            )
    mixture = budgets.find_mixture(modifier, model, groups, [*before, *later])
    sizes, budget = budgets.find_budget(modifier, model, groups, roundings, mixture)
    most = getattr(modifier.allocation, "max_sparsity", 1.0)
    if budget.share > most:
        raise ValueError(
            f"max_sparsity: must be at least {budget.share:.4f}, the modules' mean, got {most}. Raise it, or lower sparsity."
        )
    batches = checks.read_batches(loader)
    widest = max((*groups, *whole), key=lambda group: group.num_columns)
    solves = modifier.importance.eliminates or modifier.weight_update.solves
    needed = widest.num_columns + 1 if solves else 1  # tokens: one per input, and one for the bias
    calibration = checks.check_calibration(model, batches, widest.name, needed)
    early = None
    if not sizes:  # whole experts alone
        early = UnitAllocation({}, manifest.AllocationRecord(modifier.allocation.rule))
    elif uniform:
        early = allocate_uniformly(sizes, budget, lambda kind, n: kind != "attention" or can_hold_heads(model, n))
    elif not modifier.allocation.measures:
        early = modifier.allocation.decide(sizes, {}, budget)
    elif hasattr(modifier.allocation, "samples"):
        allocate_uniformly(sizes, budget)  # raises if the multiples are too coarse for the budget
    if early is not None:
        budgets.check_widths(groups, early.kept, roundings)
    count = count_parameters(model)
    return RunSetup(groups, whole, roundings, sizes, budget, mixture, batches, calibration, count, early, uniform)


def _find_whole(recipe: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    """Return the shared experts that keep all channels and are re-solved after the routed experts beside them."""
    update, lists = recipe.weight_update, {(g.layer_name, g.join.block) for g in groups if g.experts}
    if not lists or not update.solves or update.refines:
        return []
    chosen = {group.name for group in groups}
    found = find_groups(model, recipe.attention_unit, True, recipe.targets, recipe.ignore, True)
    beside = [group for group in found if group.join.block and not group.experts and group.name not in chosen]
    return [group for group in beside if (group.layer_name, group.join.block) in lists]


def _set_num_experts(model: PreTrainedModel, groups: Sequence[UnitGroup]) -> None:
    """Set the configuration's number of experts to those that are left: the pruned class is built with it. A later modifier (REAP)
    sets the number itself only afterwards.
    """
    before = dict(Counter(group.output_name for group in groups if group.experts))
    left = {name: cast(Any, model.get_submodule(name)).num_experts for name in before}
    if left != before and len({*left.values()}) == 1:
        setattr(model.config.get_text_config(decoder=True), find_routing(model).key, next(iter(left.values())))


def _check_methods(
    modifier: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup], later: Sequence[Modifier]
) -> None:
    """Raise if a method is not defined for the model, the chosen modules, or another field."""
    importance, update = modifier.importance, modifier.weight_update
    asked = f"importance: {importance.method}", f"weight_update: {update.method}"
    checks.check_heads(later, modifier.attention_unit == "head", modifier.attention_unit == "value_channels")
    importance.check(model, modifier.attention_unit, modifier.prune_ffn)
    if modifier.experts is not None and not importance.takes_experts and find_structure(model).has_experts:
        raise ValueError(
            f"`{asked[0]}` is not defined for the experts of a mixture. Set `experts: none`, or another importance."
        )
    update.check(model, modifier.attention_unit, modifier.prune_ffn)
    modifier.allocation.check(importance.method)
    for name, is_on_device in zip(asked, (not importance.takes_offload, update.refines), strict=True):
        if modifier.offload and is_on_device:
            raise ValueError(f"offload: must be false with `{name}`, which runs on the device. Remove one of the two.")
    if update.refines and not any(map(update.can_refine, groups)):
        raise ValueError(f"`{asked[1]}` has no effect on the chosen modules. Remove it, or prune other modules.")
