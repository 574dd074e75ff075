"""Speed of pruned layers on the card, by the removed fraction and by the multiple that widths are rounded to."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.accelerator.pruning import TINY, Shape, make_random
from eval.accelerator.steps import Place, Step
from eval.speed import measure_models
from struprune_plugin.allocation.rules.uniform import allocate_uniformly
from struprune_plugin.export.convert import adopt_attention, adopt_config
from struprune_plugin.linalg.elimination import keep_last, order_units, unit_columns
from struprune_plugin.linalg.rounding import find_group_sparsity
from struprune_plugin.linalg.second_moments import with_bias_index
from struprune_plugin.model.layers import count_prunable_parameters
from struprune_plugin.model.surgery import read_consumer, slice_group
from struprune_plugin.model.units import find_groups
from struprune_plugin.modifiers.widths import find_roundings, measure_groups

FRACTIONS, MULTIPLES = (0.1, 0.3, 0.5), (1, 8, 64, 128)
_SHAPE = Shape("LLaMA-2-7B", 32, 4, length=2048)


def list_output_steps(reduced: bool) -> list[Step]:
    """Return a step a fraction."""
    shape, fractions = (TINY, (0.3,)) if reduced else (_SHAPE, FRACTIONS)
    return [
        Step(f"outputs: {fraction:.0%} removed", 120.0 if reduced else 60.0, partial(measure_outputs, shape, fraction))
        for fraction in fractions
    ]


def shrink(model: PreTrainedModel, fraction: float, multiple: int) -> PreTrainedModel:
    """Remove the last units of every module, all modules alike: the sizes that pruning gives, not its weights."""
    groups = find_groups(model, "value_channels")
    sizes = measure_groups(groups, find_roundings(model, groups, [], multiple))
    plan = allocate_uniformly(sizes, find_group_sparsity(sizes, count_prunable_parameters(model), fraction))
    adopt_attention(model, find_groups(model, "value_channels"))
    for group in groups:
        layer = model.get_submodule(group.layer_name)
        order = order_units(-torch.arange(group.num_units, dtype=torch.float64), group.num_blocks)
        keep = keep_last(order, group.num_units, plan.kept[group.name])
        columns = with_bias_index(unit_columns(keep, group.columns_per_unit), group.num_columns)
        slice_group(layer, group, keep, read_consumer(layer, group)[:, columns])
    adopt_config(model)
    return model


def measure_outputs(shape: Shape, fraction: float, place: Place) -> dict[str, Any]:
    """Return the rows of ``eval.speed`` for the dense model and one a multiple, in bfloat16."""
    multiples = MULTIPLES[:2] if place.reduced else MULTIPLES
    models: dict[str, Any] = {"dense": make_random(shape, shape.layers, place).to(place.device)}
    for multiple in multiples:
        pruned = shrink(make_random(shape, shape.layers, place), fraction, multiple)
        models[f"multiple {multiple}"] = pruned.to(place.device)
    repeats, new = (1, 2) if place.reduced else (7, 32)
    args = argparse.Namespace(dense="dense", length=shape.length, repeats=repeats, new_tokens=new, compile=False)
    rows = [row for batch in (1, 4 if place.reduced else 16) for row in measure_models(models, args, batch)]
    return {"layers": shape.layers, "rows": rows}


def advise(rows: Sequence[Mapping[str, Any]], gain: float = 1.03) -> str:
    """Return which multiple is worth rounding to: the smallest whose prefill and decode are within 3 % of the best's."""
    pruned = [row for row in rows if row["model"] != "dense"]
    names = list(dict.fromkeys(row["model"] for row in pruned))
    best = {
        (row["batch"], what): max(other[what] for other in pruned if other["batch"] == row["batch"])
        for row in pruned
        for what in ("prefill_speedup", "decode_speedup")
    }
    for name in names:
        own = [row for row in pruned if row["model"] == name]
        if all(
            row[what] * gain >= best[row["batch"], what]
            for row in own
            for what in ("prefill_speedup", "decode_speedup")
        ):
            return f"{name} is within 3 % of the fastest everywhere; nothing larger is worth rounding to."
    return "No multiple is within 3 % of the fastest everywhere: " + ", ".join(
        f"{what.removesuffix('_speedup')}, batch {batch}: "
        + max((row for row in pruned if row["batch"] == batch), key=lambda row: row[what])["model"]
        for (batch, what) in best
    )
