"""``oneshot``: the host's, with everything refused early that can be, and an output folder that is whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.distributed import is_source_process
from compressed_tensors.offload import load_offloaded_model
from compressed_tensors.utils import patch_attr
from datasets import Dataset, DatasetDict, IterableDataset
from llmcompressor import oneshot as host_oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.pipelines.cache import IntermediatesCache
from llmcompressor.pytorch.model_load.helpers import parse_dtype
from llmcompressor.recipe import Recipe
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from struprune_plugin.card import try_write_card
from struprune_plugin.checkpoint import check_checkpoint, find_checkpoint
from struprune_plugin.data import HUB_DATASETS, load_tokenizer, make_calibration_dataset
from struprune_plugin.device.ranks import count_ranks, join_processes, split_range
from struprune_plugin.early import check_place
from struprune_plugin.export import MANIFEST_NAME, tidy_recipe
from struprune_plugin.folder import check_apart, prepare_output, write_folder
from struprune_plugin.manifest import DIGEST_KEY, digest_manifest
from struprune_plugin.model.families import check_model_type
from struprune_plugin.modifiers import RecoveryModifier, StruPruneModifier
from struprune_plugin.modifiers.checks import check_cache_quantisation
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.recovery_stage import RecoveryStage
from struprune_plugin.modifiers.session import PIPELINE_OPTIONS
from struprune_plugin.passes.journal import Journal
from struprune_plugin.recipe import load_recipe
from struprune_plugin.report import measure_weight_bytes

_PRECISIONS = {  # that the host reads; it takes every other word for auto
    *("auto", "None", "float32", "torch.float32", "full", "bfloat16", "torch.bfloat16"),
    *("float16", "torch.float16", "half"),
}


def oneshot(
    model: str | os.PathLike | PreTrainedModel,
    recipe: str | os.PathLike | Modifier | list[Modifier] | Recipe,
    output_dir: str | os.PathLike | None = None,
    overwrite: bool = False,
    offload_folder: str | os.PathLike | None = None,
    offload_memory: int | None = None,
    checkpoint_dir: str | os.PathLike | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Compress a model in one calibration run, as ``llmcompressor.oneshot`` does.

    Differs from the host's: recipes and arguments that the host would pass over in silence are refused; so are, before
    the model is loaded, unsupported architectures, quantised checkpoints and an output folder that is not empty. The
    output folder appears when it is complete, or not at all. ``dataset`` may also be a JSON-lines file, ``c4`` or
    ``wikitext2``: its first ``num_calibration_samples`` windows of ``max_seq_length`` tokens are taken, in order.
    Under ``torchrun`` every process takes its part of the samples, and the first decides and writes.
    A loaded model whose run fails half-way is left half pruned: load it again.

    :param model: a folder, a hub name or a loaded model
    :param recipe: a YAML file, a YAML text, or modifiers
    :param output_dir: where to save; nothing is saved where None
    :param overwrite: whether ``output_dir`` may replace an earlier output of StruPrune, whole and unchanged, and nothing else
    :param offload_folder: where weights lie that the host's memory does not hold, for a model given by name; the returned
        model reads them, so that the folder is the caller's to remove
    :param offload_memory: bytes of weights that the memory may hold then; all but 5 GB of what is free where None
    :param checkpoint_dir: where finished parts of the run are kept, durable, until it is over: the same call goes on there after
        it was killed, and ends with the same weights
    :param kwargs: everything else that the host's ``oneshot`` takes
    :return: the compressed model
    :raises ValueError: bad input, before calibration, nothing written
    :raises OSError: the model is finished and written, and cannot take its place; the message says where it is
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    join_processes()
    loaded = load_recipe(recipe)
    for modifier in loaded.modifiers:
        if isinstance(modifier, StruPruneModifier):
            modifier.take_pipeline_options({name: kwargs[name] for name in PIPELINE_OPTIONS if name in kwargs})
        elif isinstance(modifier, RecoveryModifier):
            modifier.take_tokenizer(kwargs.get("tokenizer") or kwargs.get("processor"))
    _check_arguments(model, loaded, kwargs)
    _check_offload(model, offload_folder, offload_memory)
    model = model if isinstance(model, PreTrainedModel) else os.fspath(model)
    config = _check_model(model, kwargs)
    check_cache_quantisation(config, loaded.modifiers, _has_layers_of_other_heads(config))
    source = model if isinstance(model, str) else config.name_or_path
    inputs = list_inputs(source, recipe, loaded.modifiers, offload_folder, kwargs)
    journal = _make_journal(checkpoint_dir, output_dir, loaded.modifiers, inputs)
    if output_dir is not None:
        if offload_folder is not None:
            check_apart(Path(output_dir), offload_folder)
        prepare_output(Path(output_dir), overwrite, inputs, estimate_output_bytes(source, loaded.modifiers, kwargs))
    kwargs = _split_dataset(_make_dataset(model, kwargs))
    if offload_folder is not None:
        model = _load_offloaded(str(model), Path(offload_folder), offload_memory, kwargs)
    try:
        with _pin_no_memory_without_an_accelerator():
            if output_dir is None:
                compressed = host_oneshot(model=model, recipe=loaded, **kwargs)
            else:
                with write_folder(Path(output_dir), overwrite, inputs) as partial:
                    compressed = host_oneshot(model=model, recipe=loaded, output_dir=str(partial), **kwargs)
                    if is_source_process():
                        tidy_recipe(partial)
                        _carry_manifest(source, partial)
                        try_write_card(partial, source)
        if journal is not None:
            journal.clear()
        return compressed
    except BaseException as error:
        for modifier in loaded.modifiers:
            if isinstance(modifier, StructuredModifier):
                modifier.clean_up()
        if isinstance(error, RuntimeError) and "resolving mappings" in str(error):  # before any calibration
            raise ValueError(
                f"recipe: SmoothQuantModifier must have mappings that fit the model, got none for {config.model_type!r} that the "
                "host knows or finds. Spell its mappings, or leave it out."
            ) from error
        raise


def _make_journal(
    folder: str | os.PathLike | None,
    output: str | os.PathLike | None,
    modifiers: list[Modifier],
    inputs: list[str | os.PathLike],
) -> Journal | None:
    """Give every modifier that can go on after a kill the folder to do so from; None without one.

    :raises ValueError: a folder that is something else already, or lies where the run reads or writes
    """
    if folder is None:
        return None
    path, others = Path(folder).resolve(), [Path(p).resolve() for p in (*inputs, *([] if output is None else [output]))]
    for other in others:
        if path == other or path in other.parents or other in path.parents:
            raise ValueError(
                f"checkpoint_dir: must be apart from what the run reads and writes, got {path} and {other}. Choose another path."
            )
    journal = Journal(path)
    for modifier in modifiers:
        if isinstance(modifier, (StructuredModifier, RecoveryStage)):
            modifier.take_journal(journal)
    return journal


def _check_arguments(model: object, recipe: Recipe, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that the host would ignore, or that end in a puzzle.

    :raises ValueError: the same
    """
    for name in ("stage", "recipe_args"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}: must be left out, got {kwargs[name]!r}, which the host would ignore. Edit the recipe."
            )
    if not isinstance(model, (str, os.PathLike, PreTrainedModel)):
        raise ValueError(f"model: must be a folder, a hub name or a loaded model, got {type(model).__name__}.")
    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is None:
        raise ValueError(
            f"model: must be a causal language model, got {type(model).__name__} without a head. Load that."
        )
    if str(kwargs.get("precision", "auto")) not in _PRECISIONS:
        raise ValueError(
            f"precision: must be auto, float32, bfloat16 or float16, got {kwargs['precision']!r}, which the host would take for "
            "auto. Give one of these."
        )
    _check_dataset(kwargs.get("dataset"), kwargs.get("splits"))
    pipeline, count = kwargs.get("pipeline") or "independent", len(recipe.modifiers)
    if pipeline != "independent" and not (pipeline == "sequential" and count == 1):
        raise ValueError(
            f"pipeline: must be 'independent' for a recipe of {count} modifiers, got {pipeline!r}, which gives none of them a "
            "calibration pass of its own. Leave it out."
        )


def _check_dataset(dataset: object, splits: object) -> None:
    """Refuse data that nobody can read, and splits of what has none.

    :raises ValueError: the same
    """
    if not isinstance(dataset, (str, os.PathLike, Dataset, DatasetDict, IterableDataset, DataLoader, type(None))):
        raise ValueError(
            f"dataset: must be a file, c4, wikitext2, a name that the host knows, a Dataset or a loader, got "
            f"{type(dataset).__name__}. Make a Dataset of it: Dataset.from_dict({{'text': [...]}})."
        )
    if splits is not None and not (isinstance(dataset, DatasetDict) or _is_host_s(dataset)):
        raise ValueError(
            f"splits: must be left out for a file, c4, wikitext2, a Dataset or a loader, which have none to choose, got "
            f"{splits!r}. Pass the part that you mean."
        )


def _is_host_s(dataset: object) -> bool:
    """Tell whether data are a name or a folder that the host resolves."""
    return isinstance(dataset, (str, os.PathLike)) and not (str(dataset) in HUB_DATASETS or Path(dataset).is_file())


def _check_offload(model: object, folder: str | os.PathLike | None, memory: int | None) -> None:
    """Refuse half of the options for weights that lie on the disk, or both for a model that is loaded.

    :raises ValueError: the same
    """
    if memory is not None and (folder is None or memory < 1):
        raise ValueError(
            f"offload_memory: must be bytes, at least 1, given with offload_folder, got {memory} and "
            f"offload_folder={folder!r}. Give both, or neither."
        )
    if folder is not None and isinstance(model, PreTrainedModel):
        raise ValueError(
            "offload_folder: must be left out for a loaded model, whose weights lie where they were loaded. Pass its folder."
        )
    if folder is not None:
        check_place("offload_folder", Path(folder))


def _check_model(model: str | PreTrainedModel, kwargs: dict[str, Any]) -> PretrainedConfig:
    """Return a model's configuration; refuse a model that cannot be pruned.

    :raises ValueError: as :func:`~struprune_plugin.checkpoint.check_checkpoint`; a loaded model that came from nowhere
    """
    if isinstance(model, str):
        return check_checkpoint(
            model, kwargs.get("trust_remote_code_model", False), kwargs.get("model_revision", "main")
        )
    check_model_type(model.config.model_type)
    if not model.config.name_or_path:
        raise ValueError(
            "model: must come from a folder or the hub, whose configuration the host reads again, got a model without a "
            "config.name_or_path. Save it and pass the folder."
        )
    return model.config


def list_inputs(
    model: object,
    recipe: object,
    modifiers: Iterable[Modifier],
    offload_folder: str | os.PathLike | None,
    kwargs: dict[str, Any],
) -> list[str | os.PathLike]:
    """Return the paths that a run reads, and its offload folder: what its output must not replace."""
    named = [kwargs.get(name) for name in ("dataset", "dataset_path", "tokenizer", "processor")]
    told = [
        getattr(modifier, name, None)
        for modifier in modifiers
        for name in ("teacher", "replay", "data", "state_folder")
    ]
    listed = [path for value in told for path in (value if isinstance(value, list) else [value])]
    candidates = [model, recipe, offload_folder, *named, *listed]
    return [path for path in candidates if isinstance(path, (str, os.PathLike)) and str(path) and "\n" not in str(path)]


def estimate_output_bytes(source: str, modifiers: list[Modifier], kwargs: dict[str, Any]) -> int:
    """Return what the weights of a run's output take at least, in bytes; 0 where the input's are not on this machine.

    A lower bound, so that nothing is refused that would fit: all weights shrink by the sparsity, though embeddings do
    not; by half where the model is loaded in half precision, and to a quarter where a modifier of the host's follows.
    """
    ours = [modifier for modifier in modifiers if isinstance(modifier, StructuredModifier)]
    left = min([1.0, *(1 - modifier.sparsity for modifier in ours if modifier.sparsity)])
    if kwargs.get("precision") in ("bfloat16", "float16"):
        left /= 2
    if any(not isinstance(modifier, (StructuredModifier, RecoveryStage)) for modifier in modifiers):
        left /= 4
    folder = find_checkpoint(source, kwargs.get("model_revision", "main"))
    return int(measure_weight_bytes(folder) * left) if folder else 0


def _load_offloaded(path: str, folder: Path, memory: int | None, kwargs: dict[str, Any]) -> PreTrainedModel:
    """Load a model as the host does, with the weights that the memory does not hold in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with load_offloaded_model():
        return AutoModelForCausalLM.from_pretrained(
            path,
            revision=kwargs.get("model_revision", "main"),
            dtype=parse_dtype(kwargs.get("precision", "auto")),
            trust_remote_code=kwargs.get("trust_remote_code_model", False),
            device_map="auto_offload",
            offload_folder=str(folder),
            **({} if memory is None else {"max_memory": {"cpu": memory}}),
        )


def _has_layers_of_other_heads(config: PretrainedConfig) -> bool:
    """Tell whether a pruned model's layers have other head counts than its configuration as a whole."""
    layers = getattr(config, "per_layer_config", None) or []
    stated = vars(config).get("num_attention_heads")
    return any(layer.num_attention_heads != stated for layer in layers)


@contextmanager
def _pin_no_memory_without_an_accelerator() -> Iterator[None]:
    """Let AWQ run on a CPU alone: the host pins its inputs, for faster copies to a device, and fails where none is."""
    if torch.accelerator.is_available():
        yield
        return
    with patch_attr(IntermediatesCache, "pin_memory", lambda *args: None):
        yield


def _carry_manifest(source: str, folder: Path) -> None:
    """Let the manifest of a pruned folder follow into the folder made from it, which has the same kept units.

    What was measured of the former is not the latter's.
    """
    manifest = Path(source) / MANIFEST_NAME
    if not source or not manifest.is_file() or (folder / MANIFEST_NAME).exists():
        return
    content = json.loads(manifest.read_text(encoding="utf-8"))
    if "evaluation" in content:
        del content["evaluation"]
        content[DIGEST_KEY] = digest_manifest(content)
        (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(manifest, folder / MANIFEST_NAME)


def _make_dataset(model: str | PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Turn a file or a short name into token windows, which the host takes as they are.

    :raises ValueError: as :func:`~struprune_plugin.data.make_calibration_dataset`
    """
    source = kwargs.get("dataset")
    if not isinstance(source, (str, os.PathLike)) or _is_host_s(source):
        return kwargs
    tokenizer = kwargs.get("tokenizer") or kwargs.get("processor")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        where = tokenizer or (model if isinstance(model, str) else model.config._name_or_path)
        tokenizer = load_tokenizer(where)
    length = kwargs.get("max_seq_length") or min(tokenizer.model_max_length, 2048)
    samples = kwargs.get("num_calibration_samples") or 512
    dataset = make_calibration_dataset(source, tokenizer, samples, length, kwargs.get("text_column") or "text")
    return {**kwargs, "dataset": dataset}


def _split_dataset(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Give every process its own part of a data set's samples.

    The host too would split them, but the indices that its sampler draws in a part are looked up in the whole: every
    process would read the first part.

    :raises ValueError: fewer samples than processes; a data set by a name that the host resolves
    """
    dataset = kwargs.get("dataset")
    if count_ranks() == 1 or dataset is None or isinstance(dataset, DataLoader):
        return kwargs
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"dataset: must be a file, c4, wikitext2, a Dataset or a loader in a run of {count_ranks()} processes, got "
            f"{dataset!r}. Load it and pass the Dataset."
        )
    total = min(kwargs.get("num_calibration_samples") or len(dataset), len(dataset))
    if total < count_ranks():
        raise ValueError(
            f"dataset: must have a sample for each of the {count_ranks()} processes, got {total}. Give more."
        )
    part = split_range(total)
    return {**kwargs, "dataset": dataset.select(part), "num_calibration_samples": len(part)}
