"""Pages about an output, from the templates beside this file: its model card and its HTML report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from struprune_plugin.reporting.tables import describe_units, list_facts, list_result_rows, name_module
from struprune_plugin.storage.manifest import Manifest

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: name is not None and ".html" in name,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def fill_template(name: str, /, **values: Any) -> str:
    """Return a rendered template; in HTML, all values are escaped."""
    return _TEMPLATES.get_template(f"{name}.jinja").render(**values)


def make_page(folder: Path, manifest: Manifest) -> str:
    """Return the report of an output folder as one HTML page without scripts."""
    recipe = folder / "recipe.yaml"
    return fill_template(
        "report.html",
        title=f"{Path(manifest.model.base).name}, pruned by {manifest.budget.met_sparsity:.0%}",
        facts=list_facts(manifest, folder),
        modules=[(group, name_module(group), *describe_units(group)) for group in manifest.groups],
        most=max((group.error_before for group in manifest.groups), default=0.0) or 1.0,
        experts=manifest.experts,
        results=list_result_rows(manifest.evaluation),
        seed=manifest.seed,
        digest=manifest.calibration.sha256[:16],
        versions=", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "# this folder holds no recipe.yaml\n",
    )
