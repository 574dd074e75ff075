"""``struprune sweep``: several sparsities and methods."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from struprune_plugin.cli.console import Screen
from struprune_plugin.cli.options import (
    DEFAULTED_RECIPE,
    Calibration,
    Device,
    Dtype,
    Model,
    Scores,
    Seed,
    Settings,
    check_names,
    option,
    prepare,
    read_yaml,
)
from struprune_plugin.storage.files import write_whole

_PICK = re.compile(r"([+-])(\d+(?:[.]\d+)?)(%?) (\S+)")


@dataclass(frozen=True)
class Points:
    """Settings of a sweep."""

    output: Annotated[Path, option("folder for the table, JSON and pictures", "DIR")]
    sparsities: Annotated[
        str, option("sparsities: a range, or a list such as 0.2,0.4", "A:B:STEP", name="--sparsity")
    ] = "0.1:0.6:0.1"
    budget: Annotated[
        list[str] | None, option("budget, in place of sparsities, e.g. '{bytes: 400MB}'; may be repeated", "YAML")
    ] = None
    methods: Annotated[str, option("methods: default, allocation rules (uniform, …) or names of recipes", "a,b")] = (
        "default"
    )
    recipe: Annotated[str | None, DEFAULTED_RECIPE] = None
    pick: Annotated[
        str | None, option("also write the smallest model within this loss, e.g. '+5% perplexity'", "LOSS")
    ] = None
    picked: Annotated[Path | None, option("folder for the model of --pick [default: DIR/picked]", "OUT")] = None
    seed: Seed = 0
    dtype: Dtype = "auto"
    device: Device = "auto"


def sweep(
    model: Model,
    points: Points,
    calibration: Calibration,
    settings: Settings,
    scores: Scores,
    screen: Screen,
) -> None:
    """Prune at several sparsities with several methods, and compare quality.

    All points share one calibration, one sensitivity and one set of error curves. DIR keeps finished points: after an
    interruption, the same command continues.
    """
    changes, sparsities, tasks = settings.read(), read_sparsities(points.sparsities), scores.read_tasks()
    wanted = None if points.pick is None else read_pick(points.pick, tasks)
    if wanted is None and points.picked is not None:
        raise ValueError(
            f"--picked: has no effect without --pick, got {points.picked}. Add --pick, or remove --picked."
        )
    check_names(points.device, points.recipe, [model], [calibration.data, scores.text])
    prepare(points.device, screen)
    from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_TEST
    from struprune_plugin.storage.output_folder import check_output
    from struprune_plugin.studies import sweep as sweeping
    from struprune_plugin.studies import sweep_results as results

    asked = sweeping.Sweep(
        model=model,
        recipe=points.recipe or "struprune",
        changes=changes,
        methods=list(dict.fromkeys(name.strip() for name in points.methods.split(","))),
        sparsities=sparsities,
        budgets=read_budgets(points.budget or []),
        calibration=sweeping.Calibration(
            calibration.count_samples(changes),
            calibration.seq_length,
            calibration.batch_size,
            calibration.data or str(DEMO_CALIBRATION),
            calibration.text_column,
        ),
        scoring=sweeping.Scoring(
            **vars(scores) | {"text": scores.text or DEMO_TEST, "tasks": tasks},
            text_column=calibration.text_column if scores.text else "text",
        ),
        seed=points.seed,
        dtype=points.dtype,
    )
    picked, folder = points.picked or points.output / "picked", points.output
    if wanted is not None:
        if points.picked is not None and picked.is_dir() and any(picked.iterdir()):
            raise ValueError(f"--picked: must be empty or absent, {picked} is neither. Choose another folder.")
        check_output(picked, picked.exists(), [folder] if folder.exists() and picked.parent != folder else [])
    run = sweeping.SweepRun(asked, folder)
    record = run.finish()
    for name, drawn in results.draw_sweep(record).items():
        write_whole(folder / name, drawn + "\n")
    told = [*results.format_sweep(record), f"wrote {folder}"]
    table = "\n\n".join(map(str, told[:-1]))
    write_whole(folder / "sweep.md", f"# {Path(model).name}\n\n```\n{table}\n```\n")
    if wanted is not None:
        name = results.pick_point(record, wanted)
        run.prune(asked.load(*asked.points[name]), picked)
        record = {**record, "picked": {"point": name, "output": str(picked)}}
        told.append(f"picked {name}: wrote {picked}")
    screen.show({name: part for name, part in record.items() if name != "identity"}, *told)


def read_budgets(texts: Sequence[str]) -> dict[str, Any]:
    """Return budgets by name, which is the text without its brackets.

    :raises ValueError: invalid YAML, or a repeated budget
    """
    found = {text.strip().strip("{[]}").strip(): read_yaml("--budget", text) for text in texts}
    if len(found) < len(texts):
        raise ValueError(f"--budget: each budget must be given once, got {list(texts)}. Remove the repeated one.")
    return found


def read_sparsities(text: str) -> list[float]:
    """Parse ``first:last:step`` or a comma-separated list.

    :raises ValueError: another form, a number outside (0, 1), or a repeated number
    """
    try:
        found = [float(part) for part in text.split(",")] if ":" not in text else _spread(*map(float, text.split(":")))
    except (ValueError, TypeError):
        found = []
    if not found or not all(0 < value < 1 for value in found) or len(set(found)) < len(found):
        raise ValueError(
            f"--sparsity: must be first:last:step or numbers separated by commas, each above 0 and below 1, got {text!r}. "
            "Write, for example, 0.1:0.6:0.1 or 0.2,0.4."
        )
    return found


def _spread(first: float, last: float, step: float) -> list[float]:
    """Return the numbers of a range; empty if it is not a range, or has more than a hundred numbers."""
    count = (last - first) / step if step > 0 else -1.0
    return [round(first + index * step, 6) for index in range(int(count + 1e-6) + 1)] if 0 <= count < 100 else []


def read_pick(text: str, tasks: Sequence[str]) -> tuple[float, bool, str]:
    """Parse a permitted loss, e.g. ``+5% perplexity`` or ``-0.01 arc_easy``, into (amount, whether relative, measure).

    :param tasks: tasks that the sweep scores
    :raises ValueError: another form, or a task that is not among these
    """
    found = _PICK.fullmatch(text.strip())
    if found is None or (found[1] == "+") != (found[4] == "perplexity"):
        raise ValueError(
            f"--pick: must be like '+5% perplexity' or '-1% TASK', got {text!r}. Give how far perplexity may "
            "rise, or the score of a task may fall."
        )
    if found[4] not in ("perplexity", *tasks):
        raise ValueError(f"--pick: must name what the sweep measures, got {found[4]!r}. Add it to --tasks.")
    return float(found[2]) / (100 if found[3] else 1), bool(found[3]), found[4]
