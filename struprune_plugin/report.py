"""Plain-text tables for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BAR = 20
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def format_bytes(count: float) -> str:
    """Return a size in decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def measure_weight_bytes(folder: str | Path) -> int:
    """Return the bytes of a folder's weight files; 0 where it is none.

    A checkpoint that holds its weights in several forms counts once, in the form that is loaded.
    """
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin", "*.gguf"):
        files = list(Path(folder).glob(pattern))
        if files:
            return sum(file.stat().st_size for file in files)
    return 0


def measure_cache_bytes(folder: str | Path, manifest: dict[str, Any]) -> tuple[int, int] | None:
    """Return the bytes that keys and values of one token take, in the dense model and in the pruned one.

    :return: None where the folder's configuration does not tell
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        width = config.get("value_head_dim") or config.get("head_dim")
        width = width or config["hidden_size"] // config["num_attention_heads"]
        own = {int(index): sizes for index, sizes in (config.get("per_layer_config") or {}).items()}
        left = {(group["layer"], group["kind"]): group["kept"] / group["num_units"] for group in manifest["groups"]}
        dense = pruned = 0
        for layer in range(config["num_hidden_layers"]):
            sizes = own.get(layer, {})
            count = sizes.get("num_key_value_heads", sizes.get("num_attention_heads", heads))
            values = sizes.get("value_head_dim", width)
            pruned += count * (width + values)
            dense += round(count / left.get((layer, "head"), 1)) * (width + round(values / left.get((layer, "vo"), 1)))
        item = _ITEM_BYTES[config["dtype"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return None
    return dense * item, pruned * item


def is_quantised_per_layer(folder: str | Path) -> bool:
    """Tell whether a folder's weights are quantised and its classes ours; vLLM gives such layers inputs its CPU kernels refuse."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return "quantization_config" in config and "layout" in config
    except (OSError, ValueError, TypeError):
        return False


def summarize_layers(manifest: dict[str, Any]) -> str:
    """Return one row a pruned module: kept of present, a bar of what is left, reconstruction error before and after."""
    rows = []
    for group in manifest["groups"]:
        present, kept = group["num_units"] // group["num_blocks"], group["kept"] // group["num_blocks"]
        words = {"ffn": "channels", "head": "heads", "vo": f"value channels × {group['num_blocks']} heads"}
        unit = words.get(group["kind"], group["kind"])
        filled = round(_BAR * kept / present)
        rows.append(
            [
                group["name"],
                f"{kept} / {present}",
                unit,
                "█" * filled + "·" * (_BAR - filled),
                f"{group['sparsity']:.1%}",
                f"{group['error_before']:.4f}",
                f"{group['error_after']:.4f}",
            ]
        )
    return format_table(["module", "kept", "unit", "left", "sparsity", "error deleted", "re-solved"], rows)


def summarize_manifest(manifest: dict[str, Any], folder: str | Path | None = None) -> str:
    """Return what a pruned folder is: its model, budget, allocation and stages."""
    budget, model, calibration = manifest["budget"], manifest["model"], manifest["calibration"]
    settings, allocation = manifest["settings"], manifest["allocation"]
    before, after = model["parameters_before"], model["parameters_after"]
    rows = [
        ["pruned from", model["base"]],
        ["parameters", f"{before:,} → {after:,} ({after / before - 1:+.1%})"],
        [
            "decoder linears",
            f"{budget['removed_parameters']:,} of {budget['prunable_parameters']:,} removed "
            f"({budget['met_sparsity']:.3%}, asked {budget['asked_sparsity']:.3%})",
        ],
        ["units", f"attention {settings['attention_unit']}, ffn {'channels' if settings['prune_ffn'] else 'none'}"],
        ["method", f"{settings['importance']}, {settings['restoration']}, target {settings['target']}"],
        [
            "allocation",
            allocation["method"] + (f", T = {allocation['temperature']:g}" if "temperature" in allocation else ""),
        ],
        *(["widths", _describe_rounding(entry)] for entry in budget.get("rounding", [])),
        ["calibration", f"{calibration['num_sequences']} sequences, {calibration['num_tokens']:,} tokens"],
    ]
    rows += [
        [f"stage: {stage['name']}", f"{stage['seconds']:.2f} s{_describe_peak(stage['peak_bytes'])}"]
        for stage in manifest["stages"]
    ]
    if recovery := manifest.get("recovery"):
        method = recovery["settings"].get("method", "lora")
        how = f"LoRA rank {recovery['settings']['rank']}" if method == "lora" else method.replace("_", " ")
        told = f"{how}, {recovery['steps']} steps, {recovery['tokens_seen']:,} tokens"
        rows.append(["recovery", f"{told}, {recovery['seconds']:.2f} s"])
    if folder is not None:
        rows.insert(2, ["weights on disk", format_bytes(measure_weight_bytes(folder))])
        if cache := measure_cache_bytes(folder, manifest):
            told = f"{cache[0]:,} → {cache[1]:,} bytes a token ({cache[1] / cache[0] - 1:+.1%})"
            rows.insert(3, ["cache of keys and values", told])
        if is_quantised_per_layer(folder):
            rows.append(
                [
                    "vLLM",
                    "not with its kernels for CPUs, which take quantised models in stock classes alone: output: uniform",
                ]
            )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _describe_peak(peak: int | None) -> str:
    return "" if peak is None else f", peak {format_bytes(peak)}"


def _describe_rounding(entry: dict[str, Any]) -> str:
    """Return one line of the manifest's rounding of kept widths."""
    because = ", ".join(entry["because"])
    return f"{entry['kind']} in multiples of {entry['width_multiple']} ({because}), {len(entry['modules'])} modules"
