"""Arguments of ``oneshot``: errors for those that llm-compressor would silently ignore, and loading of the model."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import llmcompressor
import psutil
import torch
from compressed_tensors.offload import load_offloaded_model
from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments
from llmcompressor.pytorch.model_load.helpers import parse_dtype
from llmcompressor.recipe import Recipe
from peft import PeftModel
from torch import nn
from transformers import FineGrainedFP8Config, Mxfp4Config, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange

from struprune_plugin.evaluation.text import check_dataset
from struprune_plugin.model.structure.tiny import find_auto_class
from struprune_plugin.modifiers.loaded_model import check_loaded
from struprune_plugin.settings.registry import shorten_value, suggest
from struprune_plugin.storage.checkpoint import find_checkpoint, is_packed, load_whole
from struprune_plugin.storage.files import MERGE, check_place, check_room, shorten_error

_PRECISIONS = r"auto|None|full|half|(torch\.)?(float32|bfloat16|float16)"  # llm-compressor treats any other as auto
# parameters of our oneshot alone
_OWN = ("overwrite", "offload_folder", "checkpoint_dir", "seed", "changes", "window_bos")
_REFUSED = {  # what would be ignored, or would put the model elsewhere -> what to do
    "config_name": "The configuration is that in the model's folder.",
    "recipe_args": "Pass changes={…}.",
    "stage": "Give a recipe of that stage alone.",
    "use_loss_mask": "All tokens that attention_mask admits count.",
}
_LEFT_FREE = 5 * 10**9  # bytes of the host's memory that an offloaded model leaves free
_UNPACKED: dict[str, Any] = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}


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


def load_model(path: str, config: PretrainedConfig, kwargs: dict[str, Any], folder: Path | None) -> PreTrainedModel:
    """Load a model as llm-compressor does; wrappers around a text decoder are loaded whole, packed weights are unpacked.

    :param folder: folder for the weights that would leave less than 5 GB of the host's memory free; None loads all to memory
    """
    options = {
        "revision": kwargs.get("model_revision", "main"),
        "dtype": parse_dtype(kwargs.get("precision", "auto")),
        "trust_remote_code": kwargs.get("trust_remote_code_model", False),
    }
    auto = find_auto_class(config)
    if is_packed(config):
        options["quantization_config"] = _UNPACKED[config.quantization_config["quant_method"]](dequantize=True)
    if folder is None:
        model = load_whole(auto, path, **options)
    else:
        stored = find_checkpoint(path, options["revision"])
        held = sum(file.stat().st_size for file in stored.glob("*.safetensors")) if stored else 0
        check_room([("offload_folder", folder, max(0, held + _LEFT_FREE - psutil.virtual_memory().available))])
        folder.mkdir(parents=True, exist_ok=True)

        class Whole:  # llm-compressor's loader replaces its ``from_pretrained`` by one that offloads
            @classmethod
            def from_pretrained(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
                return load_whole(auto, *args, **kwargs)

        with load_offloaded_model(Whole):  # type: ignore[arg-type]
            model = Whole.from_pretrained(path, device_map="auto_offload", offload_folder=str(folder), **options)
    if is_packed(config):
        _forget_packing(model)
    return model


def _forget_packing(model: PreTrainedModel) -> None:
    """Make an unpacked model run and save as if its weights had never been packed."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dtype == torch.bfloat16 != model.dtype:  # MXFP4 is always unpacked to bfloat16
                delattr(module, name)  # assignment to a weight on disk would cast the new value to the old dtype
                setattr(module, name, nn.Parameter(parameter.detach().to(model.dtype), parameter.requires_grad))
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    prefixes = [each for each in model._weight_conversions if isinstance(each, PrefixChange)]
    own = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = prefixes + [each for each in own if not isinstance(each, PrefixChange)]
