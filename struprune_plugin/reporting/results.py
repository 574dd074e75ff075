"""Measured results of an output, for its manifest, card and report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from struprune_plugin.storage.files import digest_whole_file
from struprune_plugin.storage.records import EvaluationRecord, PerplexityRecord, TaskRecord


def list_results(score: Mapping[str, Any], dense: Mapping[str, Any], settings: Mapping[str, Any]) -> EvaluationRecord:
    """Return the manifest's record of one model's scores, beside those of the dense model from the same command.

    :param score: scores by the names of ``struprune eval``'s columns
    :param dense: scores of the dense model; empty if it was not scored
    :param settings: settings of the command
    """
    perplexity, tasks = [], []
    if "perplexity" in score:
        told: dict[str, Any] = {name: settings[name] for name in ("window", "stride", "max_tokens", "dtype")}
        text = Path(settings["text"])
        told |= {"text": text.name, "sha256": digest_whole_file(text), "tokens": score["tokens"]}
        perplexity.append(PerplexityRecord(**told, value=score["perplexity"], dense=dense.get("perplexity")))
    for column, value in score.items():
        task, _, metric = column.partition(" ")
        if metric and not metric.endswith("_stderr"):
            errors = _read_error(score, column), _read_error(dense, column)
            values = float(value), dense.get(column), *errors
            tasks.append(TaskRecord(task, metric, settings["limit"], *values, dtype=settings["dtype"]))
    return EvaluationRecord(perplexity, tasks)


def _read_error(score: Mapping[str, Any], column: str) -> float | None:
    error = score.get(f"{column}_stderr")
    return float(error) if isinstance(error, int | float) and error == error else None


def name_result(entry: PerplexityRecord | TaskRecord) -> str:
    """Return the name of a measurement with the settings that its value depends on."""
    if isinstance(entry, TaskRecord):
        told = f"{entry.task}, {entry.metric}" + (f", {entry.limit} examples" if entry.limit else "")
    else:
        told = f"perplexity, {entry.text}, windows of {entry.window}"
        told += f", stride {entry.stride}" if entry.stride != entry.window else ""
        told += f", first {entry.max_tokens:,} tokens" if entry.max_tokens else ""
    return told + (f", {entry.dtype}" if entry.dtype != "float32" else "")


def list_result_rows(evaluation: EvaluationRecord) -> list[list[str]]:
    """Return (measure, dense, pruned) of all results, with standard errors if they are known."""
    rows = []
    for entry in evaluation.perplexity:
        told = [f"{value:.2f}" if value is not None else "" for value in (entry.dense, entry.value)]
        rows.append([name_result(entry), *told])
    for score in evaluation.tasks:
        cells = [_format_score(score.dense, score.dense_stderr), _format_score(score.value, score.stderr)]
        rows.append([name_result(score), *cells])
    return rows


def _format_score(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if error is None else f"{value:.3f} ± {error:.3f}"
