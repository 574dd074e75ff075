"""Score the units of a group from statistics and weights (method.md section 3).

Legend: u a unit, i one of its columns in the consuming linear W [d, n], x_i that input, t a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from struprune_plugin.statistics import Moments


def score_wanda(moments: Moments, weight: Tensor, unit_columns: Tensor) -> Tensor:
    """Score units by mean absolute input times column l1 norm: ``sum_i mean_t |x_it| * sum_o |W_oi|``.

    Source: paper, Algorithms 2 and 3, step 3 (``||W_i x_i||_1`` averaged over samples).

    :param moments: of the consuming linear
    :param weight: of the consuming linear, shape [d, n]
    :param unit_columns: columns of every unit, shape [units, columns_per_unit], int64
    :return: shape [units], float64, at least 0
    """
    mean_input = moments.absolute_sum.double() / max(moments.num_tokens, 1)
    return _sum_columns(mean_input * weight.double().abs().sum(0), unit_columns)


def score_wanda_l2(moments: Moments, weight: Tensor, unit_columns: Tensor) -> Tensor:
    """Score units by ``sum_i ||W_:i||_2 * ||X_i||_2``, norms over outputs and over tokens.

    Source: paper, Eq. (wanda). Parameters and return value as in :func:`score_wanda`.
    """
    input_norm = moments.gram.diagonal()[:-1].double().sqrt()
    return _sum_columns(weight.double().norm(dim=0) * input_norm, unit_columns)


def score_magnitude(weight: Tensor, unit_columns: Tensor, producer_rows: Sequence[Tensor]) -> Tensor:
    """Score units by ``sum |W|`` over all rows and columns that go with them; needs no data.

    Source: paper, table "Other structured methods".

    :param weight: of the consuming linear, shape [d, n]
    :param unit_columns: shape [units, columns_per_unit], int64
    :param producer_rows: l1 norm of every unit's rows, one tensor of shape [units] a producing linear
    :return: shape [units], float64
    """
    columns = _sum_columns(weight.double().abs().sum(0), unit_columns)
    return columns + sum((rows.double() for rows in producer_rows), torch.zeros_like(columns))


def _sum_columns(per_column: Tensor, unit_columns: Tensor) -> Tensor:
    return per_column[unit_columns].sum(1)


def measure_attention_importance(head_weights: Sequence[Tensor]) -> float:
    """Return ``sum_h (||W_h||_1 + 0.1 Var(W_h) + 0.01 ||W_h||_2)`` of one attention module.

    Source: paper, Algorithm 3, step 1, without its factors gamma^l and rho.

    :param head_weights: all weights of one head (rows of Q, K, V and columns of O), flattened, one tensor a head
    """
    return sum(_weigh(w.double(), variance=0.1) + 0.01 * w.double().norm().item() for w in head_weights)


def measure_mlp_importance(weights: Sequence[Tensor]) -> float:
    """Return ``sum_m (||W_m||_1 + 0.05 Var(W_m))`` over the linears of one FFN.

    Source: paper, Algorithm 3, step 1, without its factor gamma^l.
    """
    return sum(_weigh(w.double(), variance=0.05) for w in weights)


def _weigh(weight: Tensor, variance: float) -> float:
    return (weight.abs().sum() + variance * weight.var(correction=0)).item()
