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
from dataclasses import dataclass

import torch
from torch import Tensor

from struprune_plugin.maths.solve import damp_moments, solve_kept_weights
from struprune_plugin.maths.statistics import Moments, accumulate_moments, make_moments, measure_error


@dataclass(frozen=True)
class FFNVariables:
    """The per-token variables of one micro-batch; they live on the host between visits (R12).

    :param activations: p, shape [tokens, k]
    :param preactivations: z, one tensor of shape [tokens, k], or two (gate, up) for a gated FFN
    """

    activations: Tensor
    preactivations: tuple[Tensor, ...]


def activate(preactivations: Sequence[Tensor]) -> Tensor:
    """Return phi(z): ReLU of one pre-activation, SiLU gating of two."""
    if len(preactivations) == 1:
        return preactivations[0].relu()
    gate, up = preactivations
    return torch.nn.functional.silu(gate) * up


def initialize_ffn_variables(inputs: Tensor, first: Sequence[Tensor]) -> FFNVariables:
    """Start at the weights' own pre-activations and activations, where both couplings hold exactly.

    :param inputs: X, shape [tokens, d]
    :param first: W1 (one, or gate and up), shape [k, d + 1]
    """
    preactivations = tuple(apply_linear(inputs, weight) for weight in first)
    return FFNVariables(activate(preactivations), preactivations)


def apply_linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return ``W X + b``, shape [tokens, rows], for a weight with its bias as last column."""
    return inputs @ weight[:, :-1].T + weight[:, -1]


def update_ffn_variables(
    variables: FFNVariables,
    inputs: Tensor,
    targets: Tensor,
    first: Sequence[Tensor],
    second: Tensor,
    alpha: float,
    beta: float,
) -> FFNVariables:
    """Take the p-step and then the z-step on one micro-batch; neither increases the objective.

    :param inputs: X, shape [tokens, d]
    :param targets: Y, shape [tokens, d_out]
    :param first: W1 (one, or gate and up)
    :param second: W2
    """
    activations = update_activations(activate(variables.preactivations), targets - second[:, -1], second, alpha, beta)
    means = tuple(apply_linear(inputs, weight) for weight in first)
    if len(means) == 1:
        return FFNVariables(activations, (update_preactivations_relu(activations, means[0], alpha, beta),))
    gate, up = variables.preactivations
    mean_gate, mean_up = means
    moved = update_preactivations_gated(activations, gate, up, mean_gate, mean_up, alpha, beta)
    return FFNVariables(activations, moved)


def update_activations(activated: Tensor, targets: Tensor, second: Tensor, alpha: float, beta: float) -> Tensor:
    """Return ``p = (alpha W2^T W2 + beta I)^-1 (alpha W2^T (Y - b2) + beta phi(z))``, the exact minimiser.

    Source: paper, Algorithm 4, step 2, with W2 in place of the printed mix of W1 and W2 (R10).

    :param activated: phi(z), shape [tokens, k]
    :param targets: Y - b2, shape [tokens, d_out]
    """
    weight = second[:, :-1]
    system = alpha * weight.T @ weight
    system.diagonal().add_(beta)
    right = alpha * targets @ weight + beta * activated
    return torch.cholesky_solve(right.T, torch.linalg.cholesky(system)).T


def update_preactivations_relu(activations: Tensor, means: Tensor, alpha: float, beta: float) -> Tensor:
    """Return the elementwise minimiser of ``beta (p - relu(z))^2 + alpha (z - m)^2``.

    The better of ``max(0, (beta p + alpha m) / (alpha + beta))`` and ``min(0, m)``.
    Differs from the source: the printed step picks the branch by the old sign of z (R11).
    """
    positive = ((beta * activations + alpha * means) / (alpha + beta)).clamp(min=0)
    negative = means.clamp(max=0)
    cost_positive = beta * (activations - positive).square() + alpha * (positive - means).square()
    cost_negative = beta * activations.square() + alpha * (negative - means).square()
    return torch.where(cost_positive <= cost_negative, positive, negative)


def update_preactivations_gated(
    activations: Tensor, gate: Tensor, up: Tensor, mean_gate: Tensor, mean_up: Tensor, alpha: float, beta: float
) -> tuple[Tensor, Tensor]:
    """Lower ``beta (p - silu(z_g) z_u)^2 + alpha (z_g - m_g)^2 + alpha (z_u - m_u)^2``, elementwise.

    Exact in z_u; safeguarded Newton steps in z_g, each halved until it does not increase the cost, else not taken (R11).

    :return: (gate, up), each of shape [tokens, k]
    """

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


@dataclass(frozen=True)
class FFNMoments:
    """What the two weight steps need, summed over micro-batches.

    :param first: moments X -> z, one a first weight
    :param second: moments p -> Y
    :param coupling: ``sum ||p - phi(z)||^2``, scalar, grown in place
    """

    first: tuple[Moments, ...]
    second: Moments
    coupling: Tensor


def make_ffn_moments(num_first: int, width: int, num_inputs: int, num_outputs: int, like: Tensor) -> FFNMoments:
    """Return empty moments for ``num_first`` first weights of ``width`` units, with the device and dtype of ``like``."""
    return FFNMoments(
        first=tuple(make_moments(num_inputs, width, like.device, like.dtype) for _ in range(num_first)),
        second=make_moments(width, num_outputs, like.device, like.dtype),
        coupling=torch.zeros((), dtype=torch.float64, device=like.device),
    )


def accumulate_ffn_moments(moments: FFNMoments, variables: FFNVariables, inputs: Tensor, targets: Tensor) -> None:
    """Add one micro-batch."""
    for first, preactivation in zip(moments.first, variables.preactivations, strict=True):
        accumulate_moments(first, inputs, preactivation)
    accumulate_moments(moments.second, variables.activations, targets)
    gap = variables.activations - activate(variables.preactivations)
    moments.coupling.add_(gap.square().sum(dtype=torch.float64))


def solve_ffn_weights(
    moments: FFNMoments, first: Sequence[Tensor], second: Tensor, damping: float, has_bias: bool, where: str
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Take the W-steps: ridge regressions of z on X and of Y on p, pulled towards the current weights.

    Because of that pull (a proximal step), no term of the objective increases. Source: paper, Algorithm 4 and section
    "FFN", reverse recovery; Differs from the source: ridge solves on moments in place of pseudo-inverses (R12).

    :return: (first weights, second weight), float64
    """

    def solve(part: Moments, weight: Tensor) -> Tensor:
        columns = torch.arange(weight.shape[1] - 1, device=weight.device)
        return solve_kept_weights(damp_moments(part, weight.double(), damping, has_bias), columns, where).weight

    return tuple(map(solve, moments.first, first)), solve(moments.second, second)


def measure_ffn_objective(
    moments: FFNMoments, first: Sequence[Tensor], second: Tensor, alpha: float, beta: float
) -> float:
    """Return the objective over all micro-batches, from the moments alone."""
    fits = sum(measure_error(part, weight.double()) for part, weight in zip(moments.first, first, strict=True))
    return alpha * (fits + measure_error(moments.second, second.double())) + beta * float(moments.coupling)
