"""Settings of a pruning pass: its methods, and the number of units that each group keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from struprune_plugin.layerwise.dense_reference import Target
from struprune_plugin.layerwise.statistics import LayerStatistics
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.pruning.importance import Importance
from struprune_plugin.pruning.weight_update import WeightUpdate
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import count_before
from struprune_plugin.storage.manifest import AllocationRecord


@dataclass(frozen=True)
class PruningConfig:
    """Methods and numbers of a recipe, without llm-compressor's bookkeeping.

    :param dampening_frac: dampening of every solve but the closing least-squares solve
    :param chooses_dampening: whether the closing solve uses the dampening of least error on held-out sequences
    :param rotate_values: whether the units of heads are rotated first, where the importance allows it
    :param sparsity: sparsity asked of the whole model, for importances that depend on it
    """

    importance: Importance
    weight_update: WeightUpdate
    reconstruct: Target
    dampening_frac: float
    chooses_dampening: bool
    rotate_values: bool
    sparsity: float

    def make_statistics(
        self, batches: Sequence[Mapping[str, Tensor]], groups: Sequence[UnitGroup], context: DeviceContext
    ) -> LayerStatistics:
        """Return the statistics of a pass that prunes these groups on this process' batches."""
        return LayerStatistics(
            self.reconstruct,
            context,
            changes=True,
            hold_out=self.chooses_dampening,
            num_before=count_before(sum(len(batch["input_ids"]) for batch in batches)),
            revisits=self.weight_update.refines or self.importance.revisits or any(g.is_coupled for g in groups),
        )


@dataclass(frozen=True)
class UnitAllocation:
    """Number of units that each group keeps.

    :param num_keep: number of units by group name; those of kept entries of lists under their new names
    :param record: record of the allocation, for the manifest
    :param entries: kept entries, sorted, by the full name of their list; those of other lists all stay
    """

    num_keep: Mapping[str, int]
    record: AllocationRecord
    entries: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def list_left(self, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        """Return the groups that remain after entries are removed; kept entries are renumbered."""
        keep = self.entries
        return [g for g in groups if g.output_name not in keep or g.entry < len(keep[g.output_name])]
