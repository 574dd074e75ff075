"""Text tables and summaries of an output: its sizes, its layers and how it was made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.manifest import Manifest
from struprune_plugin.storage.records import (
    BudgetRecord,
    EvaluationRecord,
    GroupRecord,
    LimitRecord,
    PerplexityRecord,
    RoundingRecord,
    TaskRecord,
)

_BAR = 20
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Table:
    """Table with a header; the first column is left-aligned, the others right-aligned, and narrow terminals do not wrap rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __str__(self) -> str:
        cells = [list(map(str, row)) for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ["─" * width for width in widths])
        aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
        return "\n".join("  ".join(row).rstrip() for row in aligned)

    def __rich__(self) -> Text:
        header, rest = str(self).split("\n", 1)
        return Text.assemble((header, "bold"), f"\n{rest}")


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows under a header as text, one line per row."""
    return str(Table(header, rows))


def format_facts(facts: Sequence[tuple[str, str]]) -> str:
    """Return one line per (name, text), with the texts aligned."""
    width = max((len(name) for name, _ in facts), default=0)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in facts)


def measure_weight_bytes(folder: str | Path) -> int:
    """Return the bytes of a folder's weight files; 0 if there are none.

    A checkpoint that holds its weights in several formats counts once, in the format that is loaded.
    """
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin", "*.gguf"):
        files = list(Path(folder).glob(pattern))
        if files:
            return sum(file.stat().st_size for file in files)
    return 0


def read_saved_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of a folder's config.json; empty if it cannot be read."""
    try:
        return dict(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def describe_units(group: GroupRecord) -> tuple[str, str]:
    """Return how many units of a module are kept, and their kind, as text."""
    blocks = group.num_blocks
    words = {"ffn": "FFN channels", "head": "heads", "value_channels": f"value channels × {blocks} heads"}
    words["experts"] = "channels of an expert"
    return f"{group.kept // blocks} / {group.num_units // blocks}", words.get(group.kind, group.kind)


def name_module(group: GroupRecord) -> str:
    """Return what a module is, as text."""
    return {"ffn": "FFN", "experts": "expert"}.get(group.kind, "attention")


def describe_rounding(rounding: RoundingRecord) -> str:
    """Return the multiple that kept widths were rounded to, and the reasons, as text."""
    return f"{rounding.kind} in multiples of {rounding.width_multiple} ({', '.join(rounding.because)})"


def summarize_layers(manifest: Manifest) -> Table:
    """Return one row per pruned module: kept and total units, a bar of the kept share, errors before and after the solve."""
    rows = []
    for group in manifest.groups:
        filled = round(_BAR * group.kept / group.num_units)
        left = ["█" * filled + "·" * (_BAR - filled), f"{group.sparsity:.1%}"]
        errors = [f"{group.error_before:.4f}", f"{group.error_after:.4f}"]
        rows.append([group.name, *describe_units(group), *left, *errors])
    return Table(["module", "kept", "unit", "left", "sparsity", "error, deleted", "error, re-solved"], rows)


def show_limit(record: LimitRecord) -> str:
    """Return a budget of bytes or time, and what is planned for it, as text."""
    shown = [
        format_bytes(value) if record.name == "bytes" else f"{value:.3f} ×" for value in (record.asked, record.planned)
    ]
    return f"asked {shown[0]}, planned {shown[1]}"


def tell_budget(budget: BudgetRecord) -> str:
    """Return one sentence on the removed and the requested parameters, and on another budget."""
    removed = (
        f"removed {budget.removed_parameters:,} of {budget.prunable_parameters:,} parameters of the decoder layers"
    )
    if budget.limit is None:
        return f"{removed} ({budget.met_sparsity:.4%}, asked {budget.asked_sparsity:.4%})"
    return f"{removed} ({budget.met_sparsity:.4%}); {budget.limit.name}: {show_limit(budget.limit)}"


def list_facts(manifest: Manifest, folder: str | Path) -> list[tuple[str, str]]:
    """Return (name, text) of the facts about a pruned folder, for its summary, its card and its report."""
    budget, model, calibration = manifest.budget, manifest.model, manifest.calibration
    before, after, allocation = model.parameters_before, model.parameters_after, manifest.allocation
    removed = f"{budget.removed_parameters:,} of {budget.prunable_parameters:,} removed"
    asked = "" if budget.limit else f", asked {budget.asked_sparsity:.3%}"
    temperature = "" if allocation.temperature is None else f", T = {allocation.temperature:g}"
    left = sorted({(len(record.keep), record.num_experts) for record in manifest.experts})
    told = ", ".join(f"{kept} of {every} stay" for kept, every in left) + f" in {len(manifest.experts)} layers"
    return [
        ("parameters", f"{before:,} → {after:,} ({after / before - 1:+.1%})"),
        *(
            [("not in the output", f"{', '.join(model.left_out)}, which the class does not load")]
            if model.left_out
            else []
        ),
        ("weights on disk", format_bytes(measure_weight_bytes(folder))),
        ("decoder linears", f"{removed} ({budget.met_sparsity:.3%}{asked})"),
        *([(f"budget: {budget.limit.name}", show_limit(budget.limit))] if budget.limit else []),
        ("allocation", allocation.method + temperature),
        *([("whole experts", told)] if left else []),
        ("calibration", f"{calibration.num_sequences} sequences, {calibration.num_tokens:,} tokens"),
    ]


def name_result(entry: PerplexityRecord | TaskRecord) -> str:
    """Return the name of a measurement with the settings that its value depends on."""
    if isinstance(entry, TaskRecord):
        told = f"{entry.task}, {entry.metric}" + (f", {entry.limit} examples" if entry.limit else "")
    else:
        told = f"perplexity, {entry.text}, windows of {entry.window}"
        told += f", stride {entry.stride}" if entry.stride != entry.window else ""
        told += f", first {entry.max_tokens:,} tokens" if entry.max_tokens else ""
    return told + (f", {entry.dtype}" if entry.dtype != "float32" else "")


def list_result_rows(evaluation: EvaluationRecord) -> list[list[str]]:
    """Return (measure, dense, pruned) of all results, with standard errors if they are known."""
    rows = []
    for entry in evaluation.perplexity:
        told = [f"{value:.2f}" if value is not None else "" for value in (entry.dense, entry.value)]
        rows.append([name_result(entry), *told])
    for score in evaluation.tasks:
        cells = [_format_score(score.dense, score.dense_stderr), _format_score(score.value, score.stderr)]
        rows.append([name_result(score), *cells])
    return rows


def _format_score(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if error is None else f"{value:.3f} ± {error:.3f}"


def list_stages(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Return (stage, seconds, peak memory) of a run as text."""
    return [
        (entry.name, f"{entry.seconds:.2f} s", format_bytes(entry.peak_bytes) if entry.peak_bytes else "")
        for entry in manifest.stages
    ]


def summarize_manifest(manifest: Manifest, folder: str | Path) -> str:
    """Return a text summary of a pruned folder: its model, budget, allocation and stages."""
    settings = manifest.settings
    chosen = [settings.get(name) for name in ("importance", "weight_update")]
    methods = ", ".join(str(method.get("method") if isinstance(method, dict) else method) for method in chosen)
    units = f"attention: {settings.get('attention_unit')}, FFN: {'channels' if settings.get('prune_ffn') else 'none'}"
    facts = [
        ("pruned from", manifest.model.base),
        *list_facts(manifest, folder),
        ("units", units),
        ("method", f"{methods}, reconstruct {settings.get('reconstruct')}"),
    ]
    facts += [
        ("widths", f"{describe_rounding(entry)}, {len(entry.modules)} modules") for entry in manifest.budget.rounding
    ]
    facts += [
        (f"stage: {name}", f"{took}, peak {peak}" if peak else took) for name, took, peak in list_stages(manifest)
    ]
    if recovery := manifest.recovery:
        told = f"{recovery.steps} steps, {recovery.tokens_seen:,} tokens, {recovery.seconds:.2f} s"
        facts.append(("recovery", f"LoRA rank {recovery.settings.get('adapters', {}).get('rank')}, {told}"))
    if {"quantization_config", "layout"} <= {*read_saved_config(folder)}:  # its layers have inputs of odd widths
        why = "not with its CPU kernels, which run quantised models only in stock classes; set output: uniform"
        facts.append(("vLLM", why))
    return format_facts(facts)
