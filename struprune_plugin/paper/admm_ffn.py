"""ADMM's settings and the solves that every module shares; the sub-steps for one FFN (method.md section 7).

Legend, all for the kept units k of one FFN with inputs X and target output Y, tokens as rows:
    X [tokens, d], Y [tokens, d_out], p [tokens, k] activations, z [tokens, k] pre-activations
    W1 [k, d + 1], W2 [d_out, k + 1] weights with the bias as last column, m = W1 X, b2 the bias of W2
    objective  alpha ||Y - W2 p||^2 + beta ||p - phi(z)||^2 + alpha ||z - W1 X||^2
    variables  (p, z); weights [W1, W2]
Gated FFNs have two pre-activations (gate, up), phi(z) = silu(z_gate) * z_up, and two first weights.
Source: paper, Algorithm 4 and section "FFN"; Differs from the source: R10, R11 and R12, named where they apply.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments, accumulate_moments
from struprune_plugin.linalg.solve import damp_moments, solve_kept_weights
from struprune_plugin.settings.registry import Config

# of every token of one sample: inputs of the consumer first; on the host between visits (R12)
Variables = tuple[Tensor, ...]


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


class Sample(NamedTuple):
    """Tokens of one micro-batch: X and Y."""

    inputs: Tensor
    targets: Tensor


def solve_ridge(
    moments: Sequence[SecondMoments],
    weights: Sequence[Tensor],
    dampening_frac: float,
    has_bias: bool,
    names: Sequence[str],
) -> list[Tensor]:
    """Return the weights of every regression, pulled towards the current ones, so that none raises its own error; float64.

    ``argmin_W ||targets - W P||^2 + dampening_frac * mean(diag P P^T) * ||W - W_current||^2``, the bias not pulled.
    Source: paper, Algorithm 4, reverse recovery; struprune.tex, "Recovering weight matrices"; method.md section 7, step 4.
    Differs from the source: ridge solves on streamed moments replace its pseudo-inverses and its SGD (R12).

    :param has_bias: False for linears without bias: all returned biases are then 0
    :param names: names of the regressions, for errors
    :raises ValueError: a system is singular or its condition number exceeds 1e12
    """
    solved = []
    for total, weight, name in zip(moments, weights, names, strict=True):
        columns = torch.arange(weight.shape[1] - 1, device=weight.device)
        damped = damp_moments(total, weight.double(), dampening_frac, has_bias)
        solved.append(solve_kept_weights(damped, columns, name)[0])
    return solved


def update_activations(pull: Tensor, targets: Tensor, weight: Tensor, alpha: float, beta: float) -> Tensor:
    """Return the minimiser of ``alpha ||Y - W p - b||^2 + beta ||p - q||^2``.

    It is ``p = (alpha W^T W + beta I)^-1 (alpha W^T (Y - b) + beta q)``. Source: paper, Algorithm 4, step 2, with W2 in place of
    the printed mix of W1 and W2 (R10); struprune.tex, Eq. `86` (label).

    :param pull: q: phi(z), shape [tokens, k], or concat_i(a_i V_i), shape [T, H * dv]
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


def apply_linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return ``W X + b``, shape [tokens, rows], for a weight with its bias as last column."""
    return inputs @ weight[:, :-1].T + weight[:, -1]


def initialize_ffn_variables(inputs: Tensor, weights: Sequence[Tensor]) -> Variables:
    """Return the variables computed from the weights, where both couplings hold exactly."""
    preactivations = tuple(apply_linear(inputs, weight) for weight in weights[:-1])
    return (activate(preactivations), *preactivations)


def update_ffn_variables(
    variables: Variables, sample: Sample, weights: Sequence[Tensor], settings: ADMMSettings
) -> Variables:
    """Return the variables of one micro-batch after the p-step and the z-step; neither increases the objective."""
    alpha, beta, preactivations, (*first, second) = settings.alpha, settings.beta, variables[1:], weights
    activations = update_activations(activate(preactivations), sample.targets, second, alpha, beta)
    means = [apply_linear(sample.inputs, weight) for weight in first]
    if len(means) == 1:
        return activations, update_preactivations_relu(activations, means[0], alpha, beta)
    return (activations, *update_preactivations_gated(activations, preactivations, means, alpha, beta))


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
    """Lower ``beta (p - silu(z_g) z_u)^2 + alpha (z_g - m_g)^2 + alpha (z_u - m_u)^2``, elementwise; return (gate, up).

    The update is exact in z_u. In z_g it takes safeguarded Newton steps, each halved until it does not increase the cost, and
    skipped if it still does (R11).
    """
    gate, up = preactivations
    mean_gate, mean_up = means

    def cost(gate: Tensor) -> Tensor:
        error = activations - torch.nn.functional.silu(gate) * up
        return beta * error.square() + alpha * (gate - mean_gate).square()

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
    activations, *preactivations = variables
    *first, second = moments
    for total, preactivation in zip(first, preactivations, strict=True):
        accumulate_moments(total, sample.inputs, preactivation)
    accumulate_moments(second, activations, sample.targets)
    return float((activations - activate(preactivations)).square().sum(dtype=torch.float64))
