"""``SparsityAllocatorModifier``: the stage of a recipe that sets the budget and the allocation of the pruning stage behind it."""

from __future__ import annotations

from typing import Any

from llmcompressor.core import State
from pydantic import Field, model_validator

from struprune_plugin.modifiers.checks import list_modifiers, split_modifiers
from struprune_plugin.modifiers.fields import GROUP_FIELDS, AllocationField, StructuredModifier
from struprune_plugin.modifiers.pruning import StruPruneModifier
from struprune_plugin.storage.files import shorten_value

_BUDGET = ("sparsity", "budget")
_DECIDED = ("allocation", "sensitivity")
_SHARED = (*GROUP_FIELDS, "importance", "rotate_values")


class SparsityAllocatorModifier(StructuredModifier):
    """
    Modifier that sets how a :class:`StruPruneModifier` in a later stage allocates sparsity to the modules of all layers.
    Source: paper, Algorithms 2 and 3, steps 1, 2 and 5.

    It gives that stage its ``sparsity`` or ``budget``, ``allocation`` and ``sensitivity``; the pruning stage then
    measures the dense model and allocates. Fields as in :class:`StructuredModifier`; ``sparsity`` or a ``budget`` must be
    given, and the other fields must agree with those of the pruning stage.

    :param allocation: by default Algorithm 2

    Example recipe::

        allocation_stage:
          allocation_modifiers:
            SparsityAllocatorModifier:
              sparsity: 0.3
              allocation: softmax
        pruning_stage:
          pruning_modifiers:
            StruPruneModifier: {importance: obs}
    """

    allocation: AllocationField = Field(default="softmax", validate_default=True)  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _check_required(self) -> SparsityAllocatorModifier:
        if self.sparsity is None and not self.budget:
            raise ValueError(
                "must have sparsity or budget, which it distributes over the decoder layers, got neither. Add sparsity."
            )
        if not self.allocation.measures:
            raise ValueError(
                f"`allocation: {self.allocation.rule}` measures nothing, so that it needs no stage of its own. Remove the stage, "
                f"and set `allocation: {self.allocation.rule}` in StruPruneModifier."
            )
        return self

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        pruning = self._find_pruning()
        for name in (*_BUDGET, *_SHARED):
            if name in _SHARED or getattr(pruning, name) is not None:
                self._check_same(pruning, name, "Give both stages the same value.")
        if self.weight_update.solves != pruning.weight_update.solves:  # ADMM starts from and closes with least squares
            self._check_same(pruning, "weight_update", "Give both stages the same value.")
        for name in _DECIDED:
            if name in pruning.model_fields_set:
                self._check_same(pruning, name, "The stage sets it: remove it here.")
        for name in (*_BUDGET, *_DECIDED):
            setattr(pruning, name, getattr(self, name))
        return True

    def _find_pruning(self) -> StruPruneModifier:
        """Return the pruning stage behind this one.

        :raises ValueError: there is none, or the recipe has several allocator stages
        """
        modifiers = list_modifiers()
        pruning = next((other for other in split_modifiers(self)[1] if isinstance(other, StruPruneModifier)), None)
        if pruning is None or sum(isinstance(other, SparsityAllocatorModifier) for other in modifiers) != 1:
            ours, names = type(self).__name__, [type(modifier).__name__ for modifier in modifiers]
            raise ValueError(
                f"recipe: exactly one {ours} must come before the StruPruneModifier that uses its allocation, got {names}. "
                "Add or reorder the stages."
            )
        return pruning

    def _check_same(self, pruning: StruPruneModifier, name: str, remedy: str) -> None:
        """Raise if a field of the pruning stage differs from this stage's.

        :raises ValueError: in that case
        """
        if getattr(pruning, name) != getattr(self, name):
            mine, theirs = (modifier.dump_fields()[name] for modifier in (pruning, self))
            if isinstance(mine, dict) and isinstance(theirs, dict):
                key = next(key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key))
                name, mine, theirs = f"{name}.{key}", mine.get(key), theirs.get(key)
            raise ValueError(
                f"StruPruneModifier: {name} must be {shorten_value(theirs)} as in the {type(self).__name__} stage before, got "
                f"{shorten_value(mine)}. {remedy}"
            )
