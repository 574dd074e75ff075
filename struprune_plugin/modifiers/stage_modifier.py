"""Base class of the plugin's modifiers, each of which runs in a separate stage."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from llmcompressor.modifiers import Modifier
from pydantic import PrivateAttr, model_validator

from struprune_plugin.storage.registry import refuse_gone
from struprune_plugin.storage.resume_store import ResumeStore


class StageModifier(Modifier):
    """Base of the plugin's modifiers, which run once, in a separate stage."""

    requires_calibration_data: bool = False  # the plugin's loops pass the data through the layers

    _store: ResumeStore | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _refuse_gone(cls, values: Any) -> Any:
        refuse_gone(values if isinstance(values, dict) else ())
        return values

    @model_validator(mode="after")
    def _check_span(self) -> StageModifier:
        if self.start is not None or self.end is not None:
            raise ValueError(
                f"start and end have no effect: {type(self).__name__} runs once, in a stage of its own. Remove them."
            )
        return self

    def set_store(self, store: ResumeStore) -> None:
        """Set the store of finished parts, from which a killed run resumes."""
        self._store = store

    @property
    def store(self) -> ResumeStore | None:
        """Store of finished parts; None if the run has none."""
        return self._store

    def dump_fields(self) -> dict[str, Any]:
        """Return the recipe fields, without llm-compressor's bookkeeping."""
        return self.model_dump(exclude=set(Modifier.model_fields))


def check_patterns(field: str, names: Iterable[str]) -> None:
    """Raise if a pattern is invalid.

    :param field: name of the recipe's field, for messages
    :param names: plain names, and patterns as ``re:<pattern>``
    :raises ValueError: in that case
    """
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"{field} must hold names or valid patterns, got {name!r}: {error}. Correct the pattern."
            ) from None
