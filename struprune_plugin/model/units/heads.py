"""Whole attention heads: under grouped-query attention a KV head with its query heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from struprune_plugin.model.families import Family, Part
from struprune_plugin.model.layers import measure_layer, read_counts
from struprune_plugin.model.units.group import UnitGroup, UnitKind, Wiring, find_residual, read_residual_scale


def describe_attention(family: Family, layer: nn.Module) -> tuple[Wiring, int, int]:
    """Return the wiring of an attention module, its value heads, and the query heads that share one."""
    attention, sizes = family.attention, measure_layer(family, layer)
    repeats = sizes.num_heads // sizes.num_key_value_heads
    part_rows: dict[Part, int] = {
        "query": repeats * sizes.head_dim,
        "key": sizes.head_dim,
        "value": sizes.value_head_dim,
    }
    wiring = Wiring(
        producers=attention.producers,
        part_rows=part_rows,
        interleaved=attention.interleaved,
        consumer=attention.output,
        residual=find_residual(family, layer, attention.residual, attention.producers),
        parallel="",
        normed_output=family.normed_output,
        residual_scale=read_residual_scale(family, layer),
        attention=attention.module,
        query_key=() if attention.rotary else tuple(attention.producers)[:2],
    )
    return wiring, sizes.num_key_value_heads, repeats


def _describe(family: Family, index: int, name: str, layer: nn.Module) -> UnitGroup:
    wiring, num_heads, repeats = describe_attention(family, layer)
    return UnitGroup(
        name=f"{name}.{wiring.consumer}",
        layer_index=index,
        layer_name=name,
        unit=HEAD,
        num_units=num_heads,
        unit_cost=0,
        num_blocks=1,
        columns_per_unit=repeats * wiring.part_rows["value"],
        repeats=1,
        wiring=wiring,
    )


def _find_owners(group: UnitGroup, part: Part) -> Tensor:
    return torch.arange(group.num_units)[:, None].expand(-1, group.wiring.part_rows[part])


def _resize_rows(group: UnitGroup, num_units: int) -> Mapping[Part, int]:
    return group.wiring.part_rows


def _update_counts(layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
    attention = layer.get_submodule(group.wiring.attention)
    for name, count in read_counts(attention).items():
        if name != "value_head_dim":
            setattr(attention, name, count * num_keep // group.num_units)


def _count_heads(group: UnitGroup, num_units: int) -> int:
    return num_units


HEAD = UnitKind(
    "head", False, _describe, _find_owners, _resize_rows, _update_counts, _count_heads, rotates=False, solve_copies=7
)
