"""Base class of an importance, which ranks the units of one group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.linalg.elimination import order_units, unit_columns
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.storage.registry import Config, Registry

Order = tuple[Tensor, Tensor]  # removal order of at least the requested units; score of every unit


class Importance(Config):
    """Base class of a ranking of units.

    :cvar eliminates: whether the score of a unit is the increase of the damped, weighed error at its removal: error curves are
        then sums of scores, and where values are rotated, directions are ranked in place of :meth:`rank`
    :cvar gradients: whether it needs :attr:`Sensitivity.saliency`, which :meth:`measure` computes
    :cvar takes_offload: whether it works with ``offload``
    :cvar aims: whether scores depend on the requested sparsity
    :cvar takes_experts: whether it ranks channels of experts
    """

    eliminates: ClassVar[bool] = False
    gradients: ClassVar[bool] = False
    takes_offload: ClassVar[bool] = True
    aims: ClassVar[bool] = False
    takes_experts: ClassVar[bool] = True
    method: str

    def rank(self, problems: Sequence[GroupProblem], num_remove: int) -> list[Order]:
        """Return the removal order of at least ``num_remove`` units, lowest score first, and every unit's score, by group.

        :param problems: of one group, or of experts of one shape
        """
        return [self._rank_by_score(problem) for problem in problems]

    def _rank_by_score(self, problem: GroupProblem) -> Order:
        group, dense = problem.group, problem.dense
        columns = unit_columns(torch.arange(group.num_units, device=dense.device), group.columns_per_unit)
        scores = self.score(problem, dense, columns.view(group.num_units, -1))
        is_finite = bool(scores.isfinite().all())
        if scores.shape != (group.num_units,) or not is_finite:
            raise ValueError(
                f"importance: {self.method} must give a finite score per unit, shape [{group.num_units}], got shape "
                f"{[*scores.shape]}{'' if is_finite else ' with NaN or Inf'} for {group.name}. Correct its score()."
            )
        return order_units(scores, group.num_blocks), scores

    def score(self, problem: GroupProblem, dense: Tensor, columns: Tensor) -> Tensor:
        """Return the score of every unit, shape [units], float64; the units of lowest score go first.

        :param dense: the consumer's weights, shape [d, n + 1], float64, bias last
        :param columns: columns of every unit, shape [units, columns_per_unit], int64
        """
        raise NotImplementedError

    def measure(
        self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup]
    ) -> dict[str, Tensor]:
        """Return every unit's saliency in the whole dense model, by group name; required if :attr:`gradients` is set."""
        raise NotImplementedError

    def check(self, model: PreTrainedModel, attention_unit: str, prune_ffn: bool) -> None:
        """Raise a ValueError if the method is not defined for a model."""


IMPORTANCES: Registry[Importance] = Registry(Importance)


def sum_columns(per_column: Tensor, columns: Tensor, producer_rows: Iterable[Tensor] = ()) -> Tensor:
    """Return the sum of a quantity [n] over every unit's columns, and producer rows, shape [units].

    :param columns: shape [units, columns_per_unit], int64
    :param producer_rows: sum over every unit's rows, one tensor of shape [units] per producing linear
    """
    found = per_column[columns].sum(1)
    return found + sum((rows.to(found.dtype) for rows in producer_rows), torch.zeros_like(found))
