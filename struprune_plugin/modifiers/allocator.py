"""``SparsityAllocatorModifier``: the stage of a recipe that sets the budget and the allocation of the pruning stage behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmcompressor.core import State
from llmcompressor.modifiers import Modifier
from pydantic import Field

from struprune_plugin.modifiers.fields import AllocationField, StructuredModifier
from struprune_plugin.modifiers.pruning import StruPruneModifier

_DECIDED = ("sparsity", "budget", "allocation", "sensitivity")


class SparsityAllocatorModifier(StructuredModifier):
    """
    Modifier that sets how a :class:`StruPruneModifier` in a later stage allocates sparsity to the modules of all layers.
    Source: paper, Algorithms 2 and 3, steps 1, 2 and 5.

    It gives that stage its ``sparsity`` or ``budget``, ``allocation`` and ``sensitivity``, and every other field that is set
    here and not there; the pruning stage then measures the dense model and allocates. Fields as in
    :class:`StructuredModifier`.

    :param allocation: by default Algorithm 2
    """

    allocation: AllocationField = Field(default="softmax", validate_default=True)  # type: ignore[arg-type]

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        self.hand_over(self.find_pruning(*self.split_recipe()))
        return True

    def find_pruning(self, before: Sequence[Modifier], behind: Sequence[Modifier]) -> StruPruneModifier:
        """Return the pruning stage, one of those behind; ValueError if there is none, or another allocator."""
        pruning = next((other for other in behind if isinstance(other, StruPruneModifier)), None)
        if pruning is None or any(isinstance(other, SparsityAllocatorModifier) for other in [*before, *behind]):
            ours, names = type(self).__name__, [type(other).__name__ for other in (*before, self, *behind)]
            raise ValueError(
                f"recipe: exactly one {ours} must come before the StruPruneModifier that uses its allocation, got {names}. "
                "Add or reorder the stages."
            )
        return pruning

    def hand_over(self, pruning: StruPruneModifier) -> None:
        """Give the pruning stage what this one decides, and the fields that are set here alone.

        :raises ValueError: that stage sets otherwise what this one decides
        """
        given = pruning.model_fields_set
        for name in _DECIDED:
            if name in given and getattr(pruning, name) not in (None, getattr(self, name)):
                raise ValueError(
                    f"StruPruneModifier: {name} must be left out, or as in the {type(self).__name__} stage before, which sets it. "
                    "Remove it here."
                )
        for name in {*_DECIDED, *(self.model_fields_set & self.dump_fields().keys() - given)}:
            setattr(pruning, name, getattr(self, name))
        if "effort" not in given and "rotate_values" not in given:  # which follows from the effort
            pruning.rotate_values = self.rotate_values
