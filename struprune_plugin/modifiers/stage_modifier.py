"""Base class of the plugin's modifiers, each of which runs in a separate stage."""

from __future__ import annotations

from typing import Any

from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from pydantic import PrivateAttr, model_validator

from struprune_plugin.runtime.torch_state import copy_inference_tensors, reset_torch
from struprune_plugin.storage.checkpoint import note_left_out
from struprune_plugin.storage.registry import refuse_gone
from struprune_plugin.storage.resume_store import ResumeStore


class StageModifier(Modifier):
    """Base of the plugin's modifiers, which run once, in a separate stage, under torch's defaults."""

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

    @reset_torch()
    def initialize(self, state: State, **kwargs: Any) -> None:
        copy_inference_tensors(state.model)
        if not hasattr(state.model, "left_out"):  # llm-compressor's own oneshot
            note_left_out(state.model, state.model.config._name_or_path)
        super().initialize(state, **kwargs)

    @reset_torch()
    def update_event(self, state: State, event: Event, **kwargs: Any) -> None:
        super().update_event(state, event, **kwargs)

    @reset_torch()
    def finalize(self, state: State, **kwargs: Any) -> None:
        super().finalize(state, **kwargs)

    def set_store(self, store: ResumeStore) -> None:
        """Set the store of finished parts, from which a killed run resumes."""
        self._store = store

    def dump_fields(self) -> dict[str, Any]:
        """Return the recipe fields, without llm-compressor's bookkeeping."""
        return self.model_dump(exclude=set(Modifier.model_fields))
