"""Zero-shot accuracy on local multiple-choice items, by lm-eval."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.ledger import digest_sources, identify_text
from struprune_plugin.evaluation.scoring import check_tasks, run_tasks

TASKS_FOLDER = Path(__file__).parent / "tasks"
TASKS = {"HellaSwag": "struprune_hellaswag", "PIQA": "struprune_piqa"}  # by what tables call them
METRICS = ("acc", "acc_norm")


def identify_tasks(names: Sequence[str]) -> dict[str, Any]:
    """Return what zero-shot columns depend on: task files, items and lm-eval.

    :raises SystemExit: the items of a task are not where its file says, seen from the current folder
    """
    told: dict[str, Any] = {}
    for name in names:
        file = TASKS_FOLDER / f"{TASKS[name]}.yaml"
        parts = [file]
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if "include" in content:
            parts.append(TASKS_FOLDER / content["include"])
        items = Path(content["dataset_kwargs"]["data_files"]["test"])
        if not items.is_file():
            raise SystemExit(
                f"--zeroshot: {items} must hold the items of {name}, got no such file below {Path.cwd()}. Run from the "
                "repository's root, with the file there, or leave the option out."
            )
        told[name] = [identify_text(str(part)) for part in (*parts, items)]
    return {**told, "lm-eval": version("lm-eval"), "code": digest_sources(Path(__file__))} if told else {}


def find_items() -> list[Path]:
    """Return the files of the tasks' items, seen from the current folder; none where one of them is missing."""
    parsed = [yaml.safe_load((TASKS_FOLDER / f"{task}.yaml").read_text(encoding="utf-8")) for task in TASKS.values()]
    files = [Path(content["dataset_kwargs"]["data_files"]["test"]) for content in parsed]
    return files if all(file.is_file() for file in files) else []


def read_items() -> list[str]:
    """Return every item of the tasks with its right answer, as text."""
    rows = [json.loads(line) for file in find_items() for line in file.read_text(encoding="utf-8").splitlines()]
    return [f"{row['query']} {row['choices'][row['gold']]}" for row in rows]


def score_tasks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return accuracy and length-normalised accuracy with their standard errors, from 0 to 1, by task."""
    if not names:
        return {}
    tasks = [TASKS[name] for name in names]
    found = run_tasks(model, tokenizer, tasks, check_tasks(tasks, str(TASKS_FOLDER), include_defaults=False))
    keys = [key for metric in METRICS for key in (metric, f"{metric}_stderr")]
    return {name: {key: float(found[TASKS[name]][f"{key},none"]) for key in keys} for name in names}


def format_scores(scores: Mapping[str, float]) -> list[str]:
    """Return a cell a metric: per cent, and the standard error."""
    return [f"{scores[metric]:.1%} ± {scores[f'{metric}_stderr']:.1%}" for metric in METRICS]
