"""Updates of the remaining weights: deletion alone, a least-squares solve, or more, as registered methods."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.layerwise.statistics import Stack
from struprune_plugin.model.unit_kind import UnitGroup, UnitKind
from struprune_plugin.settings.registry import Config, Registry


@dataclass(frozen=True)
class Refined:
    """New weights of one group's linears.

    :param producers: by linear, kept rows only, shape [rows, d + 1], bias last
    :param consumer: shape [d_out, kept columns + 1], bias last
    :param objective: value at the start, then after every step
    """

    producers: dict[str, Tensor]
    consumer: Tensor
    objective: list[float]


class WeightUpdate(Config):
    """Base class of an update of the remaining weights.

    :cvar solves: whether the consumers are re-solved by least squares
    :cvar refines: whether :meth:`refine` then updates the producers, too
    """

    solves: ClassVar[bool] = True
    refines: ClassVar[bool] = False
    method: str

    def can_refine(self, group: UnitGroup) -> bool:
        """Return whether :meth:`refine` is defined for a group."""
        return False

    def refine(self, module: Stack, keep: Tensor, weight: Tensor, dampening_frac: float) -> Refined:
        """Return refined weights on the kept units, from the least-squares solution.

        :param module: not yet sliced
        :param keep: sorted kept units
        :param weight: the consumer's re-solved weights on them, bias last
        """
        raise NotImplementedError

    def check(self, model: PreTrainedModel, kinds: Sequence[UnitKind]) -> None:
        """Raise a ValueError if the method is not defined for a model, or for the kinds of units that go."""


WEIGHT_UPDATES: Registry[WeightUpdate] = Registry(WeightUpdate)


@WEIGHT_UPDATES.register
class LeastSquares(WeightUpdate):
    """Least-squares solve of the consumers on their pruned inputs (method.md section 6)."""

    method: Literal["least_squares"] = "least_squares"


@WEIGHT_UPDATES.register
class NoUpdate(WeightUpdate):
    """Deletion alone."""

    solves: ClassVar[bool] = False
    method: Literal["none"] = "none"
