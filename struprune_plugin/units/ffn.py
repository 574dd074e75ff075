"""FFN channels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Literal

from torch import nn

from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.layout import FFNLayout, LayerLayout
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup, UnitKind

ALIGNED = 8  # numbers of bfloat16 in 16 bytes: kernels of matrix units need rows that are multiples of it
_FINE = 64  # steps of that size that a width must have for ``auto`` to round it


@UNIT_KINDS.register
class FFNChannels(UnitKind):
    """A channel: its rows of the linears that produce it, its column of the one that reads it."""

    label: ClassVar[str] = "FFN channels"
    pool: ClassVar[str] = "ffn"
    parts: ClassVar[tuple[str, ...]] = ("ffn",)
    kind: Literal["ffn"] = "ffn"

    def list_groups(self, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
        for ffn in layout.ffns:
            yield describe_channels(self, ffn, layer)

    def list_steps(self, group: UnitGroup, width_multiple: int | None) -> Iterator[tuple[int, str]]:
        yield from super().list_steps(group, width_multiple)
        if width_multiple is not None:
            yield width_multiple, f"width_multiple: {width_multiple}"
        elif group.num_units >= _FINE * ALIGNED:
            yield math.gcd(ALIGNED, group.num_units), "width_multiple: auto"


def describe_channels(kind: UnitKind, ffn: FFNLayout, layer: nn.Module) -> UnitGroup:
    """Return the channels of one FFN, or of one expert."""
    runs = dict.fromkeys(ffn.producers, 1) if ffn.alternates else {}
    width = find_linear(layer, ffn.output).in_features
    return UnitGroup(kind, ffn.producers, ffn.output, ffn.join, width, {"ffn": 1}, runs=runs)
