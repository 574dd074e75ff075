"""What a recipe leaves of a model: parameters, bytes and cache, counted from shapes alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.utils import is_match
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from struprune_plugin.allocation.rules.uniform import allocate_uniformly
from struprune_plugin.export.convert import can_narrow
from struprune_plugin.linalg.rounding import find_group_sparsity
from struprune_plugin.model.footprint import count_cache_channels
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters, find_layouts, sum_outputs
from struprune_plugin.model.structure.finder import find_structure_of
from struprune_plugin.model.structure.tiny import find_class
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.model.units.kinds import VALUE
from struprune_plugin.modifiers import StruPruneModifier
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.widths import describe_roundings, find_roundings, measure_groups
from struprune_plugin.reporting.tables import measure_weight_bytes
from struprune_plugin.storage.checkpoint import check_whole, find_checkpoint, is_packed, read_config
from struprune_plugin.storage.records import RoundingRecord

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
    :param rounding: as the manifest has it
    """

    sparsity: float
    before: Footprint
    after: Footprint
    groups: Sequence[UnitGroup]
    rounding: list[RoundingRecord]


def read_shapes(model: str, dtype: str = "auto") -> Shapes:
    """Read a model's shapes from its configuration, and see that its files, where they are here, are whole.

    :raises ValueError: no configuration, an unsupported architecture, quantised or broken weights
    """
    config = read_config(model)
    find_structure_of(config)
    if getattr(config, "quantization_config", None) is not None and not is_packed(config):
        raise ValueError(
            f"model: {model!r} must not be quantised yet, its config has a quantization_config. "
            "Plan for the full-precision checkpoint."
        )
    folder = find_checkpoint(model)
    held = measure_weight_bytes(folder) if folder else 0
    if held:
        check_whole(model, config)
    kind, part = find_class(config)
    with torch.device("meta"):
        shapes = kind._from_config(copy.deepcopy(part))
    chosen = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if not isinstance(chosen, torch.dtype):  # no word in the configuration: as wide as the files are
        chosen = torch.bfloat16 if 0 < held < 3 * count_parameters(shapes) else torch.float32
    return Shapes(model, config, shapes, chosen, held)


def outline_run(shapes: Shapes, modifiers: Sequence[Modifier], sparsity: float | None = None) -> Outline:
    """Count what a recipe leaves of a model.

    How a budget is spread over layers needs calibration data; its sum does not, so that all modules are taken to lose alike.

    :param sparsity: in place of the recipe's: its pruning stage's, or that of an allocator stage before it
    :raises ValueError: a recipe that prunes nothing; a budget that is not given, or cannot be met
    """
    position, modifier = find_pruning(modifiers)
    if sparsity is None:
        told = [m.sparsity for m in modifiers if isinstance(m, StructuredModifier) and m.sparsity is not None]
        if not told:
            raise ValueError("recipe: must give a sparsity to be planned, got none. Pass --sparsity.")
        sparsity = told[-1]
    groups, later = modifier.find_groups(shapes.model), list(modifiers[position + 1 :])
    roundings = find_roundings(shapes.model, groups, later, modifier.width_multiple)
    sizes = measure_groups(groups, roundings)
    prunable = count_prunable_parameters(shapes.model, modifier.experts is not None)
    share = find_group_sparsity(sizes, prunable, sparsity)
    every = {group.name: group.num_units for group in groups}
    kept = allocate_uniformly(sizes, share).kept if sparsity else every
    return Outline(
        sparsity=sparsity,
        before=_measure(shapes, groups, every, ()),
        after=_measure(shapes, groups, kept, later),
        groups=groups,
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
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    sizes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
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
    padded = not can_narrow(shapes.model)  # narrowed values reach the cache padded
    told = {
        group.layer_index: count_cache_channels(
            group, group.num_units if padded and group.unit is VALUE else kept[group.name]
        )
        for group in groups
        if not group.unit.is_ffn
    }
    channels = 0
    for index, (layer, layout) in enumerate(find_layouts(shapes.model)):
        names = [name for name, _ in layer.named_modules() if name.endswith(("k_proj", "v_proj"))]
        whole = [count_cache_channels(group, group.num_units) for group in VALUE.describe(layout, layer)]
        channels += told.get(index, sum(whole) or sum_outputs(names, layer))
    bits = 8 * shapes.dtype.itemsize
    for modifier in later:
        scheme = getattr(modifier, "kv_cache_scheme", None) if isinstance(modifier, QuantizationMixin) else None
        bits = scheme.num_bits if scheme is not None else bits
    return channels * bits // 8
