"""``magnitude``: the size of a unit's weights; needs no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_weight, sum_rows
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance, sum_columns
from struprune_plugin.pruning.problem import GroupProblem


@IMPORTANCES.register
class Magnitude(Importance):
    """Sum of absolute weights, see :func:`score_magnitude`."""

    method: Literal["magnitude"] = "magnitude"

    def score(self, problem: GroupProblem, dense: Tensor, columns: Tensor) -> Tensor:
        group, layer = problem.group, problem.module.layer
        rows = []
        for name in group.producers:
            weight, _ = read_weight(find_linear(layer, name), problem.module.context.to_solver)
            rows.append(sum_rows(group, name, weight.abs().sum(1, dtype=torch.float64)))
        return score_magnitude(dense[:, :-1], columns, rows)


def score_magnitude(weight: Tensor, unit_columns: Tensor, producer_rows: Sequence[Tensor]) -> Tensor:
    """Score units by ``sum |W|`` over all of their rows and columns.

    Source: paper, table "Other structured methods".

    :param weight: weight of the consuming linear, shape [d, n]
    :param unit_columns: shape [units, columns_per_unit], int64
    :param producer_rows: l1 norm of every unit's rows, one tensor of shape [units] per producing linear
    :return: shape [units], float64
    """
    return sum_columns(weight.double().abs().sum(0), unit_columns, producer_rows)
