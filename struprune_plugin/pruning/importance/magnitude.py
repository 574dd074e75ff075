"""``magnitude``: the size of a unit's weights; needs no data."""

from typing import Literal

import torch
from torch import Tensor

from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_weight, sum_rows
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance, sum_columns
from struprune_plugin.pruning.problem import GroupProblem


@IMPORTANCES.register
class Magnitude(Importance):
    """Sum of absolute weights ``sum |W|`` over all rows and columns of a unit.

    Source: paper, table "Other structured methods".
    """

    method: Literal["magnitude"] = "magnitude"

    def score(self, problem: GroupProblem, columns: Tensor) -> Tensor:
        group, layer = problem.group, problem.module.layer
        rows = []
        for name in group.producers:
            weight, _ = read_weight(find_linear(layer, name), problem.module.context.to_solver)
            rows.append(sum_rows(group, name, weight.abs().sum(1, dtype=torch.float64)))
        return sum_columns(problem.weight[:, :-1].abs().sum(0), columns, rows)
