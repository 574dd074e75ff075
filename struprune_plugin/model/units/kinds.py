"""Kinds of units: FFN channels, channels of experts, whole attention heads, value channels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.model.layers import LayerSizes, find_linear, measure_layer, read_counts, read_padding
from struprune_plugin.model.structure.layout import AttentionLayout, LayerLayout, Part
from struprune_plugin.model.units.group import UnitGroup, UnitKind


class FFNChannel(UnitKind):
    """FFN channel: the rows of every producing linear and the column of the consuming linear that belong to it."""

    name = "ffn"
    is_ffn = True

    def describe(self, layout: LayerLayout, layer: nn.Module) -> Iterable[UnitGroup]:
        for ffn in layout.ffns:
            yield UnitGroup(
                self,
                ffn.producers,
                ffn.output,
                ffn.join,
                num_units=find_linear(layer, ffn.output).in_features,
                repeated={name: "channel" for name in ffn.producers if ffn.alternates},
            )

    def find_owners(self, group: UnitGroup, part: Part) -> Tensor:
        return torch.arange(group.num_units)[None]


class ExpertChannel(FFNChannel):
    """FFN channel of one expert of a mixture whose experts have been split."""

    name = "experts"

    def describe(self, layout: LayerLayout, layer: nn.Module) -> Iterable[UnitGroup]:
        if layout.experts is None:
            return
        experts: Any = layer.get_submodule(layout.experts.module)
        for index in range(experts.num_experts):
            expert = layout.experts.place(index)
            yield UnitGroup(
                self,
                expert.producers,
                expert.output,
                expert.join,
                num_units=find_linear(layer, expert.output).in_features,
                experts=layout.experts.module,
                tie=self.name,
            )


class Head(UnitKind):
    """Attention head; under grouped-query attention a KV head with its query heads."""

    name = "head"

    def describe(self, layout: LayerLayout, layer: nn.Module) -> Iterable[UnitGroup]:
        if layout.attention is not None and layout.attention.has_heads:
            yield _describe_heads(layout.attention, measure_layer(layout, layer), layer)

    def find_owners(self, group: UnitGroup, part: Part) -> Tensor:
        return torch.arange(group.num_units)[:, None].expand(-1, group.part_rows[part])

    def update_counts(self, layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
        for name in (*group.producers, group.consumer):
            for form in read_padding(layer, name).values():
                for segment in form["segments"]:
                    segment[1] = segment[1] * num_keep // group.num_units
        if not read_padding(layer, group.consumer):
            attention = layer.get_submodule(group.attention)
            for name, count in read_counts(attention).items():
                setattr(attention, name, count * num_keep // group.num_units)


class ValueChannel(UnitKind):
    """Value channel, with its columns in all query heads that share the value head, and the rows that gate it.

    Every value head keeps the same number of channels.
    """

    name = "value_channels"
    solve_copies = 17

    def describe(self, layout: LayerLayout, layer: nn.Module) -> Iterable[UnitGroup]:
        attention = layout.attention
        if attention is None:
            return
        heads = _describe_heads(attention, measure_layer(layout, layer), layer)
        repeats = heads.heads_per_block
        yield replace(
            heads,
            unit=self,
            num_units=heads.num_units * heads.part_rows["value"],
            num_blocks=heads.num_units,
            columns_per_unit=repeats,
            repeats=repeats,
            producers={linear: parts for linear, parts in heads.producers.items() if {"value", "gate"} & {*parts}},
            rotates=attention.rotates,
        )

    def find_owners(self, group: UnitGroup, part: Part) -> Tensor:
        rows, per_block = group.part_rows[part], group.num_units // group.num_blocks
        if part not in ("value", "gate"):
            return torch.full((group.num_blocks, rows), -1)
        units = torch.arange(group.num_units).view(group.num_blocks, per_block)
        return units.repeat(1, rows // per_block)

    def resize_rows(self, group: UnitGroup, num_units: int) -> Mapping[Part, int]:
        width = num_units // group.num_blocks
        return {**group.part_rows, "value": width, "gate": width * group.heads_per_block}

    def update_counts(self, layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
        width = num_keep // group.num_blocks
        for name, parts in group.producers.items():
            for part, segment in zip(parts, read_padding(layer, name)["pad"]["segments"], strict=True):
                if part in ("value", "gate"):
                    segment[1] = width
        read_padding(layer, group.consumer)["narrow"]["segments"][0][1] = width


def describe_padding(group: UnitGroup) -> dict[str, dict[str, Any]]:
    """Return the padding, by linear, with which stock attention sees heads of the dense width, or as many heads as before.

    :param group: value channels or heads, none of which is removed yet
    :return: as :func:`~struprune_plugin.model.layers.read_padding` returns it
    """
    blocks, heads = group.num_blocks, group.num_blocks * group.heads_per_block
    if group.unit is HEAD:
        counts, blocks, heads, width = {}, group.num_units, 1, group.num_columns
    else:
        width = group.part_rows["value"]
        counts = {"value": blocks, "gate": heads}
    padding: dict[str, dict[str, Any]] = {
        group.consumer: {"narrow": {"blocks": 1, "segments": [[heads, width, width]]}}
    }
    for name, parts in group.producers.items():
        rows = {part: group.part_rows[part] * blocks for part in parts}
        runs = {"": 1, "block": blocks, "head": heads}[group.repeated.get(name, "")]
        if group.unit is HEAD and name in group.repeated:  # whole runs go
            segments, runs = [[1, total := sum(rows.values()), total]], 1
        else:
            sizes = [(counts[part] // runs, width) if part in counts else (1, rows[part] // runs) for part in parts]
            segments = [[count, size, size] for count, size in sizes]
        padding[name] = {"pad": {"blocks": runs, "segments": segments}}
    return padding


def _describe_heads(attention: AttentionLayout, sizes: LayerSizes, layer: nn.Module) -> UnitGroup:
    blocks, repeats = sizes.num_key_value_heads, sizes.num_heads // sizes.num_key_value_heads
    rows: dict[Part, int] = {"value": sizes.value_head_dim, "gate": repeats * sizes.value_head_dim}
    rows |= {"query": repeats * sizes.head_dim, "key": sizes.head_dim}
    for name, parts in attention.producers.items():  # queries and keys may be of another width than values
        free = [part for part in parts if part in ("query", "key")]
        if len(free) == 1:
            known = sum(rows[part] for part in parts if part not in free)
            rows[free[0]] = find_linear(layer, name).out_features // blocks - known
    return UnitGroup(
        HEAD,
        attention.producers,
        attention.output,
        attention.join,
        num_units=blocks,
        columns_per_unit=repeats * sizes.value_head_dim,
        heads_per_block=repeats,
        part_rows=rows,
        repeated=attention.repeated,
        attention=attention.module,
        query_key=tuple(attention.producers)[:2] if attention.is_plain else (),
    )


FFN, EXPERT, HEAD, VALUE = FFNChannel(), ExpertChannel(), Head(), ValueChannel()
