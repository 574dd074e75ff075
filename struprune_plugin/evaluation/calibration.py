"""Calibration data of ``oneshot``, in the form that llm-compressor accepts."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from struprune_plugin.evaluation.sampling import SELF, sample_windows
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import (
    HUB_DATASETS,
    MESSAGES,
    find_column,
    make_calibration_dataset,
    pack_windows,
    render_chat,
)
from struprune_plugin.runtime.distributed import count_ranks, split_range
from struprune_plugin.storage.checkpoint import load_tokenizer

_DATASETS = (Dataset, IterableDataset, DatasetDict, IterableDatasetDict)


def check_dataset(dataset: object, splits: object) -> None:
    """Raise on data of an unsupported type, and on ``splits`` for data without splits."""
    if not isinstance(dataset, (str, os.PathLike, DataLoader, type(None), *_DATASETS)):
        raise ValueError(
            f"dataset: must be a file, self, c4, wikitext2, a name that llm-compressor knows, a Dataset or a loader, got "
            f"{type(dataset).__name__}. Make a Dataset of it: Dataset.from_dict({{'text': [...]}})."
        )
    if splits is not None and not (isinstance(dataset, (DatasetDict, IterableDatasetDict)) or is_from_host(dataset)):
        raise ValueError(
            f"splits: must be left out for a file, c4, wikitext2, a Dataset or a loader, which have no splits to choose from, got "
            f"{splits!r}. Pass the part that you mean as dataset."
        )


def is_from_host(dataset: object) -> bool:
    """Return whether data are a name or a folder that llm-compressor resolves."""
    ours = (SELF, *HUB_DATASETS)
    return isinstance(dataset, (str, os.PathLike)) and not (str(dataset) in ours or Path(dataset).is_file())


def prepare_dataset(model: str | PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Convert a file or a short name to token windows, which llm-compressor uses unchanged, and select this process' part.

    :param kwargs: arguments of ``oneshot``
    :return: the arguments with the data set
    :raises ValueError: as :func:`~struprune_plugin.evaluation.text.make_calibration_dataset`; fewer samples than processes; with
        several processes, a data set name that llm-compressor resolves
    """
    source = kwargs.get("dataset")
    if isinstance(source, _DATASETS):
        return _split_dataset(_take_rows(model, source, kwargs))
    if not isinstance(source, (str, os.PathLike)) or is_from_host(source):
        return _split_dataset(kwargs)
    if str(source) == SELF and kwargs.get("model_revision", "main") != "main":
        raise ValueError(
            "dataset: `self` must be left out with model_revision, whose model would not write the text. Pass a "
            "folder of that revision as model."
        )
    tokenizer, length = _find_tokenizer(model, kwargs)
    samples, column = kwargs.get("num_calibration_samples") or 512, kwargs.get("text_column") or "text"
    dataset = make_dataset(model, tokenizer, source, samples, length, column, _trusts(kwargs))
    return _split_dataset({**kwargs, "dataset": dataset})


def _trusts(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("trust_remote_code_model", False)


def _find_tokenizer(model: str | PreTrainedModel, kwargs: dict[str, Any]) -> tuple[PreTrainedTokenizerBase, int]:
    """Return the tokenizer of a run, and the tokens of a sample."""
    tokenizer = kwargs.get("tokenizer") or kwargs.get("processor")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        where = tokenizer or (model if isinstance(model, str) else model.config._name_or_path)
        tokenizer = load_tokenizer(where, trust_remote_code=_trusts(kwargs))
    return tokenizer, kwargs.get("max_seq_length") or min(tokenizer.model_max_length, 2048)


def _take_rows(
    model: str | PreTrainedModel,
    dataset: Dataset | IterableDataset | DatasetDict | IterableDatasetDict,
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments with a data set that llm-compressor takes: one split, not streamed, conversations as token ids.

    :raises ValueError: no such split; no rows; no column that holds token ids, text or conversations
    """
    kwargs = dict(kwargs)
    if isinstance(dataset, (DatasetDict, IterableDatasetDict)):
        split = kwargs.pop("splits", None) or "train"
        if not isinstance(split, str) or split not in dataset:
            raise ValueError(f"splits: must be one of {sorted(dataset)}, got {split!r}. Pass the part that you mean.")
        dataset = dataset[split]
    samples, column = kwargs.get("num_calibration_samples") or 512, kwargs.get("text_column") or "text"
    if isinstance(dataset, IterableDataset):
        dataset = Dataset.from_list(list(islice(dataset, samples)))
    kwargs["dataset"] = dataset
    if kwargs.get("preprocessing_func") is not None:
        return kwargs
    if len(dataset) == 0:
        raise ValueError("dataset: must have rows, got an empty data set. Pass another one.")
    columns = dataset.column_names
    if "input_ids" in columns:
        return kwargs
    found = find_column(columns, column)
    if found is None and "text" not in columns:
        raise ValueError(
            f"dataset: must have a column input_ids, {column} or {MESSAGES}, got {sorted(columns)}. Name the column of the text "
            "(text_column=…)."
        )
    for value in dataset.select(range(min(samples, len(dataset))))[found] if found else ():
        if not isinstance(value, str | list):
            raise ValueError(
                f"dataset: every row of {found} must hold a text or a conversation, got {value!r}. Leave such rows out, or name "
                "another column (text_column=…)."
            )
    if found is None or not isinstance(dataset[0][found], list):
        return kwargs
    tokenizer, length = _find_tokenizer(model, kwargs)

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        ids = tokenizer(render_chat(tokenizer, row[found]))["input_ids"][:length]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    return kwargs | {"dataset": dataset.map(tokenize, remove_columns=columns, load_from_cache_file=False)}


def make_dataset(
    model: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str | os.PathLike,
    num_samples: int,
    seq_length: int,
    text_column: str = "text",
    trust_remote_code: bool = False,
) -> Dataset:
    """Return calibration samples of a source; for ``self``, text that the model itself samples, always the same.

    :raises ValueError: as :func:`~struprune_plugin.evaluation.text.make_calibration_dataset`
    """
    if str(source) != SELF:
        return make_calibration_dataset(source, tokenizer, num_samples, seq_length, text_column)
    own = load_checkpoint(model, "auto", trust_remote_code)[0] if isinstance(model, str) else model
    return pack_windows(sample_windows(own, tokenizer, num_samples, seq_length))


def _split_dataset(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with this process' part of the data set's samples.

    llm-compressor would split them too, but it looks up the indices that its sampler draws within a part in the whole data
    set, so that every process would read the first part.
    """
    dataset = kwargs.get("dataset")
    if count_ranks() == 1 or dataset is None or isinstance(dataset, DataLoader):
        return kwargs
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"dataset: must be a file, c4, wikitext2, a Dataset or a loader in a run of {count_ranks()} processes, got "
            f"{dataset!r}. Load it, and pass the Dataset."
        )
    total = min(kwargs.get("num_calibration_samples") or len(dataset), len(dataset))
    if total < count_ranks():
        raise ValueError(
            f"dataset: must have a sample for each of the {count_ranks()} processes, got {total}. Use more samples."
        )
    part = split_range(total)
    return {**kwargs, "dataset": dataset.select(part), "num_calibration_samples": len(part)}
