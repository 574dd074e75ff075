"""Base class of the plugin's modifiers, each of which runs in a separate stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmcompressor.core import Event, State, active_session
from llmcompressor.modifiers import Modifier
from pydantic import PrivateAttr
from torch import Tensor
from torch.utils.data import RandomSampler

from struprune_plugin.pruning.resume import describe_run
from struprune_plugin.runtime.distributed import check_one_process
from struprune_plugin.runtime.torch_state import copy_inference_tensors, reset_torch
from struprune_plugin.storage.checkpoint import note_left_out
from struprune_plugin.storage.manifest import describe_versions
from struprune_plugin.storage.resume_store import ResumeStore


def list_modifiers() -> list[Modifier]:
    """Return all modifiers of the recipe that is being initialised, in order."""
    return active_session().lifecycle.recipe.modifiers


class StageModifier(Modifier):
    """Base of the plugin's modifiers, which run once, in a separate stage, under torch's defaults."""

    requires_calibration_data: bool = False  # the plugin's loops pass the data through the layers

    _store: ResumeStore | None = PrivateAttr(default=None)

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

    def open_store(self, state: State, batches: Sequence[dict[str, Tensor]]) -> None:
        """Begin or resume the run that the recipe describes; do nothing without a store.

        :raises ValueError: the store belongs to another run; the sampler shuffles; there are several processes
        """
        if self._store is None:
            return
        check_one_process("checkpoint_dir", "Remove it, or run one process.")
        if isinstance(getattr(state.data.calib, "sampler", None), RandomSampler):
            raise ValueError(
                "checkpoint_dir: calibration samples must come in the same order in every run, got a sampler that shuffles them. "
                "Pass shuffle_calibration_samples=False."
            )
        recipe = [{type(m).__name__: m.model_dump(exclude=set(Modifier.model_fields))} for m in list_modifiers()]
        self._store.open(describe_run(recipe, describe_versions(), state.model, batches))

    def dump_fields(self) -> dict[str, Any]:
        """Return the recipe fields, without llm-compressor's bookkeeping."""
        return self.model_dump(exclude=set(Modifier.model_fields))

    def split_recipe(self) -> tuple[list[Modifier], list[Modifier]]:
        """Return the modifiers before this one in the recipe, and those behind it."""
        modifiers = list_modifiers()
        place = next(i for i, other in enumerate(modifiers) if other is self)
        return modifiers[:place], modifiers[place + 1 :]

    def check_alone(self) -> None:
        """Raise if other modifiers share the calibration pass."""
        modifiers = list_modifiers()
        if len(modifiers) > 1:
            raise ValueError(
                f"pipeline: {type(self).__name__} must have a calibration pass of its own, got one shared by "
                f"{[type(m).__name__ for m in modifiers]}. Use pipeline='independent', the default."
            )
