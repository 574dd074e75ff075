"""Recipe field ``budget``: one limit on the size or the time of the pruned model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from struprune_plugin.storage.files import read_bytes
from struprune_plugin.storage.registry import Config


class BudgetConfig(Config):
    """One limit on the pruned model.

    :param parameters: share of parameters to remove, as ``sparsity``, which is the short form
    :param bytes: bytes of the saved weights, embeddings included, before a quantiser: a number, or digits before kB, MB
        or GB; met to within the rounding of widths
    :param speedup: dense seconds over pruned seconds, by the table in ``costs``
    :param costs: JSON file with the seconds of every module by its width, as ``python -m eval.costs`` writes it, see
        :mod:`struprune_plugin.allocation.cost_table`
    """

    parameters: float | None = Field(default=None, ge=0, lt=1)
    bytes: Annotated[int | None, BeforeValidator(lambda v: read_bytes(v) if isinstance(v, str) else v)] = Field(
        default=None, ge=1
    )
    speedup: float | None = Field(default=None, ge=1, le=1000)
    costs: str | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> BudgetConfig:
        given = [name for name in ("parameters", "bytes", "speedup") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"must give one of parameters, bytes and speedup, got {', '.join(given) or 'none'}. Choose one."
            )
        if (self.speedup is None) != (self.costs is None):
            raise ValueError("speedup and costs, its table, must come together, got one of them. Add the other.")
        return self


def split_parameters(values: Any) -> Any:
    """Return a modifier's fields with ``budget.parameters`` moved to ``sparsity``, its short form.

    :raises ValueError: a recipe gives two budgets
    """
    if not isinstance(values, dict) or values.get("budget") is None:
        return values
    if isinstance(values["budget"], list):
        raise ValueError(
            f"budget must be one mapping, got a list of {len(values['budget'])}. Give the one that counts."
        )
    budget, sparsity = BudgetConfig.model_validate(values["budget"]), values.get("sparsity")
    if budget.parameters is not None and sparsity in (None, budget.parameters):
        return {**values, "sparsity": budget.parameters, "budget": None}
    if sparsity is not None:
        raise ValueError("sparsity and budget are two budgets. Remove one of them.")
    return {**values, "budget": budget}
