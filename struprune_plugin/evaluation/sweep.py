"""Several sizes of a model by one command: each is a plain run, scored like the dense model; a table, a picture, a choice."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from loguru import logger
from tqdm import tqdm

from struprune_plugin.evaluation.scores import Score
from struprune_plugin.storage.files import check_place, is_empty, write_whole
from struprune_plugin.storage.manifest import MANIFEST_NAME

FILE_NAME, DENSE = "sweep.json", "dense"


def run_points(
    folder: Path,
    settings: Mapping[str, Any],
    sparsities: Sequence[float],
    prune: Callable[[float, Path], object],
    score: Callable[[str], Score],
) -> tuple[dict[str, Score], dict[str, str]]:
    """Prune and score every point, then score the dense model; what an earlier call with the same settings has finished is kept.

    :param folder: holds ``sweep.json`` and the output of every point, named by its sparsity
    :param settings: settings of the sweep, the model among them
    :param prune: prunes to a sparsity into a folder
    :return: scores by point, those of the dense model first; why other points are left out
    :raises ValueError: the folder holds something else, or another sweep
    """
    check_place("--output", folder)
    settings = json.loads(json.dumps(settings, default=str))
    scores = _read_scores(folder, settings)
    scores = {name: score for name, score in scores.items() if name == DENSE or (folder / name).exists()}
    folder.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        write_whole(folder / FILE_NAME, json.dumps({"settings": settings, "scores": scores}, indent=1) + "\n")

    save()  # marks the folder as this sweep's
    points, refused = {f"{sparsity:g}": sparsity for sparsity in sparsities}, dict[str, str]()
    for name in tqdm([name for name in (*points, DENSE) if name not in scores], desc="sweep"):
        try:
            if name != DENSE:
                prune(points[name], folder / name)
        except ValueError as error:
            if not scores:  # the first point tells bad input at once
                (folder / FILE_NAME).unlink()
                with suppress(OSError):  # another process has put something there
                    folder.rmdir()
                raise
            refused[name] = str(error)
            continue
        scores[name] = score(settings["model"] if name == DENSE else str(folder / name))
        save()
    return {name: scores[name] for name in (DENSE, *points) if name in scores}, refused


def digest_files(model: str, *texts: str | Path) -> str:
    """Return a digest of the weights, tokenizer, configuration and code in a model's folder, and of files of text."""
    digest, inside = hashlib.sha256(), sorted(Path(model).glob("*"))
    kinds = ".safetensors", ".json", ".model", ".txt", ".jinja", ".py"
    for file in [*(each for each in inside if each.suffix in kinds and each.name != MANIFEST_NAME), *map(Path, texts)]:
        if file.is_file():  # else it is on the hub
            with open(file, "rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _read_scores(folder: Path, settings: Mapping[str, Any]) -> dict[str, Score]:
    """Return the scores that an earlier call with these settings has left."""
    file = folder / FILE_NAME
    if not file.is_file():
        if folder.exists() and not is_empty(folder):
            raise ValueError(
                f"--output: {folder} must be empty, absent or the folder of an earlier sweep. Choose another folder."
            )
        return {}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        changed = [name for name in settings if record["settings"].get(name) != settings[name]]
        scores = dict(record["scores"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--output: {file} must be a sweep's record, it is damaged ({error!r}). Remove it.") from None
    if changed and (scores or any(path.is_dir() for path in folder.iterdir())):  # a point that has no score yet
        raise ValueError(
            f"--output: {folder} holds a sweep with another {', '.join(changed)}, which cannot be continued. Choose another folder."
        )
    return scores


def pick_point(scores: Mapping[str, Score], most: float) -> str:
    """Return the smallest point whose perplexity is above that of the dense model by at most a share."""
    limit = scores[DENSE]["perplexity"] * (1 + most)
    within = [name for name in scores if name != DENSE and scores[name]["perplexity"] <= limit]
    if not within:
        raise ValueError(
            f"--pick: none of the points keeps perplexity within {limit:.4g}. Allow a larger loss, or sweep lower sparsities."
        )
    return min(within, key=lambda name: scores[name]["parameters"])


def draw_sweep(scores: Mapping[str, Score], folder: Path) -> None:
    """Draw perplexity against the share of parameters left into ``sweep.svg``."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("no picture without matplotlib: pip install matplotlib")
        return
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).add_subplot()
    whole = scores[DENSE]["parameters"]
    points = sorted((100 * point["parameters"] / whole, point["perplexity"]) for point in scores.values())
    axes.plot([left for left, _ in points], [perplexity for _, perplexity in points], marker="o")
    axes.set(xlabel="parameters left, %", ylabel="perplexity")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "sweep.svg")
