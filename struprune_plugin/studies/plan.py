"""Plan of a run: sizes, time, memory and engines for the result, and the sparsity that fits a given memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmcompressor.modifiers import Modifier
from torch import nn

from struprune_plugin.model.layers import find_layouts, find_linear, measure_layer
from struprune_plugin.modifiers.stage_modifier import StageModifier
from struprune_plugin.reporting.tables import Table, describe_rounding, format_facts, show_budget
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.studies.needs import Needs
from struprune_plugin.studies.probe import Costs
from struprune_plugin.studies.sizes import Outline, Shapes, find_pruning, outline_run

_MOST = 0.9  # largest sparsity tried for a fit
_STEPS = 100  # steps per unit of sparsity
FIT_RECIPES = {"none": "", "8-bit weights (W8A8)": "struprune_w8a8", "4-bit weights (W4A16)": "struprune_w4a16_gptq"}


@dataclass(frozen=True)
class LayerUnits:
    """Removable units of one kind of decoder layer.

    :param layers: positions of the layers
    :param units: removable units, by the linear that reads them
    :param whole: linears that keep their width, each with the reason
    """

    layers: list[int]
    units: dict[str, str]
    whole: dict[str, str]


def list_layer_units(model: nn.Module) -> list[LayerUnits]:
    """Return the removable units of a model, with equal layers in one entry."""
    found: list[LayerUnits] = []
    for index, (layer, layout) in enumerate(find_layouts(model)):
        sizes, units = measure_layer(layout, layer), {}
        if layout.attention is not None:
            heads = "" if layout.attention.has_heads else "; whole heads cannot be removed"
            count, width = sizes.num_key_value_heads, sizes.value_head_dim
            units[layout.attention.output] = f"{count} heads of {width} value channels{heads}"
        for ffn in layout.ffns:
            units[ffn.output] = f"{find_linear(layer, ffn.output).in_features:,} FFN channels"
        if layout.experts is not None:
            experts: Any = layer.get_submodule(layout.experts.module)
            units[layout.experts.module] = f"channels of {experts.num_experts} experts"
        alike = next((kind for kind in found if (kind.units, kind.whole) == (units, layout.left)), None)
        if alike is None:
            found.append(LayerUnits([index], units, dict(layout.left)))
        else:
            alike.layers.append(index)
    return found


def _format_positions(positions: Sequence[int]) -> str:
    """Return positions as ranges, e.g. ``0 to 2, 5``; only the first ones if there are many ranges."""
    starts = [p for p in positions if p - 1 not in positions]
    ends = [p for p in positions if p + 1 not in positions]
    runs = [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    shown = ", ".join(runs[:3]) + (", …" if len(runs) > 3 else "")
    return f"{'layer' if len(positions) == 1 else 'layers'} {shown} ({len(positions)})"


def find_obstacle(shapes: Shapes) -> str:
    """Return why a few layers of a model do not represent all; empty if they do."""
    layouts = [layout for _, layout in find_layouts(shapes.model)]
    if shapes.config.get_text_config(decoder=True) is not shapes.config:
        return "the decoder is only a part of the model"
    if any(one != layouts[0] for one in layouts):
        return "the decoder layers are of several kinds"
    if layouts[0].experts is not None:
        return "the work is counted as if every linear saw every token, but an expert sees few"
    return ""


def list_engines(modifiers: Sequence[Modifier], mixture: bool = False) -> dict[str, str]:
    """Return, by engine, whether and how it runs the result of a recipe.

    :param mixture: whether the model has experts
    """
    _, pruning = find_pruning(modifiers)
    packed = any(not isinstance(modifier, StageModifier) for modifier in modifiers)
    needs = " with compressed-tensors" if packed else ""
    if pruning.output == "uniform":
        stock = f"yes{needs}, as its stock class"
        return {"transformers": stock, "lm-eval": stock, "vLLM": f"yes{needs}, as its own class"}
    own_code = f"yes{needs}, with trust_remote_code=True or after `import struprune_plugin`"
    vllm = "with this package installed there (docs/serving.md), or convert --to uniform-padded"
    if packed:
        vllm = "not with its CPU kernels, which run quantised models only in stock classes; set output: uniform"
    if mixture:
        vllm = (
            "no: its Transformers backend reads no packed experts; set output: uniform, or convert --to uniform-padded"
        )
    return {"transformers": own_code, "lm-eval": "yes, trust_remote_code=True", "vLLM": vllm}


def format_plan(
    name: str,
    outline: Outline,
    costs: Costs | str,
    needs: Needs,
    engines: Mapping[str, str],
    layers: Sequence[LayerUnits],
) -> list[Any]:
    """Return the plan of a run as its name, a table of before and after, and facts.

    :param name: name of the model and the recipe
    :param costs: result of the probe, or the reason why there was none
    :param engines: as :func:`list_engines` returns them
    """
    rows, facts = [], []
    for what, attribute in (("parameters", "parameters"), ("weights on disk", "bytes"), ("cache per token", "cache")):
        before, after = getattr(outline.before, attribute), getattr(outline.after, attribute)
        show = "{:,}".format if attribute == "parameters" else format_bytes
        rows.append([what, show(before), show(after), f"{after / before - 1:+.1%}" if before else ""])
    if isinstance(costs, str):
        facts += [("time and speed", f"not probed: {costs}"), *needs.describe()]
    else:
        rows.append(["speed, prompt", "1 ×", f"{costs.prefill:.2f} ×", ""])
        rows.append(["speed, one token", "1 ×", f"{costs.decode:.2f} ×", ""])
        facts.append(("the run takes", f"about {_format_seconds(costs.seconds)} here (probe: {costs.probe})"))
        device = f", {format_bytes(costs.device_bytes)} on the device" if costs.device_bytes else ""
        facts.append(("and needs", f"about {format_bytes(costs.peak_bytes)} of memory{device}"))
    facts += needs.describe_source()
    for kind in layers:
        where = _format_positions(kind.layers)
        facts += [(where, f"{linear}: {what}") for linear, what in kind.units.items()]
        facts += [(where, f"{linear} stays whole: {reason}") for linear, reason in kind.whole.items()]
        facts += [] if kind.units or kind.whole else [(where, "nothing can go")]
    facts += [("experts", outline.experts)] if outline.experts else []
    facts += [
        (
            f"budget: {record.name}",
            f"asked {show_budget(record, record.asked)}, all alike {show_budget(record, record.planned)}",
        )
        for record in outline.limits
    ]
    facts += [("widths", describe_rounding(entry)) for entry in outline.rounding]
    facts += [(f"runs on {engine}", how) for engine, how in engines.items()]
    return [f"{name}, sparsity {outline.sparsity:g}", Table(["", "now", "after", "change"], rows), format_facts(facts)]


def _format_seconds(seconds: float) -> str:
    """Return a duration as text in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# -- what fits a memory ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """One way to fit a memory.

    :param sparsity: least sparsity that fits; None if none does
    :param total: bytes of weights and cache at that sparsity
    :param recipe: name of the recipe to run
    """

    quantiser: str
    sparsity: float | None
    total: int
    recipe: str


def find_fits(
    shapes: Shapes, recipes: dict[str, tuple[str, Sequence[Modifier]]], limit: int, context: int
) -> list[Fit]:
    """Return, per quantiser, the least sparsity at which weights and cache fit a memory.

    :param recipes: name and modifiers of a recipe, by quantiser
    :param limit: bytes of the memory
    :param context: tokens in the cache
    """
    fits, steps = [], range(int(_MOST * _STEPS) + 1)
    for quantiser, (name, modifiers) in recipes.items():
        measure = partial(_measure_total, shapes, modifiers, context)
        step = bisect_left(steps, -limit, key=lambda step: -measure(step / _STEPS))
        total = measure(step / _STEPS) if step in steps else 0
        fits.append(Fit(quantiser, step / _STEPS if total else None, total, name))
    return fits


def _measure_total(shapes: Shapes, modifiers: Sequence[Modifier], context: int, sparsity: float) -> int:
    """Return the bytes of weights and cache at a sparsity; 0 if the units cannot reach it."""
    try:
        after = outline_run(shapes, modifiers, sparsity).after
    except ValueError:
        return 0
    return after.bytes + context * after.cache


def choose_fit(fits: Sequence[Fit]) -> Fit | None:
    """Return the fit that prunes least, and among ties the one of most bits, which come first; None if nothing fits."""
    possible = [fit for fit in fits if fit.sparsity is not None]
    return min(possible, key=lambda fit: fit.sparsity or 0.0, default=None)


def format_fits(shapes: Shapes, fits: Sequence[Fit], limit: int, context: int) -> list[Any]:
    """Return a heading, a table with one row per quantiser, and the choice."""
    rows = []
    for fit in fits:
        least = "does not fit" if fit.sparsity is None else f"{fit.sparsity:.0%}"
        rows.append([fit.quantiser, least, format_bytes(fit.total) if fit.total else "", fit.recipe])
    best = choose_fit(fits)
    if best is None:
        choice = "Nothing fits: choose a smaller model, a shorter --context or more memory."
    elif best.sparsity:
        command = f"struprune prune {shapes.name} --recipe {best.recipe} --sparsity {best.sparsity:g} --output OUT"
        choice = f"least pruned: {best.quantiser}, sparsity {best.sparsity:g}: {command}"
    else:
        choice = f"least pruned: {best.quantiser}, sparsity 0: no unit has to be removed."
    heading = f"{shapes.name} in {format_bytes(limit)}, with {context:,} tokens of context"
    return [heading, Table(["quantiser", "least sparsity", "weights + cache", "recipe"], rows), choice]
