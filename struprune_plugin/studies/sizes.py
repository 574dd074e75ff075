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
from struprune_plugin.model.layers import (
    count_parameters,
    count_prunable_parameters,
    find_layouts,
    find_linear,
    read_head_widths,
    sum_outputs,
)
from struprune_plugin.model.structure.finder import find_structure_of
from struprune_plugin.model.structure.tiny import find_class
from struprune_plugin.model.surgery import slice_group
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
    model, later = shapes.model, list(modifiers[position + 1 :])
    groups = modifier.find_groups(model)
    roundings = find_roundings(model, groups, later, modifier.width_multiple)
    prunable = count_prunable_parameters(model, modifier.experts is not None)
    whole = drop_evenly(modifier, model, groups, roundings, sparsity * prunable) if sparsity else None
    if whole is None:
        sizes = measure_groups(groups, roundings)
        share, cut = find_group_sparsity(sizes, prunable, sparsity), model
    else:
        sizes, share, groups, cut = whole.sizes, whole.share, whole.groups, whole.model
    cut = _cut(cut, groups, allocate_uniformly(sizes, share).kept) if sparsity and sizes else cut
    return Outline(
        sparsity=sparsity,
        before=_measure(shapes, model, ()),
        after=_measure(shapes, cut, later),
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


def _cut(model: PreTrainedModel, groups: Sequence[UnitGroup], kept: Mapping[str, int]) -> PreTrainedModel:
    """Return a copy, without values too, in which every group has so many units: the first ones of each block."""
    cut = copy.deepcopy(model)
    for group in groups:
        layer = cut.get_submodule(group.layer_name)
        units = torch.arange(group.num_units).view(group.num_blocks, -1)
        if group.name not in kept:
            continue
        keep = units[:, : kept[group.name] // group.num_blocks].flatten()
        rows = find_linear(layer, group.consumer).out_features
        slice_group(layer, group, keep, torch.empty(rows, len(keep) * group.columns_per_unit + 1, device="meta"))
    return cut


def _measure(shapes: Shapes, model: PreTrainedModel, later: Sequence[Modifier]) -> Footprint:
    """Return what a model, cut or not, takes once later modifiers have quantised it."""
    parameters, item, saved = count_parameters(model), shapes.dtype.itemsize, 0.0
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and (args := _find_weight_scheme(name, linear, later)) is not None:
            saved += linear.weight.numel() * item - _count_quantised(args, *linear.weight.shape)
    full = parameters * item
    if model is shapes.model and shapes.weight_bytes and not later:
        full = shapes.weight_bytes
    return Footprint(parameters, round(full - saved), _measure_cache(shapes, model, later))


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


def _measure_cache(shapes: Shapes, model: PreTrainedModel, later: Sequence[Modifier]) -> int:
    """Return the bytes of keys and values a token, of all layers."""
    padded, channels = not can_narrow(shapes.model), 0  # narrowed values reach the cache padded
    for layer, layout in find_layouts(model):
        if layout.attention is None:
            names = [name for name, _ in layer.named_modules() if name.endswith(("k_proj", "v_proj"))]
            channels += sum_outputs(names, layer)
            continue
        (group,) = VALUE.describe(layout, layer)
        value = read_head_widths(layout.attention, layer)[0] if padded else group.part_rows["value"]
        channels += group.num_blocks * (group.part_rows["key"] + value)
    bits = 8 * shapes.dtype.itemsize
    for modifier in later:
        scheme = getattr(modifier, "kv_cache_scheme", None) if isinstance(modifier, QuantizationMixin) else None
        bits = scheme.num_bits if scheme is not None else bits
    return channels * bits // 8
