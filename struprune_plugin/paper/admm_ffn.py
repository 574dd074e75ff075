"""ADMM's token variables and the solves that every module shares; the sub-steps for one FFN (method.md section 7).

Legend, all for the kept units k of one FFN with inputs X and target output Y, tokens as rows:
    X [tokens, d], Y [tokens, d_out], p [tokens, k] activations, z [tokens, k] pre-activations
    W1 [k, d + 1], W2 [d_out, k + 1] weights with the bias as last column, m = W1 X, b2 the bias of W2
    objective  alpha ||Y - W2 p||^2 + beta ||p - phi(z)||^2 + alpha ||z - W1 X||^2
Gated FFNs have two pre-activations (gate, up), phi(z) = silu(z_gate) * z_up, and two first weights.
Source: paper, Algorithm 4 and section "FFN"; Differs from the source: R10, R11 and R12, named where they apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments, accumulate_moments, make_moments, measure_error
from struprune_plugin.linalg.solve import damp_moments, solve_kept_weights
from struprune_plugin.storage.registry import Config


class ADMMSettings(Config):
    """Fields of ``weight_update: admm`` and of ``importance: closed_form``.

    :param alpha: weight of the linear terms (paper, Algorithm 4; method.md section 7)
    :param beta: weight of the activation terms
    :param steps: outer steps K
    :param inner_steps: Adam steps per attention sub-step
    :param learning_rate: learning rate of these steps, relative to the size of the updated tensor
    :param attention_method: 2: separate z_Q and z_K; 1: one z for the logits (R13)
    """

    alpha: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    beta: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    steps: int = Field(default=4, ge=1)
    inner_steps: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    attention_method: Literal[1, 2] = 2


@dataclass(frozen=True)
class Sample:
    """Tokens of one micro-batch or sequence.

    :param inputs: X, shape [tokens, d]
    :param targets: Y, shape [tokens, d_out]
    """

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Variables:
    """Per-token variables of one sample, on the host between visits (R12).

    :param activations: inputs of the consumer: p, shape [tokens, k], or mixed, shape [T, H * dv]
    :param preactivations: FFN: z, one tensor of shape [tokens, k], or two (gate, up). Attention, method 2: (z_Q, z_K), shape
        [T, H * dh] each; method 1: the logits z after the division by sqrt(dh), before the mask, shape [H, T, T], 0 where the
        mask hides the pair: a sequence then takes H * T^2 numbers on the host
    """

    activations: Tensor
    preactivations: tuple[Tensor, ...]


def make_ridge_moments(weights: Sequence[Tensor]) -> list[SecondMoments]:
    """Return empty moments for every weight's regression, bias last, on its device and in its dtype."""
    return [make_moments(w.shape[1] - 1, len(w), w.device, w.dtype) for w in weights]


def solve_ridge(
    moments: Sequence[SecondMoments],
    weights: Sequence[Tensor],
    damping: float,
    has_bias: bool,
    names: Sequence[str],
) -> list[Tensor]:
    """Solve every regression, pulled towards the current weight, so that none raises its own error.

    ``argmin_W ||targets - W P||^2 + damping * mean(diag P P^T) * ||W - W_current||^2``, the bias not pulled.
    Source: paper, Algorithm 4, reverse recovery; struprune.tex, "Recovering weight matrices"; method.md section 7, step 4.
    Differs from the source: ridge solves on streamed moments replace its pseudo-inverses and its SGD (R12).

    :param weights: current weights, bias last
    :param damping: at least 0, relative to the mean diagonal of each Gram matrix
    :param has_bias: False for linears without bias: all returned biases are then 0
    :param names: names of the regressions, for errors
    :return: solved weights, float64
    :raises ValueError: a system is singular or its condition number exceeds 1e12
    """
    solved = []
    for total, weight, name in zip(moments, weights, names, strict=True):
        columns = torch.arange(weight.shape[1] - 1, device=weight.device)
        damped = damp_moments(total, weight.double(), damping, has_bias)
        solved.append(solve_kept_weights(damped, columns, name)[0])
    return solved


def update_activations(pull: Tensor, targets: Tensor, weight: Tensor, alpha: float, beta: float) -> Tensor:
    """Return ``p = (alpha W^T W + beta I)^-1 (alpha W^T (Y - b) + beta q)``: the minimiser of
    ``alpha ||Y - W p - b||^2 + beta ||p - q||^2``.

    Source: paper, Algorithm 4, step 2, with W2 in place of the printed mix of W1 and W2 (R10); struprune.tex, Eq. `86` (label).

    :param pull: q: phi(z), shape [tokens, k], or concat_i(a_i V_i), shape [T, H * dv]
    :param targets: Y, shape [tokens, d_out]
    :param weight: weight of the consumer, bias last
    """
    weight, bias = weight[:, :-1], weight[:, -1]
    system = alpha * weight.T @ weight
    system.diagonal().add_(beta)
    right = alpha * (targets - bias) @ weight + beta * pull
    return torch.cholesky_solve(right.T, torch.linalg.cholesky(system)).T


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
    fits = sum(float(measure_error(part, weight.double())) for part, weight in zip(moments, weights, strict=True))
    return alpha * fits + beta * coupling
