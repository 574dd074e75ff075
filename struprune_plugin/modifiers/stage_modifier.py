"""Base class of the plugin's modifiers, each of which runs in a separate stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmcompressor.core import Event, State, active_session
from llmcompressor.modifiers import Modifier
from transformers import PreTrainedModel

from struprune_plugin.modifiers.loaded_model import check_loaded
from struprune_plugin.runtime.model_state import rest_model
from struprune_plugin.runtime.torch_state import copy_inference_tensors, renew_buffers, reset_torch
from struprune_plugin.storage.checkpoint import note_left_out


def list_modifiers() -> list[Modifier]:
    """Return all modifiers of the recipe that is being initialised, in order."""
    return active_session().lifecycle.recipe.modifiers


class StageModifier(Modifier):
    """Base of the plugin's modifiers, which run once, in a separate stage, under torch's defaults, on a model as its
    folder gives it."""

    @reset_torch()
    def initialize(self, state: State, **kwargs: Any) -> None:
        copy_inference_tensors(state.model)
        if not hasattr(state.model, "left_out"):  # llm-compressor's own oneshot
            check_loaded(state.model)
            renew_buffers(state.model)
            note_left_out(state.model, state.model.config._name_or_path)
        with _rest(state.model):
            super().initialize(state, **kwargs)

    @reset_torch()
    def update_event(self, state: State, event: Event, **kwargs: Any) -> None:
        with _rest(state.model):
            super().update_event(state, event, **kwargs)

    @reset_torch()
    def finalize(self, state: State, **kwargs: Any) -> None:
        with _rest(state.model):
            super().finalize(state, **kwargs)

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


@contextmanager
def _rest(model: PreTrainedModel) -> Iterator[None]:
    """Run the block as :func:`rest_model`, and without the training loss of routers, whose logits no layer gives alone."""

    def set_loss(value: bool) -> None:
        if had:
            model.config.get_text_config(decoder=True).output_router_logits = value

    had = getattr(model.config.get_text_config(decoder=True), "output_router_logits", False)
    with rest_model(model):
        set_loss(False)
        try:
            yield
        finally:
            set_loss(True)
