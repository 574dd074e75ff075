"""Value channels: the same number from every value head, with the columns of all query heads that share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.model.families import Family, Part
from struprune_plugin.model.units.group import UnitGroup, UnitKind
from struprune_plugin.model.units.heads import describe_attention


def _describe(family: Family, index: int, name: str, layer: nn.Module) -> UnitGroup:
    wiring, num_heads, repeats = describe_attention(family, layer)
    producers = {linear: parts for linear, parts in wiring.producers.items() if "value" in parts}
    return UnitGroup(
        name=f"{name}.{wiring.consumer}",
        layer_index=index,
        layer_name=name,
        unit=VALUE,
        num_units=num_heads * wiring.part_rows["value"],
        unit_cost=0,
        num_blocks=num_heads,
        columns_per_unit=repeats,
        repeats=repeats,
        wiring=replace(wiring, producers=producers),
    )


def _find_owners(group: UnitGroup, part: Part) -> Tensor:
    rows = group.wiring.part_rows[part]
    if part == "value":
        return torch.arange(group.num_units).view(group.num_blocks, rows)
    return torch.full((group.num_blocks, rows), -1)


def _resize_rows(group: UnitGroup, num_units: int) -> Mapping[Part, int]:
    return {**group.wiring.part_rows, "value": num_units // group.num_blocks}


def _update_counts(layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
    attention: Any = layer.get_submodule(group.wiring.attention)
    attention.value_head_dim = num_keep // group.num_blocks


def _count_heads(group: UnitGroup, num_units: int) -> int:
    return group.num_blocks


VALUE = UnitKind(
    "vo", False, _describe, _find_owners, _resize_rows, _update_counts, _count_heads, rotates=True, solve_copies=12
)
