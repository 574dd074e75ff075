"""Plan of a run, from shapes and measured units alone: sizes of the result, bytes that the run holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llmcompressor.modifiers import Modifier
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from struprune_plugin.allocation.rules import allocate_uniformly
from struprune_plugin.export.any_class import build_dense
from struprune_plugin.model.layers import (
    count_parameters,
    count_weight_bytes,
    find_layouts,
    find_linear,
    measure_layer,
)
from struprune_plugin.model.structure.tiny import find_class
from struprune_plugin.modifiers import StruPruneModifier
from struprune_plugin.modifiers.budgets import (
    describe_limit,
    describe_roundings,
    find_budget,
    find_mixture,
    find_roundings,
)
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.needs import Needs, Workload, count_needs
from struprune_plugin.reporting.tables import Table, describe_rounding, format_facts, measure_weight_bytes, show_limit
from struprune_plugin.runtime.torch_state import reset_torch
from struprune_plugin.storage.checkpoint import check_checkpoint, find_checkpoint, find_custom_class, is_packed
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.manifest import LimitRecord, RoundingRecord


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


@dataclass(frozen=True)
class RunPlan:
    """Sizes of a run's result, with the same cut in all modules of a kind, and what the run needs.

    :param sparsity: share of the prunable parameters that goes
    :param parameters: parameters of the model, and of the result
    :param bytes: bytes of the weights on the disk in the dtype of the run, before and after, before a quantiser
    :param packed: low-bit format that the weights are stored in and dequantised from; empty if there is none
    :param experts: text that says how many whole experts are kept; empty if none may be removed
    :param rounding: as in the manifest
    :param limit: as in the manifest, if a budget of bytes or time is given
    """

    sparsity: float
    parameters: tuple[int, int]
    bytes: tuple[int, int]
    packed: str
    experts: str
    rounding: list[RoundingRecord]
    limit: LimitRecord | None
    needs: Needs
    layers: list[LayerUnits]


@reset_torch()
def plan_run(
    path: str, modifiers: Sequence[Modifier], work: Workload, dtype: str = "auto", trust_remote_code: bool = False
) -> RunPlan:
    """Return the plan of a run on a model, from its configuration.

    The spread of a budget over layers needs calibration data, its sum does not. So all modules are assumed to lose the same share.

    :raises ValueError: no configuration, an unsupported architecture, quantised weights; the recipe prunes nothing; a budget is
        not given, or cannot be met
    """
    config = check_checkpoint(path, trust_remote_code)
    model = build_shapes(path, config, dtype)
    position = max((i for i, each in enumerate(modifiers) if isinstance(each, StruPruneModifier)), default=None)
    if position is None:
        names = [type(modifier).__name__ for modifier in modifiers]
        raise ValueError(f"recipe: must have a StruPruneModifier for a plan, got {names}. Name another recipe.")
    stages = [m for m in modifiers if isinstance(m, StructuredModifier) and (m.sparsity is not None or m.budget)]
    if not stages:
        raise ValueError("recipe: must give a sparsity or a budget for a plan, got neither. Pass --sparsity.")
    modifier: Any = modifiers[position]
    later, groups = list(modifiers[position + 1 :]), modifier.find_groups(model)
    roundings = find_roundings(model, groups, later, modifier.width_multiple)
    mixture = find_mixture(modifier, model, groups)
    sizes, budget = find_budget(stages[-1], model, groups, roundings, mixture)
    kept = dict(allocate_uniformly(sizes, budget).kept) if sizes else {}
    removed = sum((group.num_units - kept.get(group.name, group.num_units)) * group.unit_cost for group in groups)
    experts = ""
    if mixture is not None and budget.num_experts is not None:
        removed += mixture.count_gone(budget.num_experts)
        experts = f"{budget.num_experts} of {mixture.counts[0]} stay in every layer"
    parameters, held = count_parameters(model), count_weight_bytes(model)
    left, quantised = held - removed * model.dtype.itemsize, getattr(config, "quantization_config", None)
    return RunPlan(
        sparsity=removed / budget.num_prunable if budget.limit is not None else budget.sparsity,
        parameters=(parameters, parameters - removed),
        bytes=(held, left),
        packed=quantised["quant_method"] if quantised and is_packed(config) else "",
        experts=experts,
        rounding=describe_roundings(groups, roundings),
        limit=describe_limit(stages[-1], budget, left, sizes, kept),
        needs=count_needs(model, modifier, work),
        layers=_list_layer_units(model),
    )


def build_shapes(path: str, config: PretrainedConfig, dtype: str = "auto") -> PreTrainedModel:
    """Return a model without its weights, on the meta device, in the dtype in which it is loaded."""
    model = build_dense(*find_class(config, find_custom_class(path, config)))
    chosen = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if not isinstance(chosen, torch.dtype):  # not in the configuration: by the size of the files
        folder = find_checkpoint(path)
        narrow = is_packed(config) or 0 < measure_weight_bytes(folder or path) < 3 * count_parameters(model)
        chosen = torch.bfloat16 if narrow else torch.float32
    return model.to(chosen)


# -- what is told ---------------------------------------------------------------------------------------------------


def _list_layer_units(model: nn.Module) -> list[LayerUnits]:
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


def format_plan(plan: RunPlan) -> list[Any]:
    """Return a plan as a table of before and after, and facts."""
    rows = []
    for what, (before, after), show in (
        ("parameters", plan.parameters, "{:,}".format),
        ("weights", plan.bytes, format_bytes),
    ):
        rows.append([what, show(before), show(after), f"{after / before - 1:+.1%}"])
    facts = plan.needs.describe()
    if plan.packed:
        unpacked = f"stored in {plan.packed}, dequantised as it is loaded: {format_bytes(plan.needs.weights)}"
        facts.append(("source", unpacked))
    for kind in plan.layers:
        first, last, count = kind.layers[0], kind.layers[-1], len(kind.layers)
        where = f"layer {first}" if count == 1 else f"layers {first} to {last} ({count})"
        facts += [(where, f"{linear}: {what}") for linear, what in kind.units.items()]
        facts += [(where, f"{linear} stays whole: {reason}") for linear, reason in kind.whole.items()]
        facts += [] if kind.units or kind.whole else [(where, "nothing can go")]
    facts += [("experts", plan.experts)] if plan.experts else []
    facts += [(f"budget: {plan.limit.name}", show_limit(plan.limit))] if plan.limit else []
    facts += [("widths", describe_rounding(entry)) for entry in plan.rounding]
    return [Table(["", "now", "after", "change"], rows), format_facts(facts)]
