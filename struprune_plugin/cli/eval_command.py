"""``struprune eval``: perplexity and lm-eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen
from struprune_plugin.storage.files import check_place
from struprune_plugin.storage.manifest import MANIFEST_NAME, read_manifest

_NO_KEEP = "do not store the scores in the manifest and the model card"


def score(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="model folders or hub names")],
    text: opt.ScoredText = None,
    window: opt.Window = 256,
    stride: Annotated[int | None, opt.whole("--stride", "tokens between window starts [default: the window]")] = None,
    max_tokens: opt.MaxTokens = None,
    text_column: Annotated[str, opt.option("--text-column", "column of the text in --text", "NAME")] = "text",
    tasks: opt.Tasks = None,
    include_path: opt.IncludePath = None,
    limit: opt.Limit = None,
    batch_size: Annotated[int, opt.whole("--batch-size", "sequences per batch")] = 8,
    dtype: Annotated[opt.Floats, opt.option("--dtype", "dtype of the computation")] = "float32",
    trust_remote_code: opt.TrustRemoteCode = False,
    no_dense: Annotated[bool, opt.option("--no-dense", "do not score the dense model beside a pruned one")] = False,
    no_keep: Annotated[bool, opt.option("--no-keep", _NO_KEEP)] = False,
    output: Annotated[
        Path | None, opt.option("--output", "also write the scores to this file, as JSON", "FILE")
    ] = None,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure perplexity and lm-eval tasks of dense, pruned or quantised models.

    Perplexity is per token, over windows of fixed length; with --tasks alone it is left out. Several models give one table.
    """
    screen, names = Screen(as_json, quiet), opt.read_tasks(tasks, include_path)
    idle = {"--include-path": include_path, "--limit": limit} if not names else {}
    if names and text is None:
        idle = {"--stride": stride, "--max-tokens": max_tokens}
    for name, value in idle.items():
        if value is not None:
            needed = "--text" if names else "--tasks"
            raise ValueError(f"{name}: has no effect without {needed}, got {value!r}. Add {needed}, or remove {name}.")
    if output:
        _check_scores_file(output)
    opt.check_names(device, None, paths, [text])
    opt.prepare(device, screen)
    from struprune_plugin.evaluation.scoring import check_tasks
    from struprune_plugin.evaluation.text import DEMO_TEST, read_texts
    from struprune_plugin.studies.scores import Scoring, format_scores, score_model

    manager = check_tasks(names, include_path) if names else None
    source = text or (None if names else DEMO_TEST)
    texts = read_texts(source, text_column) if source else None
    scoring = Scoring(texts, window, stride, max_tokens, names, manager, limit, batch_size, dtype, trust_remote_code)
    needed_bases = [] if no_dense and no_keep else paths
    bases = {path: base for path in needed_bases if (base := _find_base(path)) is not None}
    scores = {path: score_model(path, scoring) for path in (paths if no_dense else _add_dense(paths, bases))}
    settings = {"text": str(source) if source else None, "window": window, "stride": stride or window}
    settings |= {"max_tokens": max_tokens, "limit": limit, "dtype": dtype}
    record = {"settings": settings, "scores": scores}
    screen.show(record, format_scores(scores))
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not no_keep:
        _keep_scores(screen, scores, bases, settings)


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


def _add_dense(paths: list[str], bases: dict[str, str]) -> list[str]:
    """Return the paths with the dense model inserted before each pruned folder, if it is on this machine."""
    models: list[str] = []
    for path in paths:
        base, others = bases.get(path), {_place(other) for other in paths + models}
        if base is not None and Path(base).is_dir() and _place(base) not in others:
            models.append(base)
        models.append(path)
    return models


def _keep_scores(
    screen: Screen, scores: dict[str, dict[str, Any]], bases: dict[str, str], settings: dict[str, Any]
) -> None:
    """Store the figures of StruPrune's outputs in their manifests and model cards.

    :param bases: dense model of every output
    """
    from struprune_plugin.reporting.model_card import keep_results, list_results

    by_place = {_place(path): found for path, found in scores.items()}
    for path, base in bases.items():
        results = list_results(scores[path], by_place.get(_place(base), {}), settings)
        if problem := keep_results(Path(path), results):
            screen.show_error(f"the scores are not stored with the output: {problem}")


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
