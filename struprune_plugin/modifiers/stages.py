"""What the stages of one recipe must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from struprune_plugin.model.units import UnitGroup
from struprune_plugin.modifiers.allocator import SparsityAllocatorModifier
from struprune_plugin.modifiers.checks import list_modifiers
from struprune_plugin.modifiers.fields import GROUP_FIELDS, PLAN_FIELDS, StructuredModifier


def find_allocator(modifier: StructuredModifier) -> SparsityAllocatorModifier | None:
    """Return the allocator stage that comes before a modifier in the recipe."""
    found = None
    for other in list_modifiers():
        if other is modifier:
            return found
        if isinstance(other, SparsityAllocatorModifier):
            found = other
    return found


def check_single_stage() -> None:
    """Refuse a second pruning stage: groups are measured before any stage has run.

    :raises ValueError: the same
    """
    names = [type(modifier).__name__ for modifier in list_modifiers()]
    if names.count("StruPruneModifier") > 1:
        raise ValueError(
            f"recipe: must hold one StruPruneModifier, got {names}. Prune the saved output again in a run of its own."
        )


def agree_on_budget(ours: StructuredModifier, stage: SparsityAllocatorModifier) -> dict[str, Any]:
    """Return the fields of a pruning stage that an allocator stage decides.

    :raises ValueError: other units or another budget; a field of the allocation that the stage would overrule
    """
    for name in ("sparsity", *GROUP_FIELDS):
        if name != "sparsity" or ours.sparsity is not None:
            _check_same(ours, stage, name, "Give both stages the same value.")
    if ours.search == "full":
        raise ValueError(
            "StruPruneModifier: search must be moments where a SparsityAllocatorModifier stage makes the plan, got full. "
            "Leave that stage out."
        )
    for name in PLAN_FIELDS:
        if name in ours.model_fields_set:
            _check_same(ours, stage, name, "The stage decides it: leave it out here.")
    return {name: getattr(stage, name) for name in ("sparsity", *PLAN_FIELDS)}


def check_curves(ours: StructuredModifier, stage: SparsityAllocatorModifier, groups: Sequence[UnitGroup]) -> None:
    """Refuse units that are ranked or restored otherwise than an allocator stage's error curves say.

    :raises ValueError: the same
    """
    _check_same(ours, stage, "importance", "Give both stages the same value.")
    mine, theirs = ours.make_methods(), stage.make_methods()
    if mine.restoration.solves != theirs.restoration.solves:  # ADMM starts from and closes with least squares
        _check_same(ours, stage, "restoration", "Give both stages the same value.")
    if any(mine.rotates(group) != theirs.rotates(group) for group in groups):
        _check_same(ours, stage, "rotate_values", "Give both stages the same value.")


def _check_same(ours: StructuredModifier, stage: SparsityAllocatorModifier, name: str, remedy: str) -> None:
    mine, theirs = getattr(ours, name), getattr(stage, name)
    if mine != theirs:
        raise ValueError(
            f"StruPruneModifier: {name} must be {theirs!r} as in the SparsityAllocatorModifier stage, got {mine!r}. {remedy}"
        )
