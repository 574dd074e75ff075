"""``struprune eval``: perplexity and lm-eval."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from struprune_plugin.cli.console import Screen, show_error
from struprune_plugin.cli.options import Device, Floats, Scores, check_names, flag, option, prepare, whole
from struprune_plugin.reporting.tables import Table, measure_weight_bytes
from struprune_plugin.storage.files import check_place, format_bytes
from struprune_plugin.storage.manifest import MANIFEST_NAME, read_manifest


@dataclass(frozen=True)
class Scoring(Scores):
    """Settings of the scoring."""

    stride: Annotated[int | None, whole("tokens between window starts [default: the window]")] = None
    text_column: Annotated[str, option("column of the text in --text", "NAME")] = "text"
    batch_size: Annotated[int, whole("sequences per batch")] = 8
    dtype: Annotated[Floats, option("dtype of the computation")] = "float32"
    no_dense: Annotated[bool, flag("--no-dense", "do not score the dense model beside a pruned one")] = False
    no_keep: Annotated[bool, flag("--no-keep", "do not store the scores in the manifest and the model card")] = False
    output: Annotated[Path | None, option("also write the scores to this file, as JSON", "FILE")] = None

    def read_tasks(self) -> list[str]:
        """Return the names of lm-eval's tasks.

        :raises ValueError: as :meth:`Scores.read_tasks`; an option that would have no effect
        """
        tasks = super().read_tasks()
        for name in ("include_path", "limit") if not tasks else ("stride", "max_tokens") if self.text is None else ():
            if getattr(self, name) is not None:
                needed, option = "--text" if tasks else "--tasks", f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{option}: has no effect without {needed}, got {getattr(self, name)!r}. Add {needed}, or remove {option}."
                )
        return tasks

    def describe(self, text: Path | None) -> dict[str, Any]:
        """Return the settings that figures depend on, as JSON values."""
        settings = {"text": str(text) if text else None, "window": self.window, "stride": self.stride or self.window}
        return settings | {"max_tokens": self.max_tokens, "limit": self.limit, "dtype": self.dtype}


def score(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="model folders or hub names")],
    scoring: Scoring,
    screen: Screen,
    device: Device = "auto",
) -> None:
    """Measure perplexity and lm-eval tasks of dense, pruned or quantised models.

    Perplexity is per token, over windows of fixed length; with --tasks alone it is left out. Several models give one table.
    """
    tasks = scoring.read_tasks()
    if scoring.output:
        _check_scores_file(scoring.output)
    check_names(device, None, paths, [scoring.text])
    prepare(device, screen)
    from struprune_plugin.evaluation.scoring import check_tasks
    from struprune_plugin.evaluation.text import DEMO_TEST, read_texts

    manager = check_tasks(tasks, scoring.include_path) if tasks else None
    text = scoring.text or (None if tasks else DEMO_TEST)
    texts = read_texts(text, scoring.text_column) if text else None
    needed = [] if scoring.no_dense and scoring.no_keep else paths
    bases = {path: base for path in needed if (base := _find_base(path)) is not None}
    models = paths if scoring.no_dense else _add_dense(paths, bases)
    scores = {path: _score_model(path, texts, tasks, manager, scoring) for path in models}
    record = {"settings": scoring.describe(text), "scores": scores}
    screen.show(record, _format_scores(scores))
    if scoring.output:
        scoring.output.parent.mkdir(parents=True, exist_ok=True)
        scoring.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not scoring.no_keep:
        _keep_scores(scores, bases, record["settings"])


def _score_model(
    path: str, texts: list[str] | None, tasks: list[str], manager: Any, scoring: Scoring
) -> dict[str, Any]:
    """Return a model's figures by column.

    :param manager: lm-eval's index of tasks; None without tasks
    :raises ValueError: the window exceeds the model's positions
    """
    from struprune_plugin.evaluation.scoring import check_window, load_checkpoint, measure_perplexity, run_tasks
    from struprune_plugin.evaluation.text import tokenize_texts
    from struprune_plugin.model.layers import count_parameters

    model, tokenizer = load_checkpoint(path, scoring.dtype)
    found: dict[str, Any] = {"parameters": 0, "bytes": measure_weight_bytes(path)}
    if texts is not None:
        tokens = tokenize_texts(tokenizer, texts, scoring.max_tokens)
        check_window(model.config, scoring.window)
        found["perplexity"] = measure_perplexity(model, tokens, scoring.window, scoring.stride, scoring.batch_size)
        found["tokens"] = len(tokens)
    for task in tasks:
        results = run_tasks(model, tokenizer, [task], manager, scoring.batch_size, scoring.limit)
        found |= {_name_column(name, metric): v for name, row in results.items() for metric, v in row.items()}
    found["parameters"] = count_parameters(model)  # quantised weights are unpacked by the first forward pass
    return found


def _name_column(task: str, metric: str) -> str:
    """Return the column of an lm-eval metric; its filter is named if there is one."""
    name, _, chosen = metric.partition(",")
    kind = "_stderr" if name.endswith("_stderr") else ""
    return f"{task} {name.removesuffix(kind)}{'' if chosen == 'none' else f',{chosen}'}{kind}"


def _place(path: str) -> Path:
    """Return the folder of a model, in the hub's cache where it is named by its hub name."""
    from struprune_plugin.storage.checkpoint import find_weights

    return (find_weights(path) or Path(path)).resolve()


def _find_base(path: str) -> str | None:
    """Return the dense model that an output of StruPrune was made from, a folder if its weights are on this machine.

    None for other models.
    """
    if not (Path(path) / MANIFEST_NAME).is_file():
        return None
    base = read_manifest(path).model.base
    return base if Path(base).is_dir() else str(_place(base))


def _keep_scores(scores: dict[str, dict[str, Any]], bases: dict[str, str], settings: dict[str, Any]) -> None:
    """Store the figures of StruPrune's outputs in their manifests and model cards.

    :param bases: dense model of every output
    """
    from struprune_plugin.reporting.model_card import keep_results
    from struprune_plugin.reporting.results import list_results

    by_place = {_place(path): found for path, found in scores.items()}
    for path, base in bases.items():
        results = list_results(scores[path], by_place.get(_place(base), {}), settings)
        if problem := keep_results(Path(path), results):
            show_error(f"the scores are not stored with the output: {problem}")


def _check_scores_file(file: Path) -> None:
    """Raise if a file is not an earlier file of scores, or cannot be written."""
    if not file.exists():
        check_place("--output", file.parent)
        return
    try:
        ours = json.loads(file.read_text(encoding="utf-8")).keys() == {"settings", "scores"}
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(
            f"--output: must be absent or an earlier file of scores, {file} is neither. Choose another path."
        )


def _add_dense(paths: list[str], bases: dict[str, str]) -> list[str]:
    """Return the paths with the dense model inserted before each pruned folder, if it is on this machine."""
    models: list[str] = []
    for path in paths:
        base, others = bases.get(path), {_place(other) for other in paths + models}
        if base is not None and Path(base).is_dir() and _place(base) not in others:
            models.append(base)
        models.append(path)
    return models


def _format_scores(scores: dict[str, dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for found in scores.values() for name in found if "stderr" not in name))
    columns = [name for name in columns if name != "tokens"]
    show = {"parameters": "{:,}".format, "bytes": lambda size: format_bytes(size) if size else "on the hub"}
    rows = [
        [path, *(show.get(name, "{:.4g}".format)(found[name]) if name in found else "" for name in columns)]
        for path, found in scores.items()
    ]
    return Table(["model", *columns], rows)
