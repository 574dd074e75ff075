"""Bytes of a model's saved weights and of its key-value cache, after the modifiers that follow in a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.utils import is_match
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.export.convert import can_narrow
from struprune_plugin.model.layers import (
    find_layouts,
    find_linear,
    list_parameters,
    read_head_widths,
    sum_outputs,
)
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.model.units.kinds import HEAD, VALUE

_ENTRY = 75  # bytes of a tensor's entry in a file's header, beside its name
_SHAPE = 16  # bytes of the two numbers that are stored beside packed weights
_WORD = 32  # bits that weights are packed into


def count_weight_bytes(model: PreTrainedModel, item: int, later: Sequence[Modifier]) -> int:
    """Return the bytes of a model's weight files, quantised by later modifiers; tied weights count once.

    :param item: bytes per unquantised weight
    :param later: modifiers that follow in the recipe
    """
    schemes = {
        f"{name}.weight": scheme
        for name, linear in model.named_modules()
        if later and isinstance(linear, nn.Linear) and (scheme := find_weight_scheme(name, linear, later)) is not None
    }
    return sum(
        int(_count_bytes(name, parameter.shape[0], parameter.shape[1:].numel(), item, schemes.get(name)))
        for name, parameter in list_parameters(model)
    )


def measure_group_bytes(model: PreTrainedModel, group: UnitGroup, item: int, later: Sequence[Modifier]) -> Tensor:
    """Return the bytes of the linears of one group with k = 0 ... num_units units kept, shape [num_units + 1], float64.

    Parameters as in :func:`count_weight_bytes`.
    """
    layer, kept = model.get_submodule(group.layer_name), torch.arange(group.num_units + 1, dtype=torch.int64)
    gone, total = group.num_units - kept, torch.zeros(group.num_units + 1, dtype=torch.int64)
    for name in (*group.producers, group.consumer):
        linear, full = find_linear(layer, name), f"{group.layer_name}.{name}"
        rows, columns = torch.full_like(kept, linear.out_features), torch.full_like(kept, linear.in_features)
        if name == group.consumer:
            columns = columns - gone * group.columns_per_unit
        else:
            rows = rows - gone * group.count_rows(name)
        scheme = find_weight_scheme(full, linear, later)
        total += _count_bytes(f"{full}.weight", rows, columns, item, scheme)
        if linear.bias is not None and name != group.consumer:
            total += rows * item
    return total.double()


def find_weight_scheme(name: str, linear: nn.Linear, later: Sequence[Modifier]) -> QuantizationArgs | None:
    """Return the quantisation arguments of a linear's weights under later modifiers; None if they are not quantised."""
    for modifier in later:
        if isinstance(modifier, QuantizationMixin):
            for scheme in modifier.resolved_config.config_groups.values():
                if scheme.weights is not None and is_match(name, linear, scheme.targets, modifier.ignore):
                    return scheme.weights
    return None


def _count_bytes(name: str, rows: Any, columns: Any, item: int, scheme: QuantizationArgs | None) -> Any:
    """Return the bytes of one weight, its scales and its header entries; rows and columns are numbers or tensors."""
    entry = len(name) + _ENTRY
    if scheme is None:
        return rows * columns * item + entry
    bits, is_packed = scheme.num_bits, scheme.type == "int" and scheme.num_bits < 8
    weights = rows * (-(-columns * bits // _WORD)) * (_WORD // 8) if is_packed else rows * columns * bits // 8
    scales = 1
    if scheme.strategy == QuantizationStrategy.CHANNEL:
        scales = rows
    elif scheme.group_size and scheme.group_size > 0:
        scales = rows * (-(-columns // scheme.group_size))
    zeros = 0 if scheme.symmetric else scales * bits // 8
    return weights + scales * item + zeros + (3 if is_packed else 2) * entry + (_SHAPE if is_packed else 0)


def count_cache_bytes(model: PreTrainedModel, item: int, later: Sequence[Modifier]) -> int:
    """Return the bytes of keys and values per token, over all layers.

    Parameters as in :func:`count_weight_bytes`.
    """
    padded, channels = not can_narrow(model), 0  # narrowed values are padded in the cache
    for layer, layout in find_layouts(model):
        if layout.attention is None:
            names = [name for name, _ in layer.named_modules() if name.endswith(("k_proj", "v_proj"))]
            channels += sum_outputs(names, layer)
            continue
        (group,) = VALUE.describe(layout, layer)
        value = read_head_widths(layout.attention, layer)[0] if padded else group.part_rows["value"]
        channels += group.num_blocks * (group.part_rows["key"] + value)
    return channels * _count_cache_bits(item, later) // 8


def measure_group_cache(model: PreTrainedModel, group: UnitGroup, item: int, later: Sequence[Modifier]) -> Tensor:
    """Return the bytes per token of one group's part of the cache with k = 0 ... num_units units kept, 0 for an FFN.

    Parameters and return value as in :func:`measure_group_bytes`.
    """
    channels = 0
    if group.unit is HEAD:
        channels = group.part_rows["key"] + group.part_rows["value"]
    elif group.unit is VALUE:
        channels = int(can_narrow(model))
    cached = torch.arange(group.num_units + 1, dtype=torch.float64) * channels
    return cached * _count_cache_bits(item, later) / 8


def _count_cache_bits(item: int, later: Sequence[Modifier]) -> int:
    """Return the bits per value in the cache, quantised by later modifiers."""
    bits = 8 * item
    for modifier in later:
        scheme = getattr(modifier, "kv_cache_scheme", None) if isinstance(modifier, QuantizationMixin) else None
        bits = scheme.num_bits if scheme is not None else bits
    return bits
