"""ADMM sub-steps for one FFN: activations, pre-activations and weights in turn (method.md section 7).

Legend, all for the kept units k of one FFN with inputs X and target output Y, tokens as rows:
    X [tokens, d], Y [tokens, d_out], p [tokens, k] activations, z [tokens, k] pre-activations
    W1 [k, d + 1], W2 [d_out, k + 1] weights with the bias as last column, m = W1 X, b2 the bias of W2
    objective  alpha ||Y - W2 p||^2 + beta ||p - phi(z)||^2 + alpha ||z - W1 X||^2
Gated FFNs have two pre-activations (gate, up), phi(z) = silu(z_gate) * z_up, and two first weights.
Source: paper, Algorithm 4 and section "FFN"; Differs from the source: R10, R11 and R12, named where they apply.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments, accumulate_moments, measure_error
from struprune_plugin.paper.admm_variables import Sample, Variables, update_activations


def activate(preactivations: Sequence[Tensor]) -> Tensor:
    """Return phi(z): ReLU of one pre-activation, SiLU gating of two."""
    if len(preactivations) == 1:
        return preactivations[0].relu()
    gate, up = preactivations
    return torch.nn.functional.silu(gate) * up


def initialize_ffn_variables(inputs: Tensor, first: Sequence[Tensor]) -> Variables:
    """Return the pre-activations and activations of the weights themselves, where both couplings hold exactly.

    :param inputs: X, shape [tokens, d]
    :param first: W1 (one, or gate and up), shape [k, d + 1]
    """
    preactivations = tuple(apply_linear(inputs, weight) for weight in first)
    return Variables(activate(preactivations), preactivations)


def apply_linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return ``W X + b``, shape [tokens, rows], for a weight with its bias as last column."""
    return inputs @ weight[:, :-1].T + weight[:, -1]


def update_ffn_variables(
    variables: Variables, sample: Sample, weights: Sequence[Tensor], alpha: float, beta: float
) -> Variables:
    """Return the variables of one micro-batch after the p-step and the z-step; neither increases the objective.

    :param weights: W1 (one, or gate and up), then W2
    """
    *first, second = weights
    activations = update_activations(activate(variables.preactivations), sample.targets, second, alpha, beta)
    means = [apply_linear(sample.inputs, weight) for weight in first]
    if len(means) == 1:
        return Variables(activations, (update_preactivations_relu(activations, means[0], alpha, beta),))
    moved = update_preactivations_gated(activations, variables.preactivations, means, alpha, beta)
    return Variables(activations, moved)


def update_preactivations_relu(activations: Tensor, means: Tensor, alpha: float, beta: float) -> Tensor:
    """Return the elementwise minimiser of ``beta (p - relu(z))^2 + alpha (z - m)^2``.

    It is the better of ``max(0, (beta p + alpha m) / (alpha + beta))`` and ``min(0, m)``.
    Differs from the source: the printed step picks the branch by the old sign of z (R11).
    """
    positive = ((beta * activations + alpha * means) / (alpha + beta)).clamp(min=0)
    negative = means.clamp(max=0)
    cost_positive = beta * (activations - positive).square() + alpha * (positive - means).square()
    cost_negative = beta * activations.square() + alpha * (negative - means).square()
    return torch.where(cost_positive <= cost_negative, positive, negative)


def update_preactivations_gated(
    activations: Tensor, preactivations: Sequence[Tensor], means: Sequence[Tensor], alpha: float, beta: float
) -> tuple[Tensor, Tensor]:
    """Lower ``beta (p - silu(z_g) z_u)^2 + alpha (z_g - m_g)^2 + alpha (z_u - m_u)^2``, elementwise.

    The update is exact in z_u. In z_g it takes safeguarded Newton steps, each halved until it does not increase the cost, and
    skipped if it still does (R11).

    :param preactivations: (z_g, z_u), each of shape [tokens, k]
    :param means: (m_g, m_u), the same
    :return: (gate, up), each of shape [tokens, k]
    """
    gate, up = preactivations
    mean_gate, mean_up = means

    def cost(gate: Tensor) -> Tensor:
        fit = activations - torch.nn.functional.silu(gate) * up
        return beta * fit.square() + alpha * (gate - mean_gate).square()

    for _ in range(2):
        silu = torch.nn.functional.silu(gate)
        up = (beta * silu * activations + alpha * mean_up) / (beta * silu.square() + alpha)
        sigmoid = torch.sigmoid(gate)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        gradient = -2 * beta * (activations - silu * up) * slope * up + 2 * alpha * (gate - mean_gate)
        step = gradient / (2 * beta * (slope * up).square() + 2 * alpha)  # Gauss-Newton: the curvature is positive
        before = cost(gate)
        for _ in range(8):
            worse = cost(gate - step) > before
            if not worse.any():
                break
            step = torch.where(worse, step / 2, step)
        gate = torch.where(cost(gate - step) > before, gate, gate - step)
    return gate, up


def accumulate_ffn_moments(moments: Sequence[SecondMoments], variables: Variables, sample: Sample) -> float:
    """Add one micro-batch to the moments X -> z of every first weight and p -> Y; return ``||p - phi(z)||^2``."""
    *first, second = moments
    for total, preactivation in zip(first, variables.preactivations, strict=True):
        accumulate_moments(total, sample.inputs, preactivation)
    accumulate_moments(second, variables.activations, sample.targets)
    gap = variables.activations - activate(variables.preactivations)
    return float(gap.square().sum(dtype=torch.float64))


def measure_ffn_objective(
    moments: Sequence[SecondMoments], weights: Sequence[Tensor], coupling: float, alpha: float, beta: float
) -> float:
    """Return the objective over all micro-batches.

    :param coupling: sum of the values that :func:`accumulate_ffn_moments` has returned
    """
    fits = sum(measure_error(part, weight.double()) for part, weight in zip(moments, weights, strict=True))
    return alpha * fits + beta * coupling
