"""``struprune eval``: perplexity and lm-eval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen
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
    opt.check_names(None, paths, [text], device)
    opt.prepare(device, screen)
    from struprune_plugin.evaluation.text import DEMO_TEST
    from struprune_plugin.reporting.model_card import keep_results
    from struprune_plugin.studies.scores import Scoring, format_scores, list_results, make_scorer

    source = text or (None if names else DEMO_TEST)
    asked = Scoring(
        text=None if source is None else str(source),
        text_column=text_column,
        window=window,
        stride=stride,
        max_tokens=max_tokens,
        tasks=names,
        include_path=include_path,
        limit=limit,
        batch_size=batch_size,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    scorer = make_scorer(asked)
    bases = {} if no_dense and no_keep else find_bases(paths)
    scores = {path: scorer(path) for path in (paths if no_dense else add_dense(paths, bases))}
    screen.show({"settings": asdict(asked), "scores": scores}, format_scores(scores))
    by_place = {_place(path): found for path, found in scores.items()}
    for path, base in bases.items() if not no_keep else ():
        problem = keep_results(Path(path), list_results(asked, scores[path], by_place.get(_place(base), {})))
        if problem:
            screen.show_error(f"the scores are not stored with the output: {problem}")


def _place(path: str) -> Path:
    """Return the folder of a model, in the hub's cache where it is named by its hub name."""
    from struprune_plugin.storage.checkpoint import find_weights

    return (find_weights(path) or Path(path)).resolve()


def find_bases(paths: Sequence[str]) -> dict[str, str]:
    """Return the dense model of every output of StruPrune, a folder if its weights are on this machine."""
    made = [path for path in paths if (Path(path) / MANIFEST_NAME).is_file()]
    bases = {path: read_manifest(path).model.base for path in made}
    return {path: base if Path(base).is_dir() else str(_place(base)) for path, base in bases.items()}


def add_dense(paths: Sequence[str], bases: Mapping[str, str]) -> list[str]:
    """Return the paths with the dense model inserted before each pruned folder, if it is on this machine."""
    models: list[str] = []
    for path in paths:
        base, others = bases.get(path), {_place(other) for other in (*paths, *models)}
        if base is not None and Path(base).is_dir() and _place(base) not in others:
            models.append(base)
        models.append(path)
    return models
