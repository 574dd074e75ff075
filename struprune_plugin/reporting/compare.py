"""Comparison of outputs by kept units, size, time and quality. This module imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from struprune_plugin.reporting.results import name_result
from struprune_plugin.reporting.tables import Table, measure_weight_bytes
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.manifest import Manifest, read_manifest
from struprune_plugin.storage.records import PerplexityRecord, TaskRecord


def compare_outputs(folders: Sequence[Path]) -> dict[str, Any]:
    """Return facts about several outputs, and how their kept units differ from those of the first, as JSON values.

    :raises ValueError: an output has no manifest, or is named twice
    """
    names = [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"compare: each output must be given once, got {names}. Remove the repeated one.")
    manifests = {name: read_manifest(name) for name in names}
    same = len({manifest.model.weights_sha256 for manifest in manifests.values()}) == 1
    return {
        "outputs": {name: _summarize(Path(name), manifest) for name, manifest in manifests.items()},
        "modules": _compare_units(manifests) if same else {},
        "settings": _compare_settings(manifests),
        "same_dense_model": same,
    }


def _summarize(folder: Path, manifest: Manifest) -> dict[str, Any]:
    evaluation = manifest.evaluation
    measured: list[PerplexityRecord | TaskRecord] = [*evaluation.perplexity, *evaluation.tasks]
    return {
        "base": manifest.model.base,
        "parameters": manifest.model.parameters_after,
        "bytes": measure_weight_bytes(folder if folder.is_dir() else folder.parent),
        "removed": manifest.budget.met_sparsity,
        "allocation": manifest.allocation.method,
        "error": sum(group.error_after for group in manifest.groups) / max(len(manifest.groups), 1),
        "seconds": next((stage.seconds for stage in manifest.stages if stage.name == "whole pass"), None),
        "results": {name_result(entry): entry.value for entry in measured},
    }


def _compare_units(manifests: Mapping[str, Manifest]) -> dict[str, dict[str, Any]]:
    """Return, by module, how many units each output keeps, and their overlap with the first one's (intersection over union)."""
    groups = {name: {group.name: group for group in m.groups} for name, m in manifests.items()}
    found = {}
    for module in dict.fromkeys(module for part in groups.values() for module in part):
        held = {name: part.get(module) for name, part in groups.items()}
        first, alike = next(iter(held.values())), {}
        for name, group in held.items():
            if group and first and group.kind == first.kind:
                mine, theirs = set(first.keep), set(group.keep)
                alike[name] = len(mine & theirs) / len(mine | theirs) if mine | theirs else 1.0
        found[module] = {"kept": {name: group and group.kept for name, group in held.items()}, "alike": alike}
    return found


def _compare_settings(manifests: Mapping[str, Manifest]) -> dict[str, dict[str, Any]]:
    """Return the fields of the recipe that differ between outputs."""
    settings = {name: dict(_flatten(manifest.settings)) for name, manifest in manifests.items()}
    fields = dict.fromkeys(field for part in settings.values() for field in part)
    told = {field: {name: part.get(field) for name, part in settings.items()} for field in fields}
    return {field: values for field, values in told.items() if any(a != b for a, b in pairwise(values.values()))}


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of every field; the name of a nested field is dotted."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def format_comparison(found: Mapping[str, Any], every: bool = False) -> list[Any]:
    """Return the differences as tables and lines.

    :param every: list modules that are the same in all, too
    """
    outputs = found["outputs"]
    rows = [
        ["parameters", *(f"{output['parameters']:,}" for output in outputs.values())],
        ["weights on disk", *(format_bytes(output["bytes"]) for output in outputs.values())],
        ["decoder removed", *(f"{output['removed']:.2%}" for output in outputs.values())],
        ["allocation", *(output["allocation"] for output in outputs.values())],
        ["mean error, re-solved", *(f"{output['error']:.4f}" for output in outputs.values())],
        ["pruning took", *(_format(output["seconds"], "{:.1f} s") for output in outputs.values())],
    ]
    for measure in dict.fromkeys(measure for output in outputs.values() for measure in output["results"]):
        rows.append([measure, *(_format(output["results"].get(measure), "{:.4g}") for output in outputs.values())])
    rows += [[field, *(_shorten(values[name]) for name in outputs)] for field, values in found["settings"].items()]
    parts: list[Any] = [Table(["", *outputs], rows)]
    modules = [
        [module, *(_describe_kept(told, name, first=not index) for index, name in enumerate(outputs))]
        for module, told in found["modules"].items()
        if every or any(share < 1 for share in told["alike"].values()) or len(told["alike"]) < len(outputs)
    ]
    if modules:
        parts.append(Table(["kept units (overlap with the first: intersection over union)", *outputs], modules))
    if left_out := len(found["modules"]) - len(modules):
        parts.append(f"{left_out} module{'s keep' if left_out > 1 else ' keeps'} the same units in all outputs")
    if not found["same_dense_model"]:
        parts.append("The outputs come from different dense models, so their kept units are not compared.")
    return parts


def _describe_kept(told: Mapping[str, Any], name: str, first: bool) -> str:
    shared = "" if first or name not in told["alike"] else f" ({told['alike'][name]:.0%})"
    return "" if told["kept"][name] is None else f"{told['kept'][name]}{shared}"


def _format(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"
