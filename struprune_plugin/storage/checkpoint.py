"""Checks of a checkpoint on disk: whether it is complete and fits its configuration, from the headers of its files.

transformers fills missing tensors with random numbers and continues. So it first loads tensors with shapes but no values, and
reports which ones are missing. That takes the renamings, ties and exceptions of every architecture into account.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from struprune_plugin.model.structure.finder import find_structure_of
from struprune_plugin.model.structure.tiny import find_auto_class, find_class
from struprune_plugin.storage.files import shorten_error

_FORMS = (
    "model.safetensors",
    "pytorch_model.bin",
)  # in the order in which transformers looks for them, each before its index
Header = dict[str, list[int]]  # tensor -> shape


def check_checkpoint(model: str, trust_remote_code: bool = False, revision: str = "main") -> PretrainedConfig:
    """Return the configuration of a checkpoint; raise, without reading weights, if it cannot be pruned.

    :raises ValueError: nothing to load there; an unsupported architecture or format; quantised weights; a truncated or invalid
        weight file; a tensor of the configuration that is missing or has another shape
    """
    config = read_config(model, revision, trust_remote_code)
    if Path(model).is_dir() and not _list_files(Path(model)):
        raise ValueError(f"model: {model!r} must hold weights (*.safetensors), got none. Use a complete checkpoint.")
    if getattr(config, "quantization_config", None) is not None and not is_packed(config):
        raise ValueError(
            f"model: {model!r} must not be quantised yet, its config has a quantization_config. "
            "Prune the full-precision checkpoint and quantise afterwards."
        )
    kind = find_custom_class(model, config, revision)
    check_whole(model, config, revision, kind)
    find_structure_of(config, kind)
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
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, revision=revision)
    except Exception as error:  # a broken config.json raises errors of many classes
        raise ValueError(
            f"model: {model!r} must be a model folder or a hub name that can be loaded, got: {shorten_error(error)}"
        ) from None


def check_whole(model: str, config: PretrainedConfig | None = None, revision: str = "main", kind: Any = None) -> None:
    """Raise if a checkpoint is incomplete, by its configuration and file headers; a quantised one by the headers alone.

    :param kind: the model's class, if it is not one of transformers
    :raises ValueError: as in the last two cases of :func:`check_checkpoint`
    """
    headers = read_headers(model, revision)
    config = read_config(model, revision) if config is None else config
    quantised = getattr(config, "quantization_config", None) is not None
    if kind is None and type(config) in find_auto_class(config)._model_mapping:
        kind, config = find_class(config)
    if headers and not quantised and kind is not None:
        _check_tensors(model, config, headers, kind)


def find_checkpoint(model: str, revision: str = "main") -> Path | None:
    """Return the folder of a checkpoint, a local one or that of the hub's cache; None if there is none yet."""
    if Path(model).is_dir():
        return Path(model)
    try:
        found = cached_file(model, "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError):  # not cached, or not a valid hub name
        return None
    return Path(found).parent if found else None


def find_weights(model: str) -> Path | None:
    """Return the folder of a checkpoint whose weights are on this machine, without asking the hub; None otherwise."""
    folder = find_checkpoint(model)
    files = _list_files(folder) if folder else []
    return folder if files and all(file.is_file() for file in files) else None


def read_headers(model: str, revision: str = "main") -> dict[Path, Header]:
    """Return the tensor shapes of the weight files that would be loaded; empty if they are not on this machine.

    :raises ValueError: a file of a local folder is missing, truncated, or holds anything but tensors
    """
    folder = find_checkpoint(model, revision)
    if folder is None:
        return {}
    files = _list_files(folder)
    if not Path(model).is_dir() and not all(file.is_file() for file in files):
        return {}  # the rest will be downloaded
    return {file: (_read_header if file.suffix == ".safetensors" else _read_pickled)(file) for file in files}


def _list_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers loads from a folder."""
    for name in _FORMS:
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}.index.json").is_file():
            return _read_index(folder / f"{name}.index.json")
    return []


def _read_index(index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({index.parent / name for name in names})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"model: {index} must be an index with a weight_map, got {error!r:.200}. Copy or download it again."
        ) from None


def _read_header(file: Path) -> Header:
    """Return the shapes in a safetensors file from its header, which must match the file's size."""
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        size = f"{file.stat().st_size} bytes, {error}" if file.is_file() else "no file"
        raise ValueError(f"{file}: must be a whole safetensors file, got {size}. Copy or download it again.") from None


def _read_pickled(file: Path) -> Header:
    """Return the shapes in a ``.bin`` file, read as transformers does: tensors only, anything else is refused unread."""
    try:
        tensors = torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
        return {name: list(tensor.shape) for name, tensor in tensors.items()}
    except Exception as error:  # the readers of new and of old files raise errors of many classes
        size = f"{file.stat().st_size} bytes" if file.is_file() else "no file"
        raise ValueError(
            f"model: {file} must be a whole file of tensors and nothing else, got {size}: {shorten_error(error)} Copy or download "
            "it again, best as safetensors."
        ) from None


def _check_tensors(model: str, config: PretrainedConfig, headers: dict[Path, Header], kind: Any) -> None:
    """Raise if files lack a tensor of the configuration, or hold it in another shape."""
    count = sum(map(len, headers.values()))
    for name in ("num_hidden_layers", "num_experts", "num_local_experts"):
        asked = getattr(config, name, None)
        if isinstance(asked, int) and asked > count:  # found without building that many
            raise ValueError(
                f"model: {model!r} must hold every tensor that its config asks for, got {count} tensors for {name}={asked}. Use a "
                "complete checkpoint, or the config.json that belongs to it."
            )
    tensors = {name: torch.empty(shape, device="meta") for header in headers.values() for name, shape in header.items()}
    try:
        with _quiet_transformers(), torch.random.fork_rng(devices=[]):
            _, info = kind.from_pretrained(
                None,
                config=copy.deepcopy(config),
                state_dict=tensors,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except NotImplementedError:  # a class that cannot be built without memory for its weights
        return
    except Exception as error:  # building a model from a config that makes no sense
        raise ValueError(
            f"model: {model!r} must fit its config, got: {shorten_error(error)} Use a complete checkpoint."
        ) from None
    check_loading(model, info, headers)


def check_loading(model: str, info: dict[str, Any], headers: dict[Path, Header]) -> None:
    """Raise if transformers reports that it would fill a part of a checkpoint with random numbers.

    :param info: the ``output_loading_info`` of ``from_pretrained``
    :param headers: headers of the checkpoint's files, to name the file in messages
    """
    where = next(iter(headers)) if len(headers) == 1 else Path(model)
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"model: {where} must hold every tensor that its config asks for, {missing[0]}{more} missing. Use a complete "
            "checkpoint, or the config.json that belongs to it."
        )
    for name, stored, wanted in sorted(info["mismatched_keys"], key=lambda entry: entry[0]):
        file = next((file for file, header in headers.items() if name in header), where)
        raise ValueError(
            f"model: {file}: {name} must have the shape {list(wanted)} that the config asks for, got {list(stored)}. Use the "
            "config.json that belongs to it."
        )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide the log and the progress bars of transformers in the block."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
