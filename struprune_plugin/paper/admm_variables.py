"""Shared parts of ADMM on FFNs and attention: settings, token variables, solves of weights and activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments, make_moments
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
        solved.append(solve_kept_weights(damped, columns, name).weight)
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
