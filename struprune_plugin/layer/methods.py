"""What a run has decided beforehand: its methods, and how many units every group keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from struprune_plugin.layer.admm import ADMMSettings
from struprune_plugin.layer.criteria import Criterion
from struprune_plugin.layer.records import AllocationRecord
from struprune_plugin.layer.targets import Target
from struprune_plugin.layer.tuning import TuningSettings
from struprune_plugin.maths.allocation import Candidate
from struprune_plugin.model.units.group import UnitGroup


@dataclass(frozen=True)
class Restoration:
    """How the weights that remain are restored.

    :param solves: re-solve the consumers by least squares
    :param refines: then the producers too, by ADMM
    """

    solves: bool
    refines: bool = False


RESTORATIONS = {  # name in recipes
    "least_squares": Restoration(solves=True),
    "admm": Restoration(solves=True, refines=True),
    "none": Restoration(solves=False),
}


@dataclass(frozen=True)
class Methods:
    """The recipe's choices, without the host's bookkeeping.

    :param criterion: how units are ranked
    :param restoration: how the weights that remain are restored
    :param target: what a solve should reproduce
    :param damping: of all but the closing least-squares solve
    :param chooses_damping: whether that takes the damping that does best on sequences held out
    :param rotate_values: whether heads' units are rotated first, where the criterion allows it
    :param max_swaps: exchanges of units after an elimination
    :param admm: settings of Algorithm 4's sub-steps
    :param tuning: settings of layer tuning; None for none
    :param sparsity: asked of the whole model, for criteria that aim at one
    :param max_sparsity: clip of a module's
    :param as_printed: rank exactly as the paper prints
    """

    criterion: Criterion
    restoration: Restoration
    target: Target
    damping: float
    chooses_damping: bool
    rotate_values: bool
    max_swaps: int
    admm: ADMMSettings
    tuning: TuningSettings | None
    sparsity: float
    max_sparsity: float
    as_printed: bool

    def rotates(self, group: UnitGroup) -> bool:
        """Tell whether the units of a group are rotated into each other before some go."""
        return self.rotate_values and group.unit.rotates and self.criterion.eliminates and self.restoration.solves


@dataclass(frozen=True)
class Plan:
    """How many units every group keeps.

    :param kept: units by group name
    :param record: how they were allocated, for the manifest
    :param candidates: the temperatures searched, kept counts in the order of the groups; none without a search
    :param units: which units, by group name, where a replay says so
    """

    kept: Mapping[str, int]
    record: AllocationRecord
    candidates: Sequence[Candidate] = ()
    units: Mapping[str, Sequence[int]] | None = None
