"""View of one group's module in its layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from struprune_plugin.layerwise.capture import Visit
from struprune_plugin.layerwise.statistics import GroupMoments, LayerStatistics
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_consumer
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext


@dataclass(frozen=True)
class ModuleView:
    """Group of units in its layer, with its weights and the statistics of the calibration data.

    :param layer: the decoder layer
    :param group: the group at the layer's present sizes
    :param statistics: statistics of the layer
    """

    layer: nn.Module
    group: UnitGroup
    statistics: LayerStatistics

    @property
    def context(self) -> DeviceContext:
        return self.statistics.context

    @property
    def has_bias(self) -> bool:
        """True if the consumer has a bias."""
        return find_linear(self.layer, self.group.consumer).bias is not None

    def read_dense(self) -> Tensor:
        """Return :func:`~struprune_plugin.model.surgery.read_consumer` of the group, on the device where systems are solved."""
        dense = read_consumer(self.layer, self.group, self.context.fetch)
        self.context.release(self.layer)
        return dense

    def collect_moments(self, progress: str) -> GroupMoments:
        """Return the moments of the consumer's inputs and targets, see :class:`LayerStatistics`."""
        return self.statistics.collect_moments(self.layer, self.group, progress)

    def visit_batches(self) -> Iterator[Visit]:
        """Run the present layer on every batch and yield the visits."""
        return self.statistics.visit_batches(self.layer, self.group, f"{self.group.name} inputs")

    def resize(self, num_units: int) -> ModuleView:
        """Return the view of the same module after slicing to ``num_units`` units."""
        return replace(self, group=self.group.resize(num_units))
