"""A model at several sparsities, by several methods: one sensitivity, one set of error curves; a choice on the curve."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor.recipe import Recipe
from transformers import PreTrainedModel, set_seed

from struprune_plugin.checkpoint import check_checkpoint, find_checkpoint
from struprune_plugin.contents import digest_file, write_whole
from struprune_plugin.data import load_tokenizer, make_calibration_dataset, read_texts, tokenize_texts
from struprune_plugin.entrypoint import oneshot
from struprune_plugin.evaluation import check_tasks, load_checkpoint, measure_perplexity, run_tasks
from struprune_plugin.export import describe_versions, read_manifest
from struprune_plugin.folder import check_output
from struprune_plugin.model.layers import count_parameters
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.passes.evidence import EvidenceStore
from struprune_plugin.passes.journal import Journal, digest_package
from struprune_plugin.passes.rules import RULES
from struprune_plugin.picture import draw_points
from struprune_plugin.recipe import load_recipe
from struprune_plugin.report import format_bytes, format_table, measure_weight_bytes
from struprune_plugin.shipped import list_recipes

FILE_NAME = "sweep.json"
_REPEATS, _BOOTSTRAP = 7, 100


@dataclass(frozen=True)
class Calibration:
    """The calibration text of every point: ``samples`` windows of ``length`` tokens, ``batch`` at a time."""

    data: str
    text_column: str
    samples: int
    length: int
    batch: int

    def make(self, tokenizer: Any) -> Dataset:
        """Tokenize it."""
        return make_calibration_dataset(self.data, tokenizer, self.samples, self.length, self.text_column)


@dataclass(frozen=True)
class Scoring:
    """How every point is judged.

    :param text: to score; perplexity in windows of ``window`` tokens
    :param tasks: of lm-eval, ``limit`` examples each
    """

    text: Path
    text_column: str
    window: int
    max_tokens: int | None
    tasks: Sequence[str]
    include_path: str | None
    limit: int | None
    batch: int


@dataclass(frozen=True)
class Sweep:
    """What is swept.

    :param recipe: the default method: a name or a file
    :param changes: to every method's recipe
    """

    model: str
    recipe: str
    changes: Mapping[str, Any]
    methods: Sequence[str]
    sparsities: Sequence[float]
    calibration: Calibration
    scoring: Scoring
    seed: int
    dtype: str

    @property
    def points(self) -> list[tuple[str, float]]:
        return [(method, sparsity) for method in self.methods for sparsity in self.sparsities]

    def load(self, method: str, sparsity: float) -> Recipe:
        """Return the recipe of a point.

        :raises ValueError: a method that is no allocation and no recipe
        """
        changes = {**self.changes, "sparsity": sparsity}
        if method in ("uniform", *RULES):
            changes["allocation"] = method
        elif method != "default":
            if method not in list_recipes():
                raise ValueError(
                    f"--methods: must be default, uniform, {', '.join(RULES)} or names of recipes, got {method!r}. Correct it."
                )
            return load_recipe(method, changes=changes)
        return load_recipe(self.recipe, changes=changes)


# -- running --------------------------------------------------------------------------------------------------------


def run_sweep(
    sweep: Sweep, folder: Path, watch: Callable[[str, Recipe], AbstractContextManager[object]]
) -> dict[str, Any]:
    """Finish every point of a sweep that is not finished yet; return all, as ``sweep.json`` holds them.

    :param folder: where everything is kept; the same call goes on there
    :param watch: shows how far a point is
    :raises ValueError: bad input; the folder holds something else, or another sweep
    """
    for method in sweep.methods:
        sweep.load(method, sweep.sparsities[0])
    check_checkpoint(sweep.model)
    scoring = sweep.scoring
    if scoring.tasks:
        check_tasks(scoring.tasks, scoring.include_path)
    tokenizer = load_tokenizer(sweep.model)
    dataset = sweep.calibration.make(tokenizer)
    tokens = tokenize_texts(tokenizer, read_texts(scoring.text, scoring.text_column), scoring.max_tokens)
    identity = _identify(sweep, dataset)
    record = _open(folder, identity)
    journal = Journal(folder / "evidence")
    journal.open(identity)
    store = EvidenceStore(journal)
    dense, _ = load_checkpoint(sweep.model)
    if "dense" not in record:
        record["dense"] = {**_score(dense, tokenizer, tokens, scoring), "bytes": measure_weight_bytes(sweep.model)}
        _write(folder, record)
    for method, sparsity in sweep.points:
        name = f"{method} {sparsity:g}"
        if name not in record["points"]:
            recipe = sweep.load(method, sparsity)
            with tempfile.TemporaryDirectory(dir=folder) as scratch, watch(name, recipe):
                try:
                    found = prune_point(sweep, recipe, dataset, store, Path(scratch) / "out")
                    found |= _measure(Path(scratch) / "out", tokenizer, tokens, scoring, dense)
                except ValueError as error:  # one refused point must not stop a long sweep
                    found = {"refused": str(error)}
            record["points"][name] = {"method": method, "sparsity": sparsity, **found}
            _write(folder, record)
    return {**record, "points": {name: record["points"][name] for name in (f"{m} {s:g}" for m, s in sweep.points)}}


def prune_point(
    sweep: Sweep,
    recipe: Recipe,
    dataset: Dataset | None,
    store: EvidenceStore | None,
    out: Path,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Prune by the recipe of a point; return what it took."""
    if dataset is None:
        dataset = sweep.calibration.make(load_tokenizer(sweep.model))
    for modifier in recipe.modifiers:
        if isinstance(modifier, StructuredModifier) and store is not None:
            modifier.take_evidence(store)
    set_seed(sweep.seed)
    start = time.perf_counter()
    oneshot(
        model=sweep.model,
        recipe=recipe,
        output_dir=out,
        overwrite=overwrite,
        dataset=dataset,
        batch_size=sweep.calibration.batch,
        num_calibration_samples=sweep.calibration.samples,
        shuffle_calibration_samples=False,
        precision=sweep.dtype,
    )
    return {"seconds": time.perf_counter() - start}


def check_picked(picked: Path, folder: Path) -> None:
    """Refuse, before a long sweep, a place for the picked model that cannot be written, or that holds the sweep.

    :raises ValueError: as :func:`~struprune_plugin.folder.check_output`
    """
    check_output(picked, picked.exists(), [folder] if folder.exists() and picked.parent != folder else [])


def open_store(sweep: Sweep, folder: Path) -> EvidenceStore:
    """Return what a finished sweep has measured of the dense model."""
    journal = Journal(folder / "evidence")
    journal.open(json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))["identity"])
    return EvidenceStore(journal)


def _measure(
    out: Path, tokenizer: Any, tokens: torch.Tensor, scoring: Scoring, dense: PreTrainedModel
) -> dict[str, Any]:
    manifest = read_manifest(out)
    model, _ = load_checkpoint(str(out))
    found = {**_score(model, tokenizer, tokens, scoring), "bytes": measure_weight_bytes(out)}
    found |= {"removed": manifest["budget"]["met_sparsity"], "speed": _measure_speed(dense, model, scoring.window)}
    return found


def _score(model: PreTrainedModel, tokenizer: Any, tokens: torch.Tensor, scoring: Scoring) -> dict[str, Any]:
    found: dict[str, Any] = {
        "parameters": count_parameters(model),
        "perplexity": measure_perplexity(model, tokens, scoring.window, None, scoring.batch),
        "tasks": {},
    }
    for task in scoring.tasks:
        options: dict[str, Any] = {"bootstrap_iters": _BOOTSTRAP}
        scores = run_tasks(model, tokenizer, [task], scoring.include_path, scoring.batch, scoring.limit, **options)[
            task
        ]
        metric = next(name for name in ("acc,none", *scores) if name in scores and "stderr" not in name)
        error = scores.get(metric.replace(",", "_stderr,"))
        found["tasks"][task] = {"metric": metric.partition(",")[0], "value": scores[metric], "stderr": error}
    return found


@torch.no_grad()
def _measure_speed(dense: PreTrainedModel, pruned: PreTrainedModel, window: int) -> float:
    """Return how much faster a prompt of one window is; rounds in turn, the least of each."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = time.process_time if alone else time.perf_counter  # its own seconds: others may share the machine
    tokens = torch.full((1, window), 5, device=dense.device)
    best = [float("inf")] * 2
    for _ in range(_REPEATS):
        for index, model in enumerate((dense, pruned)):
            start = clock()
            model(tokens, use_cache=False)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[index] = min(best[index], clock() - start)
    return best[0] / best[1]


def _identify(sweep: Sweep, dataset: Dataset) -> dict[str, Any]:
    """Return what all points of a sweep must share, JSON."""
    folder = find_checkpoint(sweep.model)
    files = sorted(folder.glob("*.safetensors")) if folder else []
    return {
        "model": {file.name: digest_file(file) for file in files} or sweep.model,
        "recipe": sweep.recipe,
        "changes": json.loads(json.dumps(dict(sweep.changes), default=str)),
        "calibration": hashlib.sha256(json.dumps(dataset["input_ids"][:]).encode()).hexdigest(),
        "batch": sweep.calibration.batch,
        "text": digest_file(sweep.scoring.text),
        "window": sweep.scoring.window,
        "max_tokens": sweep.scoring.max_tokens,
        "tasks": list(sweep.scoring.tasks),
        "limit": sweep.scoring.limit,
        "seed": sweep.seed,
        "dtype": sweep.dtype,
        "versions": describe_versions(),
        "code": digest_package(),
    }


def _open(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Return what a folder holds of this sweep.

    :raises ValueError: it holds something else
    """
    file = folder / FILE_NAME
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output: must be a folder, {folder} is a file. Choose another path.")
    if not file.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(
                f"--output: must be empty, absent or the folder of an earlier sweep, {folder} is none of these. Choose another."
            )
        folder.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {"identity": identity, "points": {}}
        _write(folder, record)
        return record
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        before = record["identity"]
        if not isinstance(record["points"], dict):
            raise TypeError("points")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--output: {file} must be as it was written, got {error!r:.200}. Choose another folder."
        ) from None
    changed = [name for name in identity if before.get(name) != identity[name]]
    if changed:
        raise ValueError(
            f"--output: {folder} must hold this very sweep to go on with it, got one with another {', '.join(changed)}. Choose "
            "another folder."
        )
    return record


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    write_whole(folder / FILE_NAME, json.dumps(record, indent=1) + "\n")


# -- choosing -------------------------------------------------------------------------------------------------------


def find_pareto(record: Mapping[str, Any]) -> list[str]:
    """Return the points that no other one beats: none has at most as many parameters and a lower perplexity."""
    done = {name: point for name, point in record["points"].items() if "refused" not in point}

    def beats(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
        no_worse = a["parameters"] <= b["parameters"] and a["perplexity"] <= b["perplexity"]
        return no_worse and (a["parameters"], a["perplexity"]) != (b["parameters"], b["perplexity"])

    return [name for name, point in done.items() if not any(beats(other, point) for other in done.values())]


def pick_point(record: Mapping[str, Any], wanted: tuple[float, bool, str]) -> str:
    """Return the smallest point that loses no more than may be lost.

    :param wanted: as :func:`~struprune_plugin.arguments.read_pick` gives it
    :raises ValueError: there is none, or what is named was not measured
    """
    most, relative, what = wanted
    dense = _read_value(record["dense"], what)
    if dense is None:
        raise ValueError(f"--pick: must name what the sweep measures, got {what!r}. Add it to --tasks.")
    sign = 1 if what == "perplexity" else -1
    limit = dense * (1 + sign * most) if relative else dense + sign * most
    within = {
        name: point["parameters"]
        for name, point in record["points"].items()
        if "refused" not in point and sign * (_read_value(point, what) or 0.0) <= sign * limit
    }
    if not within:
        raise ValueError(
            f"--pick: a point must keep {what} within {limit:.4g}, got none of {len(record['points'])}. Allow more, or sweep lower "
            "sparsities."
        )
    return min(within, key=within.__getitem__)


def _read_value(point: Mapping[str, Any], what: str) -> float | None:
    if what == "perplexity":
        return float(point["perplexity"])
    task = point["tasks"].get(what)
    return None if task is None else float(task["value"])


# -- showing --------------------------------------------------------------------------------------------------------


def format_sweep(record: Mapping[str, Any]) -> str:
    """Return one line a point; a star where no other point is smaller and better."""
    pareto, dense = find_pareto(record), record["dense"]
    tasks = list(dense["tasks"])
    header = ["point", "", "parameters", "weights", "perplexity", "change", *tasks, "speed, prompt", "seconds"]
    rows = [["dense", "", *_list_sizes(dense), f"{dense['perplexity']:.2f}", "", *_list_tasks(dense, tasks), "1 ×", ""]]
    notes = []
    for name, point in record["points"].items():
        if "refused" in point:
            rows.append([name, "", "refused", *[""] * (len(header) - 3)])
            notes.append(f"{name}: refused, {point['refused']}")
            continue
        change = f"{point['perplexity'] / dense['perplexity'] - 1:+.1%}"
        line = [name, "*" if name in pareto else "", *_list_sizes(point), f"{point['perplexity']:.2f}", change]
        rows.append([*line, *_list_tasks(point, tasks), f"{point['speed']:.2f} ×", f"{point['seconds']:.1f}"])
    return "\n".join([format_table(header, rows), "* no other point is smaller and better", *notes])


def _list_sizes(point: Mapping[str, Any]) -> list[str]:
    return [f"{point['parameters']:,}", format_bytes(point["bytes"])]


def _list_tasks(point: Mapping[str, Any], tasks: Sequence[str]) -> list[str]:
    cells = []
    for task in tasks:
        told = point["tasks"][task]
        cells.append(f"{told['value']:.3f}" + ("" if told["stderr"] is None else f" ± {told['stderr']:.3f}"))
    return cells


def draw_sweep(record: Mapping[str, Any]) -> dict[str, str]:
    """Return pictures by file name: perplexity and every task against parameters, perplexity against speed."""
    dense, pareto = record["dense"], find_pareto(record)
    done = {name: point for name, point in record["points"].items() if "refused" not in point}
    if not done:
        return {}

    def draw(title: str, x: Callable[[Any], float], what: str, labels: tuple[str, str]) -> str:
        series: dict[str, list[tuple[float, float, str]]] = {
            "dense": [(x(dense), _read_value(dense, what) or 0.0, "dense")]
        }
        for name, point in done.items():
            told = f"{name}: {what} {_read_value(point, what):.4g}, {point['parameters']:,} parameters, {point['speed']:.2f} ×"
            series.setdefault(point["method"], []).append((x(point), _read_value(point, what) or 0.0, told))
        marked = [told for part in series.values() for *_, told in part if told.partition(": ")[0] in pareto]
        return draw_points(title, series, labels, lines=True, marked=marked)

    def count(point: Mapping[str, Any]) -> float:
        return point["parameters"] / dense["parameters"]

    left = "parameters left"
    files = {
        "perplexity.svg": draw("Perplexity against parameters", count, "perplexity", (left, "perplexity")),
        "speed.svg": draw(
            "Perplexity against speed",
            lambda point: point.get("speed", 1.0),
            "perplexity",
            ("speed of a prompt, dense = 1", "perplexity"),
        ),
    }
    for task in dense["tasks"]:
        files[f"{re.sub(r'[^A-Za-z0-9_-]', '_', task)}.svg"] = draw(
            f"{task} against parameters", count, task, (left, task)
        )
    return files
