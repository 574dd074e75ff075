"""What a run has decided beforehand: its methods, and how many units every group keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from struprune_plugin.layerwise.dense_reference import Target
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.ffn_tuning import FFNTuning
from struprune_plugin.pruning.importance import Importance
from struprune_plugin.pruning.weight_update import WeightUpdate
from struprune_plugin.storage.records import AllocationRecord


@dataclass(frozen=True)
class PruningConfig:
    """The recipe's choices, without llm-compressor's bookkeeping.

    :param reconstruct: what a solve should reproduce
    :param dampening_frac: of all but the closing least-squares solve
    :param chooses_dampening: whether that takes the dampening that does best on sequences held out
    :param rotate_values: whether heads' units are rotated first, where the importance allows it
    :param ffn_tuning: None for none
    :param sparsity: asked of the whole model, for importances that aim at one
    """

    importance: Importance
    weight_update: WeightUpdate
    reconstruct: Target
    dampening_frac: float
    chooses_dampening: bool
    rotate_values: bool
    ffn_tuning: FFNTuning | None
    sparsity: float

    def rotates(self, group: UnitGroup) -> bool:
        """Tell whether the units of a group are rotated into each other before some go."""
        return self.rotate_values and group.rotates and self.importance.eliminates and self.weight_update.solves


@dataclass(frozen=True)
class UnitAllocation:
    """How many units every group keeps.

    :param kept: units by group name
    :param record: how they were allocated, for the manifest
    :param units: which units, by group name, where a replay says so
    """

    kept: Mapping[str, int]
    record: AllocationRecord
    units: Mapping[str, Sequence[int]] | None = None
