"""Model card of an output folder: README.md with the Hub's metadata and the measured results."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from loguru import logger

from struprune_plugin.reporting.pages import fill_template
from struprune_plugin.reporting.tables import Table, list_facts, list_result_rows, name_result, read_saved_config
from struprune_plugin.storage.checkpoint import find_checkpoint
from struprune_plugin.storage.files import digest_file, is_hub_name
from struprune_plugin.storage.manifest import MANIFEST_NAME, read_manifest, write_manifest
from struprune_plugin.storage.records import EvaluationRecord, PerplexityRecord, TaskRecord

CARD_NAME = "README.md"
_CARRIED = ("license", "license_name", "license_link", "language")  # copied from the dense model's card
_LEGAL = ("LICENSE*", "NOTICE*", "USE_POLICY*")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)$")
_TAGS = ["struprune", "structured-pruning", "llm-compressor"]


def write_card(folder: Path, base: str = "") -> None:
    """Write the model card of an output folder, and copy the dense model's licence.

    :param base: as in :func:`make_card`
    """
    text = make_card(folder, base)
    ModelCard(text)  # raises on what the Hub could not read
    (folder / CARD_NAME).write_text(text, encoding="utf-8")


def make_card(folder: Path, base: str = "") -> str:
    """Return the text of the model card of an output folder, and copy the dense model's licence.

    :param base: folder or hub name of the dense model; that of the manifest takes precedence
    """
    manifest = read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else None
    base = manifest.model.base if manifest else base
    source = find_checkpoint(base) if base else None
    carried, config = _read_card(source), read_saved_config(folder)
    if source is not None:
        _carry_legal(source, folder)
    name, hub_name = Path(base).name or "a model", find_hub_name(base, source)
    evaluation = manifest.evaluation if manifest else EvaluationRecord()
    data = ModelCardData(
        base_model=hub_name,
        base_model_relation="quantized" if "quantization_config" in config else "finetune" if hub_name else None,
        tags=_TAGS,
        library_name="transformers",
        pipeline_tag="text-generation",
        model_name=f"{name}-pruned",
        eval_results=_list_results(evaluation) or None,
        **{key: carried[key] for key in _CARRIED if key in carried},
    )
    rows = list_result_rows(evaluation)
    return fill_template(
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


def try_write_card(folder: Path, base: str = "") -> None:
    """Write the model card; log a warning if that fails, so that no run is lost."""
    try:
        write_card(folder, base)
    except Exception as error:
        logger.warning(f"{folder.name}: no model card is written: {' '.join(str(error).split())}")


def list_results(score: Mapping[str, Any], dense: Mapping[str, Any], settings: Mapping[str, Any]) -> EvaluationRecord:
    """Return the manifest's record of one model's scores, beside those of the dense model from the same command.

    :param score: scores by the names of ``struprune eval``'s columns
    :param dense: scores of the dense model; empty if it was not scored
    :param settings: settings of the command
    """
    perplexity, tasks = [], []
    if "perplexity" in score:
        told: dict[str, Any] = {name: settings[name] for name in ("window", "stride", "max_tokens", "dtype")}
        text = Path(settings["text"])
        told |= {"text": text.name, "sha256": digest_file(text), "tokens": score["tokens"]}
        perplexity.append(PerplexityRecord(**told, value=score["perplexity"], dense=dense.get("perplexity")))
    for column, value in score.items():
        task, _, metric = column.partition(" ")
        if metric and not metric.endswith("_stderr"):
            errors = _read_error(score, column), _read_error(dense, column)
            values = float(value), dense.get(column), *errors
            tasks.append(TaskRecord(task, metric, settings["limit"], *values, dtype=settings["dtype"]))
    return EvaluationRecord(perplexity, tasks)


def _read_error(score: Mapping[str, Any], column: str) -> float | None:
    error = score.get(f"{column}_stderr")
    return float(error) if isinstance(error, int | float) and error == error else None


def keep_results(folder: Path, found: EvaluationRecord) -> str:
    """Add results to an output's manifest and card; a repeated measurement replaces the earlier one. An edited card stays.

    :return: why they were not stored; empty if they were
    """
    try:
        card = folder / CARD_NAME
        is_edited = card.is_file() and card.read_text(encoding="utf-8") != make_card(folder)
        manifest, held = read_manifest(folder), {}
        for kind in ("perplexity", "tasks"):
            results = (*getattr(manifest.evaluation, kind), *getattr(found, kind))
            held[kind] = list({(name_result(entry), getattr(entry, "sha256", "")): entry for entry in results}.values())
        write_manifest(manifest.model_copy(update={"evaluation": EvaluationRecord(**held)}), folder)
        if not is_edited:
            try_write_card(folder)
    except (OSError, ValueError) as error:
        return f"{folder} cannot be read or written: {error}"
    return ""


def find_hub_name(base: str, folder: Path | None) -> str | None:
    """Return the Hub name of a model; None for a local folder, which nobody else could find."""
    if not Path(base).is_dir():
        return base if "/" in base and is_hub_name(base) else None
    for part in () if folder is None else folder.resolve().parts:
        if found := _CACHED.fullmatch(part):
            return f"{found[1]}/{found[2]}"
    return None


def _read_card(folder: Path | None) -> dict[str, Any]:
    """Return the metadata of a model's own card; empty if it has no readable card."""
    if folder is None or not (folder / CARD_NAME).is_file():
        return {}
    try:
        return ModelCard.load(folder / CARD_NAME, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # a broken card raises errors of many classes and is ignored
        return {}


def _carry_legal(source: Path, folder: Path) -> None:
    for pattern in _LEGAL:
        for file in source.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _list_results(evaluation: EvaluationRecord) -> list[EvalResult]:
    """Return the measured results in the form of the Hub's model index."""
    measured = [
        (entry.text, "perplexity", f"perplexity (windows of {entry.window} tokens)", entry.value)
        for entry in evaluation.perplexity
    ]
    measured += [(score.task, score.metric, score.metric, score.value) for score in evaluation.tasks]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=re.sub(r"\W+", "-", dataset),
            dataset_name=dataset,
            metric_type=metric,
            metric_name=label,
            metric_value=value,
        )
        for dataset, metric, label, value in measured
    ]
