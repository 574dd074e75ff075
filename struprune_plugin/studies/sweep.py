"""Several sizes of a model by one command: each is a plain run, scored like the dense model; a table, a picture, a choice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmcompressor.recipe import Recipe
from tqdm import tqdm

from struprune_plugin.allocation.rules import RULES
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.recipes.shipped import list_recipes
from struprune_plugin.storage.files import is_empty, write_whole

FILE_NAME, PICTURE_NAME, DENSE = "sweep.json", "sweep.svg", "dense"
Scores = dict[str, dict[str, Any]]


def load_points(
    recipe: str, methods: Sequence[str], sparsities: Sequence[float], changes: Mapping[str, Any]
) -> dict[str, Recipe]:
    """Return the recipe of every point by its name, e.g. ``default 0.2``.

    :param recipe: recipe of the default method and of allocation rules: a name or a file
    :raises ValueError: a method is neither an allocation rule nor a recipe; a recipe cannot be read
    """
    found = {}
    for method in methods:
        if method not in ("default", *RULES, *list_recipes()):
            raise ValueError(
                f"--methods: must be default, {', '.join(RULES)} or names of recipes, got {method!r}. Choose one of these; "
                "`struprune recipes` lists the recipes."
            )
        rule = {"allocation": method} if method in RULES else {}
        chosen = recipe if rule or method == "default" else method
        for sparsity in sparsities:
            found[f"{method} {sparsity:g}"] = load_recipe(chosen, changes={**changes, **rule, "sparsity": sparsity})
    return found


def run_points(
    folder: Path,
    settings: Mapping[str, Any],
    recipes: Mapping[str, Recipe],
    prune: Callable[[Recipe, Path], object],
    score: Callable[[str], dict[str, Any]],
) -> Scores:
    """Prune and score every point; what an earlier call with the same settings has finished is kept.

    :param folder: holds ``sweep.json`` and the output of every point
    :param settings: settings of the sweep as JSON values, the model among them
    :param prune: prunes by a recipe into a folder
    :param score: returns the scores of a model by column
    :return: scores by point, those of the dense model first; a point that was refused has the reason alone
    :raises ValueError: the folder holds something else, or another sweep
    """
    scores = _read_scores(folder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    for name in tqdm([DENSE, *recipes], desc="sweep"):
        if "parameters" not in scores.get(name, {}):  # what was refused may have been a full disk
            start, out = time.perf_counter(), find_output(folder, name)
            try:
                if name == DENSE:
                    scores[name] = score(settings["model"])
                else:
                    prune(recipes[name], out)
                    seconds = round(time.perf_counter() - start, 1)
                    scores[name] = {**score(str(out)), "seconds": seconds}
            except ValueError as error:  # one refused point must not stop a long sweep
                if name == DENSE:
                    raise
                scores[name] = {"refused": str(error)}
            write_whole(folder / FILE_NAME, json.dumps({"settings": settings, "scores": scores}, indent=1) + "\n")
    return {name: scores[name] for name in (DENSE, *recipes)}


def find_output(folder: Path, name: str) -> Path:
    """Return the output folder of a point."""
    return folder / name.replace(" ", "-")


def _read_scores(folder: Path, settings: Mapping[str, Any]) -> Scores:
    file = folder / FILE_NAME
    if not file.is_file():
        if folder.exists() and not (folder.is_dir() and is_empty(folder)):
            raise ValueError(
                f"--output: must be empty, absent or the folder of an earlier sweep, {folder} is none of "
                "these. Choose another folder."
            )
        return {}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        before, scores = dict(record["settings"]), dict(record["scores"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--output: {file} must be as it was written, but cannot be read ({error!r:.200}). Choose another folder."
        ) from None
    changed = [name for name in settings if before.get(name) != settings[name]]
    if changed:
        raise ValueError(
            f"--output: {folder} holds a sweep with another {', '.join(changed)}, which cannot be continued. Choose another folder."
        )
    return scores


def add_changes(scores: Scores) -> Scores:
    """Return the scores with the relative change of perplexity beside it, for a table."""
    dense, found = scores[DENSE].get("perplexity"), {}
    for name, point in scores.items():
        found[name] = {key: value for key, value in point.items() if key != "refused"}
        if dense and name != DENSE and "perplexity" in point:
            found[name]["change"] = f"{point['perplexity'] / dense - 1:+.1%}"
    return found


def pick_point(scores: Scores, wanted: tuple[float, bool, str]) -> str:
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


def _read_value(point: Mapping[str, Any], what: str) -> float:
    """Return the perplexity, or the accuracy or first other metric of a task."""
    if what == "perplexity":
        return float(point[what])
    columns = [f"{what} acc", *(name for name in point if name.startswith(f"{what} ") and "stderr" not in name)]
    return float(next(point[name] for name in columns if name in point))


def draw_sweep(scores: Scores, file: Path) -> None:
    """Draw perplexity against the share of parameters left, a line per method.

    :raises ImportError: matplotlib is missing
    """
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).add_subplot()
    dense, lines = scores[DENSE], dict[str, list[tuple[float, float]]]()
    for name, point in scores.items():
        if name != DENSE and "refused" not in point:
            place = 100 * point["parameters"] / dense["parameters"], point["perplexity"]
            lines.setdefault(name.rpartition(" ")[0], []).append(place)
    for method, places in lines.items():
        axes.plot(*zip(*sorted(places), strict=True), marker="o", label=method)
    axes.plot([100], [dense["perplexity"]], marker="D", color="black", linestyle="none", label=DENSE)
    axes.set(xlabel="parameters left, %", ylabel="perplexity")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)
