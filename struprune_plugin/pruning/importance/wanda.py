"""``wanda``: norms of inputs times norms of the weights that read them."""

from typing import Literal

from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance, sum_columns
from struprune_plugin.pruning.problem import GroupProblem


@IMPORTANCES.register
class Wanda(Importance):
    """Mean absolute input times column l1 norm, see :func:`score_wanda`."""

    method: Literal["wanda"] = "wanda"

    def score(self, problem: GroupProblem, columns: Tensor) -> Tensor:
        return score_wanda(problem.moments, problem.weight[:, :-1], columns)


def score_wanda(moments: SecondMoments, weight: Tensor, unit_columns: Tensor) -> Tensor:
    """Return ``sum_i mean_t |x_it| * sum_o |W_oi|`` over a unit's inputs i, tokens t and outputs o, shape [units], float64.

    Source: paper, Algorithms 2 and 3, step 3 (``||W_i x_i||_1`` averaged over samples).

    :param weight: weight of the consuming linear, shape [d, n]
    :param unit_columns: shape [units, columns_per_unit], int64
    """
    mean_input = moments.absolute_sum.double() / max(moments.num_tokens, 1)
    return sum_columns(mean_input * weight.double().abs().sum(0), unit_columns)
