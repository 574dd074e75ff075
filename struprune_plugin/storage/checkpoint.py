"""The source checkpoint: its configuration, whether it can be pruned, and loading that is whole or refused.

transformers fills missing tensors with random numbers and continues; :func:`load_whole` raises instead.
"""

import json
import logging
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.offload import disable_onloading
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from loguru import logger
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from struprune_plugin.model.structure.finder import find_structure_of
from struprune_plugin.model.structure.locate import PREFIX, find_stock
from struprune_plugin.model.structure.shrinking import walk_parts
from struprune_plugin.storage.files import ADAPTER, MERGE, check_model, is_hub_name, shorten_error
from struprune_plugin.storage.output_folder import CARRIED, TEMPLATES

# recomputed on loading
_DERIVED = re.compile(r"(inv_freq|position_ids|masked_bias|attn\.bias|attention\.bias|num_batches_tracked)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TASK = re.compile(r"For(?!CausalLM|ConditionalGeneration)[A-Z]")  # in a class' name, another one than ours
_MTP = re.compile(r"(^|[._])(mtp|nextn)")
# of such layers
_COUNTS = "num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers mtp_num_layers num_mtp_modules"


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
    """Return the dense model class that comes with a checkpoint if its configuration does (``trust_remote_code``), or None."""
    named = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if named is None or not type(config).__module__.startswith("transformers_modules."):
        return None
    return find_stock(get_class_from_dynamic_module(named, model, revision=revision))


def read_config(model: str, revision: str = "main", trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the configuration of a folder or hub name.

    :raises ValueError: there is no readable configuration; an adapter is beside it; it is of no causal language model
    """
    check_model(model)
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, revision=revision)
        adapter = None if Path(model).is_dir() else find_adapter_config_file(model, revision=revision)
    except Exception as error:  # a broken config.json raises errors of many classes
        problem, remedy = f": {shorten_error(error)}", "Correct the name, or log in (`hf auth login`)."
        if "custom code" in str(error):
            remedy = "If you trust its code, pass trust_remote_code_model=True, or --trust-remote-code."
        elif isinstance(error.__cause__, LocalEntryNotFoundError):
            problem = " no folder of that name, and the hub cannot be reached"
            problem += " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
            remedy = f"Correct it, or where there is a network, `hf download {model} --local-dir FOLDER`, and pass the folder."
        elif Path(model).is_dir():
            is_new = "does not recognize this architecture" in str(error)
            remedy = "Install a transformers that knows it." if is_new else "Correct its config.json."
        raise ValueError(
            f"model: {model!r} must be a model folder or a hub name that can be loaded, got{problem}. {remedy}"
        ) from None
    if adapter is not None:
        raise ValueError(f"model: {model!r} must be a model without adapters, got {ADAPTER}. {MERGE}")
    check_architecture(config.architectures or (), config)
    check_returns(config)
    return config


def check_returns(config: PretrainedConfig) -> None:
    """Raise ValueError if a configuration lets models return tuples, whose parts have no names, or attention maps, with which
    transformers cannot save it."""
    parts = config, config.get_text_config(decoder=True)
    for name, wanted, why in (
        ("return_dict", True, "by which layers return tuples"),
        ("output_attentions", False, "with which it cannot be saved"),
    ):
        if any(getattr(part, name) != wanted for part in parts):
            raise ValueError(
                f"model: {name} must be {json.dumps(wanted)} in the configuration, got {json.dumps(not wanted)}, {why}. Remove the "
                f"key from its config.json (of a loaded model: model.config.{name} = {wanted})."
            )


def check_architecture(names: Sequence[str], config: PretrainedConfig) -> None:
    """Raise if classes are known, by their names, not to be causal language models or wrappers of one.

    :param names: classes of one checkpoint. One that is unknown to transformers and names no task says nothing; where there is
        none, the model's type is looked at
    """
    stock, mapped = [name.removeprefix(PREFIX) for name in names], getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in mapped and PREFIX not in mapped["AutoModelForCausalLM"]:
        return  # custom code says what it is
    known = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()]
    causal = {name for classes in known for name in ([classes] if isinstance(classes, str) else classes)}
    other = ""
    if stock and not causal & {*stock} and any(hasattr(transformers, name) or _TASK.search(name) for name in stock):
        other = f"{', '.join(stock)} (architectures in its config.json)"
    elif not stock and not _may_be_causal(config):
        other = f"one of the type {config.model_type} without architectures in its config.json"
    if other:
        raise ValueError(
            f"model: must be a causal language model, got {other}. Choose another model; if its weights are such a model's, load "
            "them by AutoModelForCausalLM, and save them."
        )


def _may_be_causal(config: PretrainedConfig) -> bool:
    """Return whether a type's usual class, where transformers knows the type, is a causal language model or a wrapper of one."""
    if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or config.model_type not in CONFIG_MAPPING_NAMES:
        return True
    is_other = config.is_encoder_decoder or config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_decoder = not is_other or getattr(config, "is_decoder", False)
    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and is_decoder


def load_tokenizer(
    where: str | os.PathLike, revision: str = "main", trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer; if it has no chat template of its own, with that of its processor's ``chat_template.json``.

    :param where: a folder or a hub name
    :param revision: branch, tag or commit on the hub
    :param trust_remote_code: run the code that comes with it
    :raises ValueError: there is no readable tokenizer
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # broken files raise errors of many classes
        problem = shorten_error(error)
        if "instantiate the backend tokenizer" in problem:  # whose reasons follow in further lines
            problem = "none, or one that needs the package sentencepiece or tiktoken"
        raise ValueError(
            f"tokenizer: {os.fspath(where)!r} must hold a tokenizer that can be loaded, got: {problem}. Copy it again, with its "
            "model."
        ) from None
    tokenizer.chat_template = tokenizer.chat_template or _read_processor_template(where, revision)
    return tokenizer


def _read_processor_template(where: str | os.PathLike, revision: str) -> str | None:
    """Return the chat template that processors read from their older file; None if there is none."""
    try:
        file = cached_file(where, "chat_template.json", revision=revision, _raise_exceptions_for_missing_entries=False)
        return json.loads(Path(file).read_text(encoding="utf-8"))["chat_template"] if file else None
    except (OSError, ValueError, LookupError, TypeError):  # not reachable, or not as processors write it
        return None


def load_whole(model_class: Any, model: str, **options: Any) -> PreTrainedModel:
    """Load a checkpoint by ``model_class.from_pretrained``.

    :param model_class: class of transformers, or an auto class
    :raises ValueError: a file is missing or broken, or the files lack a tensor of the configuration or hold it in another shape
    """
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # so that the error below lists them
    try:
        loaded, info = model_class.from_pretrained(model, **options)
    except Exception as error:  # a broken file raises errors of many classes
        remedy = "Install it." if isinstance(error, ImportError) else "Copy or download it again."
        raise ValueError(
            f"model: {model!r} must hold whole weights that fit its config.json, got: {shorten_error(error)}. {remedy}"
        ) from None
    problems = [f"{name} missing" for name in sorted(info["missing_keys"])]
    problems += [
        f"{name} of shape {list(stored)} in place of {list(wanted)}"
        for name, stored, wanted in sorted(info["mismatched_keys"], key=lambda entry: entry[0])
    ]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ValueError(
            f"model: {model!r} must hold every tensor that its config.json asks for, got {problems[0]}{more}. Use a complete "
            "checkpoint, or the config.json that belongs to it."
        )
    loaded._unexpected = sorted(info["unexpected_keys"])
    return loaded


def note_left_out(model: PreTrainedModel, source: str, revision: str = "main") -> None:
    """Set ``model.left_out`` to the checkpoint's tensors that the class does not load, and say so in the log.

    The numbers of experts are replaced by ``*``. If layers that predict several tokens ahead (MTP) are among them, their count
    in the configuration becomes 0, because the saved output will not hold them either.

    :param model: a loaded model
    :param source: folder or hub name of its checkpoint
    """
    folder = find_checkpoint(source, revision) if source else None
    unexpected = model._unexpected if hasattr(model, "_unexpected") else _list_unexpected(model, folder)
    ignored = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]
    stored = list_tensors(folder) if folder else set()
    silent = {name for name in stored if _MTP.search(name) or any(one.search(name) for one in ignored)}
    loaded = {name for name, _ in model.named_parameters()}
    left = sorted(name for name in {*unexpected, *silent} - loaded if not _DERIVED.search(name))
    model.left_out = sorted({re.sub(r"(?<=experts\.)\d+", "*", name) for name in left})  # type: ignore[assignment]
    if not left:
        return
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) or math.inf
    is_ahead = any(_MTP.search(name) or any(int(index) >= count for index in _LAYER.findall(name)) for name in left)
    change = ""
    for part in walk_parts(model.config) if is_ahead else ():
        for key in _COUNTS.split():
            if isinstance(getattr(part, key, None), int) and getattr(part, key):
                setattr(part, key, 0)
                change = f"; {key} is set to 0"
    logger.warning(
        f"{source}: {type(model).__name__} does not load {len(left)} of its tensors, so that the output has none of them: "
        f"{', '.join(model.left_out[:3])}{' …' if len(model.left_out) > 3 else ''}{change}"  # type: ignore[index, arg-type]
    )


def _list_unexpected(model: PreTrainedModel, folder: Path | None) -> list[str]:
    """Return the tensors of a checkpoint that the class of a model from elsewhere does not load, without reading them."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)  # its report lists all of them
    try:
        info = type(model).from_pretrained(folder, device_map="meta", output_loading_info=True)[1] if folder else {}
    except Exception:  # a class that cannot be loaded so, or a folder that has changed since
        return []
    finally:
        transformers_logging.set_verbosity(level)
    return sorted(info.get("unexpected_keys", ()))


def find_checkpoint(model: str, revision: str = "main") -> Path | None:
    """Return the folder of a checkpoint, a local one or that of the hub's cache; None if there is none yet."""
    if Path(model).is_dir():
        return Path(model)
    try:
        file = cached_file(model, "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError):  # not cached, or not a valid hub name
        return None
    return Path(file).parent if file else None


def fetch_carried(model: str, revision: str = "main") -> None:
    """Fetch into the hub's cache what an output takes over from a hub name: loading a model fetches no files of its processor."""
    if Path(model).is_dir() or not is_hub_name(model):
        return
    try:
        snapshot_download(model, revision=revision, allow_patterns=[*CARRIED, f"{TEMPLATES}/*", "README.md"])
    except Exception as error:  # of many classes
        logger.warning(
            f"model: the files of {model}'s processor and its licence cannot be fetched, and the output has only those in the "
            f"hub's cache: {shorten_error(error)}"
        )


def list_tensors(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder's safetensors files, without those of files that cannot be read."""
    names = set[str]()
    for file in _list_files(folder):
        with suppress(OSError, SafetensorError), safe_open(file, "pt") as opened:  # loading it raises
            names.update(opened.keys())
    return names


def _list_files(folder: Path) -> list[Path]:
    return [*folder.glob("model*.safetensors"), *folder.glob("*mtp*.safetensors")]


def check_written(folder: Path, model: PreTrainedModel) -> None:
    """Raise OSError if a folder does not hold the weights of the model that was saved to it: names and shapes of all, one's values.

    Weights under other names, as classes of mixtures are saved, are counted. Linears that are quantised are not looked at.
    """
    shapes, files = dict[str, list[int]](), dict[str, Path]()
    try:
        for file in _list_files(folder):
            with safe_open(file, "pt") as opened:
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
                files |= dict.fromkeys(opened.keys(), file)
        held = _list_held(model)
        known = {name: weight for name, weight in held.items() if name in shapes}
        stored = {id(weight) for weight in known.values()}
        missing = {id(weight): (name, weight.numel()) for name, weight in held.items() if id(weight) not in stored}
        spare = sum(math.prod(shape) for name, shape in shapes.items() if name not in held)
        problem = ""
        if sum(count for _, count in missing.values()) > spare:
            name = next(name for name, _ in missing.values())
            problem = f"no {name}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}"
        for name, weight in known.items():
            if shapes[name] != list(weight.shape):
                problem = f"{name} of shape {shapes[name]} in place of {list(weight.shape)}"
        if known and not problem:
            name = max(known, key=lambda name: (known[name].dim(), name))
            with safe_open(files[name], "pt") as opened:
                value, wanted = opened.get_tensor(name), model.get_parameter(name).detach().cpu()
            if not torch.equal(value.nan_to_num(), wanted.to(value).nan_to_num()):
                problem = f"other values of {name}"
    except (OSError, SafetensorError) as error:
        problem = shorten_error(error)
    if problem:
        raise OSError(f"output_dir: what was written must be the weights of the model, got {problem}. Check the disk.")


def _list_held(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters that a model is saved with, tied ones by each of their names, without those of quantised modules."""
    ignored = [re.compile(one) for one in model._keys_to_ignore_on_save or ()]
    with disable_onloading():
        return {
            name: parameter
            for place, module in model.named_modules()
            if not hasattr(module, "quantization_scheme")
            and not type(module).__module__.startswith("compressed_tensors")
            for name, parameter in module.named_parameters(place, recurse=False, remove_duplicate=False)
            if not any(one.search(name) for one in ignored)
        }
