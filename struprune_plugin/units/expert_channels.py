"""Channels of a mixture's experts, which llm-compressor has split into linears."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

from torch import nn

from struprune_plugin.model.structure.layout import LayerLayout
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup
from struprune_plugin.units.ffn import ALIGNED, FFNChannels, describe_channels


@UNIT_KINDS.register
class ExpertChannels(FFNChannels):
    """A channel of one expert."""

    label: ClassVar[str] = "expert channels"
    pool: ClassVar[str] = "experts"
    order: ClassVar[int] = 2
    kind: Literal["experts"] = "experts"  # type: ignore[assignment]

    def list_groups(self, layout: LayerLayout, layer: nn.Module) -> Iterator[UnitGroup]:
        if layout.experts is None:
            return
        members: Any = layer.get_submodule(layout.experts.module)
        for index in range(members.num_experts):
            group = describe_channels(self, layout.experts.place(index), layer)
            yield replace(group, mixture=layout.experts.module, tie=self.kind)

    def list_steps(self, group: UnitGroup, width_multiple: int | None) -> Iterator[tuple[int, str]]:
        yield math.gcd(ALIGNED, group.num_units), "grouped kernels: 16 bytes of bfloat16"
        yield from super().list_steps(group, width_multiple)
