"""Arguments of ``oneshot``: errors for those that llm-compressor would silently ignore, and loading of the model."""

from __future__ import annotations

import inspect
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import llmcompressor
import torch
from compressed_tensors.offload import load_offloaded_model
from datasets import Dataset
from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments
from llmcompressor.pytorch.model_load.helpers import parse_dtype
from llmcompressor.recipe import Recipe
from loguru import logger
from torch import nn
from torch.utils.data import DataLoader
from transformers import FineGrainedFP8Config, Mxfp4Config, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange

from struprune_plugin.evaluation.text import check_dataset
from struprune_plugin.export.any_class import build_dense
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.locate import is_pruned
from struprune_plugin.model.structure.tiny import find_auto_class, find_class
from struprune_plugin.modifiers.checks import check_layers, check_sequences, tell_few_tokens
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.setup import find_widest_solve
from struprune_plugin.runtime.distributed import gather
from struprune_plugin.storage.checkpoint import find_custom_class, is_packed, load_whole
from struprune_plugin.storage.files import check_place, shorten_error
from struprune_plugin.storage.registry import suggest

_PRECISIONS = {  # values that llm-compressor knows; it treats any other as auto
    *("auto", "None", "float32", "torch.float32", "full", "bfloat16", "torch.bfloat16"),
    *("float16", "torch.float16", "half"),
}

_OWN = ("overwrite", "offload_folder", "checkpoint_dir", "seed", "changes")  # parameters of our oneshot alone
_IGNORED = dict.fromkeys(("stage", "recipe_args"), "Edit the recipe.") | {
    "config_name": "Edit the model's config.json."
}

_HALF_INSTRUCTIONS = ("avx512_bw", "amx_bf16", "avx_ne_convert")  # any of them makes halves about as fast as float32
_UNPACKED: dict[str, Any] = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}


def check_arguments(model: object, recipe: Recipe, offload_folder: Path | None, kwargs: dict[str, Any]) -> None:
    """Raise on arguments that llm-compressor would ignore, or would reject with an unclear error."""
    if offload_folder is not None and isinstance(model, PreTrainedModel):
        raise ValueError(
            "offload_folder: must be left out for a loaded model, whose weights stay where they were loaded. Pass the model's "
            "folder as model."
        )
    if offload_folder is not None:
        check_place("offload_folder", offload_folder)
    known = {*_OWN, *inspect.signature(llmcompressor.oneshot).parameters}
    known |= {
        field.name for arguments in (ModelArguments, DatasetArguments, RecipeArguments) for field in fields(arguments)
    }
    for name in kwargs.keys() - known:
        is_field = any(name in type(modifier).model_fields for modifier in recipe.modifiers)
        remedy = f'Pass changes={{"{name}": …}}.' if is_field else suggest(name, known) or "Remove it."
        raise ValueError(
            f"{name}: must be an argument of oneshot{', got a field of the recipe' if is_field else ''}. {remedy}"
        )
    for name, remedy in _IGNORED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}={kwargs[name]!r} has no effect. Remove it. {remedy}")
    if isinstance(model, nn.Module) and any(type(m).__module__.startswith("peft.") for m in model.modules()):
        raise ValueError(
            f"model: must have its adapters merged, got {type(model).__name__} with layers of peft. Merge them first (model = "
            "model.merge_and_unload()), save the model, and pass its folder."
        )
    if not isinstance(model, (str, os.PathLike, PreTrainedModel)):
        raise ValueError(
            f"model: must be a folder, a hub name or a loaded model, got {type(model).__name__}. Pass one of these."
        )
    if isinstance(model, PreTrainedModel):
        _check_loaded(model)
    if str(kwargs.get("precision", "auto")) not in _PRECISIONS:
        raise ValueError(
            f"precision: must be auto, float32, bfloat16 or float16, got {kwargs['precision']!r}, which llm-compressor would read "
            "as auto. Pass one of these."
        )
    for name in ("num_calibration_samples", "max_seq_length", "batch_size"):
        value = kwargs.get(name)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ValueError(
                f"{name}: must be a whole number of at least 1, got {value!r}. Correct it, or leave it out."
            )
    check_dataset(kwargs.get("dataset"), kwargs.get("splits"))
    pipeline, count = kwargs.get("pipeline") or "independent", len(recipe.modifiers)
    if pipeline != "independent" and not (pipeline == "sequential" and count == 1):
        raise ValueError(
            f"pipeline: must be 'independent' for a recipe of {count} modifiers, got {pipeline!r}, which gives none of them a "
            "calibration pass of its own. Remove it."
        )


def check_amount(
    model: str, config: PretrainedConfig, recipe: Recipe, kwargs: dict[str, Any], longest: int | None = None
) -> None:
    """Raise if calibration text cannot be enough for a model's widest solve, or is too long for it, from its configuration alone.

    :param longest: tokens of the longest sequence, if they are known
    """
    first = next((each for each in recipe.modifiers if isinstance(each, StructuredModifier)), None)
    num_tokens, where, needed = _count_most_tokens(kwargs), "", 0
    try:
        custom = find_custom_class(model, config, kwargs.get("model_revision", "main"))
        shapes = build_dense(*find_class(config, custom))
        if first is not None and num_tokens is not None:
            where, needed = find_widest_solve(first, first.find_groups(shapes))
    except Exception:  # a class without shapes, a wrong configuration: checked again when the model is loaded
        return
    check_sequences(shapes, longest or 1)
    if num_tokens is not None and num_tokens < needed:
        raise ValueError(tell_few_tokens(where, needed, f"at most {num_tokens}"))


def _count_most_tokens(kwargs: dict[str, Any]) -> int | None:
    """Return an upper bound on the tokens of ``oneshot``'s calibration data; None if it is not known before they are read."""
    dataset, length = kwargs.get("dataset"), kwargs.get("max_seq_length")
    samples = kwargs.get("num_calibration_samples") or 512
    if isinstance(dataset, Dataset) and "input_ids" in dataset.column_names:
        return None if len(dataset) > samples else sum(gather(sum(map(len, dataset["input_ids"]))))  # of all processes
    if length is None or dataset is None or isinstance(dataset, DataLoader):
        return None
    if isinstance(dataset, Dataset):
        samples = min(samples, len(dataset))
    if isinstance(dataset, (str, os.PathLike)) and Path(dataset).is_file():
        return min(samples * length, Path(dataset).stat().st_size)  # a token has a byte at least
    return samples * length


def _check_loaded(model: PreTrainedModel) -> None:
    """Raise if a loaded model cannot be pruned or generate, or if its weights are not there or are not the configuration's."""
    is_placed = hasattr(model, "hf_device_map")  # llm-compressor converts these hooks to its own
    hooked = [name or "the whole model" for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    dtypes = sorted({str(m.weight.dtype)[6:] for m in model.modules() if isinstance(m, nn.Linear)})
    problem = ""
    if model.get_output_embeddings() is None:
        problem = (
            f"be a causal language model, got {type(model).__name__}, which has no output embeddings. Load it by "
            "AutoModelForCausalLM."
        )
    elif hooked and not is_placed:
        problem = (
            f"be without accelerate's hooks, got one on {hooked[0]!r}. Remove them "
            "(accelerate.hooks.remove_hook_from_submodules), or pass the model's folder, with offload_folder for a large one."
        )
    elif empty and not is_placed:
        problem = f"hold weights, got {empty[0]} on the meta device. Pass the model's folder."
    elif len(dtypes) > 1 and not (model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict):
        problem = f"have linears of one dtype, got {' and '.join(dtypes)}. Convert it (model.to(dtype))."
    elif not model.config.name_or_path:
        problem = (
            "come from a folder or the hub, as llm-compressor reads its configuration again, got a model without "
            "config.name_or_path. Save the model, and pass the folder."
        )
    if problem:
        raise ValueError(f"model: must {problem}")
    try:
        if model.generation_config is None:
            raise ValueError("None.")
        model.generation_config.validate()
    except ValueError as error:
        raise ValueError(
            f"model: generation_config must be one that transformers can save, got {shorten_error(error)}. Correct it."
        ) from None
    find_structure(model)
    if is_pruned(type(model)):
        return
    check_layers(model)
    made = build_dense(type(model), model.config)
    wanted, found = ({name: list(p.shape) for name, p in each.named_parameters()} for each in (made, model))
    for name in sorted({**wanted, **found}):
        is_split = ".experts." in name and (name not in wanted or name not in found)
        if wanted.get(name) != found.get(name) and not is_split:
            raise ValueError(
                f"model: {name} must have the shape {wanted.get(name)} that {type(model).__name__} makes of its configuration, got "
                f"{found.get(name)}. Correct the model, or the configuration (resize_token_embeddings for other tokens, "
                "tie_word_embeddings for a head)."
            )


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
        logger.info(
            f"{path}: weights are stored as {config.quantization_config['quant_method']} and are dequantised for pruning"
        )
        options["quantization_config"] = _UNPACKED[config.quantization_config["quant_method"]](dequantize=True)
    if folder is None:
        model = load_whole(auto, path, **options)
    else:
        folder.mkdir(parents=True, exist_ok=True)

        class Whole:
            """Class whose ``from_pretrained`` llm-compressor's loader replaces by one that offloads."""

            @classmethod
            def from_pretrained(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
                return load_whole(auto, *args, **kwargs)

        with load_offloaded_model(Whole):  # type: ignore[arg-type]
            model = Whole.from_pretrained(path, device_map="auto_offload", offload_folder=str(folder), **options)
    if is_packed(config):
        _forget_packing(model)
    known = torch.cpu.get_capabilities()
    is_fast = known.get("architecture") != "x86_64" or any(known.get(name) for name in _HALF_INSTRUCTIONS)
    if model.dtype.itemsize < 4 and not is_fast and not torch.accelerator.is_available():
        logger.info(
            f"{path}: this processor multiplies {str(model.dtype)[6:]} several times slower than float32. --dtype float32 "
            '(precision="float32") saves time, and the output is of that dtype'
        )
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
