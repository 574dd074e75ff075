"""Several sizes of a model by one command: each is a plain run, scored like the dense model; a table, a picture, a choice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from struprune_plugin.storage.files import is_empty, write_whole
from struprune_plugin.studies.scores import Score

FILE_NAME, PICTURE_NAME, DENSE = "sweep.json", "sweep.svg", "dense"


def run_points(
    folder: Path,
    settings: Mapping[str, Any],
    sparsities: Sequence[float],
    prune: Callable[[float, Path], object],
    score: Callable[[str], Score],
) -> dict[str, Score]:
    """Prune and score every point; what an earlier call with the same settings has finished is kept.

    :param folder: holds ``sweep.json`` and the output of every point, named by its sparsity
    :param settings: settings of the sweep as JSON values, the model among them
    :param prune: prunes to a sparsity into a folder
    :param score: returns the scores of a model by column
    :return: scores by point, those of the dense model first; a point that was refused has the reason alone
    :raises ValueError: the folder holds something else, or another sweep
    """
    scores = _read_scores(folder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    points = {DENSE: None, **{f"{sparsity:g}": sparsity for sparsity in sparsities}}
    for name, sparsity in tqdm(points.items(), desc="sweep"):
        if "parameters" in scores.get(name, {}):  # what was refused may have been a full disk
            continue
        if sparsity is None:
            scores[name] = score(settings["model"])
        else:
            start = time.perf_counter()
            try:
                prune(sparsity, folder / name)
                seconds = round(time.perf_counter() - start, 1)
                found = score(str(folder / name))
                change = found["perplexity"] / scores[DENSE]["perplexity"] - 1
                scores[name] = {**found, "seconds": seconds, "change": change}
            except ValueError as error:  # one refused point must not stop a long sweep
                scores[name] = {"refused": str(error)}
        write_whole(folder / FILE_NAME, json.dumps({"settings": settings, "scores": scores}, indent=1) + "\n")
    return {name: scores[name] for name in points}


def _read_scores(folder: Path, settings: Mapping[str, Any]) -> dict[str, Score]:
    """Return the scores that an earlier call has left.

    :raises ValueError: the folder holds something else, or another sweep
    """
    if not folder.exists() or (folder.is_dir() and is_empty(folder)):
        return {}
    try:
        record = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        before, scores = dict(record["settings"]), dict(record["scores"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"--output: must be empty, absent or the folder of an earlier sweep, {folder} is none of these. Choose another folder."
        ) from None
    changed = [name for name in settings if before.get(name) != settings[name]]
    if changed:
        raise ValueError(
            f"--output: {folder} holds a sweep with another {', '.join(changed)}, which cannot be continued. Choose another folder."
        )
    return scores


def pick_point(scores: Mapping[str, Score], wanted: tuple[float, bool, str]) -> str:
    """Return the smallest point within a permitted loss.

    :param wanted: amount, whether it is relative, and what it is of: perplexity or a task
    :raises ValueError: there is no such point
    """
    most, relative, what = wanted
    dense = _read_value(scores[DENSE], what)
    sign = 1 if what == "perplexity" else -1
    limit = dense * (1 + sign * most) if relative else dense + sign * most
    points = {name: point for name, point in scores.items() if name != DENSE and "refused" not in point}
    within = {n: p["parameters"] for n, p in points.items() if sign * _read_value(p, what) <= sign * limit}
    if not within:
        raise ValueError(
            f"--pick: none of the {len(scores) - 1} points keeps {what} within {limit:.4g}. Allow a larger loss, or sweep "
            "lower sparsities."
        )
    return min(within, key=within.__getitem__)


def _read_value(point: Score, what: str) -> float:
    """Return the perplexity, or the accuracy or first other metric of a task."""
    if what == "perplexity":
        return float(point[what])
    columns = [f"{what} acc", *(name for name in point if name.startswith(f"{what} ") and "stderr" not in name)]
    return float(next(point[name] for name in columns if name in point))


def draw_sweep(scores: Mapping[str, Score], file: Path) -> None:
    """Draw perplexity against the share of parameters left.

    :raises ImportError: matplotlib is missing
    """
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).add_subplot()
    whole = scores[DENSE]["parameters"]
    points = [(100 * p["parameters"] / whole, p["perplexity"]) for p in scores.values() if "refused" not in p]
    axes.plot(*zip(*sorted(points), strict=True), marker="o")
    axes.set(xlabel="parameters left, %", ylabel="perplexity")
    axes.grid(alpha=0.3)
    figure.savefig(file)
