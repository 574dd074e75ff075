"""``oneshot``: llm-compressor's entry point with early checks and an output folder that is complete or absent."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.distributed import is_source_process
from compressed_tensors.utils import patch_attr
from llmcompressor import oneshot as host_oneshot
from llmcompressor.entrypoints import Oneshot
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from llmcompressor.modifiers import Modifier
from llmcompressor.pipelines.cache import IntermediatesCache
from llmcompressor.recipe import Recipe
from loguru import logger
from transformers import PretrainedConfig, PreTrainedModel

from struprune_plugin.evaluation.text import prepare_dataset
from struprune_plugin.export.convert import carry_files, keep_generation_settings
from struprune_plugin.export.older_readers import find_origin, keep_tokenizer
from struprune_plugin.model.experts import linearize_experts
from struprune_plugin.model.layers import count_weight_bytes
from struprune_plugin.model.structure.locate import is_pruned
from struprune_plugin.modifiers import LoRARecoveryModifier, StruPruneModifier
from struprune_plugin.modifiers.checks import check_mappings, check_pruned
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.host_arguments import check_arguments
from struprune_plugin.recipes.load import load_recipe, write_recipe
from struprune_plugin.reporting.pages import write_card
from struprune_plugin.reporting.tables import summarize_output
from struprune_plugin.runtime.distributed import join_processes
from struprune_plugin.runtime.model_state import rest_model
from struprune_plugin.runtime.torch_state import copy_inference_tensors, renew_buffers, reset_torch
from struprune_plugin.storage.checkpoint import (
    check_checkpoint,
    check_written,
    is_packed,
    load_tokenizer,
    note_left_out,
)
from struprune_plugin.storage.files import check_room
from struprune_plugin.storage.loading import load_model
from struprune_plugin.storage.manifest import MANIFEST_NAME, carry_manifest
from struprune_plugin.storage.output_folder import write_folder
from struprune_plugin.storage.resume_store import ResumeStore


@reset_torch()
def oneshot(
    model: str | os.PathLike | PreTrainedModel,
    recipe: str | os.PathLike | Mapping[str, Any] | Modifier | list[Modifier] | Recipe,
    output_dir: str | os.PathLike | None = None,
    overwrite: bool = False,
    offload_folder: str | os.PathLike | None = None,
    checkpoint_dir: str | os.PathLike | None = None,
    seed: int | None = 0,
    changes: Mapping[str, Any] | None = None,
    window_bos: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """Compress a model in one calibration run, as ``llmcompressor.oneshot`` does.

    In addition, it refuses what llm-compressor would silently ignore and, before the model is loaded, unsupported architectures,
    quantised checkpoints and an output folder that is not empty. ``dataset`` may also be a JSON-lines file, ``c4`` or
    ``wikitext2``, of which the first ``num_calibration_samples`` windows of ``max_seq_length`` tokens are used. Under ``torchrun``
    every process uses its part of the samples, and the first decides and writes. A loaded model whose run fails is half pruned.

    :param model: a folder, a hub name or a loaded model
    :param recipe: a shipped recipe's name, a YAML file, a YAML text, its content as a mapping, or modifiers
    :param output_dir: folder to write, which appears when it is complete, or not at all. None saves nothing
    :param overwrite: let ``output_dir`` replace an earlier output of StruPrune
    :param offload_folder: for a model given by name, folder for the weights that would leave less than 5 GB of the host's memory
        free; the returned model reads them, so the caller removes the folder
    :param checkpoint_dir: folder for finished parts, until the run ends; after a kill the same call continues from there and ends
        with the same weights
    :param seed: seed of torch in the run, e.g. of llm-compressor's shuffling; None leaves torch's state alone
    :param changes: fields to set in a recipe that is not modifiers, as ``--set`` does: ``{"sparsity": 0.3}``
    :param window_bos: let every window of a file or a hub data set begin as the tokenizer begins a text, where it puts a
        beginning-of-text token there; False cuts windows from one stream of texts
    :param kwargs: all other arguments of llm-compressor's ``oneshot``
    :return: the compressed model
    :raises ValueError: bad input, before calibration, nothing written
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    join_processes()
    loaded = load_recipe(recipe, changes)
    offloaded = None if offload_folder is None else Path(offload_folder)  # a path counts even if nothing is there yet
    check_arguments(model, loaded, offloaded, window_bos, kwargs)
    revision, trusts = kwargs.get("model_revision", "main"), kwargs.get("trust_remote_code_model", False)
    model = model if isinstance(model, PreTrainedModel) else os.fspath(model)
    source = model if isinstance(model, str) else model.config.name_or_path
    config = check_checkpoint(model, trusts, revision) if isinstance(model, str) else model.config
    check_pruned(loaded.modifiers, config)
    named = [source, recipe, offloaded, *map(kwargs.get, ("dataset", "dataset_path", "tokenizer", "processor"))]
    inputs = [path for path in named if isinstance(path, (str, os.PathLike)) and str(path) and "\n" not in str(path)]
    pruning = next((each for each in loaded.modifiers if isinstance(each, StruPruneModifier)), None)
    with ExitStack() as stack:
        if checkpoint_dir is not None:
            if pruning is None:
                raise ValueError(
                    "checkpoint_dir: holds parts of a StruPruneModifier, got a recipe without one. Leave it out."
                )
            others = [*inputs, *([] if output_dir is None else [output_dir])]
            pruning.set_store(stack.enter_context(ResumeStore(Path(checkpoint_dir), others)))
        if seed is not None:
            stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
            torch.manual_seed(seed)
        folder = None
        if output_dir is not None:
            folder = stack.enter_context(write_folder(Path(output_dir), overwrite, inputs))
            kwargs["output_dir"] = str(folder)
            if pruning is not None:
                pruning.set_output(folder)
        origin = find_origin(kwargs.get("tokenizer") or kwargs.get("processor") or source, trusts)
        kwargs = prepare_dataset(model, _read_tokenizer(model, kwargs), window_bos)
        if isinstance(model, str):
            model = load_model(model, config, kwargs, offloaded)
        else:
            renew_buffers(model)
        if pruning is None:
            _check_alone(loaded.modifiers, model, folder)
        copy_inference_tensors(model)
        note_left_out(model, source, revision)
        with rest_model(model), _adapt_host(config, model, loaded.modifiers), keep_generation_settings():
            compressed = host_oneshot(model=model, recipe=loaded, **kwargs)
        if folder is not None and is_source_process():
            check_written(folder, compressed)
            write_recipe(loaded, folder)
            keep_tokenizer(origin, source, folder, revision)
            carry_files(source, folder, compressed.config, revision)
            carry_manifest(source, folder)
            if (folder / MANIFEST_NAME).is_file():
                write_card(folder)
    if output_dir is not None and is_source_process():
        logger.info("\n" + "\n\n".join(summarize_output(Path(output_dir))))
    return compressed


def _check_alone(modifiers: list[Modifier], model: PreTrainedModel, folder: Path | None) -> None:
    """Raise where other modifiers do not suit the model, or the disk is too small; a pruning stage checks this itself."""
    if not get_non_linearized_moes(model):  # else llm-compressor linearizes experts first
        check_mappings(modifiers, model)
    if folder is not None:
        check_room([("output_dir", folder, count_weight_bytes(model) // 8)])  # float32 at 4 bits


def _read_tokenizer(model: str | PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with a tokenizer in place of its name, or with that of a model given by name."""
    trusts, tokenizer = kwargs.get("trust_remote_code_model", False), kwargs.get("tokenizer")
    if isinstance(tokenizer, (str, os.PathLike)):
        return {**kwargs, "tokenizer": load_tokenizer(tokenizer, trust_remote_code=trusts)}
    if isinstance(model, str) and not (tokenizer or kwargs.get("processor")):
        # also for a wrapper, whose other files are copied
        return {**kwargs, "tokenizer": load_tokenizer(model, kwargs.get("model_revision", "main"), trusts)}
    return kwargs


@contextmanager
def _adapt_host(config: PretrainedConfig, model: PreTrainedModel, modifiers: list[Modifier]) -> Iterator[None]:
    """Patch llm-compressor in the block to accept models that it would refuse or change needlessly."""
    host = import_module("llmcompressor.entrypoints.oneshot")
    with ExitStack() as stack:
        if is_packed(config) and not is_packed(model.config):  # weights that were unpacked as they were loaded
            stack.enter_context(patch_attr(Oneshot, "validate_model", lambda self, model: None))
        if not torch.accelerator.is_available():  # AWQ pins its inputs for faster copies, and fails without a device
            stack.enter_context(patch_attr(IntermediatesCache, "pin_memory", lambda *args: None))
        if all(isinstance(modifier, StructuredModifier | LoRARecoveryModifier) for modifier in modifiers):
            # Quantisers need experts split into linears, which not all classes can save, and norms that scale by
            # ``1 + weight`` replaced, which rounds their weights; StruPrune's modifiers need neither.
            stack.enter_context(patch_attr(host, "get_non_linearized_moes", lambda model: []))
            stack.enter_context(patch_attr(host, "norm_calibration_context", nullcontext))
        elif is_pruned(type(model.config)):
            linearize_experts(model)  # llm-compressor would read their width before pruning from the configuration
        yield
