"""Manifest record of a run's budgets."""

from __future__ import annotations

from transformers import PreTrainedModel

from struprune_plugin.modifiers.checks import split_modifiers
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.setup import RunSetup
from struprune_plugin.modifiers.targets import describe_targets, measure_met
from struprune_plugin.modifiers.widths import describe_roundings
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.records import BudgetRecord


def describe_budget(
    setup: RunSetup, recipe: StructuredModifier, model: PreTrainedModel, plan: UnitAllocation, removed: int
) -> BudgetRecord:
    """Return the manifest's record of the requested and the achieved budget.

    :param model: the pruned model
    :param removed: number of removed parameters
    """
    met = {"parameters": setup.num_prunable - removed, **measure_met(model, setup.targets, split_modifiers(recipe)[1])}
    return BudgetRecord(
        prunable_parameters=setup.num_prunable,
        asked_sparsity=recipe.sparsity or 0.0,
        removed_parameters=removed,
        met_sparsity=removed / setup.num_prunable,
        rounding=describe_roundings(plan.list_left(setup.groups), setup.roundings),
        limits=describe_targets(setup.targets, setup.sizes, plan.kept, met),
    )
