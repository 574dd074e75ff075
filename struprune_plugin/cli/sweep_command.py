"""``struprune sweep``: several sizes by one command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen
from struprune_plugin.recipes.shipped import find_recipe

_PICK = re.compile(r"([+-])(\d+(?:[.]\d+)?)(%?) (\S+)")
_WANTED = "also name the smallest model within this loss, e.g. '+5% perplexity'"


def sweep(
    model: opt.Model,
    output: Annotated[Path, opt.option("--output", "folder for the models, the table, JSON and a picture", "DIR")],
    sparsity: Annotated[
        str, opt.option("--sparsity", "a range, or a list such as 0.2,0.4", "A:B:STEP")
    ] = "0.1:0.6:0.1",
    recipe: opt.RecipeName = "struprune",
    pick: Annotated[str | None, opt.option("--pick", _WANTED, "LOSS")] = None,
    seed: opt.Seed = 0,
    dtype: opt.Dtype = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    device: opt.Device = "auto",
    num_samples: opt.NumSamples = None,
    seq_length: opt.SeqLength = 256,
    batch_size: opt.BatchSize = 8,
    data: opt.Data = None,
    text_column: opt.TextColumn = "text",
    settings: opt.Settings = None,
    text: opt.ScoredText = None,
    window: opt.Window = 256,
    max_tokens: opt.MaxTokens = None,
    tasks: opt.Tasks = None,
    include_path: opt.IncludePath = None,
    limit: opt.Limit = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prune at several sparsities, each by a run of its own, and compare quality.

    DIR holds the model of every point, e.g. DIR/0.2; after an interruption, the same command continues.
    """
    screen, changes = Screen(as_json, quiet), opt.read_changes(settings)
    sparsities, names = read_sparsities(sparsity), opt.read_tasks(tasks, include_path)
    wanted = None if pick is None else read_pick(pick, names)
    opt.check_names(recipe, [model], [data, text], device)
    opt.prepare(device, screen)
    from struprune_plugin.entrypoint import oneshot
    from struprune_plugin.evaluation.scoring import check_window
    from struprune_plugin.evaluation.text import DEMO_TEST
    from struprune_plugin.modifiers.host_arguments import check_amount, count_most_tokens
    from struprune_plugin.recipes.load import load_recipe
    from struprune_plugin.storage.checkpoint import check_checkpoint
    from struprune_plugin.studies.scores import Scoring, format_scores, make_scorer
    from struprune_plugin.studies.sweep import PICTURE_NAME, draw_sweep, pick_point, run_points

    config, count = check_checkpoint(model, trust_remote_code), opt.count_samples(num_samples, changes)
    check_window(config, window)
    first = load_recipe(recipe, changes={**changes, "sparsity": sparsities[0]})
    run: dict[str, Any] = {"precision": dtype, "seed": seed, "trust_remote_code_model": trust_remote_code}
    run |= opt.describe_calibration(data, text_column, count, seq_length, batch_size)
    check_amount(model, config, first, count_most_tokens(run), seq_length)
    asked = Scoring(
        text=str(text or DEMO_TEST),
        text_column=text_column if text else "text",
        window=window,
        max_tokens=max_tokens,
        tasks=names,
        include_path=include_path,
        limit=limit,
        batch_size=batch_size,
        trust_remote_code=trust_remote_code,
    )
    scorer = make_scorer(asked)

    def prune(sparsity: float, out: Path) -> None:
        own = {**changes, "sparsity": sparsity}
        oneshot(model=model, recipe=recipe, changes=own, output_dir=out, overwrite=out.exists(), **run)

    told = {
        "model": model,
        "recipe": find_recipe(recipe).read_text(encoding="utf-8"),
        "changes": str(changes),
        "run": {name: str(value) for name, value in run.items()},
        "scoring": asdict(asked),
    }
    scores = run_points(output, told, sparsities, prune, scorer)
    parts: list[Any] = [format_scores(scores)]
    parts += [f"{point}: refused, {found['refused']}" for point, found in scores.items() if "refused" in found]
    parts.append(f"wrote {output}")
    try:
        draw_sweep(scores, output / PICTURE_NAME)
    except ImportError:
        parts.append('no picture without matplotlib: pip install "struprune-plugin[plots]"')
    record: dict[str, Any] = {"scores": scores}
    if wanted is not None:
        point = pick_point(scores, wanted)
        record["picked"] = {"point": point, "output": str(output / point)}
        parts.append(f"picked {point}: {output / point}")
    screen.show(record, *parts)


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
