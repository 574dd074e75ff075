"""Pages about an output: its model card with the Hub's metadata, and its HTML report, from the templates beside this file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from loguru import logger

from struprune_plugin.reporting.tables import (
    describe_units,
    list_facts,
    list_result_rows,
    list_vocabulary_facts,
    read_label,
    read_saved_config,
)
from struprune_plugin.storage.files import is_hub_name
from struprune_plugin.storage.manifest import MANIFEST_NAME, Manifest, ResultRecord, read_manifest, write_manifest
from struprune_plugin.storage.vocabulary_record import read_record

CARD_NAME = "README.md"
_CARRIED = ("license", "license_name", "license_link", "language")  # copied from the dense model's card
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: name is not None and ".html" in name,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def _fill(template: str, manifest: Manifest | None, folder: Path, base: str, **values: Any) -> str:
    """Return a rendered template; in HTML, all values are escaped."""
    facts = list_facts(manifest, folder) if manifest else list_vocabulary_facts(read_record(folder))
    rows = list_result_rows(manifest.evaluation) if manifest else []
    versions = ", ".join(f"{name} {value}" for name, value in (manifest.versions if manifest else {}).items())
    shared = {"manifest": manifest, "name": Path(base).name, "facts": facts, "rows": rows}
    return _TEMPLATES.get_template(template).render(shared, versions=versions, **values)


def write_card(folder: Path) -> None:
    """Write the model card of a pruned or trimmed folder; log a warning if that fails, so that no run is lost."""
    try:
        text = make_card(folder)
        ModelCard(text)  # raises on what the Hub could not read
        (folder / CARD_NAME).write_text(text, encoding="utf-8")
    except Exception as error:
        logger.warning(f"{folder.name}: no model card is written: {' '.join(str(error).split())}")


def make_card(folder: Path) -> str:
    """Return the text of the model card of a pruned or trimmed folder."""
    record, config = read_record(folder), read_saved_config(folder)
    manifest = None if record and not (folder / MANIFEST_NAME).is_file() else read_manifest(folder)
    base = manifest.model.base if manifest else record.base if record else ""
    hub_name = base if "/" in base and not Path(base).is_dir() and is_hub_name(base) else None
    data = ModelCardData(
        base_model=hub_name,
        base_model_relation="quantized" if "quantization_config" in config else "finetune" if hub_name else None,
        tags=["struprune", "structured-pruning", "llm-compressor"],
        library_name="transformers",
        pipeline_tag="text-generation",
        **_read_carried(base),
    )
    own_code, gguf = "auto_map" in config, next((file.name for file in folder.glob("*.gguf")), "")
    values = {"data": data.to_yaml(), "hub_name": hub_name, "own_code": own_code, "gguf": gguf}
    return _fill("model_card.md.jinja", manifest, folder, base, **values)


def _read_carried(base: str) -> dict[str, Any]:
    """Return the licence and language on a model's own card; empty if it has no readable card on this machine."""
    from struprune_plugin.storage.checkpoint import find_checkpoint  # which imports transformers

    source = find_checkpoint(base) if base else None
    try:
        fields = ModelCard.load(source / CARD_NAME, ignore_metadata_errors=True).data.to_dict() if source else {}
        return {key: fields[key] for key in _CARRIED if key in fields}
    except Exception:  # a card that is missing or broken raises errors of many classes and is ignored
        return {}


def keep_results(folder: Path, results: Sequence[ResultRecord]) -> None:
    """Add results to an output's manifest and card; a repeated measurement replaces the earlier one. An edited card stays."""
    card, manifest = folder / CARD_NAME, read_manifest(folder)
    is_edited = card.is_file() and card.read_bytes() != make_card(folder).encode()
    held = {result.name: result for result in manifest.evaluation}
    for new in results:
        old = held.get(new.name)
        if new.dense is None and old and old.text == new.text:  # scored without the dense model this time
            new = replace(new, dense=old.dense, dense_stderr=old.dense_stderr)
        held[new.name] = new
    write_manifest(manifest.model_copy(update={"evaluation": [*held.values()]}), folder)
    if not is_edited:
        write_card(folder)


def make_page(folder: Path, manifest: Manifest) -> str:
    """Return the report of an output folder as one HTML page without scripts."""
    recipe = folder / "recipe.yaml"
    most = max((group.error_before for group in manifest.groups), default=0.0) or 1.0
    first = next(map(read_label, manifest.groups), "")  # in another colour
    modules = [(group, *describe_units(group), read_label(group) == first) for group in manifest.groups]
    values = {"modules": modules, "most": most}
    text = recipe.read_text(encoding="utf-8") if recipe.is_file() else "# this folder holds no recipe.yaml\n"
    return _fill("report.html.jinja", manifest, folder, manifest.model.base, recipe=text, **values)
