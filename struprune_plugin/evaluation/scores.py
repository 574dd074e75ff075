"""Scores of checkpoints by column, and the manifest's records of them, for ``struprune eval`` and ``struprune sweep``."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from struprune_plugin.evaluation import scoring
from struprune_plugin.evaluation.text import read_texts, tokenize_texts
from struprune_plugin.model.layers import count_parameters
from struprune_plugin.reporting.tables import Table
from struprune_plugin.runtime.torch_state import reset_torch
from struprune_plugin.storage.checkpoint import find_checkpoint, load_tokenizer, read_config
from struprune_plugin.storage.files import format_bytes, measure_weight_bytes
from struprune_plugin.storage.manifest import MANIFEST_NAME, ResultRecord, read_manifest
from struprune_plugin.storage.vocabulary_record import read_record

Score = dict[str, Any]  # parameters, bytes, perplexity and metrics of tasks of one model, by column


@dataclass(frozen=True)
class Scoring:
    """Settings of a scoring, as the options of ``struprune eval``; None as text leaves perplexity out."""

    text: Path | None
    text_column: str = "text"
    window: int = 256
    max_tokens: int | None = None
    trust_remote_code: bool = False
    tasks: Sequence[str] = ()
    include_path: Path | None = None
    limit: int | None = None
    batch_size: int = 8
    dtype: str = "float32"
    window_bos: bool = True
    bits: bool = False  # whether bits per byte are measured, too


def make_scorer(asked: Scoring, models: Sequence[str]) -> Callable[[str], Score]:
    """Return a function that scores a checkpoint.

    :param models: checkpoints whose tokenizers and configurations are tried on the text before any is loaded
    :raises ValueError: a text that cannot be read or gives no window, a window that exceeds a model's positions, an unknown task
    """
    manager = scoring.check_tasks(asked.tasks, asked.include_path) if asked.tasks else None

    @cache
    @reset_torch()
    def read_tokens(path: str) -> Tensor:
        config = read_config(path, trust_remote_code=asked.trust_remote_code)
        tokenizer = load_tokenizer(path, trust_remote_code=asked.trust_remote_code)
        texts = read_texts(str(asked.text), asked.text_column, tokenizer)
        tokens = tokenize_texts(tokenizer, texts, asked.max_tokens, asked.window if asked.window_bos else None)
        scoring.check_windows(tokens, asked.window, config)
        return tokens

    @reset_torch()
    def score(path: str) -> Score:
        model, tokenizer = scoring.load_checkpoint(path, asked.dtype, asked.trust_remote_code)
        measured: Score = {"parameters": 0, "bytes": measure_weight_bytes(path)}
        with scoring.compute_fast(model):
            if asked.text is not None:
                tokens = read_tokens(path)
                measured["perplexity"] = scoring.measure_perplexity(model, tokens, asked.window, asked.batch_size)
            if asked.text is not None and asked.bits:
                texts = scoring.cut_texts(read_texts(str(asked.text), asked.text_column, tokenizer), asked.max_tokens)
                bits = scoring.measure_bits(model, tokenizer, texts, asked.window, asked.batch_size)
                measured["bits per byte"] = bits
            if manager is not None:
                results = scoring.run_tasks(model, tokenizer, asked.tasks, manager, asked.batch_size, asked.limit)
                for task, metrics in results.items():
                    measured |= {f"{task} {name}".removesuffix(",none"): value for name, value in metrics.items()}
        measured["parameters"] = count_parameters(model)  # quantised weights are unpacked by the first forward pass
        return measured

    for path in models if asked.text is not None else ():
        read_tokens(path)
    return score


def format_scores(scores: Mapping[str, Score], dense: str = "") -> Table:
    """Return a table with a row per model; a column that a model lacks is empty there.

    :param dense: row of the dense model, where rows are named by their sparsity: a column tells the whole model's share
    """
    columns = [name for name in dict.fromkeys(n for score in scores.values() for n in score) if "stderr" not in name]
    rows = [[path, *(_show(name, score.get(name)) for name in columns)] for path, score in scores.items()]
    if not dense:
        return Table(["model", *columns], rows)
    gone = [f"{1 - score['parameters'] / scores[dense]['parameters']:.1%}" for score in scores.values()]
    rows = [[name, share, *cells] for (name, *cells), share in zip(rows, gone, strict=True)]
    return Table(["of the decoder's linears", "of the whole model", *columns], rows)


def _show(column: str, value: Any) -> str:
    if column == "bytes":
        return format_bytes(value) if value else "on the hub"
    return "" if value is None else f"{value:,}" if column == "parameters" else f"{value:.4g}"


def _place(path: str) -> Path:
    """Return the folder of a model, or where it is in the hub's cache."""
    return (find_checkpoint(path) or Path(path)).resolve()


def find_dense(paths: Sequence[str]) -> dict[str, str]:
    """Return the dense model of every output of StruPrune among some paths, one of these; empty where it is not among them."""
    known = {_place(path): path for path in paths}
    outputs = [path for path in paths if (Path(path) / MANIFEST_NAME).is_file()]
    return {path: known.get(_place(read_manifest(path).model.base), "") for path in outputs}


def _take_comparable(dense: Score, path: str, base: str) -> Score:
    """Return a dense model's scores without its perplexity, which is per token, where an output has another vocabulary."""
    whole, kept = (record and record.kept for record in map(read_record, (base, path)))
    return dense if whole == kept else {name: value for name, value in dense.items() if name != "perplexity"}


def list_results(asked: Scoring, scores: Mapping[str, Score], path: str, base: str) -> list[ResultRecord]:
    """Return the manifest's records of a model's scores, beside those of the dense model; empty if it was not scored.

    :param scores: by path
    :param base: path of the dense model; empty where it is not among them
    """
    score, dense = scores[path], _take_comparable(scores[base], path, base) if base else {}
    dtype = f", {asked.dtype}" if asked.dtype != "float32" else ""
    results = []
    if asked.text is not None:
        most, stream = asked.max_tokens, "" if asked.window_bos else " of one stream"
        digest = hashlib.sha256(asked.text_column.encode() + asked.text.read_bytes()).hexdigest()
        for column, unit, each, cut in (("perplexity", "tokens", 1, stream), ("bits per byte", "bytes", 4, "")):
            name = f"{column}, {asked.text.name}, windows of {asked.window}{cut}"
            name += f", first {each * most:,} {unit}" if most else ""
            if column in score:
                results.append(ResultRecord(name + dtype, score[column], dense.get(column), text=digest))
    limit = f", {asked.limit} examples" if asked.limit else ""
    for column, value in score.items():
        task, space, metric = column.partition(" ")
        if space and column != "bits per byte" and "_stderr" not in metric:
            name, comma, chosen = column.partition(",")
            errors = (each.get(f"{name}_stderr{comma}{chosen}") for each in (score, dense))
            stderr, dense_stderr = (None if error is None or math.isnan(error) else float(error) for error in errors)
            label = f"{task}, {metric}{limit}{dtype}"
            results.append(ResultRecord(label, float(value), dense.get(column), stderr, dense_stderr))
    return results
