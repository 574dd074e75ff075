"""``SparsityAllocatorModifier``: the stage of a recipe that sets the budget and the allocation of the pruning stage behind it."""

from collections.abc import Sequence
from typing import Any, TypeVar

from llmcompressor.core import State
from llmcompressor.modifiers import Modifier
from pydantic import Field

from struprune_plugin.modifiers.fields import AllocationField, StructuredModifier

R = TypeVar("R", bound=StructuredModifier)
_DECIDED = ("sparsity", "budget", "allocation", "sensitivity")


class SparsityAllocatorModifier(StructuredModifier):
    """
    Modifier that sets how a :class:`StruPruneModifier` in a later stage allocates sparsity to the modules of all layers.
    Source: paper, Algorithms 2 and 3, steps 1, 2 and 5.

    That stage takes its ``sparsity`` or ``budget``, ``allocation`` and ``sensitivity`` from here, and every other field that is set
    here and not there; it then measures the dense model and allocates. Fields as in :class:`StructuredModifier`.

    :param allocation: by default Algorithm 2
    """

    allocation: AllocationField = Field(default="softmax", validate_default=True)  # type: ignore[arg-type]

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        before, behind = self.split_recipe()
        check_allocator([*before, self, *behind])
        return True


def check_allocator(modifiers: Sequence[Modifier]) -> None:
    """Raise if a recipe has several allocators, or one that no pruning stage follows."""
    stages = [isinstance(one, SparsityAllocatorModifier) for one in modifiers if isinstance(one, StructuredModifier)]
    if any(stages) and (stages[-1] or sum(stages) > 1):
        raise ValueError(
            "recipe: exactly one SparsityAllocatorModifier must come before the StruPruneModifier that uses its allocation, got "
            f"{[type(modifier).__name__ for modifier in modifiers]}. Add or reorder the stages."
        )


def complete_recipe(pruning: R, before: Sequence[Modifier]) -> R:
    """Return a pruning stage with the fields that an allocator before it sets; the stage itself if there is none.

    :raises ValueError: the pruning stage sets otherwise what the allocator sets
    """
    stage = next((modifier for modifier in before if isinstance(modifier, SparsityAllocatorModifier)), None)
    if stage is None:
        return pruning
    for name in _DECIDED:
        if name in pruning.model_fields_set and getattr(pruning, name) not in (None, getattr(stage, name)):
            raise ValueError(
                f"StruPruneModifier: {name} must be left out, or as in the SparsityAllocatorModifier stage before, which sets it. "
                "Remove it here."
            )
    names = [*(stage.model_fields_set - pruning.model_fields_set), *_DECIDED]
    fields = {name: getattr(pruning, name) for name in pruning.model_fields_set}
    fields |= {name: getattr(stage, name) for name in names}
    return type(pruning)(**{name: value for name, value in fields.items() if name not in Modifier.model_fields})
