"""Attention: whole heads, or value channels, which go from all heads that share a value head."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.couplings import Coupling, Measured
from struprune_plugin.model.structure.layout import LayerLayout, UnitLayout
from struprune_plugin.model.structure.locate import read_padding, scale_counts
from struprune_plugin.model.structure.tiny import TinyRun
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup, UnitKind
from struprune_plugin.units.attention_reading import (
    AttentionLayout,
    pads_heads,
    prove_values,
    read_head_widths,
    read_values,
)


class AttentionUnits(UnitKind):
    """Base of the units of attention."""

    pool: ClassVar[str] = "attention"
    order: ClassVar[int] = 0

    def prove(self, unit: AttentionLayout, measured: Measured, run: TinyRun) -> tuple[str, UnitLayout]:
        return prove_values(unit, measured, run)

    def read_sizes(self, unit: AttentionLayout, layer: nn.Module) -> dict[str, int]:
        return measure_heads(unit, layer)

    def list_config_keys(self, layout: LayerLayout, layer: nn.Module) -> dict[str, str]:
        if any(pads_heads(attention, layer) for attention in layout.list_units(AttentionLayout)):
            return {}
        return {"num_attention_heads": "num_heads", "num_key_value_heads": "num_key_value_heads"}

    def release(self, unit: AttentionLayout, layer: nn.Module) -> str:
        """Let attention that sees zeros in place of removed heads count the present ones."""
        if not pads_heads(unit, layer):
            return ""
        _, kept, dense = read_padding(layer, unit.output)["narrow"]["segments"][0]
        scale_counts(layer.get_submodule(unit.module), kept, dense)
        return unit.module

    def count_activations(self, unit: AttentionLayout, layer: nn.Module, config: Any) -> int:
        return 3 * sum(find_linear(layer, name).out_features for name in unit.producers)

    def describe_unit(self, unit: AttentionLayout, layer: nn.Module) -> str:
        sizes, heads = measure_heads(unit, layer), "" if unit.has_heads else "; not as whole heads"
        return f"{unit.output}: {sizes['num_key_value_heads']} heads of {sizes['value_head_dim']} value channels{heads}"

    def describe_padding(self, group: UnitGroup) -> dict[str, Any]:
        blocks = group.num_blocks if self.splits_blocks else group.num_units
        heads = blocks * (group.part_rows["gate"] // group.part_rows["value"])
        width = group.part_rows["value"] if self.splits_blocks else group.num_columns
        columns = [heads if self.splits_blocks else 1, width, width]
        padding: dict[str, Any] = {group.consumer: {"narrow": {"blocks": 1, "segments": [columns]}}}
        for name, parts in group.producers.items():
            rows, runs = {part: group.part_rows[part] * blocks for part in parts}, blocks * group.runs.get(name, 0) or 1
            if not self.splits_blocks and runs > 1:  # whole runs go
                rows, parts, runs = {"value": sum(rows.values())}, ("value",), 1
            sizes = [width if self.splits_blocks and part in self.parts else rows[part] // runs for part in parts]
            segments = [[rows[part] // runs // size, size, size] for part, size in zip(parts, sizes, strict=True)]
            padding[name] = {"pad": {"blocks": runs, "segments": segments}}
        return padding

    def list_surplus(self, units: Sequence[UnitLayout]) -> dict[str, str]:
        """Return all but one mixer of a layer: softmax attention, whose values may be rotated, rather than a state space."""
        mixers = sorted(
            (unit for unit in units if isinstance(unit, AttentionLayout)), key=lambda unit: not unit.rotates
        )
        return {unit.output: "another module of the layer has values" for unit in mixers[1:]}

    def list_weights(self, layer: nn.Module, group: UnitGroup) -> list[Tensor]:
        """Return the weights of every head (rows of Q, K and V, columns of O), flattened, one tensor per (KV) head."""
        heads = describe_heads(group.layout, layer, Heads())
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
    short_form: ClassVar[tuple[str, Any] | None] = ("attention_unit", "head")
    kind: Literal["head"] = "head"

    def check(self, model_type: str, layers: Sequence[tuple[nn.Module, LayerLayout]]) -> None:
        attentions = [(layer, unit) for layer, layout in layers for unit in layout.list_units(AttentionLayout)]
        problem = ""
        if not any(unit.has_heads for _, unit in attentions):
            problem = "has none whose heads are independent of each other"
        elif any(len(set(read_head_widths(unit, layer))) > 1 for layer, unit in attentions):
            problem = "has lost value channels, after which whole heads cannot be removed"
        if problem:
            raise ValueError(_refuse(self.kind, ValueChannels().kind, model_type, problem))

    def list_groups(self, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
        for attention in layout.list_units(AttentionLayout):
            if attention.has_heads:
                yield describe_heads(attention, layer, self)

    def describe_padding(self, group: UnitGroup) -> dict[str, Any]:
        return {} if group.layout.takes_fewer_heads else super().describe_padding(group)

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
    short_form: ClassVar[tuple[str, Any] | None] = ("attention_unit", "value_channels")
    kind: Literal["value_channels"] = "value_channels"

    def read(self, measured: Measured, thin: Mapping[str, Coupling], consumer: str) -> UnitLayout | None:
        return read_values(measured, thin, consumer)

    def check(self, model_type: str, layers: Sequence[tuple[nn.Module, LayerLayout]]) -> None:
        if any(pads_heads(unit, layer) for layer, layout in layers for unit in layout.list_units(AttentionLayout)):
            problem = "has lost heads that it counts by itself, after which value channels cannot be removed"
            raise ValueError(_refuse(self.kind, Heads().kind, model_type, problem))

    def list_groups(self, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
        for attention in layout.list_units(AttentionLayout):
            heads = describe_heads(attention, layer, self)
            yield replace(
                heads,
                num_units=heads.num_units * heads.part_rows["value"],
                num_blocks=heads.num_units,
                columns_per_unit=heads.part_rows["gate"] // heads.part_rows["value"],
                rotates=attention.rotates,
            )

    def describe(self, group: UnitGroup) -> str:
        return f"{self.label} × {group.num_blocks} heads"


def measure_heads(attention: AttentionLayout, layer: nn.Module) -> dict[str, int]:
    """Return the present numbers of heads and their widths, by the fields of :class:`LayerSizes`."""
    head_dim, value_dim = read_head_widths(attention, layer)
    heads = blocks = find_linear(layer, attention.output).in_features // value_dim
    if attention.is_grouped:
        name, parts = next(pair for pair in attention.producers.items() if "value" in pair[1])
        rows = find_linear(layer, name).out_features - (heads * head_dim if "query" in parts else 0)
        blocks = rows // (value_dim + (head_dim if "key" in parts else 0))
    return {"num_heads": heads, "num_key_value_heads": blocks, "head_dim": head_dim, "value_head_dim": value_dim}


def describe_heads(attention: AttentionLayout, layer: nn.Module, kind: UnitKind) -> UnitGroup:
    """Return the heads of attention, also where heads alone cannot be removed."""
    num_heads, blocks, head_dim, value_dim = measure_heads(attention, layer).values()
    repeats = num_heads // blocks
    rows = {"value": value_dim, "gate": repeats * value_dim, "query": repeats * head_dim, "key": head_dim}
    for name, parts in attention.producers.items():  # queries and keys may be of another width than values
        free = [part for part in parts if part in ("query", "key")]
        if len(free) == 1:
            known = sum(rows[part] for part in parts if part not in free)
            rows[free[0]] = find_linear(layer, name).out_features // blocks - known
    return UnitGroup(
        kind,
        attention,
        blocks,
        rows,
        columns_per_unit=rows["gate"],
        runs={name: repeats if order == "head" else 1 for name, order in attention.repeated.items()},
        module=attention.module,
        extra_linears=tuple(attention.producers)[:2] if attention.is_plain else (),
    )


def _refuse(unit: str, other: str, model_type: str, problem: str) -> str:
    return (
        f"`attention_unit: {unit}` cannot be used with {model_type!r}, whose attention {problem}. Set "
        f"`attention_unit: {other}` or `attention_unit: none`."
    )
