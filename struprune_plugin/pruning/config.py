"""Decisions before the pruning: methods, and the number of units that each group keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from struprune_plugin.layerwise.dense_reference import Target
from struprune_plugin.model.structure.routing import Routing
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.ffn_tuning import FFNTuning
from struprune_plugin.pruning.importance import Importance
from struprune_plugin.pruning.weight_update import WeightUpdate
from struprune_plugin.storage.records import AllocationRecord

Value = TypeVar("Value")


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
        """Return whether the units of a group are rotated into each other before some go."""
        return self.rotate_values and group.rotates and self.importance.eliminates and self.weight_update.solves


@dataclass(frozen=True)
class KeptExperts:
    """The whole experts that stay.

    :param routing: what goes with the others
    :param keep: those that stay, sorted, by the full name of their list
    """

    routing: Routing
    keep: Mapping[str, Sequence[int]]

    @property
    def count(self) -> int:
        """Count per layer."""
        return len(next(iter(self.keep.values())))

    def tell(self, config: Any) -> None:
        """Let a text model's configuration say how many experts there are."""
        setattr(config, self.routing.key, self.count)

    def list_left(self, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        """Return the groups that are left: experts that stay are numbered anew."""
        return [
            group for group in groups if not group.experts or group.expert_index < len(self.keep[group.output_name])
        ]

    def rename(self, groups: Sequence[UnitGroup], values: Mapping[str, Value]) -> dict[str, Value]:
        """Return values by the names that groups have once the other experts have gone.

        :param groups: of the dense model
        :param values: by their names there; some may be missing
        """
        names = {(group.output_name, group.expert_index): group.name for group in groups if group.experts}
        found = {group.name: values[group.name] for group in groups if not group.experts and group.name in values}
        for name, keep in self.keep.items():
            old = [(names[name, place], names[name, index]) for place, index in enumerate(keep)]
            found |= {new: values[before] for new, before in old if before in values}
        return found


@dataclass(frozen=True)
class UnitAllocation:
    """Number of units that each group keeps.

    :param kept: units by group name; of experts that stay, by their new names
    :param record: how they were allocated, for the manifest
    :param units: which units, by group name, where a replay says so
    :param experts: the whole experts that stay; None where all do
    """

    kept: Mapping[str, int]
    record: AllocationRecord
    units: Mapping[str, Sequence[int]] | None = None
    experts: KeptExperts | None = None

    def list_left(self, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
        """Return the groups that are left once whole experts have gone."""
        return list(groups) if self.experts is None else self.experts.list_left(groups)
