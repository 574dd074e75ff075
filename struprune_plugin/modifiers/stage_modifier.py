"""Base class of the plugin's modifiers, each of which runs in a separate stage."""

from __future__ import annotations

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

    def dump_fields(self) -> dict[str, Any]:
        """Return the recipe fields, without llm-compressor's bookkeeping."""
        return self.model_dump(exclude=set(Modifier.model_fields))
