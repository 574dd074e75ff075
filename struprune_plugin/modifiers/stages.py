"""Checks that the stages of one recipe agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmcompressor.modifiers import Modifier

from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.allocator import SparsityAllocatorModifier
from struprune_plugin.modifiers.checks import split_modifiers
from struprune_plugin.modifiers.fields import GROUP_FIELDS, PLAN_FIELDS, StructuredModifier
from struprune_plugin.storage.files import shorten_value
from struprune_plugin.storage.registry import list_differences


def find_allocator(modifier: StructuredModifier) -> SparsityAllocatorModifier | None:
    """Return the last allocator stage before a modifier in the recipe; None if there is none."""
    before = split_modifiers(modifier)[0]
    return next((other for other in reversed(before) if isinstance(other, SparsityAllocatorModifier)), None)


def check_one_pruning(modifiers: Sequence[Modifier]) -> None:
    """Raise if a recipe has several pruning stages.

    :raises ValueError: in that case
    """
    count = sum(isinstance(other, StructuredModifier) and not other.only_plans for other in modifiers)
    if count > 1:
        raise ValueError(
            f"recipe: must have one StruPruneModifier, got {count}. To prune further, prune the saved output in a second run."
        )


def agree_on_budget(ours: StructuredModifier, stage: SparsityAllocatorModifier) -> dict[str, Any]:
    """Return the fields of a pruning stage that an allocator stage decides.

    :raises ValueError: the stages differ in units or budget, or in a field of the allocation that the recipe sets
    """
    for name in ("sparsity", "budget", *GROUP_FIELDS):
        if name in GROUP_FIELDS or getattr(ours, name) is not None:
            _check_same(ours, stage, name, "Give both stages the same value.")
    for name in PLAN_FIELDS:
        if name in ours.model_fields_set:
            _check_same(ours, stage, name, "The stage sets it: remove it here.")
    return {name: getattr(stage, name) for name in ("sparsity", "budget", *PLAN_FIELDS)}


def check_curves(ours: StructuredModifier, stage: SparsityAllocatorModifier, groups: Sequence[UnitGroup]) -> None:
    """Raise if units are ranked or updated differently than in an allocator stage's error curves.

    :raises ValueError: in that case
    """
    _check_same(ours, stage, "importance", "Give both stages the same value.")
    mine, theirs = ours.make_config(), stage.make_config()
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
