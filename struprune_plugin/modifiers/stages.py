"""Checks that the stages of one recipe agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from llmcompressor.modifiers import Modifier

from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.allocator import SparsityAllocatorModifier
from struprune_plugin.modifiers.checks import list_modifiers, split_modifiers
from struprune_plugin.modifiers.fields import GROUP_FIELDS, PLAN_FIELDS, StructuredModifier
from struprune_plugin.storage.files import shorten_value
from struprune_plugin.storage.records import BudgetRecord
from struprune_plugin.storage.registry import list_differences

_TWO_RUNS = "To prune a pruned model in another way, prune the saved output in a second run."
_GROWTH = 0.01  # of the sparsity from round to round, which rounding must not have reached already


def find_allocator(modifier: StructuredModifier) -> SparsityAllocatorModifier | None:
    """Return the last allocator stage before a modifier in the recipe; None if there is none."""
    before = split_modifiers(modifier)[0]
    return next((other for other in reversed(before) if isinstance(other, SparsityAllocatorModifier)), None)


def list_rounds(modifiers: Sequence[Modifier]) -> list[StructuredModifier]:
    """Return the pruning stages among modifiers."""
    return [other for other in modifiers if isinstance(other, StructuredModifier) and not other.only_plans]


def prepare_round(modifier: StructuredModifier) -> tuple[Sequence[Modifier], StructuredModifier | None]:
    """Return all modifiers of the recipe that is being initialised, and the pruning stage before a given one; None for the first.

    The first one checks all of them, and gives those after the first round another group: llm-compressor saves a recipe by group
    and class, and of two stages of one class in one group it would keep the second.

    :raises ValueError: as :func:`check_rounds`
    """
    modifiers, before = list_modifiers(), list_rounds(split_modifiers(modifier)[0])
    if before:
        return modifiers, before[-1]
    check_rounds(modifiers)
    seen, number = set[tuple[str | None, type]](), 1
    for other in modifiers:
        kind = other.group, type(other)
        if kind in seen:
            seen, number = set(), number + 1
        seen.add(kind)
        if number > 1:
            other.group = f"{other.group or 'default'}_{number}"
    return modifiers, None


def check_rounds(modifiers: Sequence[Modifier]) -> None:
    """Raise if several pruning stages of a recipe cannot be its rounds.

    :param modifiers: all modifiers of the recipe
    :raises ValueError: in that case
    """
    stages = list_rounds(modifiers)
    if len(stages) > 1 and any(isinstance(other, SparsityAllocatorModifier) for other in modifiers):
        raise ValueError(
            f"recipe: must have no SparsityAllocatorModifier beside several StruPruneModifiers. {_TWO_RUNS}"
        )
    for stage in stages if len(stages) > 1 else ():
        if stage.budget or (stage.experts is not None and stage.experts.drops):
            raise ValueError(
                "recipe: several StruPruneModifiers must have `sparsity` and no `budget` and no whole experts. "
                f"{_TWO_RUNS}"
            )
        if getattr(stage, "replay", None):
            raise ValueError("replay: must be left out for several StruPruneModifiers in one recipe. Remove it.")
    for before, stage in pairwise(stages):
        for name in (*GROUP_FIELDS, "output"):
            _check_same(stage, before, name, _TWO_RUNS)
        if stage.sparsity is None or before.sparsity is None or stage.sparsity < before.sparsity + _GROWTH:
            raise ValueError(
                f"sparsity: must grow by at least {_GROWTH} from one StruPruneModifier to the next, as each counts from the dense "
                f"model, got {before.sparsity} and {stage.sparsity}. Give each stage its own value in the recipe."
            )


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
