"""Plan of a run, from shapes and measured units alone: sizes of the result, memory of the run, engines that load the result."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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
    count_prunable_parameters,
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
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.mixtures import find_mixture
from struprune_plugin.modifiers.setup import find_budget
from struprune_plugin.modifiers.stage_modifier import StageModifier
from struprune_plugin.modifiers.targets import check_bytes, describe_target
from struprune_plugin.modifiers.widths import describe_roundings, find_roundings
from struprune_plugin.pruning.selection import list_together
from struprune_plugin.reporting.tables import (
    Table,
    describe_rounding,
    format_facts,
    measure_weight_bytes,
    show_limit,
)
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
class Shapes:
    """Model without its weights.

    :param dtype: dtype of the loaded weights
    :param weight_bytes: bytes of its weight files; 0 if they are not on this machine
    """

    name: str
    config: PretrainedConfig
    model: PreTrainedModel
    dtype: torch.dtype
    weight_bytes: int


def read_shapes(model: str, dtype: str = "auto", trust_remote_code: bool = False) -> Shapes:
    """Return a model's shapes from its configuration.

    :raises ValueError: no configuration, an unsupported architecture, quantised weights
    """
    config = check_checkpoint(model, trust_remote_code)
    folder = find_checkpoint(model)
    held = measure_weight_bytes(folder) if folder else 0
    kind, part = find_class(config, find_custom_class(model, config))
    with torch.device("meta"):
        shapes = kind._from_config(copy.deepcopy(part))
    chosen = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if not isinstance(chosen, torch.dtype):  # not in the configuration: by the size of the files
        narrow = is_packed(config) or 0 < held < 3 * count_parameters(shapes)
        chosen = torch.bfloat16 if narrow else torch.float32
    return Shapes(model, config, shapes.to(chosen), chosen, held)


# -- sizes of the result --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """Parameters and bytes of a model.

    :param bytes: bytes of its weights on the disk, before a quantiser
    """

    parameters: int
    bytes: int


@dataclass(frozen=True)
class Outline:
    """Sizes before and after a recipe, with the same cut in all modules of a kind.

    :param rounding: as in the manifest
    :param experts: text that says how many whole experts are kept; empty if none may be removed
    :param limit: as in the manifest, if a budget of bytes or time is given
    """

    sparsity: float
    before: Footprint
    after: Footprint
    rounding: list[RoundingRecord]
    experts: str = ""
    limit: LimitRecord | None = None


def outline_run(shapes: Shapes, modifiers: Sequence[Modifier]) -> Outline:
    """Return the sizes of a model before and after a recipe.

    The spread of a budget over layers needs calibration data, its sum does not. So all modules are assumed to lose the same share.

    :raises ValueError: the recipe prunes nothing; a budget is not given, or cannot be met
    """
    position, modifier = find_pruning(modifiers)
    stages = [m for m in modifiers if isinstance(m, StructuredModifier) and (m.sparsity is not None or m.budget)]
    if not stages:
        raise ValueError("recipe: must give a sparsity or a budget for a plan, got neither. Pass --sparsity.")
    model, later = shapes.model, list(modifiers[position + 1 :])
    groups = modifier.find_groups(model)
    check_bytes(stages[-1], later)
    roundings = find_roundings(model, groups, later, modifier.width_multiple)
    prunable = count_prunable_parameters(model, modifier.experts is not None)
    mixture = find_mixture(modifier, model, groups)
    sizes, target, share = find_budget(stages[-1], model, groups, roundings, prunable, mixture)
    kept = dict(allocate_uniformly(sizes, share, limit=target.limit).kept) if sizes else {}
    removed = sum((group.num_units - kept.get(group.name, group.num_units)) * group.unit_cost for group in groups)
    told = ""
    if mixture is not None and target.num_experts is not None:
        removed += mixture.count_gone(target.num_experts)
        told = f"{target.num_experts} of {mixture.counts[0]} stay in every layer"
    after = _measure(shapes, removed)
    return Outline(
        sparsity=removed / prunable if target.limit is not None else target.sparsity,
        before=_measure(shapes, 0),
        after=after,
        rounding=describe_roundings(groups, roundings),
        experts=told,
        limit=describe_target(stages[-1], target, after.bytes, sizes, kept),
    )


def find_pruning(modifiers: Sequence[Modifier]) -> tuple[int, StruPruneModifier]:
    """Return (position, pruning stage) of a recipe.

    :raises ValueError: there is none
    """
    for position, modifier in reversed(list(enumerate(modifiers))):
        if isinstance(modifier, StruPruneModifier):
            return position, modifier
    raise ValueError(
        f"recipe: must have a StruPruneModifier for a plan, got {[type(m).__name__ for m in modifiers]}. Name another recipe."
    )


def _measure(shapes: Shapes, removed: int) -> Footprint:
    """Return the footprint of a model that loses so many parameters."""
    held = count_weight_bytes(shapes.model) if removed or not shapes.weight_bytes else shapes.weight_bytes
    return Footprint(count_parameters(shapes.model) - removed, held - removed * shapes.dtype.itemsize)


# -- memory of the run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """Bytes that a run holds.

    :param device: peak on the device, with one layer at a time and the next one on its way there
    :param weights: weights of the whole model as loaded, on the host
    :param states: hidden states and targets of the calibration tokens, on the host
    :param moments: second moments of all modules on the host, if trials of plans use them
    :param sensitivity: Fisher information of all modules, on the host
    :param packed: low-bit format that the weights are stored in and dequantised from; empty if there is none
    """

    device: int
    weights: int
    states: int
    moments: int
    sensitivity: int
    packed: str

    @property
    def host(self) -> int:
        return self.weights + self.states + self.moments + self.sensitivity

    def describe(self) -> list[tuple[str, str]]:
        """Return (name, text) of the bytes on the device and on the host."""
        parts = {name: getattr(self, name) for name in ("weights", "states", "moments", "sensitivity")}
        told = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        facts = [("on the device", f"about {format_bytes(self.device)}")]
        facts += [("on the host", f"about {format_bytes(self.host)}: {told}")]
        unpacked = f"stored in {self.packed}, dequantised as it is loaded: {format_bytes(self.weights)}"
        return [*facts, ("source", unpacked)] if self.packed else facts


def count_needs(shapes: Shapes, modifiers: Sequence[Modifier], work: Workload) -> Needs:
    """Return the bytes that a run needs, counted from shapes alone."""
    _, modifier = find_pruning(modifiers)
    model, item, groups = shapes.model, shapes.dtype.itemsize, modifier.find_groups(shapes.model)
    hidden, senses = _read_hidden(model), modifier.sensitivity_samples is not None
    device, modules = _count_device(model, modifier, groups, work), len({group.output_name for group in groups})
    quantised: Any = getattr(shapes.config, "quantization_config", None)
    return Needs(
        device=device,
        weights=count_parameters(model) * item,
        states=work.num_samples * work.seq_length * hidden * (_STREAM_COPIES * item + 4),
        moments=count_kept_moments(modifier, groups, hidden),
        sensitivity=4 * modules * hidden**2 if senses else 0,
        packed=quantised["quant_method"] if is_packed(shapes.config) else "",
    )


def count_kept_moments(modifier: StruPruneModifier, groups: Sequence[UnitGroup], hidden_size: int) -> int:
    """Return the bytes of moments that trials keep on the host between their passes; 0 where they keep none."""
    tries = getattr(modifier.allocation, "trial_samples", 0) > 0
    groups = [group for group in groups if not group.experts or (modifier.experts and not modifier.experts.drops)]
    if not tries or not groups:
        return 0
    return count_moment_bytes(groups, hidden_size) if can_keep_moments(groups, hidden_size) else 0


def _read_hidden(model: PreTrainedModel) -> int:
    size: int = model.config.get_text_config(decoder=True).hidden_size
    return size


def _count_device(
    model: PreTrainedModel, modifier: StruPruneModifier, groups: Sequence[UnitGroup], work: Workload
) -> int:
    """Return the peak bytes on the device: while moments are gathered, in a solve, in a backward pass, or at the logits."""
    layouts, hidden, tokens = find_layouts(model), _read_hidden(model), work.batch_size * work.seq_length
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
    name: str, outline: Outline, needs: Needs, engines: Mapping[str, str], layers: Sequence[LayerUnits]
) -> list[Any]:
    """Return the plan of a run as its name, a table of before and after, and facts.

    :param name: name of the model and the recipe
    :param engines: as :func:`list_engines` returns them
    """
    rows, facts = [], needs.describe()
    for what, attribute in (("parameters", "parameters"), ("weights", "bytes")):
        before, after = getattr(outline.before, attribute), getattr(outline.after, attribute)
        show = "{:,}".format if attribute == "parameters" else format_bytes
        rows.append([what, show(before), show(after), f"{after / before - 1:+.1%}" if before else ""])
    for kind in layers:
        where = _format_positions(kind.layers)
        facts += [(where, f"{linear}: {what}") for linear, what in kind.units.items()]
        facts += [(where, f"{linear} stays whole: {reason}") for linear, reason in kind.whole.items()]
        facts += [] if kind.units or kind.whole else [(where, "nothing can go")]
    facts += [("experts", outline.experts)] if outline.experts else []
    facts += [(f"budget: {outline.limit.name}", show_limit(outline.limit))] if outline.limit else []
    facts += [("widths", describe_rounding(entry)) for entry in outline.rounding]
    facts += [(f"runs on {engine}", how) for engine, how in engines.items()]
    return [f"{name}, sparsity {outline.sparsity:g}", Table(["", "now", "after", "change"], rows), format_facts(facts)]
