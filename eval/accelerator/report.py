"""Report of the results of the steps, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.accelerator.outputs import advise
from eval.accelerator.pruning import TARGET, describe_speed
from eval.accelerator.steps import Journal, Step
from eval.speed import format_rows
from struprune_plugin.reporting.tables import format_table

Rows = Mapping[str, Mapping[str, Any]]


def write_report(journal: Journal, steps: Sequence[Step], folder: Path) -> None:
    """Write ``accelerator.md`` from all steps done so far."""
    rows = {step.name: row for step in steps if (row := journal.find(step)) is not None}
    waiting = [step.name for step in steps if step.name not in rows]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "accelerator.md").write_text(make_report(rows, waiting, journal.settings), encoding="utf-8")


def make_report(rows: Rows, waiting: Sequence[str], settings: Mapping[str, str]) -> str:
    """Return the Markdown text.

    :param rows: by step
    :param waiting: steps not done yet
    """
    told = ", ".join(f"{name}: {value}" for name, value in settings.items())
    good = {name: row for name, row in rows.items() if "error" not in row}
    parts = [f"# On an accelerator\n\n{told}. {len(good)} of {len(rows) + len(waiting)} steps done."]
    failed = [f"- {name}: {row['error']}" for name, row in rows.items() if "error" in row]
    failed += [
        f"- {name}: not as it should be, see its row" for name, row in good.items() if row.get("passed") is False
    ]
    for heading, lines in (("Failed", failed), ("Not done yet", [f"- {name}" for name in waiting])):
        if lines:
            parts.append(f"## {heading}\n\n" + "\n".join(lines))
    makers = (_tell_rates, _tell_correct, _tell_speed, _tell_memory, _tell_outputs)
    return "\n\n".join([*parts, *filter(None, (make(good) for make in makers))]) + "\n"


def _fence(table: str) -> str:
    return f"```\n{table}\n```"


def _fence_table(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    return _fence(format_table(header, lines))


def _tell_rates(rows: Rows) -> str:
    if "rates" not in rows:
        return ""
    rates = rows["rates"]["rates"]
    units = {"model": "TFLOP/s", "single": "TFLOP/s", "double": "TFLOP/s", "host": "TB/s", "memory": "TB/s"}
    lines = [[name, f"{rates[name] / 1e12:.3f} {unit}"] for name, unit in units.items()]
    return "## Rates\n\n" + _fence_table(["what", "measured"], lines)


def _tell_correct(rows: Rows) -> str:
    lines = [
        [
            name.removeprefix("correct: "),
            f"{row['same_units']:.1%}",
            f"{row['weights']:.1e}",
            f"{row['reloaded']:.1e}",
            f"{row['tolerance']:g}",
            "yes" if row["passed"] else "NO",
        ]
        for name, row in rows.items()
        if name.startswith("correct: ")
    ]
    if not lines:
        return ""
    header = ["case", "same units", "weights differ by", "reloaded logits by", "allowed", "passed"]
    return "## The card's results and the CPU's\n\n" + _fence_table(header, lines)


def _tell_speed(rows: Rows) -> str:
    parts = []
    for name, row in rows.items():
        if not name.startswith("speed: "):
            continue
        table = _fence_table(["stage", "seconds", "floor", "target", "ratio", "peak, GB"], describe_speed(row))
        told = (
            f"{row['layer_seconds']:.2f} s a layer, {row['ratio']:.2f} × the floor (target: {TARGET:g} ×), "
            f"{row['counted']:.1f} s counted at the measured rates; the whole model {row['model_seconds']:.0f} s"
        )
        if "fasp_seconds" in row:
            told += f", FASP as its paper tells {row['fasp_seconds']:.0f} s"
        parts.append(f"### {name.removeprefix('speed: ')}, {row['layers']} layers\n\n{table}\n\n{told}.")
    return "\n\n".join(["## Speed of pruning", *parts]) if parts else ""


def _tell_memory(rows: Rows) -> str:
    lines = []
    for name, row in rows.items():
        if not name.startswith("memory: "):
            continue
        sizes = [
            row["layer_bytes"],
            row["budget_bytes"],
            row["peak_bytes"],
            row["account_bytes"],
            row["reserved_bytes"],
        ]
        cells = ["" if size is None else f"{size / 1e9:.4f}" for size in sizes]
        ratios = [f"{row['account_bytes'] / row['peak_bytes']:.3f}", f"{row['peak_bytes'] / row['layer_bytes']:.2f}"]
        lines.append([name.removeprefix("memory: "), *cells, *ratios, "yes" if row["passed"] else "NO"])
    if not lines:
        return ""
    header = ["GB", "one layer", "budget", "peak", "account", "reserved", "account / peak", "peak / layer", "passed"]
    return "## Memory\n\n" + _fence_table(header, lines)


def _tell_outputs(rows: Rows) -> str:
    parts = [
        f"### {name.removeprefix('outputs: ')}, {row['layers']} layers\n\n"
        f"{_fence(format_rows(row['rows']))}\n\n{advise(row['rows'])}"
        for name, row in rows.items()
        if name.startswith("outputs: ")
    ]
    return "\n\n".join(["## Speed of pruned layers", *parts]) if parts else ""
