"""FFN channels: a row of every producing linear and a column of the consuming one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from struprune_plugin.model.families import Family, Part
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.units.group import UnitGroup, UnitKind, Wiring, find_residual, read_residual_scale


def _describe(family: Family, index: int, name: str, layer: nn.Module) -> UnitGroup:
    ffn = family.ffn
    parallel = getattr(layer, family.parallel) if isinstance(family.parallel, str) else family.parallel
    return UnitGroup(
        name=f"{name}.{ffn.output}",
        layer_index=index,
        layer_name=name,
        unit=FFN,
        num_units=find_linear(layer, ffn.output).in_features,
        unit_cost=0,
        num_blocks=1,
        columns_per_unit=1,
        repeats=1,
        wiring=Wiring(
            producers=ffn.producers,
            part_rows={},
            interleaved=False,
            consumer=ffn.output,
            residual=find_residual(family, layer, ffn.residual, ffn.producers),
            parallel=family.attention.output if parallel else "",
            normed_output=family.normed_output,
            residual_scale=read_residual_scale(family, layer),
            attention="",
            query_key=(),
        ),
    )


def _find_owners(group: UnitGroup, part: Part) -> Tensor:
    return torch.arange(group.num_units)[None]


def _resize_rows(group: UnitGroup, num_units: int) -> Mapping[Part, int]:
    return group.wiring.part_rows


def _update_counts(layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
    """Nothing but the linears' own sizes says how many channels there are."""


def _count_heads(group: UnitGroup, num_units: int) -> int:
    return 0


FFN = UnitKind(
    "ffn", True, _describe, _find_owners, _resize_rows, _update_counts, _count_heads, rotates=False, solve_copies=7
)
