"""Group of coupled units, and the interface of a kind of units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.layout import Join, LayerLayout, Part, Producers, Rows


class UnitKind(ABC):
    """Kind of units; a new kind is a new subclass.

    :cvar name: name in recipes and manifests
    :cvar is_ffn: whether units belong to the FFN, else to attention; groups of one module kind are allocated together
    :cvar solve_copies: number of float64 Gram matrices alive at the same time in the worst solve, float32 ones counted half
    """

    name: ClassVar[str]
    is_ffn: ClassVar[bool] = False
    solve_copies: ClassVar[int] = 7

    @abstractmethod
    def describe(self, layout: LayerLayout, layer: nn.Module) -> Iterable[UnitGroup]:
        """Yield the groups of a layer, without the layer's position in the model."""

    @abstractmethod
    def find_owners(self, group: UnitGroup, part: Part) -> Tensor:
        """Return the unit that every row of one part of a producer belongs to, -1 for rows that are never removed.

        :return: shape [heads, rows of one head], or [1, rows] for the FFN
        """

    def resize_rows(self, group: UnitGroup, num_units: int) -> Mapping[Part, int]:
        """Return the number of rows per part of a head when the group has another number of units."""
        return group.part_rows

    def update_counts(self, layer: nn.Module, group: UnitGroup, num_keep: int) -> None:  # noqa: B027 - the FFN has none
        """Update the attention module's attributes to the number of units that its linears now hold."""


@dataclass(frozen=True)
class UnitGroup:
    """Coupled units of one module of one decoder layer, its linears, and how its output joins the residual stream.

    Names of linears and submodules are relative to the layer.
    For example, the FFN of LLaMA's first layer: consumer ``mlp.down_proj`` [4096, 11008] loses columns, the producers
    ``mlp.gate_proj`` and ``mlp.up_proj`` [11008, 4096] lose the rows of the same channels; num_units is 11008, unit_cost
    3 * 4096, and the consumer's output is added to the input of ``post_attention_layernorm`` (``join.residual``).

    :param unit: the kind of the units
    :param producers: linears that lose rows, each with the parts of its rows in order
    :param consumer: the linear that loses columns
    :param join: how the consumer's output joins the residual stream
    :param name: full name of the consuming linear, used by targets in recipes and in messages
    :param layer_index: position of the decoder layer
    :param layer_name: full name of the decoder layer
    :param num_units: number of present units
    :param unit_cost: parameters that removing one unit frees
    :param num_blocks: number of equal runs of units that each keep the same number: the value heads for value channels, else 1
    :param columns_per_unit: number of the consumer's input columns per unit
    :param repeats: for value channels, number of query heads that share one value head; else 1
    :param heads_per_block: number of query heads that share one value head
    :param part_rows: number of rows per part, for one value head and the query heads that share it; empty for the FFN
    :param repeated: producers whose rows are ordered head by head, block by block or channel by channel, not part by part
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
    name: str = ""
    layer_index: int = 0
    layer_name: str = ""
    num_units: int = 0
    unit_cost: int = 0
    num_blocks: int = 1
    columns_per_unit: int = 1
    repeats: int = 1
    heads_per_block: int = 1
    part_rows: Mapping[Part, int] = field(default_factory=dict)
    repeated: Mapping[str, Rows] = field(default_factory=dict)
    rotates: bool = False
    attention: str = ""
    experts: str = ""
    tie: str = ""
    query_key: tuple[str, ...] = ()

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
    def expert_index(self) -> int:
        """Index of the expert that a group belongs to."""
        return int(self.consumer.removeprefix(f"{self.experts}.").partition(".")[0])

    def find_row_owners(self, producer: str) -> Tensor:
        """Return the unit that every row of a producing linear belongs to, -1 for rows that are never removed, shape [rows]."""
        owners = [self.unit.find_owners(self, part) for part in self.producers[producer]]
        repeated = self.repeated.get(producer, "")
        if repeated:
            per_block = {"block": 1, "head": self.heads_per_block, "channel": owners[0].shape[1]}[repeated]
            return torch.cat([owner.reshape(len(owner) * per_block, -1) for owner in owners], 1).flatten()
        return torch.cat([owner.flatten() for owner in owners])

    def count_rows(self, producer: str) -> int:
        """Return the number of rows of a producing linear per unit."""
        return int((self.find_row_owners(producer) == 0).sum())

    def find_kept_rows(self, producer: str, keep: Tensor) -> Tensor:
        """Return the row indices of a producing linear that stay with the kept units, sorted, shape [kept rows]."""
        owners = self.find_row_owners(producer)
        stays = torch.zeros(self.num_units + 1, dtype=torch.bool)  # the last entry stands for owner -1
        stays[keep.cpu()] = stays[-1] = True
        return stays[owners].nonzero().flatten()

    def resize(self, num_units: int) -> UnitGroup:
        """Return the description of the same module with another number of units, the same in every block."""
        return replace(self, num_units=num_units, part_rows=self.unit.resize_rows(self, num_units))

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
