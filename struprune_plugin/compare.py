"""Outputs side by side: where they differ in kept units, size, time and quality. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from struprune_plugin.manifest import read_manifest
from struprune_plugin.report import format_bytes, format_table, measure_weight_bytes


def compare_outputs(folders: Sequence[Path]) -> dict[str, Any]:
    """Return what several outputs are, and how the first one's kept units differ from each other one's, as JSON has it.

    :raises ValueError: no manifest in one of them, or one that is named twice
    """
    names = [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"compare: must be given outputs once each, got {names}. Drop the repeated one.")
    manifests = {name: read_manifest(name) for name in names}
    return {
        "outputs": {name: _summarize(Path(name), manifest) for name, manifest in manifests.items()},
        "modules": _compare_units(manifests),
        "settings": _compare_settings(manifests),
        "same_dense_model": len({manifest["model"]["weights_sha256"] for manifest in manifests.values()}) == 1,
    }


def _summarize(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    model = manifest["model"]
    seconds = next((stage["seconds"] for stage in manifest["stages"] if stage["name"] == "whole pass"), None)
    results = {}
    for entry in manifest.get("evaluation", {}).get("perplexity", ()):
        results[f"perplexity, {entry['text']}, windows of {entry['window']}"] = entry["value"]
    for entry in manifest.get("evaluation", {}).get("tasks", ()):
        results[f"{entry['task']}, {entry['metric']}"] = entry["value"]
    return {
        "base": model["base"],
        "parameters": model["parameters_after"],
        "bytes": measure_weight_bytes(folder if folder.is_dir() else folder.parent),
        "removed": manifest["budget"]["met_sparsity"],
        "allocation": manifest["allocation"]["method"],
        "error": sum(group["error_after"] for group in manifest["groups"]) / max(len(manifest["groups"]), 1),
        "seconds": seconds,
        "results": results,
    }


def _compare_units(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by module what each output keeps, and the share of the first one's units that each other one keeps, too."""
    groups = {name: {group["name"]: group for group in m["groups"]} for name, m in manifests.items()}
    first = next(iter(groups.values()))
    found = {}
    for module in dict.fromkeys(module for part in groups.values() for module in part):
        kept = {name: part[module]["kept"] if module in part else None for name, part in groups.items()}
        alike = {}
        for name, part in groups.items():
            if module in part and module in first and part[module]["kind"] == first[module]["kind"]:
                mine, theirs = set(first[module]["keep"]), set(part[module]["keep"])
                alike[name] = len(mine & theirs) / len(mine | theirs)
        found[module] = {"kept": kept, "alike": alike}
    return found


def _compare_settings(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the fields of the recipe that are not the same in all."""
    settings = {name: manifest["settings"] for name, manifest in manifests.items()}
    fields = dict.fromkeys(field for part in settings.values() for field in part)
    told = {field: {name: part.get(field) for name, part in settings.items()} for field in fields}
    return {
        field: values
        for field, values in told.items()
        if any(v != next(iter(values.values())) for v in values.values())
    }


def format_comparison(found: Mapping[str, Any], every: bool = False) -> str:
    """Return what differs, as tables.

    :param every: modules that are alike, too
    """
    outputs = found["outputs"]
    names = list(outputs)
    rows = [
        ["parameters", *(f"{outputs[name]['parameters']:,}" for name in names)],
        ["weights on disk", *(format_bytes(outputs[name]["bytes"]) for name in names)],
        ["decoder removed", *(f"{outputs[name]['removed']:.2%}" for name in names)],
        ["allocation", *(outputs[name]["allocation"] for name in names)],
        ["mean error, re-solved", *(f"{outputs[name]['error']:.4f}" for name in names)],
        ["pruning took", *("" if (s := outputs[name]["seconds"]) is None else f"{s:.1f} s" for name in names)],
    ]
    measures = dict.fromkeys(measure for name in names for measure in outputs[name]["results"])
    for measure in measures:
        values = [outputs[name]["results"].get(measure) for name in names]
        rows.append([measure, *("" if value is None else f"{value:.4g}" for value in values)])
    rows += [[field, *(_shorten(values[name]) for name in names)] for field, values in found["settings"].items()]
    parts = [format_table(["", *names], rows)]
    modules = []
    for module, told in found["modules"].items():
        if every or any(share < 1 for share in told["alike"].values()) or len(told["alike"]) < len(names):
            shares = [
                f"{told['kept'][name]}" + (f" ({told['alike'][name]:.0%})" if index and name in told["alike"] else "")
                if told["kept"][name] is not None
                else ""
                for index, name in enumerate(names)
            ]
            modules.append([module, *shares])
    if modules:
        parts.append(format_table(["kept units (shared with the first)", *names], modules))
    left_out = len(found["modules"]) - len(modules)
    if left_out:
        parts.append(f"{left_out} module{'s' if left_out > 1 else ''} the same in all")
    if not found["same_dense_model"]:
        parts.append("These were made from different dense models: kept units do not compare.")
    return "\n\n".join(parts)


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"
