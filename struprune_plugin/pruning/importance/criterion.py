"""Base class of an importance, which ranks the units of one group."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.linalg.elimination import RankedUnits, order_units, unit_columns
from struprune_plugin.model.unit_kind import UnitGroup, UnitKind
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.settings.registry import Config, Registry


class Importance(Config):
    """Base class of a ranking of units.

    :cvar eliminates: whether the score of a unit is the increase of the damped, weighed error at its removal: error curves are
        then sums of scores, and where values are rotated, directions are ranked in place of :meth:`rank`
    :cvar gradients: whether it needs :attr:`Sensitivity.saliency`, which :meth:`measure` computes
    :cvar takes_offload: whether it works with ``offload``
    :cvar aims: whether scores depend on the requested sparsity
    :cvar revisits: whether it reads activations, by :meth:`Stack.visit_batches`
    :cvar takes_experts: whether it ranks channels of experts
    """

    eliminates: ClassVar[bool] = False
    gradients: ClassVar[bool] = False
    takes_offload: ClassVar[bool] = True
    aims: ClassVar[bool] = False
    revisits: ClassVar[bool] = False
    takes_experts: ClassVar[bool] = True
    method: str

    def rank(self, problem: GroupProblem, num_remove: int) -> RankedUnits:
        """Return at least ``num_remove`` units of every group of a stack, lowest score first, and every unit's score."""
        scores = [self._score_checked(problem.select(linear)) for linear in range(len(problem.weight))]
        orders = [order_units(of_linear, problem.group.num_blocks) for of_linear in scores]
        return RankedUnits(torch.stack(orders), torch.stack(scores))

    def _score_checked(self, problem: GroupProblem) -> Tensor:
        group = problem.group
        columns = unit_columns(torch.arange(group.num_units, device=problem.weight.device), group.columns_per_unit)
        scores = self.score(problem, columns.view(group.num_units, -1))
        is_finite = bool(scores.isfinite().all())
        if scores.shape != (group.num_units,) or not is_finite:
            raise ValueError(
                f"importance: {self.method} must give a finite score per unit, shape [{group.num_units}], got shape "
                f"{[*scores.shape]}{'' if is_finite else ' with NaN or Inf'} for {group.name}. Correct its score()."
            )
        return scores

    def score(self, problem: GroupProblem, columns: Tensor) -> Tensor:
        """Return the score of every unit, shape [units], float64; the units of lowest score go first.

        :param problem: of one linear
        :param columns: columns of every unit, shape [units, columns_per_unit], int64
        """
        raise NotImplementedError

    def measure(
        self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup]
    ) -> dict[str, Tensor]:
        """Return every unit's saliency in the whole dense model, by group name; required if :attr:`gradients` is set."""
        raise NotImplementedError

    def check(self, model: PreTrainedModel, kinds: Sequence[UnitKind]) -> None:
        """Raise a ValueError if the method is not defined for a model, for the kinds of units that go, or not at all."""
        if type(self).rank is Importance.rank and type(self).score is Importance.score:
            raise ValueError(f"importance: {self.method} must define score() or rank(), got neither. Add one of them.")


IMPORTANCES: Registry[Importance] = Registry(Importance)


def sum_columns(per_column: Tensor, columns: Tensor, producer_rows: Iterable[Tensor] = ()) -> Tensor:
    """Return the sum of a quantity [n] over every unit's columns, and producer rows, shape [units].

    :param columns: shape [units, columns_per_unit], int64
    :param producer_rows: sum over every unit's rows, one tensor of shape [units] per producing linear
    """
    total = per_column[columns].sum(1)
    return total + sum((rows.to(total.dtype) for rows in producer_rows), torch.zeros_like(total))
