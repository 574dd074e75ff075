"""Score the units of a group from statistics and weights (method.md section 3).

Legend: u a unit, i one of its columns in the consuming linear W [d, n], x_i that input, t a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from struprune_plugin.maths.statistics import Moments


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


def score_fluctuation(moments: Moments, weight: Tensor, unit_columns: Tensor) -> Tensor:
    """Score units by how much their inputs vary about their mean: ``sum_i Var_t(x_it) * ||W_:i||_2^2``.

    What a unit gives on average a bias can give in its place; that is what a least-squares solve with bias does.
    Source: FLAP (An et al. 2024), Eq. 5, the weighted input feature variance. Differs from the source: scores of different
    modules are not standardised against each other, for a rule of allocation spreads the budget over modules.

    Parameters and return value as in :func:`score_wanda`.
    """
    tokens = max(moments.num_tokens, 2)
    squares, sums = moments.gram.diagonal()[:-1].double(), moments.gram[-1, :-1].double()
    variance = (squares - sums.square() / tokens).clamp(min=0) / (tokens - 1)
    return _sum_columns(variance * weight.double().square().sum(0), unit_columns)


def measure_block_influence(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return the sum over tokens of one minus the cosine of a layer's input and output.

    Source: ShortGPT (Men et al. 2024), Eq. 1, whose mean is the block influence.

    :param inputs: hidden states that enter, shape [tokens, d]
    :param outputs: those that leave, the same shape
    :return: scalar, float64, in [0, 2 tokens]
    """
    return (1 - torch.cosine_similarity(inputs.double(), outputs.double(), dim=-1)).sum()


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


def score_closed_form(
    dense: Tensor, current: Tensor, gram_dense: Tensor, gram_cross: Tensor, gram_current: Tensor, num_units: int
) -> Tensor:
    """Return Lemma 1's score of every unit: the least-squares optimal scalar gate of its rows.

    ``s_u = sum (c b + d z_pre) / sum (c^2 + d^2)`` over tokens and the unit's rows, with ``b = W a`` (current weights,
    current inputs), ``c = z_pre = W^ a_pre`` (dense weights, dense inputs), ``d = W^ a`` (dense weights, current inputs).
    Source: paper, Lemma 1 and Algorithm 1; d and z_pre of the same layer (R2), sums over tokens in numerator and
    denominator (R3). All sums are read off three Gram matrices of the inputs, bias row included.

    :param dense: W^, shape [rows, n + 1], bias last; rows of one unit are consecutive
    :param current: W, the same shape
    :param gram_dense: ``sum a_pre a_pre^T``, shape [n + 1, n + 1]
    :param gram_cross: ``sum a_pre a^T``
    :param gram_current: ``sum a a^T``
    :return: shape [num_units], float64; exactly 1 where nothing has changed yet (R4)
    """
    dense, current = dense.double(), current.double()

    def products(left: Tensor, gram: Tensor, right: Tensor) -> Tensor:
        return ((left @ gram.double()) * right).sum(1).view(num_units, -1).sum(1)

    numerator = products(dense, gram_cross, current) + products(dense, gram_cross, dense)
    denominator = products(dense, gram_dense, dense) + products(dense, gram_current, dense)
    return numerator / denominator.clamp(min=1e-300)


def score_snip(saliency: Tensor, unit_columns: Tensor, producer_saliency: Sequence[Tensor]) -> Tensor:
    """Return ``|sum w * dloss/dw|`` over all rows and columns of every unit.

    A column's weights give ``sum_o W_oi dloss/dW_oi = sum_t x_it dloss/dx_it``: activations and their gradients suffice.
    Source: paper, table "Other structured methods" (Lee et al. 2018).

    :param saliency: ``sum_t x_it dloss/dx_it`` of the consumer's inputs, shape [n]
    :param unit_columns: shape [units, columns_per_unit], int64
    :param producer_saliency: ``sum_t y_jt dloss/dy_jt`` of every producer's outputs without bias, summed over a unit's
        rows, shape [units] each
    :return: shape [units], float64
    """
    columns = _sum_columns(saliency.double(), unit_columns)
    return (columns + sum((part.double() for part in producer_saliency), torch.zeros_like(columns))).abs()


_CONCRETE_LOW, _CONCRETE_HIGH, _CONCRETE_TEMPERATURE = -0.1, 1.1, 2 / 3  # Louizos et al. 2018, section 4
_BUDGET_PENALTY = 10.0


def score_l0(
    damped: Moments, weight: Tensor, unit_columns: Tensor, retention: float, steps: int = 200, seed: int = 0
) -> Tensor:
    """Learn one hard-concrete gate a unit on the reconstruction error, and return the gates' log-odds.

    Minimises ``E_g ||Y - W diag(g) P||^2 / tr(Y Y^T) + 10 (E(share open) - retention)^2`` by Adam, eight draws of the gates
    a step. The error of any gates is a quadratic form in them, read off the moments: no pass over data.
    Source: paper, table "Other structured methods" (Louizos et al. 2018, Eq. 10 to 12).

    :param damped: from :func:`~struprune_plugin.maths.solve.damp_moments`
    :param weight: shape [d, n + 1], float64, bias last
    :param unit_columns: shape [units, columns_per_unit], int64
    :param retention: share of units wanted open
    :return: shape [units], float64
    """
    quadratic, linear = _gate_quadratic(damped, weight, unit_columns)
    energy = damped.target_energy.clamp(min=1e-300)
    generator = torch.Generator().manual_seed(seed)  # the host's, so that every device draws the same
    log_odds = torch.full((len(unit_columns),), 2.0, dtype=torch.float64, device=weight.device, requires_grad=True)
    optimizer = torch.optim.Adam([log_odds], lr=0.1)
    shift = _CONCRETE_TEMPERATURE * torch.log(torch.tensor(-_CONCRETE_LOW / _CONCRETE_HIGH, dtype=torch.float64))
    for _ in range(steps):
        with torch.enable_grad():
            noise = torch.rand(8, len(log_odds), generator=generator, dtype=torch.float64).to(weight.device)
            noise = noise.clamp(1e-6, 1 - 1e-6).logit()
            concrete = torch.sigmoid((noise + log_odds) / _CONCRETE_TEMPERATURE)
            gates = (concrete * (_CONCRETE_HIGH - _CONCRETE_LOW) + _CONCRETE_LOW).clamp(0, 1)
            gates = torch.cat([gates, torch.ones_like(gates[:, :1])], 1)  # the bias has no gate
            error = ((gates @ quadratic) * gates).sum(1) - 2 * gates @ linear + damped.target_energy
            open_share = torch.sigmoid(log_odds - shift).mean()
            loss = error.mean() / energy + _BUDGET_PENALTY * (open_share - retention).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return log_odds.detach()


def _gate_quadratic(damped: Moments, weight: Tensor, unit_columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return (M, v) with ``||Y - W diag(g) P||^2 = g^T M g - 2 v^T g + tr(Y Y^T)``, g over units and the bias."""
    num_units, size = len(unit_columns), damped.gram.shape[0]
    member = torch.zeros(size, num_units + 1, dtype=torch.float64, device=weight.device)
    for column in range(unit_columns.shape[1]):
        member[unit_columns[:, column], torch.arange(num_units, device=weight.device)] = 1
    member[-1, -1] = 1
    products = (weight.T @ weight) * damped.gram
    return member.T @ products @ member, member.T @ (weight * damped.cross).sum(0)


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
