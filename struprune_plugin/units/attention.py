"""Attention: whole heads, or value channels, which go from all heads that share a value head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from struprune_plugin.model.layers import find_linear, measure_layer
from struprune_plugin.model.structure.layout import LayerLayout
from struprune_plugin.model.structure.locate import read_padding, scale_counts
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup, UnitKind


class AttentionUnits(UnitKind):
    """Base of the units of attention."""

    pool: ClassVar[str] = "attention"
    order: ClassVar[int] = 0

    def list_weights(self, layer: nn.Module, layout: LayerLayout, group: UnitGroup) -> list[Tensor]:
        """Return the weights of every head (rows of Q, K and V, columns of O), flattened, one tensor per (KV) head."""
        heads = describe_heads(layout, layer, Heads())
        parts = []
        for name in heads.producers:
            weight, owners = find_linear(layer, name).weight.detach(), heads.find_row_owners(name)
            parts.append(weight[owners.argsort(stable=True).to(weight.device)].unflatten(0, (heads.num_units, -1)))
        parts.append(find_linear(layer, heads.consumer).weight.detach().T.unflatten(0, (heads.num_units, -1)))
        return [torch.cat([part[head].flatten() for part in parts]) for head in range(heads.num_units)]


@UNIT_KINDS.register
class Heads(AttentionUnits):
    """A KV head with its query heads."""

    label: ClassVar[str] = "heads"
    parts: ClassVar[tuple[str, ...]] = ("query", "key", "value", "gate")
    kind: Literal["head"] = "head"

    def list_groups(self, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
        if layout.attention is not None and layout.attention.has_heads:
            yield describe_heads(layout, layer, self)

    def describe_padding(self, group: UnitGroup, layout: LayerLayout) -> dict[str, Any]:
        counts_heads = layout.attention is not None and not layout.attention.takes_fewer_heads
        return _describe_padding(group) if counts_heads else {}

    def resize_module(self, layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
        super().resize_module(layer, group, num_keep)
        if not read_padding(layer, group.consumer):
            scale_counts(layer.get_submodule(group.module), num_keep, group.num_units)


@UNIT_KINDS.register
class ValueChannels(AttentionUnits):
    """A value channel of all heads that share a value head, gates included."""

    label: ClassVar[str] = "value channels"
    parts: ClassVar[tuple[str, ...]] = ("value", "gate")
    splits_blocks: ClassVar[bool] = True
    solve_copies: ClassVar[int] = 17
    kind: Literal["value_channels"] = "value_channels"

    def list_groups(self, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
        if layout.attention is not None:
            heads = describe_heads(layout, layer, self)
            yield replace(
                heads,
                num_units=heads.num_units * heads.part_rows["value"],
                num_blocks=heads.num_units,
                columns_per_unit=heads.part_rows["gate"] // heads.part_rows["value"],
                producers={name: parts for name, parts in heads.producers.items() if {*self.parts} & {*parts}},
                rotates=layout.attention.rotates,
            )

    def describe(self, group: UnitGroup) -> str:
        return f"{self.label} × {group.num_blocks} heads"

    def describe_padding(self, group: UnitGroup, layout: LayerLayout) -> dict[str, Any]:
        return _describe_padding(group)


def describe_heads(layout: LayerLayout, layer: nn.Module, kind: UnitKind) -> UnitGroup:
    """Return the heads of a layer that has attention, also where heads alone cannot be removed."""
    attention, sizes = layout.attention, measure_layer(layout, layer)
    assert attention is not None
    blocks, repeats = sizes.num_key_value_heads, sizes.num_heads // sizes.num_key_value_heads
    rows = {"value": sizes.value_head_dim, "gate": repeats * sizes.value_head_dim}
    rows |= {"query": repeats * sizes.head_dim, "key": sizes.head_dim}
    for name, parts in attention.producers.items():  # queries and keys may be of another width than values
        free = [part for part in parts if part in ("query", "key")]
        if len(free) == 1:
            known = sum(rows[part] for part in parts if part not in free)
            rows[free[0]] = find_linear(layer, name).out_features // blocks - known
    return UnitGroup(
        kind,
        attention.producers,
        attention.output,
        attention.join,
        blocks,
        rows,
        columns_per_unit=rows["gate"],
        runs={name: repeats if order == "head" else 1 for name, order in attention.repeated.items()},
        module=attention.module,
        extra_linears=tuple(attention.producers)[:2] if attention.is_plain else (),
    )


def _describe_padding(group: UnitGroup) -> dict[str, Any]:
    is_split, blocks = group.unit.splits_blocks, group.num_blocks if group.unit.splits_blocks else group.num_units
    heads = blocks * (group.part_rows["gate"] // group.part_rows["value"])
    width = group.part_rows["value"] if is_split else group.num_columns
    columns = [heads if is_split else 1, width, width]
    padding: dict[str, Any] = {group.consumer: {"narrow": {"blocks": 1, "segments": [columns]}}}
    for name, parts in group.producers.items():
        rows, runs = {part: group.part_rows[part] * blocks for part in parts}, blocks * group.runs.get(name, 0) or 1
        if not is_split and runs > 1:  # whole runs go
            rows, parts, runs = {"value": sum(rows.values())}, ("value",), 1
        sizes = [width if is_split and part in group.unit.parts else rows[part] // runs for part in parts]
        segments = [[rows[part] // runs // size, size, size] for part, size in zip(parts, sizes, strict=True)]
        padding[name] = {"pad": {"blocks": runs, "segments": segments}}
    return padding
