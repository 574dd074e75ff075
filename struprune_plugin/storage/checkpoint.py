"""The source checkpoint: its configuration, whether it can be pruned, and loading that is whole or refused."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from loguru import logger
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import cached_file

from struprune_plugin.model.structure.finder import find_structure_of
from struprune_plugin.model.structure.shrinking import walk_parts
from struprune_plugin.storage.files import check_model, shorten_error

# recomputed on loading
_DERIVED = re.compile(r"(inv_freq|position_ids|masked_bias|attn\.bias|attention\.bias|num_batches_tracked)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MTP = re.compile(r"(^|[._])(mtp|nextn)")  # in names of tensors and of fields


def check_checkpoint(model: str, trust_remote_code: bool = False, revision: str = "main") -> PretrainedConfig:
    """Return the configuration of a checkpoint; raise, without reading weights, if it cannot be pruned.

    :raises ValueError: nothing to load there; an unsupported architecture; quantised weights
    """
    config = read_config(model, revision, trust_remote_code)
    if getattr(config, "quantization_config", None) is not None and not is_packed(config):
        raise ValueError(
            f"model: {model!r} must not be quantised yet, its config has a quantization_config. "
            "Prune the full-precision checkpoint and quantise afterwards."
        )
    find_structure_of(config, find_custom_class(model, config, revision))
    return config


def is_packed(config: PretrainedConfig) -> bool:
    """Return whether weights are stored in a low-bit format that transformers can dequantise (FP8, MXFP4)."""
    stored = getattr(config, "quantization_config", None)
    return isinstance(stored, dict) and stored.get("quant_method") in ("fp8", "mxfp4")


def find_custom_class(model: str, config: PretrainedConfig, revision: str = "main") -> Any:
    """Return the model class that ships with a checkpoint if its configuration class does (``trust_remote_code``); else None."""
    named = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if named is None or not type(config).__module__.startswith("transformers_modules."):
        return None
    return get_class_from_dynamic_module(named, model, revision=revision)


def read_config(model: str, revision: str = "main", trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the configuration of a folder or hub name.

    :raises ValueError: there is no readable configuration
    """
    check_model(model)
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, revision=revision)
    except Exception as error:  # a broken config.json raises errors of many classes
        remedy = (
            "Correct its config.json or the name, log in (`hf auth login`), or download it where there is a network."
        )
        if "custom code" in str(error):
            remedy = "If you trust its code, pass trust_remote_code_model=True, or --trust-remote-code."
        raise ValueError(
            f"model: {model!r} must be a model folder or a hub name that can be loaded, got: {shorten_error(error)}. {remedy}"
        ) from None


def load_tokenizer(
    where: str | os.PathLike, revision: str = "main", trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub name.

    :param revision: branch, tag or commit on the hub
    :raises ValueError: there is no readable tokenizer
    """
    try:
        return AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # broken files raise errors of many classes
        raise ValueError(
            f"tokenizer: {os.fspath(where)!r} must hold a tokenizer that can be loaded, got: {shorten_error(error)}. Copy it "
            "again, with its model."
        ) from None


def load_whole(kind: Any, model: str, **options: Any) -> PreTrainedModel:
    """Load a checkpoint by ``kind.from_pretrained``, which alone would fill missing tensors with random numbers.

    :param kind: class of transformers, or an auto class
    :raises ValueError: a file is missing or broken, or the files lack a tensor of the configuration or hold it in another shape
    """
    try:
        loaded, info = kind.from_pretrained(model, output_loading_info=True, **options)
    except Exception as error:  # a broken file raises errors of many classes
        raise ValueError(
            f"model: {model!r} must hold whole weights that fit its config.json, got: {shorten_error(error)}. Copy or download "
            "it again."
        ) from None
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"model: {model!r} must hold every tensor that its config.json asks for, got {missing[0]} missing, one of "
            f"{len(missing)}. Use a complete checkpoint, or the config.json that belongs to it."
        )
    loaded._unexpected = set(info["unexpected_keys"])
    return loaded


def note_left_out(model: PreTrainedModel, source: str, revision: str = "main") -> None:
    """Set ``model.left_out`` to the checkpoint's tensors that its class does not load, experts' numbers as ``*``, and log them.

    The configuration's count of layers that predict several tokens ahead (MTP) becomes 0 if they are among them.

    :param model: loaded by :func:`load_whole`, which adds what transformers tells, or elsewhere
    :param source: folder or hub name of its checkpoint
    """
    folder = find_checkpoint(source, revision) if source else None
    untold = [_MTP, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]  # by transformers
    silent = {name for name in _list_tensors(folder) if any(one.search(name) for one in untold)}
    own = {name for name, _ in model.named_parameters()}
    left = sorted(name for name in (getattr(model, "_unexpected", set()) | silent) - own if not _DERIVED.search(name))
    model.left_out = sorted({re.sub(r"(?<=experts\.)\d+", "*", name) for name in left})
    if not left:
        return
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) or math.inf
    if any(_MTP.search(name) or any(int(index) >= count for index in _LAYER.findall(name)) for name in left):
        for part in walk_parts(model.config):
            for key in [key for key, value in vars(part).items() if _MTP.search(key) and type(value) is int]:
                setattr(part, key, 0)
    logger.warning(
        f"{source}: {type(model).__name__} does not load {len(left)} of its tensors, so that the output has none of them: "
        f"{', '.join(model.left_out[:3])}{' …' if len(model.left_out) > 3 else ''}"
    )


def _list_tensors(folder: Path | None) -> set[str]:
    """Return the names of the tensors in a folder's safetensors files."""
    names = set[str]()
    for file in (*folder.glob("model*.safetensors"), *folder.glob("*mtp*.safetensors")) if folder else ():
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names


def find_checkpoint(model: str, revision: str = "main") -> Path | None:
    """Return the folder of a checkpoint, a local one or that of the hub's cache; None if there is none yet."""
    if Path(model).is_dir():
        return Path(model)
    try:
        found = cached_file(model, "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError):  # not cached, or not a valid hub name
        return None
    return Path(found).parent if found else None
