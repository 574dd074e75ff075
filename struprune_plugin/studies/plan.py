"""Plan of a run, from shapes and measured units alone: sizes of the result, bytes that the run holds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llmcompressor.modifiers import Modifier
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from struprune_plugin.allocation.curves import can_keep_moments, count_moment_bytes
from struprune_plugin.allocation.rules.uniform import allocate_uniformly
from struprune_plugin.linalg.second_moments import count_sums
from struprune_plugin.model.layers import (
    can_fuse_attention,
    count_parameters,
    count_weight_bytes,
    find_layouts,
    find_linear,
    measure_layer,
    sum_outputs,
)
from struprune_plugin.model.structure.layout import LayerLayout
from struprune_plugin.model.structure.tiny import find_class
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers import StruPruneModifier
from struprune_plugin.modifiers.budgets import describe_limit, find_budget
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.mixtures import find_mixture
from struprune_plugin.modifiers.widths import describe_roundings, find_roundings
from struprune_plugin.pruning.selection import list_together
from struprune_plugin.reporting.tables import Table, describe_rounding, format_facts, measure_weight_bytes, show_limit
from struprune_plugin.storage.checkpoint import check_checkpoint, find_checkpoint, find_custom_class, is_packed
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.records import LimitRecord, RoundingRecord

_STREAM_COPIES = 4  # of all tokens' hidden states, in the model's dtype: inputs and outputs, dense and pruned
_LOGIT_COPIES = 5  # float32 copies of one sequence's logits
_OFFLOADED = 256  # tokens converted, and rows of a product, on the device at once with `offload`


@dataclass(frozen=True)
class Workload:
    """Calibration size of a run: sequences, tokens per sequence, sequences on the device at a time."""

    num_samples: int
    seq_length: int
    batch_size: int


@dataclass(frozen=True)
class Needs:
    """Bytes that a run holds.

    :param device: peak on the device, with one layer at a time and the next one on its way there
    :param weights: weights of the whole model as loaded, on the host
    :param states: hidden states and targets of the calibration tokens, on the host
    :param moments: second moments of all modules on the host, if trials of plans use them
    :param sensitivity: Fisher information of all modules, on the host
    :param host: all of the host's
    """

    device: int
    weights: int
    states: int
    moments: int
    sensitivity: int
    host: int


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
    sizes, budget = find_budget(stages[-1], model, groups, roundings, mixture, later)
    kept = dict(allocate_uniformly(sizes, budget.share, limit=budget.limit).kept) if sizes else {}
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
        needs=_count_needs(model, modifier, groups, work),
        layers=_list_layer_units(model),
    )


def build_shapes(path: str, config: PretrainedConfig, dtype: str = "auto") -> PreTrainedModel:
    """Return a model without its weights, on the meta device, in the dtype in which it is loaded."""
    kind, part = find_class(config, find_custom_class(path, config))
    with torch.device("meta"):
        model = kind._from_config(copy.deepcopy(part))
    chosen = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if not isinstance(chosen, torch.dtype):  # not in the configuration: by the size of the files
        folder = find_checkpoint(path)
        narrow = is_packed(config) or 0 < measure_weight_bytes(folder or path) < 3 * count_parameters(model)
        chosen = torch.bfloat16 if narrow else torch.float32
    return model.to(chosen)


# -- memory of the run ----------------------------------------------------------------------------------------------


def _count_needs(
    model: PreTrainedModel, modifier: StruPruneModifier, groups: Sequence[UnitGroup], work: Workload
) -> Needs:
    """Return the bytes that a run holds, counted from shapes alone."""
    hidden: int = model.config.get_text_config(decoder=True).hidden_size
    weights = count_parameters(model) * model.dtype.itemsize
    states = work.num_samples * work.seq_length * hidden * (_STREAM_COPIES * model.dtype.itemsize + 4)
    modules = len({group.output_name for group in groups})
    sensitivity = 4 * modules * hidden**2 if modifier.sensitivity_samples is not None else 0
    kept = [group for group in groups if not group.experts or (modifier.experts and not modifier.experts.drops)]
    tries = getattr(modifier.allocation, "trial_samples", 0) > 0 and can_keep_moments(kept, hidden)
    moments = count_moment_bytes(kept, hidden) if tries else 0
    host = weights + states + moments + sensitivity
    return Needs(_count_device(model, modifier, groups, work, hidden), weights, states, moments, sensitivity, host)


def _count_device(
    model: PreTrainedModel, modifier: StruPruneModifier, groups: Sequence[UnitGroup], work: Workload, hidden: int
) -> int:
    """Return the peak bytes on the device: while moments are gathered, in a solve, in a backward pass, or at the logits."""
    layouts, tokens = find_layouts(model), work.batch_size * work.seq_length
    weights = 2 * max(_count_bytes(layer) for layer, _ in layouts)  # with the next layer's, on their way
    activations = max(_count_activations(model, layer, layout, work) for layer, layout in layouts)
    widest = max(group.num_columns for group in groups)
    solve = max(
        8 * len(run) * (run[0].num_columns + 1) * (run[0].unit.solve_copies * (run[0].num_columns + 1) + 4 * hidden)
        for run in list_together(groups)
    )
    by_layer: dict[str, list[UnitGroup]] = {}
    for group in groups:
        by_layer.setdefault(group.layer_name, []).append(group)
    copies = 2 if modifier.dampening_frac == "auto" else 1  # moments of held-out sequences are apart
    gathered = waiting = 0  # waiting: moments of a layer's experts, beside the solve of one
    for layer in by_layer.values():  # all modules of a layer for error curves, else one module, or all its experts
        experts = _count_moments([group for group in layer if group.experts], hidden)
        one = max(experts, *(_count_moments([group], hidden) for group in layer))
        gathered = max(gathered, _count_moments(layer, hidden) * modifier.allocation.measures, copies * one)
        waiting = max(waiting, copies * experts)
    head: Any = model.get_output_embeddings()
    backward = logits = 0
    if modifier.sensitivity_samples is not None:
        backward = 3 * activations + 4 * hidden * (tokens + hidden)
        logits = 4 * _LOGIT_COPIES * work.seq_length * head.out_features
    if modifier.offload:  # moments, solves and the head are on the host, and no layer is fetched ahead
        pieces = 12 * _OFFLOADED * (widest + 1)
        return weights // 2 + max(activations + pieces, backward)
    running = activations + gathered + 12 * tokens * (widest + 1)  # float32 tokens, a tile and its product
    return max(weights + max(running, solve + waiting, backward), _count_bytes(head) + activations + logits)


def _count_moments(groups: Sequence[UnitGroup], hidden: int) -> int:
    return sum(4 * count_sums(group.num_columns, hidden) for group in groups)


def _count_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _count_activations(model: PreTrainedModel, layer: nn.Module, layout: LayerLayout, work: Workload) -> int:
    """Return the bytes of one layer's forward pass on a micro-batch."""
    config: Any = model.config.get_text_config(decoder=True)
    attention, hidden, length = layout.attention, config.hidden_size, work.seq_length
    values = 0 if attention is None else 3 * sum_outputs(attention.producers, layer)
    inside = sum(sum_outputs(ffn.producers, layer) + find_linear(layer, ffn.output).in_features for ffn in layout.ffns)
    if layout.experts is not None:
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        inside += (getattr(config, "num_experts_per_tok", None) or 1) * (3 * width + 2 * hidden)
    per_token = model.dtype.itemsize * (max(values, inside) + 7 * hidden + 2 * length) + 20 * hidden
    heads = 0 if attention is None else measure_layer(layout, layer).num_heads
    maps = 0 if can_fuse_attention(model) else 12 * heads * length
    return work.batch_size * length * (per_token + maps)


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
    needs = plan.needs
    parts = {name: getattr(needs, name) for name in ("weights", "states", "moments", "sensitivity")}
    told = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    facts = [("on the device", f"about {format_bytes(needs.device)}")]
    facts.append(("on the host", f"about {format_bytes(needs.host)}: {told}"))
    if plan.packed:
        unpacked = f"stored in {plan.packed}, dequantised as it is loaded: {format_bytes(needs.weights)}"
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
