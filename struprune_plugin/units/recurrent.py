"""Heads of recurrent mixers: gated delta nets, Mamba-2."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from torch import nn

from struprune_plugin.export.modeling_struprune import find_owner, narrow
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.couplings import Coupling, Measured
from struprune_plugin.model.structure.layout import UnitLayout
from struprune_plugin.model.structure.locate import read_padding
from struprune_plugin.model.surgery import change_tensor
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup
from struprune_plugin.units.recurrent_reading import COLUMN, ENTRY, KEY, SHARED, RecurrentLayout, read_recurrent
from struprune_plugin.units.shrinking_modules import ShrinkingUnits


@UNIT_KINDS.register
class RecurrentHeads(ShrinkingUnits):
    """A head: its rows of all linears before the recurrence, its filters and decays, and its columns behind it."""

    label: ClassVar[str] = "recurrent heads"
    pool: ClassVar[str] = "recurrent"
    parts: ClassVar[tuple[str, ...]] = (COLUMN, ENTRY, KEY)
    kind: Literal["recurrent_heads"] = "recurrent_heads"

    def read(self, measured: Measured, thin: Mapping[str, Coupling], consumer: str) -> UnitLayout | None:
        return read_recurrent(measured, consumer)

    def describe_group(self, unit: RecurrentLayout, layer: nn.Module) -> UnitGroup:
        count, columns = int(getattr(*find_owner(layer, unit.counter))), find_linear(layer, unit.output).in_features
        rows = {COLUMN: columns // count, ENTRY: unit.entries}
        for name, parts in unit.producers.items():  # what is left is of the parts whose size nothing else states
            known = sum(rows[part] * count for part in parts if part in (COLUMN, ENTRY))
            left, free = find_linear(layer, name).out_features - known, [p for p in parts if p in (KEY, SHARED)]
            if free:
                rows[free[0]] = left // len(free) // (count if free[0] == KEY else 1)
        return UnitGroup(
            self,
            unit,
            count,
            rows,
            num_blocks=int(getattr(*find_owner(layer, unit.blocks))) if unit.blocks else 1,
            columns_per_unit=columns // count,
            runs=dict.fromkeys(unit.mixed, 1),
            is_coupled=bool(unit.norms),
        )

    def describe_unit(self, unit: RecurrentLayout, layer: nn.Module) -> str:
        group = self.describe_group(unit, layer)
        return f"{unit.output}: {group.num_units} {self.label} of {group.columns_per_unit} channels"

    def describe_padding(self, group: UnitGroup) -> dict[str, Any]:
        unit: RecurrentLayout = group.layout
        sizes = {part: size if part == SHARED else size * group.num_units for part, size in group.part_rows.items()}
        return {
            name: {"narrow": {"blocks": 1, "segments": [[1, sizes[part], sizes[part]] for part in unit.tensors[name]]}}
            for name in unit.buffers
        }

    def release(self, unit: RecurrentLayout, layer: nn.Module) -> str:
        """Cut buffers of which the module reads a part to that part, as the class computes them for fewer heads."""
        forms = {name: form for name in unit.buffers if (form := read_padding(layer, name))}
        for name, form in forms.items():
            change_tensor(layer, name, partial(narrow, form=form["narrow"]))
        return unit.output.rpartition(".")[0] if forms else ""

    def resize_module(self, layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
        unit: RecurrentLayout = group.layout
        padded = replace(unit, producers={name: unit.tensors[name] for name in unit.buffers})
        super().resize_module(layer, replace(group, layout=padded), num_keep)
        for name in unit.scaled:
            setattr(*find_owner(layer, name), getattr(*find_owner(layer, name)) * num_keep // group.num_units)
        for name, tensor in unit.rows.items():
            setattr(*find_owner(layer, name), max(getattr(*find_owner(layer, tensor)).shape))
        for eps, weight in unit.norms.items():  # the same function of fewer channels: zeros no longer count in the mean
            setattr(*find_owner(layer, eps), getattr(*find_owner(layer, eps)) * group.num_units / num_keep)
            factor = math.sqrt(group.num_units / num_keep)
            change_tensor(layer, weight, lambda old, factor=factor: old.float() * factor)  # type: ignore[misc]
