"""Recipe field ``budget``: limits on the size, cache and time of the pruned model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from struprune_plugin.storage.files import read_bytes
from struprune_plugin.storage.registry import Config

_OF_SPEED = ("phase", "batch", "length", "engine")


class BudgetConfig(Config):
    """One or several limits on the pruned model, all of which must be met.

    :param parameters: share of parameters to remove, as ``sparsity``, which is the short form
    :param bytes: upper bound on the saved weights, embeddings included, counted after a quantiser that follows: a
        number of bytes, or digits before kB, MB or GB
    :param cache: share of the dense model's bytes of keys and values per token that may remain
    :param speedup: dense seconds over pruned seconds
    :param phase: timed part: ``prompt``, all tokens of a prompt at once; ``token``, one new token with all others in
        the cache
    :param batch: sequences per batch
    :param length: tokens of the prompt, or in the cache
    :param engine: ``transformers``, or ``llama.cpp`` or ``vllm`` where this Python has them, timed by the run itself; or
        the file that ``struprune costs`` wrote on the machine that will serve
    """

    parameters: float | None = Field(default=None, ge=0, lt=1)
    bytes: Annotated[int | None, BeforeValidator(lambda v: read_bytes(v) if isinstance(v, str) else v)] = Field(
        default=None, ge=1
    )
    cache: float | None = Field(default=None, gt=0, le=1)
    speedup: float | None = Field(default=None, ge=1, le=1000)
    phase: Literal["prompt", "token"] = "token"
    batch: int = Field(default=1, ge=1)
    length: int = Field(default=512, ge=1)
    engine: str = "transformers"

    @model_validator(mode="after")
    def _check_parts(self) -> BudgetConfig:
        kinds = ("parameters", "bytes", "cache", "speedup")
        if all(getattr(self, name) is None for name in kinds):
            raise ValueError(f"must give at least one of {', '.join(kinds[:-1])} and {kinds[-1]}, got none. Add one.")
        idle = [name for name in _OF_SPEED if getattr(self, name) != type(self).model_fields[name].default]
        if self.speedup is None and idle:
            raise ValueError(
                f"{', '.join(idle)} {'have' if len(idle) > 1 else 'has'} no effect without speedup. Remove "
                f"{'them' if len(idle) > 1 else 'it'}, or add speedup."
            )
        return self


def read_budgets(value: Any) -> Any:
    """Return the recipe's budgets as a list; a recipe may give a single budget without brackets."""
    return [value] if isinstance(value, (dict, BudgetConfig)) else [] if value is None else value


def split_parameters(values: Any) -> Any:
    """Return a modifier's fields with ``budget.parameters`` moved to ``sparsity``, its short form.

    :raises ValueError: two different fractions are given
    """
    budgets = read_budgets(values.get("budget")) if isinstance(values, dict) else None
    if not budgets or not isinstance(budgets, list):
        return values
    rest, sparsity = [], values.get("sparsity")
    for part in budgets:
        given = part.model_dump(exclude_unset=True) if isinstance(part, BudgetConfig) else part
        told = given.get("parameters") if isinstance(given, dict) else None
        if told is None:
            rest.append(part)
            continue
        if sparsity not in (None, told):
            raise ValueError(
                f"sparsity {sparsity!r} and budget.parameters {told!r} are two values of one budget. Remove one of them."
            )
        sparsity, left = told, {name: value for name, value in given.items() if name != "parameters"}
        rest += [left] if left else []
    return {**values, "sparsity": sparsity, "budget": rest}
