"""HTML report of an output: one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from struprune_plugin.reporting.results import list_result_rows
from struprune_plugin.reporting.svg import draw_layers, draw_points
from struprune_plugin.reporting.tables import describe_units, list_facts, list_stages, name_module
from struprune_plugin.reporting.templates import fill_template
from struprune_plugin.storage.manifest import Manifest

PROMPTS = ("The captain looked at the sea and", "The most important thing in science is", "She opened the letter, and")


@dataclass(frozen=True)
class Sample:
    """Text that the models write after a prompt.

    :param dense: text of the dense model; None if that model is not available
    """

    prompt: str
    dense: str | None
    pruned: str


def make_page(folder: Path, manifest: Manifest, samples: Sequence[Sample] = ()) -> str:
    """Return the report of an output folder as HTML."""
    base, groups, recipe = manifest.model.base, manifest.groups, folder / "recipe.yaml"
    seconds = [("pruning took", took) for name, took, _ in list_stages(manifest) if name == "whole pass"]
    return fill_template(
        "report.html",
        title=f"{Path(base).name}, pruned by {manifest.budget.met_sparsity:.0%}",
        facts=[*list_facts(manifest, folder), *seconds],
        layers=Markup(draw_layers(manifest)),
        modules=[(group, name_module(group), describe_units(group)[0]) for group in groups],
        most=max(group.error_before for group in groups) or 1.0,
        allocation=Markup(_draw_allocation(manifest)),
        results=list_result_rows(manifest.evaluation),
        samples=samples,
        base=base,
        folder=folder.name,
        seed=manifest.seed,
        digest=manifest.calibration.sha256[:16],
        versions=", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "# this folder holds no recipe.yaml\n",
        stages=list_stages(manifest),
    )


def _draw_allocation(manifest: Manifest) -> str:
    """Return a plot of each module's sparsity against its measured sensitivity or importance; empty if none was measured."""
    measured = manifest.sensitivity or manifest.allocation.importance or {}
    what = "sensitivity (Fisher information)" if manifest.sensitivity else "importance"
    series: dict[str, list[tuple[float, float, str]]] = {}
    for group in manifest.groups:
        value = measured.get(group.name)
        if value is not None and value > 0:
            point = (float(value), 100 * group.sparsity, f"{group.name}: {group.sparsity:.1%} removed")
            series.setdefault(name_module(group), []).append(point)
    return draw_points("Allocation against sensitivity", series, (what, "removed, %"), log_x=True) if series else ""
