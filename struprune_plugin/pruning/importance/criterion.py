"""Base class of an importance, which ranks the units of one group. A file in this folder is one method, or two alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.layerwise.statistics import ModuleView
from struprune_plugin.linalg.elimination import order_units, unit_columns
from struprune_plugin.linalg.second_moments import SecondMoments
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.storage.registry import Config, Registry


@dataclass(frozen=True)
class Sensitivity:
    """Measurements of the dense model, on the host; empty where not requested.

    :param fisher_sqrt: R with ``R^T R`` the Fisher information of a module's output, by :attr:`UnitGroup.output_name`, shape
        [d, d], float64
    :param saliency: score of every unit from gradients, by group name, for importances that need one, shape [units], float64
    """

    fisher_sqrt: Mapping[str, Tensor] = field(default_factory=dict)
    saliency: Mapping[str, Tensor] = field(default_factory=dict)

    def summarize_fisher(self) -> dict[str, float]:
        """Return the mean diagonal of the Fisher information of every module's output."""
        return {name: float(root.square().sum() / root.shape[-1]) for name, root in self.fisher_sqrt.items()}


@dataclass(frozen=True)
class Ranking:
    """Inputs of an importance.

    :param module: module before slicing
    :param moments: moments of the group's consumer, inputs in unit order
    :param damped: the same, damped; weighted by the sensitivity for an importance that eliminates
    :param sparsity: sparsity asked of the whole model
    :param dampening_frac: dampening of every solve but the closing one
    """

    module: ModuleView
    moments: SecondMoments
    damped: SecondMoments
    sensitivity: Sensitivity
    sparsity: float
    dampening_frac: float

    @property
    def group(self) -> UnitGroup:
        return self.module.group


Order = tuple[Tensor, Tensor]  # removal order of at least the requested units; score of every unit


class Importance(Config):
    """Base class of a ranking of units.

    :cvar eliminates: whether it removes units one by one on damped moments: the sensitivity then weights them, and values may
        be rotated
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

    def rank(self, rankings: Sequence[Ranking], num_remove: int) -> list[Order]:
        """Return the removal order of at least ``num_remove`` units, lowest score first, and every unit's score, by group.

        :param rankings: of one group, or of experts of one shape
        """
        return [self._rank_by_score(ranking) for ranking in rankings]

    def _rank_by_score(self, ranking: Ranking) -> Order:
        group = ranking.group
        dense = ranking.module.read_dense()
        columns = unit_columns(torch.arange(group.num_units, device=dense.device), group.columns_per_unit)
        scores = self.score(ranking, dense, columns.view(group.num_units, -1))
        return order_units(scores, group.num_blocks), scores

    def score(self, ranking: Ranking, dense: Tensor, columns: Tensor) -> Tensor:
        """Return the score of every unit, shape [units], float64.

        :param dense: the consumer's weights, shape [d, n + 1], bias last
        :param columns: columns of every unit, shape [units, columns_per_unit], int64
        """
        raise NotImplementedError

    def measure(
        self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup]
    ) -> dict[str, Tensor]:
        """Return every unit's saliency in the whole dense model, by group name; required if :attr:`gradients` is set."""
        raise NotImplementedError

    def check(self, model: PreTrainedModel, attention_unit: str, prune_ffn: bool) -> None:
        """Raise if the method is not defined for a model.

        :raises ValueError: the method is not defined for it
        """


IMPORTANCES: Registry[Importance] = Registry(Importance)


def sum_columns(per_column: Tensor, columns: Tensor, producer_rows: Iterable[Tensor] = ()) -> Tensor:
    """Return the sum over every unit's columns and producer rows, shape [units].

    :param per_column: shape [n]
    :param columns: shape [units, columns_per_unit], int64
    :param producer_rows: sum over every unit's rows, one tensor of shape [units] per producing linear
    """
    found = per_column[columns].sum(1)
    return found + sum((rows.to(found.dtype) for rows in producer_rows), torch.zeros_like(found))
