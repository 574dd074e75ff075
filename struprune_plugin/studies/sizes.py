"""What a recipe leaves of a model: parameters, bytes and cache, counted from shapes alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from struprune_plugin.model.layers import (
    count_parameters,
    count_prunable_parameters,
    find_layouts,
    read_head_widths,
    sum_outputs,
)
from struprune_plugin.model.structure.finder import find_structure_of
from struprune_plugin.model.structure.tiny import find_class
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.model.units.kinds import VALUE
from struprune_plugin.modifiers import StruPruneModifier
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.mixtures import drop_evenly
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

    :param rounding: as the manifest has it
    :param experts: how many whole ones stay; empty where none may go
    """

    sparsity: float
    before: Footprint
    after: Footprint
    rounding: list[RoundingRecord]
    experts: str = ""


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
    if not isinstance(
        chosen, torch.dtype
    ):  # no word in the configuration: what is packed is unpacked to, or as wide as the files
        narrow = is_packed(config) or 0 < held < 3 * count_parameters(shapes)
        chosen = torch.bfloat16 if narrow else torch.float32
    return Shapes(model, config, shapes.to(chosen), chosen, held)


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
    model, later = shapes.model, list(modifiers[position + 1 :])
    groups = modifier.find_groups(model)
    roundings = find_roundings(model, groups, later, modifier.width_multiple)
    prunable = count_prunable_parameters(model, modifier.experts is not None)
    whole = drop_evenly(modifier, model, groups, roundings, sparsity * prunable) if sparsity else None
    after = shapes
    if whole is None:
        sizes = measure_groups(groups, roundings)
        share = find_group_sparsity(sizes, prunable, sparsity)
    else:
        sizes, share, groups = whole.sizes, whole.share, whole.groups
        after = replace(shapes, model=whole.model, weight_bytes=0)
    kept = allocate_uniformly(sizes, share).kept if sparsity and sizes else {}
    left = [(group, kept[group.name]) for group in groups if group.name in kept]
    return Outline(
        sparsity=sparsity,
        before=_measure(shapes, [], ()),
        after=_measure(after, left, later),
        rounding=describe_roundings(groups, roundings),
        experts="" if whole is None else whole.told,
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


def _measure(shapes: Shapes, left: Sequence[tuple[UnitGroup, int]], later: Sequence[Modifier]) -> Footprint:
    """Return what a model takes once groups have so many units left, and later modifiers have quantised it."""
    model, item = shapes.model, shapes.dtype.itemsize
    parameters = count_parameters(model) - sum((group.num_units - units) * group.unit_cost for group, units in left)
    full = parameters * item
    if not left and shapes.weight_bytes and not later:
        full = shapes.weight_bytes
    return Footprint(parameters, round(full - _count_saved(shapes, left, later)), _measure_cache(shapes, left, later))


def _count_saved(shapes: Shapes, left: Sequence[tuple[UnitGroup, int]], later: Sequence[Modifier]) -> float:
    """Return the bytes that later quantisers save."""
    if not any(isinstance(modifier, QuantizationMixin) for modifier in later):
        return 0.0
    gone: dict[str, tuple[int, int]] = {}  # rows and columns that go, by linear
    for group, units in left:
        count, name = group.num_units - units, f"{group.layer_name}."
        gone |= {name + producer: (count * group.count_rows(producer), 0) for producer in group.producers}
        gone[name + group.consumer] = 0, count * group.columns_per_unit
    saved = 0.0
    for name, linear in shapes.model.named_modules():
        if isinstance(linear, nn.Linear) and (args := _find_weight_scheme(name, linear, later)) is not None:
            sizes = zip(linear.weight.shape, gone.get(name, (0, 0)), strict=True)
            rows, columns = (size - lost for size, lost in sizes)
            saved += rows * columns * shapes.dtype.itemsize - _count_quantised(args, rows, columns)
    return saved


def _find_weight_scheme(name: str, linear: nn.Linear, later: Sequence[Modifier]) -> QuantizationArgs | None:
    """Return how the quantisers of a recipe write a linear's weights; None where they leave it alone."""
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


def _measure_cache(shapes: Shapes, left: Sequence[tuple[UnitGroup, int]], later: Sequence[Modifier]) -> int:
    """Return the bytes of keys and values a token, of all layers."""
    padded, channels = not can_narrow(shapes.model), 0  # narrowed values reach the cache padded
    attention = {group.layer_index: (group, units) for group, units in left if group.attention}
    for index, (layer, layout) in enumerate(find_layouts(shapes.model)):
        if layout.attention is None:
            names = [name for name, _ in layer.named_modules() if name.endswith(("k_proj", "v_proj"))]
            channels += sum_outputs(names, layer)
            continue
        (dense,) = VALUE.describe(layout, layer)
        group, units = attention.get(index, (dense, dense.num_units))
        narrow = group.unit.resize_rows(group, units)["value"]
        value = read_head_widths(layout.attention, layer)[0] if padded else narrow
        channels += group.unit.count_heads(group, units) * (group.part_rows["key"] + value)
    bits = 8 * shapes.dtype.itemsize
    for modifier in later:
        scheme = getattr(modifier, "kv_cache_scheme", None) if isinstance(modifier, QuantizationMixin) else None
        bits = scheme.num_bits if scheme is not None else bits
    return channels * bits // 8
