"""Setup and checks of a run before any calibration, from the recipe, the model and the data, and its manifest at the end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from llmcompressor.utils.dev import get_main_device
from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.rounding import GroupSize
from struprune_plugin.allocation.rules import Budget, allocate_uniformly
from struprune_plugin.allocation.whole_experts import Mixture
from struprune_plugin.export.outputs import OUTPUTS
from struprune_plugin.export.rehearsal import rehearse, rehearse_with_mixtures
from struprune_plugin.model.groups import find_groups
from struprune_plugin.model.layers import count_parameters, count_weight_bytes
from struprune_plugin.model.structure.routing import find_routing
from struprune_plugin.model.surgery import check_sliceable
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.modifiers import budgets, checks
from struprune_plugin.modifiers.allocator import complete_recipe
from struprune_plugin.modifiers.fields import PruningFields, StructuredModifier
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.precision import describe_precision
from struprune_plugin.storage import manifest


@dataclass(frozen=True)
class Setup:
    """What a recipe comes to on a model, known from its shapes: neither weights nor data are read."""

    recipe: PruningFields  # as it runs: completed by an allocator's, without experts that failed the rehearsal
    groups: Sequence[UnitGroup]  # to prune, in the order in which the model computes them
    whole: Sequence[UnitGroup]  # they keep all units and are re-solved
    roundings: dict[str, budgets.Rounding]  # of kept counts, by group name
    sizes: Sequence[GroupSize]  # of the groups beside whole experts
    budget: Budget
    mixture: Mixture | None  # whole experts that may be removed
    early: UnitAllocation | None  # plan of a rule that needs no calibration data

    def count_removed(self) -> int:
        """Return the parameters that go; how they spread over the layers may need calibration data, their sum does not."""
        kept = (self.early or allocate_uniformly(self.sizes, self.budget)).kept
        removed = sum(
            (group.num_units - kept.get(group.name, group.num_units)) * group.unit_cost for group in self.groups
        )
        if self.mixture is not None and self.budget.num_experts is not None:
            removed += (self.mixture.counts[0] - self.budget.num_experts) * (self.mixture.cost + self.mixture.entries)
        return removed


@dataclass(frozen=True)
class RunSetup(Setup):
    """Setup of a run, with its data."""

    batches: list[dict[str, Tensor]]
    calibration: manifest.CalibrationRecord
    num_parameters: int

    def finish(
        self,
        plan: UnitAllocation,
        groups: list[manifest.GroupRecord],
        context: DeviceContext,
        model: PreTrainedModel,
    ) -> manifest.Manifest:
        """Give the pruned model its configuration and class; return the manifest of the run."""
        _set_num_experts(model, self.groups)
        OUTPUTS[self.recipe.output].adopt(model)
        experts = self.mixture.describe(plan.experts) if self.mixture and plan.experts else []
        removed = sum(r.removed_parameters for r in groups) + sum(r.removed_parameters for r in experts)
        return manifest.Manifest(
            model=manifest.ModelRecord(
                base=os.path.abspath(source) if os.path.isdir(source := model.config._name_or_path) else source,
                type=model.config.model_type,
                parameters_before=self.num_parameters,
                parameters_after=(left := count_parameters(model)),
                removed_share=1 - left / self.num_parameters,
                left_out=getattr(model, "left_out", []),
            ),
            settings=self.recipe.dump_fields(),
            seed=torch.initial_seed(),
            calibration=self.calibration,
            budget=manifest.BudgetRecord(
                prunable_parameters=self.budget.num_prunable,
                asked_sparsity=self.budget.sparsity,
                removed_parameters=removed,
                met_sparsity=removed / self.budget.num_prunable,
                rounding=budgets.describe_roundings(plan.list_left(self.groups), self.roundings),
                limit=budgets.describe_limit(self.recipe, self.num_parameters, left, count_weight_bytes(model)),
            ),
            allocation=plan.record,
            computed_in=describe_precision(model.dtype, self.recipe.precision, get_main_device()),
            memory_measure=context.measure,
            stages=[manifest.StageEntry(name, round(s.seconds, 3), s.peak_bytes) for name, s in context.stages.items()],
            groups=groups,
            experts=experts,
        )


def set_up(pruning: PruningFields, model: PreTrainedModel, stages: checks.Stages) -> Setup:
    """Find the groups of the model as it is now, and how many of their units may stay. Experts whose removal fails in the
    rehearsal are not pruned, and those that cannot go whole lose channels, as the log says.

    :param stages: modifiers before the pruning stage in the recipe, and those behind it
    :raises ValueError: recipe and model do not go together, or the budget cannot be met
    """
    recipe = _rehearse(complete_recipe(pruning, stages[0]), model)
    groups, mixture = recipe.prepare_groups(model), None
    try:
        mixture = budgets.find_mixture(recipe, model, groups, [*stages[0], *stages[1]])
    except ValueError as reason:
        logger.warning(f"experts: their channels go, not whole experts: {reason}")
        recipe = recipe.take_channels()
        groups = recipe.prepare_groups(model)
    checks.refuse(recipe, model, groups, stages)
    roundings = budgets.find_roundings(model, groups, stages[1], recipe.width_multiple)
    for group in groups:
        check_sliceable(model.get_submodule(group.layer_name), group)
        if (rounding := roundings[group.name]).step > group.num_units:
            raise ValueError(
                f"{group.name}: kept widths must be multiples of {rounding.width} ({', '.join(rounding.because)}), more than the "
                f"width {group.num_columns}. Choose a smaller multiple or group size."
            )
    sizes, budget = budgets.find_budget(recipe, model, groups, roundings, mixture)
    early = _allocate_early(recipe, model, sizes, budget)
    if early is not None:
        budgets.check_widths(groups, early.kept, roundings)
    return Setup(recipe, groups, _find_whole(recipe, model, groups), roundings, sizes, budget, mixture, early)


def prepare_run(pruning: PruningFields, model: PreTrainedModel, loader: Any, stages: checks.Stages) -> RunSetup:
    """Set a run up, and check its weights and calibration data, too.

    :param stages: as of :func:`set_up`
    """
    setup = set_up(pruning, model, stages)
    checks.check_weights(model)
    batches = checks.read_batches(loader)
    widest = max((*setup.groups, *setup.whole), key=lambda group: group.num_columns)
    solves = setup.recipe.importance.eliminates or setup.recipe.weight_update.solves
    needed = widest.num_columns + 1 if solves else 1  # tokens: one per input, and one for the bias
    calibration = checks.check_calibration(model, batches, widest.name, needed)
    return RunSetup(**vars(setup), batches=batches, calibration=calibration, num_parameters=count_parameters(model))


def _rehearse(recipe: PruningFields, model: PreTrainedModel) -> PruningFields:
    """Return the recipe without experts whose removal fails in the rehearsal, as the log says."""
    kinds = recipe.list_units()
    if recipe.experts is None:
        rehearse(model, kinds)
    elif not rehearse_with_mixtures(model, kinds):
        units = None if recipe.units is None else [kind for kind in kinds if not kind.of_mixture]
        return recipe.model_copy(update={"experts": None, "units": units})
    return recipe


def _allocate_early(
    recipe: PruningFields, model: PreTrainedModel, sizes: Sequence[GroupSize], budget: Budget
) -> UnitAllocation | None:
    """Return the allocation if it needs no calibration data; else None.

    :raises ValueError: the multiples of the widths are too coarse for the budget
    """
    rule = recipe.allocation
    if not sizes:  # whole experts alone
        return UnitAllocation({}, manifest.AllocationRecord(rule.rule))
    if (can_keep := OUTPUTS[recipe.output].allocate(model)) is not None:
        return allocate_uniformly(sizes, budget, can_keep)
    if not rule.measures:
        return rule.decide(sizes, {}, budget)
    if hasattr(rule, "samples"):
        allocate_uniformly(sizes, budget)
    return None


def _find_whole(recipe: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    """Return the shared experts that keep all channels and are re-solved after the routed experts beside them."""
    update, lists = recipe.weight_update, {(g.layer_name, g.join.block) for g in groups if g.mixture}
    if not lists or not update.solves or update.refines:
        return []
    chosen = {group.name for group in groups}
    found = find_groups(model, recipe.attention_unit, True, recipe.targets, recipe.ignore, True)
    beside = [group for group in found if group.join.block and not group.mixture and group.name not in chosen]
    return [group for group in beside if (group.layer_name, group.join.block) in lists]


def _set_num_experts(model: PreTrainedModel, groups: Sequence[UnitGroup]) -> None:
    """Set the configuration's number of experts to those that are left: the pruned class is built with it. A later modifier (REAP)
    sets the number itself only afterwards.
    """
    before = dict(Counter(group.output_name for group in groups if group.mixture))
    left = {name: cast(Any, model.get_submodule(name)).num_experts for name in before}
    if left != before and len({*left.values()}) == 1:
        setattr(model.config.get_text_config(decoder=True), find_routing(model).key, next(iter(left.values())))
