"""Results of a sweep: Pareto points, the picked point, a table, plots."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from struprune_plugin.reporting.svg import draw_points
from struprune_plugin.reporting.tables import Table
from struprune_plugin.storage.files import format_bytes


def find_pareto(record: Mapping[str, Any]) -> list[str]:
    """Return the Pareto points: no other point is better in parameters or perplexity and no worse in the other."""
    done = {name: point for name, point in record["points"].items() if "refused" not in point}

    def beats(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
        no_worse = a["parameters"] <= b["parameters"] and a["perplexity"] <= b["perplexity"]
        return no_worse and (a["parameters"], a["perplexity"]) != (b["parameters"], b["perplexity"])

    return [name for name, point in done.items() if not any(beats(other, point) for other in done.values())]


def pick_point(record: Mapping[str, Any], wanted: tuple[float, bool, str]) -> str:
    """Return the smallest point within a permitted loss.

    :param wanted: as :func:`~struprune_plugin.cli.sweep_command.read_pick` returns it
    :raises ValueError: there is no such point
    """
    most, relative, what = wanted
    dense = _read_value(record["dense"], what)
    sign = 1 if what == "perplexity" else -1
    limit = dense * (1 + sign * most) if relative else dense + sign * most
    within = {
        name: point["parameters"]
        for name, point in record["points"].items()
        if "refused" not in point and sign * _read_value(point, what) <= sign * limit
    }
    if not within:
        raise ValueError(
            f"--pick: none of the {len(record['points'])} points keeps {what} within {limit:.4g}. Allow a larger loss, or sweep "
            "lower sparsities."
        )
    return min(within, key=within.__getitem__)


def _read_value(point: Mapping[str, Any], what: str) -> float:
    return float(point["perplexity"] if what == "perplexity" else point["tasks"][what]["value"])


def format_sweep(record: Mapping[str, Any]) -> list[Any]:
    """Return a table with one row per point and a star at Pareto points, and notes."""
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
    return [Table(header, rows), "\n".join(["* no other point is smaller and better", *notes])]


def _list_sizes(point: Mapping[str, Any]) -> list[str]:
    return [f"{point['parameters']:,}", format_bytes(point["bytes"])]


def _list_tasks(point: Mapping[str, Any], tasks: Sequence[str]) -> list[str]:
    cells = []
    for task in tasks:
        told = point["tasks"][task]
        cells.append(f"{told['value']:.3f}" + ("" if told["stderr"] is None else f" ± {told['stderr']:.3f}"))
    return cells


def draw_sweep(record: Mapping[str, Any]) -> dict[str, str]:
    """Return SVG plots by file name: perplexity and every task against parameters, perplexity against speed."""
    dense, pareto = record["dense"], find_pareto(record)
    done = {name: point for name, point in record["points"].items() if "refused" not in point}
    if not done:
        return {}

    pictures = [("perplexity", "Perplexity against parameters", "perplexity")]
    pictures += [("speed", "Perplexity against speed", "perplexity")]
    pictures += [(re.sub(r"[^A-Za-z0-9_-]", "_", task), f"{task} against parameters", task) for task in dense["tasks"]]
    files = {}
    for file, title, what in pictures:
        series: dict[str, list[tuple[float, float, str]]] = {}
        marked = []
        for name, point in {"dense": dense, **done}.items():
            value, told = _read_value(point, what), name
            if point is not dense:
                told = f"{name}: {what} {value:.4g}, {point['parameters']:,} parameters, {point['speed']:.2f} ×"
            x = point.get("speed", 1.0) if file == "speed" else point["parameters"] / dense["parameters"]
            series.setdefault(point.get("method", "dense"), []).append((x, value, told))
            marked += [told] if name in pareto else []
        label = "speed of a prompt, dense = 1" if file == "speed" else "parameters left"
        files[f"{file}.svg"] = draw_points(title, series, (label, what), lines=True, marked=marked)
    return files
