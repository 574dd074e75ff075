"""``fluctuation``: variance of a unit's inputs about their mean."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance, Ranking, sum_columns


@IMPORTANCES.register
class Fluctuation(Importance):
    """FLAP's weighted variance of the inputs, see :func:`score_fluctuation`."""

    method: Literal["fluctuation"] = "fluctuation"

    def score(self, ranking: Ranking, dense: Tensor, columns: Tensor) -> Tensor:
        return score_fluctuation(ranking.moments, dense[:, :-1], columns)


def score_fluctuation(moments: SecondMoments, weight: Tensor, unit_columns: Tensor) -> Tensor:
    """Score units by ``sum_i Var_t(x_it) * ||W_:i||_2^2``.

    A bias can replace the mean of a unit's output, as a least-squares solve with bias does.
    Source: FLAP (An et al. 2024), Eq. 5, the weighted input feature variance. Differs from the source: scores of different
    modules are not standardised against each other, because an allocation rule spreads the budget over modules.

    :param moments: moments of the consuming linear
    :param weight: weight of the consuming linear, shape [d, n]
    :param unit_columns: shape [units, columns_per_unit], int64
    :return: shape [units], float64, at least 0
    """
    tokens = max(
        float(moments.gram[-1, -1]), 1e-30
    )  # of an expert, the sum of its tokens' squared weights, which may be below 1
    squares, sums = moments.gram.diagonal()[:-1].double(), moments.gram[-1, :-1].double()
    variance = (squares - sums.square() / tokens).clamp(min=0) / max(tokens - 1, tokens / 2)
    return sum_columns(variance * weight.double().square().sum(0), unit_columns)
