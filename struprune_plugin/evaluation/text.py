"""Token windows from text: local JSON lines, hub data sets, the text that ships with the package; the data of ``oneshot``."""

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.registry import standardize_lookup_name
from datasets import Dataset, IterableDataset, load_dataset
from llmcompressor.transformers.data import TextGenerationDataset
from loguru import logger
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from struprune_plugin.runtime.distributed import count_ranks, split_range
from struprune_plugin.settings.registry import shorten_value
from struprune_plugin.storage.checkpoint import load_tokenizer, read_config
from struprune_plugin.storage.files import shorten_error

DEMO = Path(__file__).parents[1] / "demo"
DEMO_MODEL, DEMO_CALIBRATION, DEMO_TEST = DEMO / "model", DEMO / "calibration.jsonl", DEMO / "test.jsonl"

MESSAGES = "messages"  # column of conversations: lists of {"role": …, "content": …}

_C4_FILES = {"train": "en/c4-train.00000-of-01024.json.gz", "validation": "en/c4-validation.00000-of-00008.json.gz"}
HUB_DATASETS: dict[str, dict[str, Any]] = {  # short names that pruning papers use -> arguments of load_dataset
    "c4": {"path": "allenai/c4", "data_files": _C4_FILES},
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1"},
}


def read_texts(
    path: str | os.PathLike, text_column: str = "text", tokenizer: PreTrainedTokenizerBase | None = None
) -> list[str]:
    """Read the texts of a file of JSON lines, or of one JSON array of objects.

    :param tokenizer: tokenizer whose chat template makes texts of lines with ``messages``
    :raises ValueError: no such file, or a line that is not UTF-8, not a JSON object, or without a text in the column
    """
    if not Path(path).is_file():
        raise ValueError(f"{os.fspath(path)}: must be an existing JSON-lines file. Correct the path.")
    texts = []
    for where, line in _list_lines(path):
        try:
            if not isinstance(row := json.loads(line), dict):
                raise ValueError(f"a {type(row).__name__}")
            if text_column not in row and MESSAGES not in row:
                raise ValueError(f"neither {text_column} nor {MESSAGES}")
            value = row[find_column(row, text_column)]
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails for other encodings and half a character
        except (ValueError, RecursionError) as error:
            problem = error.msg if isinstance(error, json.JSONDecodeError) else shorten_error(error)
            problem = "not UTF-8" if isinstance(error, UnicodeError) else problem
            raise ValueError(
                f"{where}: must be a JSON object in UTF-8 with a text in the column {text_column!r}, got "
                f'{shorten_value(line.strip())} ({problem}). Write one {{"{text_column}": "…"}} per line, or name the column of '
                "the text (--text-column)."
            ) from None
        texts.append(make_text(value, tokenizer, where))
    if not texts:
        raise ValueError(f"{path}: must hold at least one text, got an empty file. Choose another file.")
    return texts


def _list_lines(path: str | os.PathLike) -> Iterator[tuple[str, str]]:
    """Yield the place and the JSON of every row in a file of JSON lines, or of one JSON array of objects."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        text = file.read()
    rows: Any = None
    if text.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # else its first line is refused
            rows = json.loads(text)
    if rows and all(isinstance(row, dict) for row in rows):
        for number, row in enumerate(rows, 1):
            yield f"{path}, item {number}", json.dumps(row, ensure_ascii=False)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", line


def find_column(columns: Collection[str], text_column: str) -> str:
    """Return the column that holds the texts or, where it is missing, the conversations of a data set.

    :raises ValueError: there is neither
    """
    for name in (text_column, MESSAGES):
        if name in columns:
            return name
    raise ValueError(
        f"dataset: must have a column {text_column} or {MESSAGES}, got {sorted(columns)}. Name the column of the text "
        "(--text-column, text_column=…)."
    )


def make_text(value: Any, tokenizer: PreTrainedTokenizerBase | None, where: str = "dataset", at: str = "") -> str:
    """Return the text of a row: as it is or, of a conversation, by the tokenizer's chat template, without the special token that
    tokenising adds in front.

    :param where: the data, for messages
    :param at: column and row there
    :raises ValueError: it is neither; there is no template, or the messages do not fit it
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ValueError(
            f"{where}: every row must hold a text or a conversation, a list of messages with role and content, got "
            f"{shorten_value(value)}{at}. Leave such rows out, or name another column (--text-column, text_column=…)."
        )
    if tokenizer is None:
        raise ValueError(f"{where}: must hold a text, got a conversation{at}. Name the column of the text.")
    try:
        text = str(tokenizer.apply_chat_template(value, tokenize=False))
    except Exception as error:  # a template raises errors of many classes
        raise ValueError(
            f"{where}: `messages` must fit the tokenizer's chat template, got: {shorten_error(error)}{at}. Correct the messages, "
            "give texts, or set tokenizer.chat_template."
        ) from None
    start = tokenizer.bos_token or ""
    return text.removeprefix(start) if start and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else text


def _is_message(value: Any) -> bool:
    has_role = isinstance(value, dict) and bool(value.get("role"))
    return has_role and any(value[name] is not None for name in value.keys() - {"role"})


def stream_texts(
    source: str | os.PathLike,
    text_column: str = "text",
    split: str = "train",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Iterable[str]:
    """Return the texts of a local JSON-lines file or, streamed, of one split of a hub data set.

    :param source: a file, ``c4``, ``wikitext2`` or any hub name
    :raises ValueError: neither a file nor a data set that can be loaded; no such column
    """
    if Path(source).is_file() or Path(source).suffix in (".json", ".jsonl"):
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
    return _make_texts((row[column] for row in rows), tokenizer, column)


def find_special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and after a text by itself, as measured on one."""
    whole, bare = (tokenizer("text", add_special_tokens=added)["input_ids"] for added in (True, False))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _make_texts(rows: Iterable[Any], tokenizer: PreTrainedTokenizerBase | None, column: str) -> Iterator[str]:
    """Yield the texts of a data set's column, as :func:`make_text`; a ValueError names the row, from 0 on."""
    return (make_text(row, tokenizer, at=f" in row {n} of the column {column!r}") for n, row in enumerate(rows))


def tokenize_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], max_tokens: int | None = None, window: int | None = None
) -> Tensor:
    """Tokenise every text with the tokenizer's own special tokens and concatenate.

    :param window: number of tokens of the windows that the result is cut into. Each then begins with the token (or tokens) that the
        tokenizer puts before a text, which stands before no text inside. None leaves it before every text
    :return: the first ``max_tokens`` tokens (all where None), shape [tokens], int64
    :raises ValueError: ``window`` has no room for text
    """
    before, after = ([], []) if window is None else find_special_tokens(tokenizer)
    stream = (t for text in texts for t in _strip_start(tokenizer(text, verbose=False)["input_ids"], before, after))
    if before and window is not None:
        if window <= len(before):
            raise ValueError(
                f"windows: must have more tokens than the {len(before)} that the tokenizer puts before a text, got {window}. Take "
                "longer windows, or cut them from one stream (--no-window-bos, window_bos=False)."
            )
        size, bodies = min(window, sys.maxsize) - len(before), stream
        pieces = iter(lambda: list(islice(bodies, size)), [])
        stream = (token for piece in pieces for token in (*before, *piece))
    return torch.tensor(list(islice(stream, max_tokens and min(max_tokens, sys.maxsize))), dtype=torch.int64)


def _strip_start(ids: list[int], before: list[int], after: list[int]) -> list[int]:
    """Return a text's tokens without ``before`` at the start, also where the text itself has it written out, and without
    ``after`` at the end where both are the same token."""
    while before and ids[: len(before)] == before:
        ids = ids[len(before) :]
    return ids[: -len(after)] if after and after == before else ids


def make_calibration_dataset(
    source: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase,
    num_samples: int,
    seq_length: int,
    text_column: str = "text",
    window_bos: bool = True,
) -> Dataset:
    """Return the first ``num_samples`` windows of ``seq_length`` tokens of a source, in order, for ``oneshot(dataset=…)``.

    :param window_bos: let every window begin as the tokenizer begins a text; False cuts windows from one stream of texts
    :raises ValueError: as :func:`stream_texts`; too little text; windows without room for text
    """
    texts = stream_texts(source, text_column, tokenizer=tokenizer)
    tokens = tokenize_texts(tokenizer, texts, num_samples * seq_length, seq_length if window_bos else None)
    if len(tokens) < num_samples * seq_length:
        most = len(tokens) // seq_length
        fewer = f"Lower the number of samples to at most {most}, shorten" if most else "Shorten"
        raise ValueError(
            f"dataset: {os.fspath(source)!r} must hold {num_samples} windows of {seq_length} tokens, got {len(tokens)} tokens. "
            f"{fewer} them, or give more text."
        )
    return pack_windows(tokens.view(num_samples, seq_length))


def pack_windows(windows: Tensor) -> Dataset:
    """Return a data set of token windows, shape [windows, length], for ``oneshot(dataset=…)``."""
    return Dataset.from_dict({"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()})


# -- data of oneshot ----------------------------------------------------------------------------------------------


def check_dataset(kwargs: dict[str, Any], window_bos: bool = True) -> None:
    """Raise on data of an unsupported type, on numbers that are none, and on ``splits`` and ``window_bos`` without effect.

    :param kwargs: arguments of ``oneshot``
    """
    dataset, splits = kwargs.get("dataset"), kwargs.get("splits")
    if not isinstance(dataset, (str, os.PathLike, DataLoader, type(None), Dataset, IterableDataset)):
        raise ValueError(
            f"dataset: must be a file, c4, wikitext2, a name that llm-compressor knows, a Dataset or a loader, got "
            f"{type(dataset).__name__}. Pass one split, or make a Dataset: Dataset.from_dict({{'text': [...]}})."
        )
    if splits is not None and not is_from_host(dataset):
        raise ValueError(f"splits: has no effect on this dataset, got {splits!r}. Pass the part itself as dataset.")
    is_text = isinstance(dataset, (Dataset, IterableDataset)) and "input_ids" not in (dataset.column_names or ())
    if kwargs.get("preprocessing_func") and not (is_text or is_from_host(dataset)):
        raise ValueError("preprocessing_func: has no effect on this dataset. Apply it, and pass the Dataset.")
    unread = [name for name in ("num_calibration_samples", "max_seq_length", "batch_size") if kwargs.get(name)]
    if isinstance(dataset, DataLoader) and unread:
        logger.warning(f"dataset: all batches of a loader are used as they are, without {', '.join(unread)}.")
    for name in ("max_seq_length", "num_calibration_samples", "batch_size"):
        if (count := kwargs.get(name)) is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{name}: must be a whole number above 0, got {count!r}. Correct it.")
    is_cut = isinstance(dataset, (str, os.PathLike)) or kwargs.get("concatenate_data")
    if not window_bos and (not is_cut or is_from_host(dataset)):
        raise ValueError("window_bos: has no effect on this dataset, whose rows are not cut, got False. Leave it out.")


def is_from_host(dataset: object) -> bool:
    """Return whether data are a name that llm-compressor resolves, or a class of its kind as ``file.py:Class``."""
    if not isinstance(dataset, str) or dataset in HUB_DATASETS or Path(dataset).is_file():
        return False
    known = [*TextGenerationDataset.registered_names(), *TextGenerationDataset.registered_aliases()]
    return ":" in dataset or standardize_lookup_name(dataset) in known


def prepare_dataset(model: str | PreTrainedModel, kwargs: dict[str, Any], window_bos: bool = True) -> dict[str, Any]:
    """Convert a file or a short name to token windows, and a data set to what llm-compressor takes: not streamed, conversations as
    token ids. Select this process' part.

    :param kwargs: arguments of ``oneshot``
    :param window_bos: as of :func:`make_calibration_dataset`
    :raises ValueError: as :func:`make_calibration_dataset`; no column that holds token ids, text or conversations; fewer samples
        than processes; with several processes, a data set name that llm-compressor resolves
    """
    source, samples = kwargs.get("dataset"), kwargs.get("num_calibration_samples") or 512
    preprocesses, columns = bool(kwargs.get("preprocessing_func")), list[str]()
    if isinstance(source, Dataset | IterableDataset):
        columns = [*(source.column_names or next(iter(source), ()))]  # a stream may not know them
    has_tokens = "input_ids" in columns
    is_cut = bool(kwargs.get("concatenate_data")) and not (preprocesses or has_tokens)
    if isinstance(source, IterableDataset) and not (is_cut and columns):
        source = Dataset.from_list(list(islice(source, samples))) or Dataset.from_dict({"text": []})
    if isinstance(source, Dataset) and source.column_names and not len(source):
        raise ValueError("dataset: must have at least one row, got none. Pass other data, or select other rows.")
    if source is None or isinstance(source, DataLoader) or has_tokens:
        return _split_dataset(kwargs | {"dataset": source})
    trusts, column = kwargs.get("trust_remote_code_model", False), kwargs.get("text_column") or "text"
    if isinstance(model, str):
        config = read_config(model, kwargs.get("model_revision", "main"), trusts)
    else:
        model, config = model.config._name_or_path, model.config
    tokenizer = kwargs.get("tokenizer") or kwargs.get("processor")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = load_tokenizer(tokenizer or model, trust_remote_code=trusts)
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize
    most = min(positions, tokenizer.model_max_length)
    length = kwargs.get("max_seq_length") or min(2048, most)
    if tokenizer.model_max_length > positions:  # llm-compressor would make rows of that length, which may be 1e30
        known = most if tokenizer.model_max_length < 10**9 else length
        kwargs = kwargs | {"max_seq_length": kwargs.get("max_seq_length") or known}
    if preprocesses or is_from_host(source):
        return _split_dataset(kwargs | {"dataset": source})
    if not isinstance(source, Dataset | IterableDataset):
        dataset = make_calibration_dataset(source, tokenizer, samples, length, column, window_bos)
        return _split_dataset(kwargs | {"dataset": dataset})
    column = find_column(columns, column)
    if not is_cut:
        return _split_dataset(kwargs | {"dataset": _read_rows(source, tokenizer, length, column)})
    texts = _make_texts((row[column] for row in source), tokenizer, column)
    tokens = tokenize_texts(tokenizer, texts, samples * length, length if window_bos else None)
    if len(tokens) < length:
        raise ValueError(
            f"dataset: must hold a window of {length} tokens, got {len(tokens)}. Lower max_seq_length, or give more text."
        )
    windows = pack_windows(tokens[: len(tokens) // length * length].view(-1, length))
    return _split_dataset(kwargs | {"dataset": windows, "concatenate_data": False})


def _read_rows(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, length: int, column: str) -> Dataset:
    """Return a data set of its texts alone, which llm-compressor tokenises, or of the token ids of its conversations; rows without
    text are left out."""
    rows = [*dataset[column]]
    texts = [*_make_texts(rows, tokenizer, column)]
    places = [place for place, text in enumerate(texts) if text.strip()]
    if not places:
        raise ValueError(f"dataset: must have a row with text in the column {column!r}, got none. Pass other data.")
    if all(isinstance(row, str) for row in rows):
        return Dataset.from_dict({"text": [texts[place] for place in places]})
    ids = [tokenizer(texts[place], verbose=False)["input_ids"][:length] for place in places]
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})


def _split_dataset(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with this process' part of the data set's samples.

    llm-compressor would split them too, but it looks up the indices that its sampler draws within a part in the whole data
    set, so that every process would read the first part.
    """
    dataset, ranks = kwargs.get("dataset"), count_ranks()
    if ranks == 1 or dataset is None or isinstance(dataset, DataLoader):
        return kwargs
    total = min(kwargs.get("num_calibration_samples") or len(dataset), len(dataset))
    if not isinstance(dataset, Dataset) or total < ranks:
        raise ValueError(
            f"dataset: must be a file, c4, wikitext2, a Dataset or a loader with a sample for each of the {ranks} processes, got "
            f"{type(dataset).__name__} with {total}. Load it and pass the Dataset, or use more samples."
        )
    part = split_range(total)
    return {**kwargs, "dataset": dataset.select(part), "num_calibration_samples": len(part)}
