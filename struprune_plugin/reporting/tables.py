"""Text tables and facts of an output: its sizes, its layers and how it was made."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from struprune_plugin.storage.files import format_bytes, measure_weight_bytes
from struprune_plugin.storage.manifest import (
    MANIFEST_NAME,
    GroupRecord,
    LimitRecord,
    Manifest,
    ResultRecord,
    RoundingRecord,
    read_manifest,
)
from struprune_plugin.storage.vocabulary_record import VOCABULARY_NAME, VocabularyRecord, read_record

_BAR = 20


@dataclass(frozen=True)
class Table:
    """Table with a header; the first column is left-aligned, the others right-aligned."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __str__(self) -> str:
        cells = [list(map(str, row)) for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ["─" * width for width in widths])
        aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
        return "\n".join("  ".join(row).rstrip() for row in aligned)


def format_facts(facts: Sequence[tuple[str, str]]) -> str:
    """Return one line per (name, text), with the texts aligned."""
    width = max((len(name) for name, _ in facts), default=0)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in facts)


def read_saved_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json; empty if there is none."""
    file = folder / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


# -- parts of a manifest as text ------------------------------------------------------------------------------------


def describe_units(group: GroupRecord) -> tuple[str, str]:
    """Return how many units of a module are kept, and their kind, as text."""
    blocks = group.num_blocks
    return f"{group.kept // blocks} / {group.num_units // blocks}", group.units or group.kind


def read_label(group: GroupRecord) -> str:
    """Return the label of a module's kind of units."""
    return (group.units or group.kind).partition(" × ")[0]


def describe_rounding(rounding: RoundingRecord) -> str:
    """Return the multiple that kept widths were rounded to, and the reasons, as text."""
    return f"{rounding.kind} in multiples of {rounding.width_multiple} ({', '.join(rounding.because)})"


def show_limit(record: LimitRecord) -> str:
    """Return a budget, and what is planned for it, as text."""
    show = format_bytes if record.name == "bytes" else "{:,.0f}".format
    return f"asked {show(record.asked)}, planned {show(record.planned)}"


def list_vocabulary_facts(record: VocabularyRecord | None) -> list[tuple[str, str]]:
    """Return (name, text) of the facts about a trimmed vocabulary; none where it is whole."""
    if record is None:
        return []
    before, after = record.held_out_tokens_before, record.held_out_tokens_after
    share = record.parameters_after / record.parameters_before - 1
    longer = f"{before:,} → {after:,} tokens ({after / before - 1:+.2%}) for {format_bytes(record.held_out_bytes)}"
    facts = [
        ("vocabulary", f"{record.rows_before:,} → {record.rows_after:,} tokens ({share:+.1%} of the whole model)"),
        ("held-out text", longer),
    ]
    # a tenth of whose tokens is left at most: they are now written in bytes, or letter by letter
    scripts = {name: before for name, (before, after) in record.scripts.items() if after < 0.1 * before}
    names = sorted(scripts, key=lambda name: (-scripts[name], name))
    lost = ", ".join(name.title() for name in names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return [*facts, ("scripts without words", lost)] if lost else facts


def _show_range(shares: Sequence[float]) -> str:
    least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return least if least == most else f"{least} to {most}"


def list_facts(manifest: Manifest, folder: Path) -> list[tuple[str, str]]:
    """Return (name, text) of the facts about a pruned folder, for its summary, its card and its report."""
    budget, model, settings = manifest.budget, manifest.model, manifest.settings
    before, after, calibration = model.parameters_before, model.parameters_after, manifest.calibration
    asked = "" if budget.limit else f", asked {budget.asked_sparsity:.3%}"
    removed = f"{budget.removed_parameters:,} of {budget.prunable_parameters:,} removed"
    shares: dict[str, list[float]] = {}
    for group in manifest.groups:
        shares.setdefault(read_label(group), []).append(group.kept / group.num_units)
    chosen = [settings.get(name) for name in ("importance", "weight_update")]
    methods = ", ".join(str(method.get("method") if isinstance(method, dict) else method) for method in chosen)
    temperature, name = manifest.allocation.temperature, manifest.allocation.method
    if manifest.allocation.taken not in (None, name):
        name += f"; of the candidates tried, `{manifest.allocation.taken}` did best"
    facts = [
        ("parameters", f"{before:,} → {after:,} ({after / before - 1:+.1%} of the whole model)"),
        ("weights on disk", format_bytes(measure_weight_bytes(folder))),
        *list_vocabulary_facts(read_record(folder)),
        ("decoder linears", f"{removed} ({budget.met_sparsity:.3%}{asked})"),
        ("units that stay", ", ".join(f"{name} {_show_range(of)}" for name, of in shares.items())),
        ("method", f"{methods}, reconstruct {settings.get('reconstruct')}"),
        ("allocation", name + ("" if temperature is None else f", T = {temperature:g}")),
        ("calibration", f"{calibration.num_sequences} sequences, {calibration.num_tokens:,} tokens"),
    ]
    if manifest.allocation.doubt:
        facts.append(("allocation in doubt", manifest.allocation.doubt))
    if model.left_out:
        facts.append(("not in the output", f"{', '.join(model.left_out)}, which the class does not load"))
    if budget.limit:
        facts.append((f"budget: {budget.limit.name}", show_limit(budget.limit)))
    for label, records in manifest.entries.items():
        left = sorted({f"{len(record.keep)} of {record.num_experts} stay" for record in records})
        facts.append((label, f"{', '.join(left)} in {len(records)} layers"))
    facts += [("widths", f"{describe_rounding(entry)}, {len(entry.modules)} modules") for entry in budget.rounding]
    if recovery := manifest.recovery:
        spent = f"{recovery.steps} steps, {recovery.tokens_seen:,} tokens, {recovery.seconds:.1f} s"
        facts.append(("recovery", f"LoRA rank {recovery.settings.get('adapters', {}).get('rank')}, {spent}"))
    if {"quantization_config", "layout"} <= {*read_saved_config(folder)}:  # its layers have inputs of odd widths
        why = "not with its CPU kernels, which run quantised models only in stock classes; set output: uniform"
        facts.append(("vLLM", why))
    if manifest.stages:
        *parts, whole = manifest.stages
        by_stage = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in parts)
        peak = max(stage.peak_bytes or 0 for stage in manifest.stages)
        took = f"{whole.seconds:.1f} s ({by_stage})" + (f", peak {format_bytes(peak)} on the device" if peak else "")
        facts.append(("took", took))
    return facts


# -- what is shown --------------------------------------------------------------------------------------------------


def summarize_layers(manifest: Manifest) -> Table:
    """Return one row per pruned module: kept and total units, a bar of the kept share, errors before and after the solve."""
    rows = []
    for group in manifest.groups:
        bar = "█" * round(_BAR * group.kept / group.num_units)
        errors = [f"{group.error_before:.4f}", f"{group.error_after:.4f}"]
        rows.append([group.name, *describe_units(group), bar.ljust(_BAR, "·"), f"{group.sparsity:.1%}", *errors])
    return Table(["module", "kept", "unit", "left", "sparsity", "error, deleted", "error, re-solved"], rows)


def summarize_manifest(manifest: Manifest, folder: Path) -> str:
    """Return a text summary of a pruned folder."""
    return format_facts([("pruned from", manifest.model.base), *list_facts(manifest, folder)])


def summarize_output(folder: Path) -> list[str]:
    """Return what a run left and where to go next, as paragraphs of at most 25 lines together."""
    if (record := read_record(folder)) and not (folder / MANIFEST_NAME).is_file():
        return summarize_vocabulary(record, folder)
    if not (folder / MANIFEST_NAME).is_file():
        return [f"wrote {folder}"]
    code = ", trust_remote_code=True" if "auto_map" in read_saved_config(folder) else ""
    manifest = read_manifest(folder)
    place = quote(str(folder))
    following = [
        (f"struprune eval {quote(manifest.model.base)} {place}", "measures it beside the dense model"),
        (f"struprune inspect {place}", "shows it layer by layer"),
        (f"struprune report {place}", "writes a page about it"),
        ("in Python", f'AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto"{code})'),
    ]
    return [summarize_manifest(manifest, folder), f"wrote {folder}", format_facts(following)]


def summarize_vocabulary(record: VocabularyRecord, folder: Path | None = None) -> list[str]:
    """Return the curve of a vocabulary's sizes and what is planned, or was written into a folder, as paragraphs."""
    whole, rows = record.parameters_before, []
    for point in record.curve:
        chosen = "←" if point.rows == record.rows_after else ""
        shares = f"{point.parameters / whole - 1:+.1%}", f"{point.tokens_more:+.2%}", f"{point.bits_more:+.2%}"
        rows.append([f"{point.rows:,}", *shares, chosen])
    header = ["rows", "whole model", "held-out tokens, at most", "bits per byte, estimated", ""]
    curve = str(Table(header, rows))
    name = "planned for" if folder is None else "trimmed from"
    paragraphs = [curve, format_facts([(name, record.base), *list_vocabulary_facts(record)])]
    if folder is None:
        return [*paragraphs, "wrote nothing: --output DIR writes the rows marked ←"]
    following = [
        (f"struprune eval {quote(record.base)} {quote(str(folder))}", "measures it in bits per byte"),
        (f"struprune prune {quote(str(folder))} --output OUT", "prunes it"),
        (f"{folder / VOCABULARY_NAME}", "holds the old id of every new one (`kept`)"),
    ]
    return [*paragraphs, f"wrote {folder}", format_facts(following)]


def list_result_rows(results: Sequence[ResultRecord]) -> list[list[str]]:
    """Return (measure, dense, pruned) of all results, with standard errors if they are known."""
    return [[r.name, _show(r.dense, r.dense_stderr), _show(r.value, r.stderr)] for r in results]


def _show(value: float | None, error: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if error is None else f"{value:.3f} ± {error:.3f}"
