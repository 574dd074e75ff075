"""Sweep of a model over sparsities and methods, which share calibration text, sensitivity and error curves."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor.recipe import Recipe
from tqdm import tqdm
from transformers import PreTrainedModel, set_seed

from struprune_plugin.allocation.rules import RULES
from struprune_plugin.entrypoint import oneshot
from struprune_plugin.evaluation.calibration import make_dataset
from struprune_plugin.evaluation.scoring import (
    check_tasks,
    check_window,
    load_checkpoint,
    measure_perplexity,
    run_tasks,
)
from struprune_plugin.evaluation.text import load_tokenizer, read_texts, tokenize_texts
from struprune_plugin.model.layers import count_parameters
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.recipes.shipped import find_recipe, list_recipes
from struprune_plugin.reporting.tables import measure_weight_bytes
from struprune_plugin.runtime.stopwatch import time_runs
from struprune_plugin.storage.checkpoint import check_checkpoint, find_checkpoint
from struprune_plugin.storage.files import digest_file, is_empty, write_whole
from struprune_plugin.storage.manifest import describe_versions, read_manifest
from struprune_plugin.studies.plan import Workload

FILE_NAME = "sweep.json"
_REPEATS = 7
_SCRATCH = ".point-"  # begins the name of the folder of a point's model


@dataclass(frozen=True)
class Calibration(Workload):
    """Calibration text of every point."""

    data: str
    text_column: str


@dataclass(frozen=True)
class Scoring:
    """Settings of the scoring of every point.

    :param text: file of the text to score, in this column; perplexity in windows of ``window`` tokens
    :param tasks: lm-eval tasks, ``limit`` examples each
    """

    text: Path
    text_column: str
    window: int
    max_tokens: int | None
    tasks: Sequence[str]
    include_path: str | None
    limit: int | None


@dataclass(frozen=True)
class Sweep:
    """Settings of a sweep.

    :param recipe: recipe of the default method: a name or a file
    :param changes: changes to every method's recipe
    :param budgets: budgets by name, which replace the sparsities if there are any
    """

    model: str
    recipe: str
    changes: Mapping[str, Any]
    methods: Sequence[str]
    sparsities: Sequence[float]
    budgets: Mapping[str, Any]
    calibration: Calibration
    scoring: Scoring
    seed: int
    dtype: str

    @property
    def points(self) -> dict[str, tuple[str, float | str]]:
        """Method, and sparsity or name of a budget, by the name of the point."""
        sizes: list[float | str] = [*(self.budgets or self.sparsities)]
        told = {size: size if isinstance(size, str) else f"{size:g}" for size in sizes}
        return {f"{method} {told[size]}": (method, size) for method in self.methods for size in sizes}

    def load(self, method: str, size: float | str) -> Recipe:
        """Return the recipe of a point.

        :param size: a sparsity, or the name of a budget
        :raises ValueError: the method is neither an allocation rule nor a recipe
        """
        changes = dict(self.changes)
        if isinstance(size, str):
            changes["budget"] = self.budgets[size]
        else:
            changes["sparsity"] = size
        if method in RULES:
            changes["allocation"] = method
        elif method != "default":
            if method not in list_recipes():
                raise ValueError(
                    f"--methods: must be default, {', '.join(RULES)} or names of recipes, got {method!r}. Choose one of these; "
                    "`struprune recipes` lists the recipes."
                )
            return load_recipe(method, changes=changes)
        return load_recipe(self.recipe, changes=changes)


class SweepRun:
    """Sweep in a folder, with its finished points and the data that all points share.

    :param folder: folder of the results, in which the same sweep resumes
    :ivar record: finished points, as stored in ``sweep.json``
    :raises ValueError: bad input; the folder holds something else, or another sweep
    """

    def __init__(self, sweep: Sweep, folder: Path):
        for method in sweep.methods:
            for size in [*sweep.budgets] or sweep.sparsities[:1]:
                sweep.load(method, size)
        scoring, calibration = sweep.scoring, sweep.calibration
        check_window(check_checkpoint(sweep.model), scoring.window)
        self._manager = check_tasks(scoring.tasks, scoring.include_path) if scoring.tasks else None
        self.sweep, self.folder = sweep, folder
        self._tokenizer = load_tokenizer(sweep.model)
        self._dataset = make_dataset(
            sweep.model,
            self._tokenizer,
            calibration.data,
            calibration.num_samples,
            calibration.seq_length,
            calibration.text_column,
        )
        texts = read_texts(scoring.text, scoring.text_column)
        self._tokens = tokenize_texts(self._tokenizer, texts, scoring.max_tokens)
        identity = _identify(sweep, self._dataset)
        self.record = _open(folder, identity)

    def finish(self) -> dict[str, Any]:
        """Run every point that is not finished yet; return all points, as stored in ``sweep.json``."""
        record, points = self.record, self.sweep.points
        for left in self.folder.glob(f"{_SCRATCH}*"):  # of a sweep that was killed
            shutil.rmtree(left)
        dense, _ = load_checkpoint(self.sweep.model)
        if "dense" not in record:
            record["dense"] = {**self._score(dense), "bytes": measure_weight_bytes(self.sweep.model)}
            _write(self.folder, record)
        for name, (method, size) in tqdm(points.items(), desc="sweep"):
            if "perplexity" not in record["points"].get(name, {}):  # what was refused may have been a full disk
                recipe = self.sweep.load(method, size)
                with tempfile.TemporaryDirectory(dir=self.folder, prefix=_SCRATCH) as scratch:
                    try:
                        seconds = self.prune(recipe, Path(scratch) / "out")
                        found = {"seconds": seconds, **self._measure(Path(scratch) / "out", dense)}
                    except ValueError as error:  # one refused point must not stop a long sweep
                        found = {"refused": str(error)}
                asked = {"budget": self.sweep.budgets[size]} if isinstance(size, str) else {"sparsity": size}
                record["points"][name] = {"method": method, **asked, **found}
                _write(self.folder, record)
        return {**record, "points": {name: record["points"][name] for name in points}}

    def prune(self, recipe: Recipe, out: Path) -> float:
        """Prune with the recipe of a point into a folder, which may hold an earlier output; return the seconds."""
        set_seed(self.sweep.seed)
        start = time.perf_counter()
        oneshot(
            model=self.sweep.model,
            recipe=recipe,
            output_dir=out,
            overwrite=out.exists(),
            dataset=self._dataset,
            batch_size=self.sweep.calibration.batch_size,
            num_calibration_samples=self.sweep.calibration.num_samples,
            shuffle_calibration_samples=False,
            precision=self.sweep.dtype,
        )
        return time.perf_counter() - start

    def _measure(self, out: Path, dense: PreTrainedModel) -> dict[str, Any]:
        model, _ = load_checkpoint(str(out))
        budget = read_manifest(out).budget
        tokens = torch.full((1, self.sweep.scoring.window), 5, device=dense.device)
        runs = {"dense": partial(dense, tokens, use_cache=False), "pruned": partial(model, tokens, use_cache=False)}
        with torch.no_grad():
            seconds = time_runs(runs, _REPEATS)
        return {
            **self._score(model),
            "bytes": measure_weight_bytes(out),
            "removed": budget.met_sparsity,
            "speed": seconds["dense"] / seconds["pruned"],
        }

    def _score(self, model: PreTrainedModel) -> dict[str, Any]:
        scoring, batch = self.sweep.scoring, self.sweep.calibration.batch_size
        found: dict[str, Any] = {
            "parameters": count_parameters(model),
            "perplexity": measure_perplexity(model, self._tokens, scoring.window, None, batch),
            "tasks": {},
        }
        for task in scoring.tasks:
            scores = run_tasks(model, self._tokenizer, [task], self._manager, batch, scoring.limit)[task]
            metric = next(name for name in ("acc,none", *scores) if name in scores and "stderr" not in name)
            error = scores.get(metric.replace(",", "_stderr,"))
            found["tasks"][task] = {"metric": metric.partition(",")[0], "value": scores[metric], "stderr": error}
        return found


def _list_recipe_files(sweep: Sweep) -> list[str]:
    """Return the names of the recipes that the points of a sweep are made of."""
    return [sweep.recipe, *(method for method in sweep.methods if method in list_recipes())]


def _identify(sweep: Sweep, dataset: Dataset) -> dict[str, Any]:
    """Return what all points of a sweep must share, as JSON values."""
    folder = find_checkpoint(sweep.model)
    files = sorted(folder.glob("*.safetensors")) if folder else []
    return {
        "model": {file.name: digest_file(file) for file in files} or sweep.model,
        "recipe": {name: digest_file(find_recipe(name)) for name in _list_recipe_files(sweep)},
        "changes": json.loads(json.dumps(dict(sweep.changes), default=str)),
        "calibration": hashlib.sha256(json.dumps(dataset["input_ids"][:]).encode()).hexdigest(),
        "batch": sweep.calibration.batch_size,
        **asdict(sweep.scoring),
        "text": digest_file(sweep.scoring.text),
        "seed": sweep.seed,
        "dtype": sweep.dtype,
        "versions": describe_versions(),
    }


def _open(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Return the record of this sweep in a folder, a new one if the folder is empty or absent.

    :raises ValueError: the folder holds something else
    """
    file = folder / FILE_NAME
    if not file.is_file():
        if folder.exists() and not (folder.is_dir() and is_empty(folder)):
            raise ValueError(
                f"--output: must be empty, absent or the folder of an earlier sweep, {folder} is none of "
                "these. Choose another folder."
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
            f"--output: {file} must be as it was written, but cannot be read ({error!r:.200}). Choose another folder."
        ) from None
    changed = [name for name in identity if before.get(name) != identity[name]]
    if changed:
        raise ValueError(
            f"--output: {folder} holds a sweep with another {', '.join(changed)}, which cannot be continued. Choose another folder."
        )
    return record


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    write_whole(folder / FILE_NAME, json.dumps(record, indent=1) + "\n")
