"""``SparsityAllocatorModifier``: the stage of a recipe that sets the budget and the allocation of the pruning stage behind it."""

from __future__ import annotations

from typing import Any

from llmcompressor.core import State
from pydantic import Field, model_validator

from struprune_plugin.modifiers.fields import AllocationField, StructuredModifier
from struprune_plugin.modifiers.pruning import StruPruneModifier
from struprune_plugin.storage.files import shorten_value

_BUDGET = {"sparsity", "budget"}
_DECIDED = {"allocation", "sensitivity"}
_FREE = {"weight_update", "dampening_frac", "effort", "offload"}  # may differ between the stages


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
        before, behind = self.split_recipe()
        pruning = next((other for other in behind if isinstance(other, StruPruneModifier)), None)
        if pruning is None or any(isinstance(other, SparsityAllocatorModifier) for other in [*before, *behind]):
            ours, names = type(self).__name__, [type(other).__name__ for other in (*before, self, *behind)]
            raise ValueError(
                f"recipe: exactly one {ours} must come before the StruPruneModifier that uses its allocation, got {names}. "
                "Add or reorder the stages."
            )
        given = {name for name in _BUDGET if getattr(pruning, name) is not None} | (_DECIDED & pruning.model_fields_set)
        mine, theirs = self.dump_fields(), pruning.dump_fields()
        shared = (mine.keys() - _FREE - _BUDGET - _DECIDED) | given
        if self.weight_update.solves != pruning.weight_update.solves:  # ADMM starts from and closes with least squares
            shared.add("weight_update")
        for name in (name for name in mine if name in shared and mine[name] != theirs[name]):
            remedy = "The stage sets it: remove it here." if name in _DECIDED else "Give both stages the same value."
            place, wanted, found = name, mine[name], theirs[name]
            if isinstance(wanted, dict) and isinstance(found, dict):
                key = next(key for key in {**found, **wanted} if found.get(key) != wanted.get(key))
                place, wanted, found = f"{name}.{key}", wanted.get(key), found.get(key)
            raise ValueError(
                f"StruPruneModifier: {place} must be {shorten_value(wanted)} as in the {type(self).__name__} stage before, got "
                f"{shorten_value(found)}. {remedy}"
            )
        for name in _BUDGET | _DECIDED:
            setattr(pruning, name, getattr(self, name))
        return True
