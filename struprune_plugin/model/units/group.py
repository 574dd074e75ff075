"""Group of coupled units, and the kinds of units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.layout import Join, Part, Producers, Rows


@dataclass(frozen=True)
class UnitKind:
    """Kind of units.

    :param parts: parts of producers whose rows belong to units; rows of other parts are never removed
    :param is_ffn: whether units belong to the FFN, else to attention; groups of one module kind are allocated together
    :param splits_heads: whether a unit is a channel of a head, else a whole head or an FFN channel
    :param solve_copies: number of float64 Gram matrices alive at the same time in the worst solve, float32 ones counted half
    """

    name: str
    parts: tuple[Part, ...]
    is_ffn: bool = False
    splits_heads: bool = False
    solve_copies: int = 7


@dataclass(frozen=True)
class UnitGroup:
    """Coupled units of one module of one decoder layer, its linears, and how its output joins the residual stream.

    Names of linears and submodules are relative to the layer.
    For example, the FFN of LLaMA's first layer: consumer ``mlp.down_proj`` [4096, 11008] loses columns, the producers
    ``mlp.gate_proj`` and ``mlp.up_proj`` [11008, 4096] lose the rows of the same channels; num_units is 11008, unit_cost
    3 * 4096, and the consumer's output is added to the input of ``post_attention_layernorm`` (``join.residual``).

    :param num_units: number of present units
    :param part_rows: number of rows per part: of one value head and the query heads that share it, or of one FFN channel
    :param unit_cost: parameters that removing one unit frees
    :param num_blocks: number of equal runs of units that each keep the same number: the value heads for value channels, else 1
    :param repeated: the order of producers' rows, where it is not part by part
    :param rotates: whether the units of a block may be rotated into each other first
    :param attention: name of the attention module; empty for the FFN
    :param experts: name of the list of experts that contains the module; empty elsewhere
    :param tie: groups with the same tie keep the same number of units; empty where a group's number is independent
    :param query_key: linears that produce queries and keys, where no position encoding lies in between; else empty
    """

    unit: UnitKind
    producers: Producers
    consumer: str
    join: Join
    num_units: int
    part_rows: Mapping[Part, int]
    layer_index: int = 0
    layer_name: str = ""
    unit_cost: int = 0
    num_blocks: int = 1
    columns_per_unit: int = 1
    repeated: Mapping[str, Rows] = field(default_factory=dict)
    rotates: bool = False
    attention: str = ""
    experts: str = ""
    tie: str = ""
    query_key: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Full name of the consuming linear."""
        return f"{self.layer_name}.{self.consumer}"

    @property
    def kind(self) -> str:
        return self.unit.name

    @property
    def module_kind(self) -> str:
        return "experts" if self.experts else "ffn" if self.unit.is_ffn else "attention"

    @property
    def output_name(self) -> str:
        """Full name of the module whose output error is measured: the consumer, or the list of experts."""
        return f"{self.layer_name}.{self.experts}" if self.experts else self.name

    @property
    def num_columns(self) -> int:
        return self.num_units * self.columns_per_unit

    @property
    def repeats(self) -> int:
        """For value channels, number of query heads that share one value head; else 1."""
        return self.columns_per_unit if self.unit.splits_heads else 1

    @property
    def heads_per_block(self) -> int:
        return self.part_rows["gate"] // self.part_rows["value"]

    @property
    def expert_index(self) -> int:
        return int(self.consumer.removeprefix(f"{self.experts}.").partition(".")[0])

    def find_row_owners(self, producer: str) -> Tensor:
        """Return the unit that every row of a producing linear belongs to, -1 for rows that are never removed, shape [rows]."""
        blocks = self.num_blocks if self.unit.splits_heads else self.num_units
        units = torch.arange(self.num_units).view(blocks, self.num_units // blocks if blocks else 1)
        owners = [
            units.repeat(1, self.part_rows[part] // units.shape[1])
            if part in self.unit.parts
            else units.new_full((blocks, self.part_rows[part]), -1)
            for part in self.producers[producer]
        ]
        order = self.repeated.get(producer)
        if not order:
            return torch.cat([owner.flatten() for owner in owners])
        runs = blocks * (self.heads_per_block if order == "head" else 1)
        return torch.cat([owner.reshape(runs, -1) for owner in owners], 1).flatten()

    def count_rows(self, producer: str) -> int:
        """Return the number of a producing linear's rows per unit."""
        return int((self.find_row_owners(producer) == 0).sum())

    def find_kept_rows(self, producer: str, keep: Tensor) -> Tensor:
        """Return the row indices of a producing linear that stay with the kept units, sorted, shape [kept rows]."""
        owners = self.find_row_owners(producer)
        stays = torch.zeros(self.num_units + 1, dtype=torch.bool)  # the last entry stands for owner -1
        stays[keep.cpu()] = stays[-1] = True
        return stays[owners].nonzero().flatten()

    def resize(self, num_units: int) -> UnitGroup:
        """Return the description of the same module with another number of units, the same in every block."""
        rows = dict(self.part_rows)
        for part in self.unit.parts if self.unit.splits_heads else ():
            rows[part] = rows[part] * num_units // self.num_units
        return replace(self, num_units=num_units, part_rows=rows)

    def to_unit_order(self, columns: Tensor) -> Tensor:
        """Return consumer columns (the last dimension) reordered from the module's order to unit order."""
        if self.repeats == 1:
            return columns
        return columns.unflatten(-1, (self.num_blocks, self.repeats, -1)).transpose(-1, -2).flatten(-3)

    def to_module_order(self, columns: Tensor) -> Tensor:
        """Return consumer columns (the last dimension), of all or of the kept units, reordered to the module's order."""
        if self.repeats == 1:
            return columns
        return columns.unflatten(-1, (self.num_blocks, -1, self.repeats)).transpose(-1, -2).flatten(-3)


def select_groups(groups: Sequence[UnitGroup], layer_name: str) -> list[UnitGroup]:
    """Return the groups of one decoder layer, in order."""
    return [group for group in groups if group.layer_name == layer_name]


def count_unit_parameters(layer: nn.Module, group: UnitGroup) -> int:
    """Return the number of parameters per unit: its rows with their biases, and its columns."""
    count = group.columns_per_unit * find_linear(layer, group.consumer).out_features
    for name in group.producers:
        producer = find_linear(layer, name)
        count += group.count_rows(name) * (producer.in_features + (producer.bias is not None))
    return count
