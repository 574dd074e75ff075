"""Checks that the stages of one recipe agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.allocator import SparsityAllocatorModifier
from struprune_plugin.modifiers.checks import list_modifiers, split_modifiers
from struprune_plugin.modifiers.fields import GROUP_FIELDS, PLAN_FIELDS, StructuredModifier
from struprune_plugin.storage.files import shorten_value
from struprune_plugin.storage.records import BudgetRecord
from struprune_plugin.storage.registry import list_differences


def find_allocator(modifier: StructuredModifier) -> SparsityAllocatorModifier | None:
    """Return the last allocator stage before a modifier in the recipe; None if there is none."""
    before = split_modifiers(modifier)[0]
    return next((other for other in reversed(before) if isinstance(other, SparsityAllocatorModifier)), None)


def find_round_before(modifier: StructuredModifier) -> StructuredModifier | None:
    """Return the pruning stage before a modifier in the recipe, after checking that both can be rounds; None for the first.

    :raises ValueError: as :func:`_check_round`
    """
    before = [other for other in split_modifiers(modifier)[0] if type(other) is type(modifier)]
    if not before:
        return None
    _check_round(modifier, before[-1])
    return before[-1]


def find_share_left(sparsity: float, before: BudgetRecord) -> float:
    """Return the share of the remaining parameters to remove, so that ``sparsity`` of the dense model's are removed in all.

    :param before: budget record of the rounds before
    :raises ValueError: these have removed as much
    """
    left = 1 - (1 - sparsity) * before.prunable_parameters / (before.prunable_parameters - before.removed_parameters)
    if left <= 0:
        raise ValueError(
            f"sparsity: must be above {before.met_sparsity:.4f}, which the rounds before have reached by rounding, got {sparsity}. "
            "Raise it."
        )
    return left


def _check_round(ours: StructuredModifier, before: StructuredModifier) -> None:
    """Raise if a pruning stage cannot follow another one in one recipe.

    :raises ValueError: in that case
    """
    remedy = "To prune a pruned model in another way, prune the saved output in a second run."
    if any(isinstance(other, SparsityAllocatorModifier) for other in list_modifiers()):
        raise ValueError(f"recipe: must have no SparsityAllocatorModifier beside several StruPruneModifiers. {remedy}")
    for name in (*GROUP_FIELDS, "output"):
        _check_same(ours, before, name, remedy)
    if ours.store is not None:
        raise ValueError(
            "checkpoint_dir: must be left out for several StruPruneModifiers in one recipe. Remove it, or run each stage by itself."
        )
    if ours.budget or before.budget or ours.sublayers != "none" or (ours.experts is not None and ours.experts.drops):
        raise ValueError(
            "recipe: several StruPruneModifiers must have `sparsity` and no `budget`, no `sublayers` and no whole experts. "
            f"{remedy}"
        )
    if getattr(ours, "replay", None) or getattr(before, "replay", None):
        raise ValueError("replay: must be left out for several StruPruneModifiers in one recipe. Remove it.")
    if ours.sparsity is None or before.sparsity is None or ours.sparsity <= before.sparsity:
        raise ValueError(
            "sparsity: must grow from one StruPruneModifier to the next, as each counts from the dense model, got "
            f"{before.sparsity} and {ours.sparsity}. Set a larger one in the later stage."
        )


def agree_on_budget(ours: StructuredModifier, stage: SparsityAllocatorModifier) -> dict[str, Any]:
    """Return the fields of a pruning stage that an allocator stage decides.

    :raises ValueError: the stages differ in units or budget, or in a field of the allocation that the recipe sets
    """
    for name in ("sparsity", "budget", *GROUP_FIELDS):
        if name in GROUP_FIELDS or getattr(ours, name) not in (None, []):
            _check_same(ours, stage, name, "Give both stages the same value.")
    for name in PLAN_FIELDS:
        if name in ours.model_fields_set:
            _check_same(ours, stage, name, "The stage sets it: remove it here.")
    return {name: getattr(stage, name) for name in ("sparsity", "budget", *PLAN_FIELDS)}


def check_curves(
    ours: StructuredModifier, stage: SparsityAllocatorModifier, model: PreTrainedModel, groups: Sequence[UnitGroup]
) -> None:
    """Raise if units are ranked or updated differently than in an allocator stage's error curves.

    :raises ValueError: in that case
    """
    _check_same(ours, stage, "importance", "Give both stages the same value.")
    mine, theirs = ours.make_config(model), stage.make_config(model)
    if mine.weight_update.solves != theirs.weight_update.solves:  # ADMM starts from and closes with least squares
        _check_same(ours, stage, "weight_update", "Give both stages the same value.")
    if any(mine.rotates(group) != theirs.rotates(group) for group in groups):
        _check_same(ours, stage, "rotate_values", "Give both stages the same value.")


def _check_same(ours: StructuredModifier, stage: StructuredModifier, name: str, remedy: str) -> None:
    if getattr(ours, name) != getattr(stage, name):
        place, mine, theirs = next(list_differences(ours.dump_fields()[name], stage.dump_fields()[name], name))
        raise ValueError(
            f"StruPruneModifier: {place} must be {shorten_value(theirs)} as in the {type(stage).__name__} stage before, got "
            f"{shorten_value(mine)}. {remedy}"
        )
