"""Scores of checkpoints by column, beside those of their dense models, for ``struprune eval`` and ``struprune sweep``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from struprune_plugin.evaluation.scoring import (
    check_tasks,
    check_windows,
    load_checkpoint,
    measure_perplexity,
    run_tasks,
)
from struprune_plugin.evaluation.text import read_texts, tokenize_texts
from struprune_plugin.model.layers import count_parameters
from struprune_plugin.reporting.tables import Table, measure_weight_bytes
from struprune_plugin.runtime.torch_state import reset_torch
from struprune_plugin.storage.checkpoint import find_checkpoint, load_tokenizer, read_config
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.manifest import MANIFEST_NAME, ResultRecord, read_manifest

Score = dict[str, Any]  # parameters, bytes, perplexity and metrics of tasks of one model, by column


@dataclass(frozen=True)
class Scoring:
    """Settings of a scoring.

    :param text: JSON-lines file for the perplexity; None leaves it out
    :param window: tokens per window of the perplexity
    :param stride: tokens between window starts; None is the window
    :param max_tokens: tokens that are scored; None for all
    :param tasks: lm-eval tasks, ``limit`` examples each
    :param include_path: folder with further task files
    """

    text: str | None
    text_column: str = "text"
    window: int = 256
    stride: int | None = None
    max_tokens: int | None = None
    tasks: Sequence[str] = ()
    include_path: str | None = None
    limit: int | None = None
    batch_size: int = 8
    dtype: str = "float32"
    trust_remote_code: bool = False


def make_scorer(asked: Scoring, models: Sequence[str]) -> Callable[[str], Score]:
    """Return a function that scores a checkpoint, after reading the texts and finding the tasks.

    :param models: checkpoints whose tokenizers and configurations are tried on the text before any is loaded
    :raises ValueError: a text that cannot be read or gives no window, a window that exceeds a model's positions, an unknown task
    """
    texts = None if asked.text is None else read_texts(asked.text, asked.text_column)
    manager = check_tasks(asked.tasks, asked.include_path) if asked.tasks else None

    @reset_torch()
    def tokenize(path: str) -> Tensor:
        config = read_config(path, trust_remote_code=asked.trust_remote_code)
        tokenizer = load_tokenizer(path, trust_remote_code=asked.trust_remote_code)
        tokens = tokenize_texts(tokenizer, texts or (), asked.max_tokens)
        check_windows(len(tokens), asked.window, asked.stride or asked.window, config)
        return tokens

    known = {path: tokenize(path) for path in models} if texts is not None else {}

    @reset_torch()
    def score(path: str) -> Score:
        model, tokenizer = load_checkpoint(path, asked.dtype, asked.trust_remote_code)
        found: Score = {"parameters": 0, "bytes": measure_weight_bytes(path)}
        if texts is not None:
            tokens = known[path] if path in known else tokenize(path)
            found["perplexity"] = measure_perplexity(model, tokens, asked.window, asked.stride, asked.batch_size)
        if manager is not None:
            for task in asked.tasks:
                results = run_tasks(model, tokenizer, [task], manager, asked.batch_size, asked.limit)
                found |= {name_column(name, metric): v for name, row in results.items() for metric, v in row.items()}
        found["parameters"] = count_parameters(model)  # quantised weights are unpacked by the first forward pass
        return found

    return score


def name_column(task: str, metric: str) -> str:
    """Return the column of an lm-eval metric; its filter is named if there is one."""
    name, _, chosen = metric.partition(",")
    kind = "_stderr" if name.endswith("_stderr") else ""
    return f"{task} {name.removesuffix(kind)}{'' if chosen == 'none' else f',{chosen}'}{kind}"


def format_scores(scores: Mapping[str, Score]) -> Table:
    """Return a table with a row per model; a column that a model lacks is empty there."""
    columns = list(dict.fromkeys(name for found in scores.values() for name in found))
    columns = [name for name in columns if "stderr" not in name and name != "refused"]
    rows = [
        [path, *(_show(name, found[name]) if name in found else "" for name in columns)]
        for path, found in scores.items()
    ]
    return Table(["model", *columns], rows)


def _show(column: str, value: Any) -> str:
    if column == "bytes":
        return format_bytes(value) if value else "on the hub"
    return f"{value:,}" if column == "parameters" else f"{value:+.1%}" if column == "change" else f"{value:.4g}"


def _place(path: str) -> Path:
    """Return the folder of a model, in the hub's cache where its weights are there."""
    folder = find_checkpoint(path)
    return (folder if folder and measure_weight_bytes(folder) else Path(path)).resolve()


def find_dense(paths: Sequence[str]) -> dict[str, str]:
    """Return the dense model of every output of StruPrune: one of the paths, or the folder where it is on this machine."""
    known = {_place(path): path for path in reversed(paths)}
    found = {}
    for path in paths:
        if (Path(path) / MANIFEST_NAME).is_file():
            base = read_manifest(path).model.base
            found[path] = known.setdefault(_place(base), base if Path(base).is_dir() else str(_place(base)))
    return found


def list_results(asked: Scoring, score: Score, dense: Score) -> list[ResultRecord]:
    """Return the manifest's records of a model's scores, beside those of the dense model; empty if it was not scored."""
    dtype = f", {asked.dtype}" if asked.dtype != "float32" else ""
    results = []
    if "perplexity" in score:
        name = f"perplexity, {Path(str(asked.text)).name}, windows of {asked.window}"
        name += f", stride {asked.stride}" if asked.stride not in (None, asked.window) else ""
        name += f", first {asked.max_tokens:,} tokens" if asked.max_tokens else ""
        results.append(ResultRecord(name + dtype, score["perplexity"], dense.get("perplexity")))
    limit = f", {asked.limit} examples" if asked.limit else ""
    for column, value in score.items():
        task, _, metric = column.partition(" ")
        if metric and not metric.endswith("_stderr"):
            errors = _read_error(score, column), _read_error(dense, column)
            results.append(ResultRecord(f"{task}, {metric}{limit}{dtype}", float(value), dense.get(column), *errors))
    return results


def _read_error(score: Score, column: str) -> float | None:
    error = score.get(f"{column}_stderr")
    return float(error) if isinstance(error, int | float) and error == error else None
