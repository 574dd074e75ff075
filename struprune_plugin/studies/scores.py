"""Scores of checkpoints by column, for ``struprune eval`` and ``struprune sweep``, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from struprune_plugin.evaluation.scoring import check_window, load_checkpoint, measure_perplexity, run_tasks
from struprune_plugin.evaluation.text import tokenize_texts
from struprune_plugin.model.layers import count_parameters
from struprune_plugin.reporting.tables import Table, measure_weight_bytes
from struprune_plugin.storage.files import format_bytes

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


@dataclass(frozen=True)
class Scoring:
    """Settings of a scoring.

    :param texts: texts for the perplexity; None leaves it out
    :param window: tokens per window of the perplexity
    :param stride: tokens between window starts; None is the window
    :param tasks: lm-eval tasks, ``limit`` examples each
    :param manager: lm-eval's index of tasks; None without tasks
    """

    texts: Sequence[str] | None
    window: int
    stride: int | None = None
    max_tokens: int | None = None
    tasks: Sequence[str] = ()
    manager: TaskManager | None = None
    limit: int | None = None
    batch_size: int = 8
    dtype: str = "float32"
    trust_remote_code: bool = False


def score_model(path: str, scoring: Scoring) -> dict[str, Any]:
    """Return a model's parameters, bytes, perplexity and metrics of tasks, by column.

    :raises ValueError: nothing to load there; the window exceeds the model's positions
    """
    model, tokenizer = load_checkpoint(path, scoring.dtype, scoring.trust_remote_code)
    found: dict[str, Any] = {"parameters": 0, "bytes": measure_weight_bytes(path)}
    if scoring.texts is not None:
        tokens = tokenize_texts(tokenizer, scoring.texts, scoring.max_tokens)
        check_window(model.config, scoring.window)
        found["perplexity"] = measure_perplexity(model, tokens, scoring.window, scoring.stride, scoring.batch_size)
        found["tokens"] = len(tokens)
    if scoring.manager is not None:
        for task in scoring.tasks:
            results = run_tasks(model, tokenizer, [task], scoring.manager, scoring.batch_size, scoring.limit)
            found |= {name_column(name, metric): v for name, row in results.items() for metric, v in row.items()}
    found["parameters"] = count_parameters(model)  # quantised weights are unpacked by the first forward pass
    return found


def name_column(task: str, metric: str) -> str:
    """Return the column of an lm-eval metric; its filter is named if there is one."""
    name, _, chosen = metric.partition(",")
    kind = "_stderr" if name.endswith("_stderr") else ""
    return f"{task} {name.removesuffix(kind)}{'' if chosen == 'none' else f',{chosen}'}{kind}"


def format_scores(scores: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with a row per model; a column that a model lacks is empty there."""
    columns = list(dict.fromkeys(name for found in scores.values() for name in found if "stderr" not in name))
    columns = [name for name in columns if name != "tokens"]
    rows = [
        [path, *(_show(name, found[name]) if name in found else "" for name in columns)]
        for path, found in scores.items()
    ]
    return Table(["model", *columns], rows)


def _show(column: str, value: Any) -> str:
    if column == "bytes":
        return format_bytes(value) if value else "on the hub"
    return f"{value:,}" if column == "parameters" else value if isinstance(value, str) else f"{value:.4g}"
