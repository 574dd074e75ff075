"""Channels of short convolutions over tokens."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.couplings import Coupling, Measured
from struprune_plugin.model.structure.layout import UnitLayout
from struprune_plugin.model.structure.locate import list_linears
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup
from struprune_plugin.units.shrinking_modules import ShrinkingLayout, ShrinkingUnits


@UNIT_KINDS.register
class ConvolutionChannels(ShrinkingUnits):
    """A channel: its rows of the linears before the convolution (input and gates), its filter, and its column behind it."""

    label: ClassVar[str] = "convolution channels"
    pool: ClassVar[str] = "convolution"
    parts: ClassVar[tuple[str, ...]] = ("channel",)
    aligned: ClassVar[str] = "kernels of convolutions: 16 bytes of bfloat16"
    kind: Literal["convolution"] = "convolution"

    def read(self, measured: Measured, thin: Mapping[str, Coupling], consumer: str) -> UnitLayout | None:
        columns = measured.inputs[consumer].shape[-1]
        producers: dict[str, tuple[str, ...]] = {}
        for name, coupling in thin.items():
            count, rest = divmod(len(coupling.reached), columns)
            if rest or not torch.equal(coupling.reached, torch.eye(columns, dtype=torch.bool).repeat(count, 1)):
                return None
            producers[name] = ("channel",) * count
        owner, linears = consumer.rpartition(".")[0], list_linears(measured.layer)
        tensors = {
            f"{owner}.{name}": ("channel",)
            for name, tensor in measured.layer.get_submodule(owner).named_parameters()
            if f"{owner}.{name}".rpartition(".")[0] not in linears and len(tensor) == columns
        }
        if not tensors or not any(coupling.later.any() for coupling in thin.values()):
            return None
        return ShrinkingLayout(kind="convolution", producers=producers, output=consumer, tensors=tensors)

    def describe_group(self, unit: UnitLayout, layer: nn.Module) -> UnitGroup:
        width = find_linear(layer, unit.output).in_features
        return UnitGroup(self, unit, width, {"channel": 1})

    def resize_module(self, layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
        for name in {name.rpartition(".")[0] for name in group.tensors}:
            module: Any = layer.get_submodule(name)
            if isinstance(module, nn.Conv1d):
                module.in_channels = module.out_channels = module.groups = num_keep
