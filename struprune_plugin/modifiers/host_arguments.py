"""Arguments of ``oneshot``: errors for those that llm-compressor would silently ignore."""

import inspect
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import llmcompressor
from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments
from llmcompressor.recipe import Recipe
from peft import PeftModel
from transformers import PreTrainedModel

from struprune_plugin.evaluation.text import check_dataset
from struprune_plugin.modifiers.loaded_model import check_loaded
from struprune_plugin.settings.registry import shorten_value, suggest
from struprune_plugin.storage.files import MERGE, check_place, shorten_error

_PRECISIONS = r"auto|None|full|half|(torch\.)?(float32|bfloat16|float16)"  # llm-compressor treats any other as auto
# parameters of our oneshot alone
_OWN = ("overwrite", "offload_folder", "checkpoint_dir", "seed", "changes", "window_bos")
_REFUSED = {  # what would be ignored, or would put the model elsewhere -> what to do
    "config_name": "The configuration is that in the model's folder.",
    "recipe_args": "Pass changes={…}.",
    "stage": "Give a recipe of that stage alone.",
    "use_loss_mask": "All tokens that attention_mask admits count.",
}


def check_arguments(
    model: object, recipe: Recipe, offload_folder: Path | None, window_bos: bool, kwargs: dict[str, Any]
) -> None:
    """Raise on arguments that llm-compressor would ignore, or would reject with an unclear error."""
    if offload_folder is not None:
        check_place("offload_folder", offload_folder)
    known = {*_OWN, *inspect.signature(llmcompressor.oneshot).parameters}
    known |= {field.name for part in (ModelArguments, DatasetArguments, RecipeArguments) for field in fields(part)}
    for name in kwargs.keys() - known:
        is_field = any(name in type(modifier).model_fields for modifier in recipe.modifiers)
        remedy = f'Pass changes={{"{name}": …}}.' if is_field else suggest(name, known) or "Remove it."
        raise ValueError(
            f"{name}: must be an argument of oneshot{', got a field of the recipe' if is_field else ''}. {remedy}"
        )
    for name, remedy in _REFUSED.items():
        if kwargs.get(name):
            raise ValueError(f"{name}: must be left out, got {shorten_value(kwargs[name])}. {remedy}")
    if isinstance(model, PeftModel):
        raise ValueError(f"model: must carry no adapters, got {', '.join(model.peft_config)}. {MERGE}")
    if not isinstance(model, (str, os.PathLike, PreTrainedModel)):
        raise ValueError(
            f"model: must be a folder, a hub name or a loaded model, got {type(model).__name__}. Pass one of these."
        )
    if isinstance(model, PreTrainedModel):
        _check_loaded(model)
    if not re.fullmatch(_PRECISIONS, str(kwargs.get("precision", "auto"))):
        raise ValueError(
            f"precision: must be auto, float32, bfloat16 or float16, got {kwargs['precision']!r}. Pass one of these."
        )
    check_dataset(kwargs, window_bos)
    if (pipeline := kwargs.get("pipeline") or "independent") != "independent":
        raise ValueError(
            f"pipeline: must be 'independent', which gives each modifier a pass of its own, got {pipeline!r}. Remove it."
        )


def _check_loaded(model: PreTrainedModel) -> None:
    """Raise if a loaded model cannot generate or be saved, if its weights are not there, or as
    :func:`check_loaded`."""
    check_loaded(model)
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"model: must be a causal language model, got {type(model).__name__}, which has no output embeddings. Load it by "
            "AutoModelForCausalLM."
        )
    if empty and not hasattr(model, "hf_device_map"):  # with one, llm-compressor converts accelerate's hooks to its own
        raise ValueError(
            f"model: must hold weights, got {empty[0]} on the meta device. Pass the model's folder, with offload_folder if "
            "it is large."
        )
    if not model.config.name_or_path:
        raise ValueError(
            "model: must come from a folder or the hub, as llm-compressor reads its configuration there. Save it, and pass that."
        )
    try:
        model.generation_config.validate()  # type: ignore[union-attr]
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"model: generation_config must be one that transformers can save, got {shorten_error(error)}. Correct it."
        ) from None
