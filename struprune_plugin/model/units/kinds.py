"""Kinds of units: FFN channels, channels of experts, whole attention heads, value channels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from struprune_plugin.model.layers import find_linear, measure_layer, read_padding
from struprune_plugin.model.structure.layout import FFNLayout, LayerLayout, Part, Rows
from struprune_plugin.model.structure.locate import scale_counts
from struprune_plugin.model.units.group import UnitGroup, UnitKind

FFN = UnitKind("ffn", ("ffn",), is_ffn=True)
EXPERT = UnitKind("experts", ("ffn",), is_ffn=True)  # channels of split experts
# a head is a KV head with its query heads; a value channel goes from all heads that share the value head, gates included
HEAD = UnitKind("head", ("query", "key", "value", "gate"))
VALUE = UnitKind("value_channels", ("value", "gate"), splits_heads=True, solve_copies=17)


def describe_groups(unit: UnitKind, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
    """Yield the groups of a layer whose units are of one kind, without the layer's position in the model."""
    attention, experts = layout.attention, layout.experts
    if unit is FFN:
        for ffn in layout.ffns:
            yield _describe_ffn(FFN, ffn, layer)
    elif unit is EXPERT and experts is not None:
        members: Any = layer.get_submodule(experts.module)
        for index in range(members.num_experts):
            group = _describe_ffn(EXPERT, experts.place(index), layer)
            yield replace(group, experts=experts.module, tie=EXPERT.name)
    elif unit is HEAD and attention is not None and attention.has_heads:
        yield describe_heads(layout, layer)
    elif unit is VALUE and attention is not None:
        heads = describe_heads(layout, layer)
        yield replace(
            heads,
            unit=VALUE,
            num_units=heads.num_units * heads.part_rows["value"],
            num_blocks=heads.num_units,
            columns_per_unit=heads.heads_per_block,
            producers={linear: parts for linear, parts in heads.producers.items() if {*VALUE.parts} & {*parts}},
            rotates=attention.rotates,
        )


def _describe_ffn(unit: UnitKind, ffn: FFNLayout, layer: nn.Module) -> UnitGroup:
    repeated: dict[str, Rows] = dict.fromkeys(ffn.producers, "block") if ffn.alternates else {}
    width = find_linear(layer, ffn.output).in_features
    return UnitGroup(unit, ffn.producers, ffn.output, ffn.join, width, {"ffn": 1}, repeated=repeated)


def describe_heads(layout: LayerLayout, layer: nn.Module) -> UnitGroup:
    """Return the heads of a layer that has attention, also where heads alone cannot be removed."""
    attention, sizes = layout.attention, measure_layer(layout, layer)
    assert attention is not None
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
        blocks,
        rows,
        columns_per_unit=rows["gate"],
        repeated=attention.repeated,
        attention=attention.module,
        query_key=tuple(attention.producers)[:2] if attention.is_plain else (),
    )


def update_counts(layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
    """Update an attention module's padding and its numbers of heads to the units that its linears hold."""
    for name, parts in {**group.producers, group.consumer: group.unit.parts}.items():
        for form in read_padding(layer, name).values():
            for part, segment in zip(parts, form["segments"], strict=False):
                if part in group.unit.parts:
                    segment[1] = segment[1] * num_keep // group.num_units
    if group.unit is HEAD and not read_padding(layer, group.consumer):
        scale_counts(layer.get_submodule(group.attention), num_keep, group.num_units)


def describe_padding(group: UnitGroup) -> dict[str, Any]:
    """Return the padding, by linear, with which stock attention sees a group's dense heads, none of which is removed yet."""
    is_split, blocks = group.unit.splits_heads, group.num_blocks if group.unit.splits_heads else group.num_units
    heads, width = blocks * group.heads_per_block, group.part_rows["value"] if is_split else group.num_columns
    columns = [heads if is_split else 1, width, width]
    padding: dict[str, Any] = {group.consumer: {"narrow": {"blocks": 1, "segments": [columns]}}}
    for name, parts in group.producers.items():
        rows = {part: group.part_rows[part] * blocks for part in parts}
        runs = {"": 1, "block": blocks, "head": heads}[group.repeated.get(name, "")]
        if not is_split and runs > 1:  # whole runs go
            rows, parts, runs = {"value": sum(rows.values())}, ("value",), 1
        sizes = [width if is_split and part in group.unit.parts else rows[part] // runs for part in parts]
        segments = [[rows[part] // runs // size, size, size] for part, size in zip(parts, sizes, strict=True)]
        padding[name] = {"pad": {"blocks": runs, "segments": segments}}
    return padding
