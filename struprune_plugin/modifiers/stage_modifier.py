"""Base class of all modifiers here: each works in a stage of its own."""

from __future__ import annotations

from typing import Any

from llmcompressor.modifiers import Modifier
from pydantic import PrivateAttr, model_validator

from struprune_plugin.storage.resume_store import ResumeStore


class StageModifier(Modifier):
    """A modifier of ours, which works once, in a stage of its own."""

    requires_calibration_data: bool = False  # our own loops take it through the layers

    _store: ResumeStore | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_span(self) -> StageModifier:
        if self.start is not None or self.end is not None:
            raise ValueError(
                f"start and end must be left out: {type(self).__name__} works once, in a stage of its own."
            )
        return self

    def set_store(self, store: ResumeStore) -> None:
        """Set where finished parts are kept, so that a killed run goes on there."""
        self._store = store

    @property
    def store(self) -> ResumeStore | None:
        """Store of finished parts. None without one."""
        return self._store

    def dump_fields(self) -> dict[str, Any]:
        """Return the recipe fields, without llm-compressor's bookkeeping."""
        return self.model_dump(exclude=set(Modifier.model_fields))
