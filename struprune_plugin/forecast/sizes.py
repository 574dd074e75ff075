"""What a recipe leaves of a model: parameters, bytes and cache, counted from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.utils import is_match
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from struprune_plugin.checkpoint import check_whole, find_checkpoint, read_config
from struprune_plugin.maths.rounding import find_group_sparsity
from struprune_plugin.model.families import check_model_type
from struprune_plugin.model.footprint import count_cache_channels
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers import StruPruneModifier
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.widths import describe_roundings, find_roundings, measure_groups
from struprune_plugin.passes.allocation import make_uniform_plan
from struprune_plugin.report import measure_weight_bytes

_MAX_LAYERS = 1 << 12  # of a configuration that anybody could have meant
_SCALE_BYTES = 2


@dataclass(frozen=True)
class Shapes:
    """A model without its weights.

    :param dtype: of the weights as they are loaded
    :param weight_bytes: of its files; 0 where they are not on this machine
    """

    name: str
    config: PretrainedConfig
    model: PreTrainedModel
    dtype: torch.dtype
    weight_bytes: int


@dataclass(frozen=True)
class Footprint:
    """What a model takes.

    :param bytes: of its weights on the disk
    :param cache: bytes of keys and values a token
    """

    parameters: int
    bytes: int
    cache: int


@dataclass(frozen=True)
class Outline:
    """What a recipe leaves of a model, all modules of a kind cut alike.

    :param groups: to prune
    :param kept: units by group name
    :param rounding: as the manifest has it
    """

    sparsity: float
    before: Footprint
    after: Footprint
    groups: Sequence[UnitGroup]
    kept: Mapping[str, int]
    rounding: list[dict[str, Any]]


def read_shapes(model: str, dtype: str = "auto") -> Shapes:
    """Read a model's shapes from its configuration, and see that its files, where they are here, are whole.

    :raises ValueError: no configuration, an unsupported architecture, quantised or broken weights
    """
    config = read_config(model)
    check_model_type(config.model_type)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"model: {model!r} must not be quantised yet, its config has a quantization_config. "
            "Plan for the full-precision checkpoint."
        )
    if not 0 < getattr(config, "num_hidden_layers", 0) <= _MAX_LAYERS:
        raise ValueError(
            f"model: num_hidden_layers must be in [1, {_MAX_LAYERS}], got {getattr(config, 'num_hidden_layers', None)}. Use the "
            "config.json that belongs to the model."
        )
    folder = find_checkpoint(model)
    held = measure_weight_bytes(folder) if folder else 0
    if held:
        check_whole(model, config)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config)
    chosen = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if not isinstance(chosen, torch.dtype):  # no word in the configuration: as wide as the files are
        chosen = torch.bfloat16 if 0 < held < 3 * count_parameters(shapes) else torch.float32
    return Shapes(model, config, shapes, chosen, held)


def outline_run(shapes: Shapes, modifiers: Sequence[Modifier], sparsity: float | None = None) -> Outline:
    """Count what a recipe leaves of a model.

    How a budget is spread over layers needs calibration data; its sum does not, so that all modules are taken to lose alike.

    :param sparsity: in place of the recipe's
    :raises ValueError: a recipe that prunes nothing; a budget that cannot be met
    """
    position, modifier = find_pruning(modifiers)
    sparsity = find_sparsity(modifiers) if sparsity is None else sparsity
    groups, later = modifier.find_groups(shapes.model), list(modifiers[position + 1 :])
    roundings = find_roundings(shapes.model, groups, later, modifier.channel_multiple)
    sizes, prunable = measure_groups(groups, roundings), count_prunable_parameters(shapes.model)
    share = find_group_sparsity(sizes, prunable, sparsity)
    kept = make_uniform_plan(sizes, share).kept if sparsity else {group.name: group.num_units for group in groups}
    every = {group.name: group.num_units for group in groups}
    return Outline(
        sparsity=sparsity,
        before=_measure(shapes, groups, every, ()),
        after=_measure(shapes, groups, kept, later),
        groups=groups,
        kept=kept,
        rounding=describe_roundings(groups, roundings),
    )


def find_pruning(modifiers: Sequence[Modifier]) -> tuple[int, StruPruneModifier]:
    """Return the pruning stage of a recipe, and its position.

    :raises ValueError: there is none
    """
    for position, modifier in enumerate(modifiers):
        if isinstance(modifier, StruPruneModifier):
            return position, modifier
    raise ValueError(
        f"recipe: must hold a StruPruneModifier to be planned, got {[type(m).__name__ for m in modifiers]}. Name another recipe."
    )


def find_sparsity(modifiers: Sequence[Modifier]) -> float:
    """Return the sparsity that a recipe asks for: its pruning stage's, or that of an allocator stage before it.

    :raises ValueError: none is given
    """
    told = [m.sparsity for m in modifiers if isinstance(m, StructuredModifier) and m.sparsity is not None]
    if not told:
        raise ValueError("recipe: must give a sparsity to be planned, got none. Pass --sparsity.")
    return told[-1]


def _measure(
    shapes: Shapes, groups: Sequence[UnitGroup], kept: Mapping[str, int], later: Sequence[Modifier]
) -> Footprint:
    removed = sum((group.num_units - kept[group.name]) * group.unit_cost for group in groups)
    parameters = count_parameters(shapes.model) - removed
    item = shapes.dtype.itemsize
    saved = sum(
        rows * columns * item - _count_quantised(args, rows, columns)
        for name, (rows, columns) in _measure_linears(shapes.model, groups, kept).items()
        if (args := _find_weight_scheme(shapes.model, name, later)) is not None
    )
    full = parameters * item
    if shapes.weight_bytes and not later and not removed:
        full = shapes.weight_bytes
    return Footprint(parameters, round(full - saved), _measure_cache(shapes, groups, kept, later))


def _measure_linears(
    model: nn.Module, groups: Sequence[UnitGroup], kept: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Return rows and columns of every linear once groups have so many units."""
    sizes = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    for group in groups:
        rows, _ = sizes[group.name]
        sizes[group.name] = (rows, kept[group.name] * group.columns_per_unit)
        per_block = group.num_units // group.num_blocks
        first = torch.arange(group.num_units).view(group.num_blocks, per_block)
        keep = first[:, : kept[group.name] // group.num_blocks].flatten()
        for producer in group.producers:
            name = f"{group.layer_name}.{producer}"
            sizes[name] = (len(group.find_kept_rows(producer, keep)), sizes[name][1])
    return sizes


def _find_weight_scheme(model: nn.Module, name: str, later: Sequence[Modifier]) -> QuantizationArgs | None:
    """Return how the quantisers of a recipe write a linear's weights; None where they leave it alone."""
    linear = model.get_submodule(name)
    for modifier in later:
        if isinstance(modifier, QuantizationMixin):
            for scheme in modifier.resolved_config.config_groups.values():
                if scheme.weights is not None and is_match(name, linear, scheme.targets, modifier.ignore):
                    return scheme.weights
    return None


def _count_quantised(args: QuantizationArgs, rows: int, columns: int) -> float:
    """Return the bytes of a linear's quantised weights and their scales."""
    scales = 1
    if args.strategy == QuantizationStrategy.CHANNEL:
        scales = rows
    elif args.group_size and args.group_size > 0:
        scales = rows * math.ceil(columns / args.group_size)
    zeros = 0 if args.symmetric else scales * args.num_bits / 8
    return rows * columns * args.num_bits / 8 + scales * _SCALE_BYTES + zeros


def _measure_cache(
    shapes: Shapes, groups: Sequence[UnitGroup], kept: Mapping[str, int], later: Sequence[Modifier]
) -> int:
    """Return the bytes of keys and values a token, of all layers."""
    config: Any = shapes.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    told = {
        group.layer_index: count_cache_channels(group, kept[group.name]) for group in groups if not group.unit.is_ffn
    }
    channels = sum(told.get(index, 2 * heads * size) for index in range(config.num_hidden_layers))
    bits = 8 * shapes.dtype.itemsize
    for modifier in later:
        scheme = getattr(modifier, "kv_cache_scheme", None) if isinstance(modifier, QuantizationMixin) else None
        bits = scheme.num_bits if scheme is not None else bits
    return channels * bits // 8
