"""Token windows from text: local JSON lines, hub data sets, the text that ships with the package; the data of ``oneshot``."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.registry import standardize_lookup_name
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from llmcompressor.transformers.data import TextGenerationDataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from struprune_plugin.evaluation.sampling import SELF, sample_windows
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.runtime.distributed import count_ranks, split_range
from struprune_plugin.storage.checkpoint import load_tokenizer
from struprune_plugin.storage.files import check_text, shorten_error, shorten_value

DEMO = Path(__file__).parents[1] / "demo"
DEMO_MODEL, DEMO_CALIBRATION, DEMO_TEST = DEMO / "model", DEMO / "calibration.jsonl", DEMO / "test.jsonl"

MESSAGES = "messages"  # column of conversations: lists of {"role": …, "content": …}

_C4_FILES = {
    "train": "en/c4-train.00000-of-01024.json.gz",
    "validation": "en/c4-validation.00000-of-00008.json.gz",
}
HUB_DATASETS: dict[str, dict[str, Any]] = {  # short names that pruning papers use -> arguments of load_dataset
    "c4": {"path": "allenai/c4", "data_files": _C4_FILES},
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1"},
}
_DATASETS = (Dataset, IterableDataset, DatasetDict, IterableDatasetDict)


def read_texts(
    path: str | os.PathLike, text_column: str = "text", tokenizer: PreTrainedTokenizerBase | None = None
) -> list[str]:
    """Read the texts of a JSON-lines file.

    :param tokenizer: tokenizer whose chat template makes texts of lines with ``messages``; None refuses such lines
    :raises ValueError: no such file, or a line that is not UTF-8, not a JSON object, or without a text in the column
    """
    check_text(path)
    texts = []
    for number, line in enumerate(Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            value = row[find_column(row, text_column)]
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails for half a character (a lone surrogate)
        except (ValueError, TypeError, RecursionError) as error:
            found = shorten_value(line.decode("utf-8", "replace"))
            raise ValueError(
                f"{path}, line {number}: must be a JSON object in UTF-8 with a text in the column {text_column!r}, got {found} "
                f"({error.msg if isinstance(error, json.JSONDecodeError) else shorten_error(error)}). Write one "
                f'{{"{text_column}": "…"}} per line, or name the column of the text (--text-column).'
            ) from None
        texts.append(make_text(value, tokenizer, f"{path}, line {number}"))
    if not texts:
        raise ValueError(f"{path}: must hold at least one text, got an empty file. Choose another file.")
    return texts


def find_column(columns: Collection[str], text_column: str) -> str:
    """Return the column that holds the texts or, where it is missing, the conversations of a data set.

    :raises ValueError: there is neither
    """
    found = next((name for name in (text_column, MESSAGES) if name in columns), None)
    if found is None:
        raise ValueError(
            f"dataset: must have a column {text_column} or {MESSAGES}, got {sorted(columns)}. Name the column of the text "
            "(--text-column, text_column=…)."
        )
    return found


def make_text(value: object, tokenizer: PreTrainedTokenizerBase | None, where: str = "dataset") -> str:
    """Return the text of a row: as it is or, of a conversation, by the tokenizer's chat template, without the special token that
    tokenising adds in front.

    :param where: place of the row, for messages
    :raises ValueError: it is neither; there is no template, or the messages do not fit it
    """
    if isinstance(value, str):
        return value
    messages = value if isinstance(value, list) else []
    if not messages or not all(isinstance(message, dict) and message.get("role") for message in messages):
        raise ValueError(
            f"{where}: every row must hold a text or a conversation, a list of messages with role and content, got "
            f"{shorten_value(value)}. Leave such rows out, or name another column (--text-column, text_column=…)."
        )
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(
            f"{where}: data of `messages` must come with a tokenizer that has a chat template, got none. Give texts, or set "
            "tokenizer.chat_template."
        )
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template raises errors of many classes
        raise ValueError(
            f"{where}: `messages` must fit the tokenizer's chat template, got: {shorten_error(error)}. Correct the messages."
        ) from None
    start = tokenizer.bos_token or ""
    return text.removeprefix(start) if start and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else text


def stream_texts(
    source: str | os.PathLike,
    text_column: str = "text",
    split: str = "train",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Iterable[str]:
    """Return the texts of a local JSON-lines file or, streamed, of one split of a hub data set.

    :param source: a file, ``c4``, ``wikitext2`` or any hub name
    :param split: split of a hub data set
    :param tokenizer: as in :func:`read_texts`
    :raises ValueError: neither a file nor a data set that can be loaded; no such column
    """
    if Path(source).exists() or Path(source).suffix in (".json", ".jsonl"):
        return read_texts(source, text_column, tokenizer)
    name = os.fspath(source)
    try:
        rows = load_dataset(**HUB_DATASETS.get(name, {"path": name}), split=split, streaming=True)
        columns = next(iter(rows)).keys()
    except Exception as error:  # load_dataset raises errors of many classes
        raise ValueError(
            f"dataset: {name!r} must be a JSON-lines file or a hub data set that can be loaded, got: {shorten_error(error)}. "
            "Correct the name, or give a local file."
        ) from None
    column = find_column(columns, text_column)
    return (make_text(row[column], tokenizer) for row in rows)


def tokenize_texts(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], max_tokens: int | None = None) -> Tensor:
    """Tokenise every text with the tokenizer's own special tokens and concatenate.

    :return: the first ``max_tokens`` tokens (all where None), shape [tokens], int64
    """
    stream = (token for text in texts for token in tokenizer(text, verbose=False)["input_ids"])
    return torch.tensor(list(islice(stream, max_tokens)), dtype=torch.int64)


def make_calibration_dataset(
    source: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase,
    num_samples: int,
    seq_length: int,
    text_column: str = "text",
) -> Dataset:
    """Return the first ``num_samples`` windows of ``seq_length`` tokens of a source, in order, for ``oneshot(dataset=…)``.

    :raises ValueError: as :func:`stream_texts`; too little text
    """
    tokens = tokenize_texts(tokenizer, stream_texts(source, text_column, tokenizer=tokenizer), num_samples * seq_length)
    if len(tokens) == 0:
        raise ValueError("tokenizer: must turn text into tokens, got none. Check the tokenizer in the model's folder.")
    if len(tokens) < num_samples * seq_length:
        most = len(tokens) // seq_length
        remedy = (
            f"Lower the number of samples to at most {most}"
            if most
            else f"Cut sequences to at most {len(tokens)} tokens"
        )
        raise ValueError(
            f"dataset: {os.fspath(source)!r} must hold {num_samples} windows of {seq_length} tokens, got {len(tokens)} tokens. "
            f"{remedy}, or give more text."
        )
    return pack_windows(tokens.view(num_samples, seq_length))


def pack_windows(windows: Tensor) -> Dataset:
    """Return a data set of token windows, shape [windows, length], for ``oneshot(dataset=…)``."""
    return Dataset.from_dict({"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()})


# -- data of oneshot ----------------------------------------------------------------------------------------------


def check_dataset(dataset: object, splits: object) -> None:
    """Raise on data of an unsupported type, and on ``splits`` for data without splits."""
    if not isinstance(dataset, (str, os.PathLike, DataLoader, type(None), *_DATASETS)):
        raise ValueError(
            f"dataset: must be a file, self, c4, wikitext2, a name that llm-compressor knows, a Dataset or a loader, got "
            f"{type(dataset).__name__}. Make a Dataset of it: Dataset.from_dict({{'text': [...]}})."
        )
    if splits is not None and not (isinstance(dataset, (DatasetDict, IterableDatasetDict)) or is_from_host(dataset)):
        raise ValueError(
            f"splits: must be left out for a file, a hub data set by its name, a Dataset or a loader, got {splits!r}. Pass the "
            "part that you mean as dataset."
        )


def is_from_host(dataset: object) -> bool:
    """Return whether data are a name that llm-compressor resolves, or a class of its kind as ``file.py:Class``."""
    if not isinstance(dataset, str) or dataset in (SELF, *HUB_DATASETS) or Path(dataset).is_file():
        return False
    known = [*TextGenerationDataset.registered_names(), *TextGenerationDataset.registered_aliases()]
    return ":" in dataset or standardize_lookup_name(dataset) in known


def prepare_dataset(model: str | PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Convert a file or a short name to token windows, which llm-compressor uses unchanged, and select this process' part.

    :param kwargs: arguments of ``oneshot``
    :return: the arguments with the data set
    :raises ValueError: as :func:`make_calibration_dataset`; fewer samples than processes; with
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
    if str(source) != SELF:
        dataset = make_calibration_dataset(source, tokenizer, samples, length, column)
    else:  # text that the model itself samples, always the same
        trusts = kwargs.get("trust_remote_code_model", False)
        own = load_checkpoint(model, "auto", trusts)[0] if isinstance(model, str) else model
        dataset = pack_windows(sample_windows(own, tokenizer, samples, length))
    return _split_dataset({**kwargs, "dataset": dataset})


def _find_tokenizer(model: str | PreTrainedModel, kwargs: dict[str, Any]) -> tuple[PreTrainedTokenizerBase, int]:
    """Return the tokenizer of a run, and the tokens of a sample."""
    tokenizer = kwargs.get("tokenizer") or kwargs.get("processor")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        where = tokenizer or (model if isinstance(model, str) else model.config._name_or_path)
        tokenizer = load_tokenizer(where, trust_remote_code=kwargs.get("trust_remote_code_model", False))
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
    if all(isinstance(value, str) for value in dataset.select(range(min(samples, len(dataset))))[found]):
        return kwargs | {"dataset": dataset.select_columns(found)}  # llm-compressor prefers one of the name text
    tokenizer, length = _find_tokenizer(model, kwargs)

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        ids = tokenizer(make_text(row[found], tokenizer))["input_ids"][:length]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    return kwargs | {"dataset": dataset.map(tokenize, remove_columns=columns, load_from_cache_file=False)}


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
