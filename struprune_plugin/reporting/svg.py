"""Standalone SVG plots: a pruned model layer by layer, allocation against sensitivity, a sweep's curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from struprune_plugin.reporting.tables import describe_units
from struprune_plugin.storage.manifest import Manifest
from struprune_plugin.storage.records import ExpertsRecord, GroupRecord

KEPT, GONE, FFN, TEXT, LINE = "#2b6cb0", "#e2e8f0", "#2f855a", "#1a202c", "#4a5568"
_WIDTH, _LEFT, _GAP = 480, 34, 14
_PANEL = (_WIDTH - _LEFT - _GAP - 4) / 2
_MAX_TICKS = 5


def draw_layers(manifest: Manifest) -> str:
    """Return an SVG of every decoder layer, to scale: attention heads on the left, FFN channels on the right, kept parts filled."""
    layers = sorted({group.layer for group in manifest.groups})
    pitch = 18 if len(layers) <= 16 else 12
    shapes = [
        _text(_LEFT, 14, "attention, by head" if any(not _is_ffn(group) for group in manifest.groups) else "", 13),
        _text(_LEFT + _PANEL + _GAP, 14, "FFN channels", 13),
    ]
    for row, layer in enumerate(layers):
        top = 22 + row * pitch
        shapes.append(_text(_LEFT - 6, top + pitch - 5, str(layer), 11, "end"))
        here = [group for group in manifest.groups if group.layer == layer]
        shapes += [_draw_attention(group, top, pitch - 4) for group in here if not _is_ffn(group)]
        shapes += _draw_ffns([group for group in here if _is_ffn(group)], manifest.experts, top, pitch - 4)
    height = 22 + len(layers) * pitch + 4
    told = f"{len(layers)} decoder layers; what is kept is filled. The table below says the same in numbers."
    return _wrap(height, "What is left of every layer", told, shapes)


def _is_ffn(group: GroupRecord) -> bool:
    return group.kind in ("ffn", "experts")


def _draw_attention(group: GroupRecord, top: float, height: float) -> str:
    """Return one box per head."""
    shares = [group.kept / group.num_units] * group.num_blocks
    if group.kind == "head":
        shares = [float(unit in group.keep) for unit in range(group.num_units)]
    width = _PANEL / len(shares)
    inner = max(width - 1.5, 0.6 * width)
    boxes = [_draw_bar(_LEFT + index * width, top, inner, height, share, KEPT) for index, share in enumerate(shares)]
    return f"<g><title>{escape(_describe(group))}</title>{''.join(boxes)}</g>"


def _draw_ffns(groups: Sequence[GroupRecord], left: Sequence[ExpertsRecord], top: float, height: float) -> list[str]:
    """Return a bar for every FFN of a layer, and one for all its experts.

    :param left: experts that stay, of the layers that have lost some
    """
    bars = [(group.kept / group.num_units, _describe(group)) for group in groups if group.kind == "ffn"]
    if experts := [group for group in groups if group.kind == "experts"]:
        every = next((record.num_experts for record in left if record.layer == experts[0].layer), len(experts))
        kept, units = sum(group.kept for group in experts), every * experts[0].num_units
        told = f"layer {experts[0].layer}: {kept} / {units} channels, {len(experts)} / {every} experts"
        bars.append((kept / units, told))
    shapes = []
    for index, (share, told) in enumerate(bars):
        width, start = _PANEL / len(bars), _LEFT + _PANEL + _GAP
        inner = width if index == len(bars) - 1 else width - 1.5
        bar = _draw_bar(start + index * width, top, inner, height, share, FFN)
        shapes.append(f"<g><title>{escape(told)}</title>{bar}</g>")
    return shapes


def _describe(group: GroupRecord) -> str:
    errors = f"error {group.error_before:.3g} deleted, {group.error_after:.3g} re-solved"
    return f"layer {group.layer}: {' '.join(describe_units(group))}; {errors}"


def _draw_bar(left: float, top: float, width: float, height: float, share: float, colour: str) -> str:
    filled = _box(left, top, share * width, height, colour) if share else ""
    return _box(left, top, width, height, GONE) + filled


# -- points on axes -------------------------------------------------------------------------------------------------


def draw_points(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float, str]]],
    labels: tuple[str, str],
    log_x: bool = False,
    lines: bool = False,
    marked: Sequence[str] = (),
) -> str:
    """Return an SVG of named series of (x, y, description) as points, or as lines through them.

    :param labels: labels of the axes
    :param log_x: whether x is on a logarithmic scale; values must be above 0 then
    :param lines: whether lines are drawn through the points of a series
    :param marked: descriptions of the points that get a ring
    """
    points = [point for part in series.values() for point in part]
    place = math.log10 if log_x else float
    xs, ys = [place(x) for x, _, _ in points], [y for _, y, _ in points]
    box = (52.0, 30.0, 412.0, 210.0)  # left, top, width, height
    low_x, high_x = _widen(min(xs), max(xs))
    low_y, high_y = _widen(min(ys), max(ys))

    def across(x: float) -> float:
        return box[0] + box[2] * (x - low_x) / (high_x - low_x)

    def down(y: float) -> float:
        return box[1] + box[3] * (1 - (y - low_y) / (high_y - low_y))

    shapes = [f'<rect x="{box[0]}" y="{box[1]}" width="{box[2]}" height="{box[3]}" fill="none" stroke="{LINE}"/>']
    for tick in _find_ticks(low_y, high_y):
        y = down(tick)
        shapes.append(_rule(box[0], y, box[0] + box[2], y) + _text(box[0] - 6, y + 4, f"{tick:.4g}", 12, "end"))
    for tick in _find_ticks(low_x, high_x):
        x = across(tick)
        shown = f"{10**tick:.1e}" if log_x else f"{tick:.4g}"
        shapes.append(_rule(x, box[1], x, box[1] + box[3]) + _text(x, box[1] + box[3] + 15, shown, 12, "middle"))
    colours = (KEPT, FFN, "#b7791f", "#805ad5", "#c53030")
    legend = 60
    for index, (name, part) in enumerate(series.items()):
        colour, route = colours[index % len(colours)], [(across(place(x)), down(y), told) for x, y, told in part]
        if lines:
            corners = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in route)
            shapes.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for x, y, told in route:
            ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="{TEXT}"/>' if told in marked else ""
            shapes.append(
                f'<g><title>{escape(told)}</title>{ring}<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/></g>'
            )
        shapes.append(f'<circle cx="{legend}" cy="15" r="4" fill="{colour}"/>')
        shapes.append(_text(legend + 8, 19, name, 12))
        legend += 32 + 7 * len(name)
    middle = box[1] + box[3] / 2
    shapes.append(_text(box[0] + box[2] / 2, box[1] + box[3] + 31, labels[0], 12, "middle"))
    shapes.append(
        f'<text x="12" y="{middle:.0f}" font-size="12" text-anchor="middle" fill="{TEXT}" '
        f'transform="rotate(-90 12 {middle:.0f})">{escape(labels[1])}</text>'
    )
    return _wrap(276, title, f"{labels[1]} against {labels[0]}, {len(points)} points.", shapes)


def _widen(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return low - margin, high + margin


def _find_ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers within a range."""
    raw = (high - low) / _MAX_TICKS
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def _wrap(height: float, title: str, description: str, shapes: Sequence[str]) -> str:
    name = "".join(letter for letter in title.lower() if letter.isalnum())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-labelledby="{name}-t {name}-d" font-family="system-ui, sans-serif">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>'
        f'<rect width="{_WIDTH}" height="{height:.0f}" fill="white"/>{"".join(shapes)}</svg>'
    )


def _box(left: float, top: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, content: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{TEXT}">{escape(content)}</text>'


def _rule(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{GONE}"/>'
