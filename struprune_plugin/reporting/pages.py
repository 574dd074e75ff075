"""Pages about an output: its model card with the Hub's metadata, and its HTML report, from the templates beside this file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from loguru import logger

from struprune_plugin.reporting.tables import (
    Table,
    describe_units,
    list_facts,
    list_result_rows,
    name_module,
    read_saved_config,
)
from struprune_plugin.storage.files import is_hub_name
from struprune_plugin.storage.manifest import MANIFEST_NAME, Manifest, ResultRecord, read_manifest, write_manifest

CARD_NAME = "README.md"
_CARRIED = ("license", "license_name", "license_link", "language")  # copied from the dense model's card
_TAGS = ["struprune", "structured-pruning", "llm-compressor"]
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: name is not None and ".html" in name,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def _fill(template: str, /, **values: Any) -> str:
    """Return a rendered template; in HTML, all values are escaped."""
    return _TEMPLATES.get_template(f"{template}.jinja").render(**values)


def write_card(folder: Path, base: str = "") -> None:
    """Write the model card of an output folder; log a warning if that fails, so that no run is lost.

    :param base: as in :func:`make_card`
    """
    try:
        text = make_card(folder, base)
        ModelCard(text)  # raises on what the Hub could not read
        (folder / CARD_NAME).write_text(text, encoding="utf-8")
    except Exception as error:
        logger.warning(f"{folder.name}: no model card is written: {' '.join(str(error).split())}")


def make_card(folder: Path, base: str = "") -> str:
    """Return the text of the model card of an output folder.

    :param base: folder or hub name of the dense model; that of the manifest takes precedence
    """
    manifest = read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else None
    base = manifest.model.base if manifest else base
    carried, config = _read_metadata(base), read_saved_config(folder)
    name, results = Path(base).name or "a model", manifest.evaluation if manifest else []
    hub_name = base if "/" in base and not Path(base).is_dir() and is_hub_name(base) else None
    data = ModelCardData(
        base_model=hub_name,
        base_model_relation="quantized" if "quantization_config" in config else "finetune" if hub_name else None,
        tags=_TAGS,
        library_name="transformers",
        pipeline_tag="text-generation",
        **{key: carried[key] for key in _CARRIED if key in carried},
    )
    rows = list_result_rows(results)
    return _fill(
        "model_card.md",
        data=data.to_yaml(),
        name=name,
        hub_name=hub_name,
        facts=list_facts(manifest, folder) if manifest else [],
        results=str(Table(["", "dense", "pruned"], rows)) if rows else "",
        own_code="auto_map" in config,
        gguf=next((file.name for file in folder.glob("*.gguf")), ""),
        versions=", ".join(f"{name} {value}" for name, value in (manifest.versions if manifest else {}).items()),
    )


def _read_metadata(base: str) -> dict[str, Any]:
    """Return the metadata of a model's own card; empty if it has no readable card on this machine."""
    from struprune_plugin.storage.checkpoint import (
        find_checkpoint,  # imports transformers, which a report does not need
    )

    source = find_checkpoint(base) if base else None
    try:
        return ModelCard.load(source / CARD_NAME, ignore_metadata_errors=True).data.to_dict() if source else {}
    except Exception:  # a card that is missing or broken raises errors of many classes and is ignored
        return {}


def keep_results(folder: Path, found: Sequence[ResultRecord]) -> str:
    """Add results to an output's manifest and card; a repeated measurement replaces the earlier one. An edited card stays.

    :return: why they were not stored; empty if they were
    """
    try:
        card, manifest = folder / CARD_NAME, read_manifest(folder)
        is_edited = card.is_file() and card.read_text(encoding="utf-8") != make_card(folder)
        held = {result.name: result for result in (*manifest.evaluation, *found)}
        write_manifest(manifest.model_copy(update={"evaluation": [*held.values()]}), folder)
        if not is_edited:
            write_card(folder)
    except (OSError, ValueError) as error:
        return f"{folder} cannot be read or written: {error}"
    return ""


def make_page(folder: Path, manifest: Manifest) -> str:
    """Return the report of an output folder as one HTML page without scripts."""
    recipe = folder / "recipe.yaml"
    return _fill(
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
