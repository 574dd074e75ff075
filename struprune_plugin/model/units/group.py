"""A group of coupled units, and what a kind of units has to say of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from struprune_plugin.model.families import Family, Part, Producers
from struprune_plugin.model.layers import find_linear


@dataclass(frozen=True)
class UnitKind:
    """One kind of units; adding a kind means adding one of these.

    :param name: in recipes and manifests
    :param is_ffn: whether units are of the FFN, else of attention; groups of one module kind are allocated together
    :param describe: the group of a layer without its cost, from the family, the layer's position and name, and itself
    :param find_owners: the unit that every row of one part of a producer belongs to, -1 where it always stays, shape
        [heads, rows of one head], or [1, rows] for the FFN
    :param resize_rows: the rows of one part of a head when the group has another number of units
    :param update_counts: lets the attention module know how many units its linears now hold
    :param count_heads: the heads that read and write values when a group has so many units; 0 in the FFN
    :param rotates: whether a head's units may be rotated into each other first
    :param solve_copies: float64 Gram matrices alive together in the worst solve, float32 ones counted half
    """

    name: str
    is_ffn: bool
    describe: Callable[[Family, int, str, nn.Module], UnitGroup]
    find_owners: Callable[[UnitGroup, Part], Tensor]
    resize_rows: Callable[[UnitGroup, int], Mapping[Part, int]]
    update_counts: Callable[[nn.Module, UnitGroup, int], None]
    count_heads: Callable[[UnitGroup, int], int]
    rotates: bool
    solve_copies: int


@dataclass(frozen=True)
class Wiring:
    """The linears of a group's module, and how its output joins the residual stream. Names are relative to the layer.

    :param producers: linears that lose rows, each with the parts of which its rows consist
    :param part_rows: rows of one part: of one value head and the query heads that share it; empty for the FFN
    :param interleaved: whether a fused projection's rows come head by head, not part by part
    :param consumer: the linear that loses the columns
    :param residual: submodule whose input is the residual stream that the consumer's output is added to
    :param parallel: linear whose output is added to the same residual stream in parallel; empty where none
    :param normed_output: whether a norm stands between the consumer and the residual stream
    :param residual_scale: the factor on the consumer's output, and the parallel one's, when it joins the residual stream
    :param attention: the attention module; empty for the FFN
    :param query_key: the linears that make queries and keys, where no positions are rotated in between; empty else
    """

    producers: Producers
    part_rows: Mapping[Part, int]
    interleaved: bool
    consumer: str
    residual: str
    parallel: str
    normed_output: bool
    residual_scale: float
    attention: str
    query_key: tuple[str, ...]


@dataclass(frozen=True)
class UnitGroup:
    """The coupled units of one module of one decoder layer.

    :param name: full name of the consuming linear; what recipes target and messages name
    :param layer_index: position of the decoder layer
    :param layer_name: full name of the decoder layer
    :param unit: the kind of the units
    :param num_units: units now present
    :param unit_cost: parameters that removing one unit frees
    :param num_blocks: equal runs of units that keep the same number each: the value heads for ``vo``, else 1
    :param columns_per_unit: input columns of the consumer that belong to one unit
    :param repeats: for ``vo``, query heads that share one value head; else 1
    """

    name: str
    layer_index: int
    layer_name: str
    unit: UnitKind
    num_units: int
    unit_cost: int
    num_blocks: int
    columns_per_unit: int
    repeats: int
    wiring: Wiring

    @property
    def kind(self) -> str:
        return self.unit.name

    @property
    def module_kind(self) -> str:
        return "ffn" if self.unit.is_ffn else "attention"

    @property
    def producers(self) -> Producers:
        return self.wiring.producers

    @property
    def consumer(self) -> str:
        return self.wiring.consumer

    @property
    def num_columns(self) -> int:
        return self.num_units * self.columns_per_unit

    def find_row_owners(self, producer: str) -> Tensor:
        """Return the unit that every row of a producing linear belongs to, -1 where it always stays, shape [rows]."""
        owners = [self.unit.find_owners(self, part) for part in self.producers[producer]]
        if self.wiring.interleaved:
            return torch.cat(owners, 1).flatten()
        return torch.cat([owner.flatten() for owner in owners])

    def find_kept_rows(self, producer: str, keep: Tensor) -> Tensor:
        """Return the rows of a producing linear that stay with the kept units, sorted, shape [kept rows]."""
        owners = self.find_row_owners(producer)
        stays = torch.zeros(self.num_units + 1, dtype=torch.bool)  # the last entry stands for owner -1
        stays[keep.cpu()] = stays[-1] = True
        return stays[owners].nonzero().flatten()

    def resize(self, num_units: int) -> UnitGroup:
        """Return the description of the same module with another number of units, the same in every block."""
        wiring = replace(self.wiring, part_rows=self.unit.resize_rows(self, num_units))
        return replace(self, num_units=num_units, wiring=wiring)

    def to_unit_order(self, columns: Tensor) -> Tensor:
        """Bring consumer columns (the last dimension) from the module's order to unit order."""
        if self.repeats == 1:
            return columns
        return columns.unflatten(-1, (self.num_blocks, self.repeats, -1)).transpose(-1, -2).flatten(-3)

    def to_module_order(self, columns: Tensor) -> Tensor:
        """Bring consumer columns (the last dimension), of all or of the kept units, back to the module's order."""
        if self.repeats == 1:
            return columns
        return columns.unflatten(-1, (self.num_blocks, -1, self.repeats)).transpose(-1, -2).flatten(-3)


def select_groups(groups: Sequence[UnitGroup], layer_name: str) -> list[UnitGroup]:
    """Return the groups of one decoder layer, in order."""
    return [group for group in groups if group.layer_name == layer_name]


def find_residual(family: Family, layer: nn.Module, norm: str, producers: Producers) -> str:
    """Return the submodule that the residual stream enters: the norm, or the first linear where norms come after."""
    pre_norm = not family.pre_norm_flag or getattr(layer, family.pre_norm_flag)
    return norm if pre_norm else next(iter(producers))


def read_residual_scale(family: Family, layer: nn.Module) -> float:
    """Return the factor on a layer's module outputs when they join the residual stream."""
    return float(getattr(layer, family.residual_scale)) if family.residual_scale else 1.0


def count_unit_parameters(layer: nn.Module, group: UnitGroup) -> int:
    """Count the parameters that go with one unit: its rows with their biases, and its columns."""
    count = group.columns_per_unit * find_linear(layer, group.consumer).out_features
    for name in group.producers:
        producer = find_linear(layer, name)
        rows = int((group.find_row_owners(name) == 0).sum())
        count += rows * (producer.in_features + (producer.bias is not None))
    return count
