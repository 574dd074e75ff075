"""The report of an output: one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from struprune_plugin.card import list_result_rows
from struprune_plugin.picture import draw_layers, draw_points
from struprune_plugin.report import format_bytes, measure_weight_bytes

PROMPTS = ("The captain looked at the sea and", "The most important thing in science is", "She opened the letter, and")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # no network, no script
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #1a202c; background: #fff; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #cbd5e0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1rem 0; padding: 0; }
.tiles div { border: 1px solid #cbd5e0; border-radius: .4rem; padding: .5rem .75rem; }
dt { font-size: .85rem; color: #4a5568; } dd { margin: 0; font-size: 1.1rem; font-weight: 600; overflow-wrap: anywhere; }
svg { width: 100%; max-width: 45rem; height: auto; display: block; } figure { margin: 0; }
figcaption, .note { font-size: .9rem; color: #4a5568; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; width: 100%; }
caption { text-align: left; font-size: .9rem; color: #4a5568; padding: .25rem 0; }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid #e2e8f0; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
.bar { display: inline-block; height: .6rem; background: #a0aec0; vertical-align: middle; } .bar.after { background: #2b6cb0; }
pre { background: #f7fafc; border: 1px solid #e2e8f0; padding: .75rem; overflow-x: auto; font-size: .85rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: .75rem; margin-bottom: 1rem; }
.pair > div { border: 1px solid #cbd5e0; border-radius: .4rem; padding: .5rem .75rem; overflow-wrap: anywhere; }
.pair h4 { margin: 0; font-size: .85rem; color: #4a5568; } .prompt { color: #4a5568; }
td { white-space: nowrap; } tbody th { min-width: 5rem; }
td.bars { text-align: left; line-height: .7; }
@media (max-width: 36rem) { .bars { display: none; } th, td { padding: .2rem .3rem; font-size: .8rem; } pre { font-size: .75rem; } }
summary { cursor: pointer; } a { color: #2b6cb0; }
@media print { body { max-width: none; font-size: 10pt; } h2 { break-after: avoid; } figure, .pair, tr { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


@dataclass(frozen=True)
class Sample:
    """What a model writes after a prompt.

    :param dense: None where the dense model is not here
    """

    prompt: str
    dense: str | None
    pruned: str


def make_page(folder: Path, manifest: Mapping[str, Any], samples: Sequence[Sample] = ()) -> str:
    """Return the report of an output folder as HTML."""
    base = Path(manifest["model"]["base"]).name
    title = f"{base}, pruned by {manifest['budget']['met_sparsity']:.0%}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _make_tiles(folder, manifest),
        "<h2>What is left, layer by layer</h2>",
        f"<figure>{draw_layers(manifest)}<figcaption>Filled: kept. Point at a bar for its figures.</figcaption></figure>",
        "<h2>Errors, before and after re-solving</h2>",
        _make_errors(manifest),
        "<h2>Allocation against sensitivity</h2>",
        _make_allocation(manifest),
        "<h2>Quality, dense and pruned</h2>",
        _make_results(manifest),
        "<h2>What they write</h2>",
        _make_samples(samples),
        "<h2>How it was made</h2>",
        _make_recipe(folder, manifest),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _make_tiles(folder: Path, manifest: Mapping[str, Any]) -> str:
    model, budget, stages = manifest["model"], manifest["budget"], manifest["stages"]
    before, after = model["parameters_before"], model["parameters_after"]
    seconds = next((stage["seconds"] for stage in stages if stage["name"] == "whole pass"), None)
    tiles = [
        ("parameters", f"{before:,} → {after:,} ({after / before - 1:+.1%})"),
        ("decoder removed", f"{budget['met_sparsity']:.2%} (asked {budget['asked_sparsity']:.2%})"),
        ("weights on disk", format_bytes(measure_weight_bytes(folder))),
        ("allocation", manifest["allocation"]["method"]),
        ("calibration", f"{manifest['calibration']['num_tokens']:,} tokens"),
    ]
    if seconds is not None:
        tiles.append(("pruning took", f"{seconds:.1f} s"))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(told)}</dd></div>" for name, told in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _make_errors(manifest: Mapping[str, Any]) -> str:
    """Return a table with a bar an error, which is the text alternative of the picture, too."""
    most = max(group["error_before"] for group in manifest["groups"]) or 1.0
    rows = []
    for group in manifest["groups"]:
        bars = "".join(
            f'<span class="bar {kind}" style="width:{max(0.1, 8 * group[name] / most):.2f}rem"></span><br>'
            for kind, name in (("", "error_before"), ("after", "error_after"))
        )
        blocks = group["num_blocks"]
        cells = [
            f"{group['kept'] // blocks} / {group['num_units'] // blocks}{f' × {blocks}' if blocks > 1 else ''}",
            f"{group['sparsity']:.1%}",
            f"{group['error_before']:.4f}",
            f"{group['error_after']:.4f}",
        ]
        told = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        short = f"{group['layer']} {'FFN' if group['kind'] == 'ffn' else 'attention'}"
        name = f'<th scope="row" title="{escape(group["name"], quote=True)}">{short}</th>'
        rows.append(f'<tr>{name}{told}<td class="bars" aria-hidden="true">{bars}</td></tr>')
    header = ["layer", "kept", "sparsity", "deleted", "re-solved"]
    return _make_table(
        "Squared error of a module's output over its target's energy: by deletion alone, and once the rest is re-solved.",
        "".join(f'<th scope="col">{name}</th>' for name in header) + '<td class="bars" aria-hidden="true"></td>',
        rows,
    )


def _make_allocation(manifest: Mapping[str, Any]) -> str:
    told = manifest.get("sensitivity") or manifest["allocation"].get("importance") or {}
    what = "sensitivity (Fisher information)" if manifest.get("sensitivity") else "importance"
    series: dict[str, list[tuple[float, float, str]]] = {}
    for group in manifest["groups"]:
        value = told.get(group["name"])
        if value is not None and value > 0:
            kind = "FFN" if group["kind"] == "ffn" else "attention"
            point = (float(value), 100 * group["sparsity"], f"{group['name']}: {group['sparsity']:.1%} removed")
            series.setdefault(kind, []).append(point)
    if not series:
        return '<p class="note">This run measured no sensitivity: the recipe spreads the budget without one.</p>'
    drawn = draw_points("Allocation against sensitivity", series, (what, "removed, %"), log_x=True)
    note = "Each point is a module. What the output feels most should lose least; what compresses well may lose more all the same."
    return f"<figure>{drawn}<figcaption>{note}</figcaption></figure>"


def _make_results(manifest: Mapping[str, Any]) -> str:
    rows = list_result_rows(manifest.get("evaluation", {}))
    if not rows:
        return '<p class="note">Not measured yet: <code>struprune eval OUT</code> adds perplexity, <code>--tasks</code> more.</p>'
    body = [
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(dense)}</td><td>{escape(pruned)}</td></tr>'
        for name, dense, pruned in rows
    ]
    header = '<th scope="col">measure</th><th scope="col">dense</th><th scope="col">pruned</th>'
    return _make_table("± is one standard error.", header, body)


def _make_samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return '<p class="note">No samples were asked for.</p>'
    parts = []
    for sample in samples:
        boxes = []
        for name, text in (("dense", sample.dense), ("pruned", sample.pruned)):
            if text is None:
                told = '<p class="note">The dense model is not on this machine.</p>'
            else:
                told = f'<p><span class="prompt">{escape(sample.prompt)}</span>{escape(text)}</p>'
            boxes.append(f"<div><h4>{name}</h4>{told}</div>")
        parts.append(f'<div class="pair">{"".join(boxes)}</div>')
    return '<p class="note">The likeliest next token each time, nothing drawn.</p>' + "".join(parts)


def _make_recipe(folder: Path, manifest: Mapping[str, Any]) -> str:
    file = folder / "recipe.yaml"
    recipe = file.read_text(encoding="utf-8") if file.is_file() else "# this folder holds no recipe.yaml\n"
    versions = ", ".join(f"{name} {value}" for name, value in manifest.get("versions", {}).items())
    calibration, base = manifest["calibration"], Path(manifest["model"]["base"]).name
    stages = [
        f'<tr><th scope="row">{escape(stage["name"])}</th><td>{stage["seconds"]:.2f} s</td>'
        f"<td>{'' if stage['peak_bytes'] is None else format_bytes(stage['peak_bytes'])}</td></tr>"
        for stage in manifest["stages"]
    ]
    steps = (
        f"struprune prune {base} --recipe recipe.yaml --output again   # on the same calibration text\n"
        f"struprune compare {folder.name} again"
    )
    header = '<th scope="col">stage</th><th scope="col">took</th><th scope="col">peak</th>'
    return (
        f"<pre>{escape(steps)}</pre>"
        f"<p>Seed {manifest.get('seed', '?')}; {calibration['num_sequences']} calibration sequences of digest "
        f"<code>{escape(calibration['sha256'][:16])}…</code>; {escape(versions)}.</p>"
        f"<details open><summary>recipe.yaml</summary><pre>{escape(recipe)}</pre></details>"
        f"{_make_table('What each stage took.', header, stages)}"
    )


def _make_table(caption: str, header: str, rows: Sequence[str]) -> str:
    return (
        f'<div class="wide" tabindex="0"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
