"""Stream activations into moments: everything that importance, allocation and solve need, in one pass.

Legend (per linear that consumes a group's units):
    P [n + 1, tokens]  inputs of the linear, with a last row of ones that carries the bias
    Y [d, tokens]      target output
    W [d, n + 1]       weights, with the bias as last column
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Sums over calibration tokens for one consuming linear. The tensors grow in place.

    :param gram: ``H = P P^T``, shape [n + 1, n + 1]; the last row and column belong to the bias
    :param cross: ``C = Y P^T``, shape [d, n + 1]
    :param target_energy: ``tr(Y Y^T)``, scalar
    :param absolute_sum: ``sum_t |x_it|``, shape [n]
    """

    gram: Tensor
    cross: Tensor
    target_energy: Tensor
    absolute_sum: Tensor

    @property
    def num_tokens(self) -> int:
        return round(self.gram[-1, -1].item())  # the row of ones against itself


@dataclass(frozen=True)
class Tiles:
    """How moments grow that live elsewhere than the activations.

    :param rows: of the moments, made at once
    :param tokens: widened to the moments' dtype at once
    :param fetch: brings a tile to the moments
    """

    rows: int
    tokens: int
    fetch: Callable[[Tensor], Tensor]


def make_moments(num_inputs: int, num_outputs: int, device: torch.device | str, dtype: torch.dtype) -> Moments:
    """Return empty moments of a linear with ``num_inputs`` inputs and ``num_outputs`` outputs.

    :param dtype: accumulation dtype, float32 or float64
    """
    size = num_inputs + 1
    return Moments(
        gram=torch.zeros(size, size, device=device, dtype=dtype),
        cross=torch.zeros(num_outputs, size, device=device, dtype=dtype),
        target_energy=torch.zeros((), device=device, dtype=torch.float64),
        absolute_sum=torch.zeros(num_inputs, device=device, dtype=dtype),
    )


def accumulate_moments(moments: Moments, inputs: Tensor, targets: Tensor, tiles: Tiles | None = None) -> None:
    """Add the tokens of one micro-batch.

    Sums, not means: the result does not depend on how the tokens are split into batches.

    :param moments: grown in place
    :param inputs: inputs of the consuming linear, shape [tokens, n], any float dtype
    :param targets: target outputs of that linear, shape [tokens, d], any float dtype
    :param tiles: how to go about it where the moments are elsewhere; at once where None
    """
    dtype = moments.gram.dtype
    size = len(inputs) if tiles is None else tiles.tokens
    for part, wanted in zip(inputs.split(max(size, 1)), targets.split(max(size, 1)), strict=True):
        widened = part.new_ones(len(part), part.shape[1] + 1, dtype=dtype)  # the last column carries the bias
        widened[:, :-1] = part
        wanted = wanted.to(dtype)
        if tiles is None:
            moments.gram.addmm_(widened.T, widened)
            moments.cross.addmm_(wanted.T, widened)
        else:
            for total, left in ((moments.gram, widened), (moments.cross, wanted)):
                for start in range(0, len(total), tiles.rows):
                    rows = slice(start, start + tiles.rows)
                    total[rows] += tiles.fetch(left[:, rows].T @ widened)
        fetch = (lambda tensor: tensor) if tiles is None else tiles.fetch
        moments.target_energy.add_(fetch(_measure_energy(wanted)))
        moments.absolute_sum.add_(fetch(torch.linalg.vector_norm(widened[:, :-1], 1, dim=0)))


def _measure_energy(targets: Tensor) -> Tensor:
    """Return the sum of squares in float64, without a widened copy."""
    return torch.linalg.vector_norm(targets, dim=1, dtype=torch.float64).square().sum()


def reorder_moments(moments: Moments, order: Tensor) -> Moments:
    """Return the moments of the same tokens with the inputs in another order, the bias last as before.

    :param order: which input comes where, shape [n], int64
    """
    rows = with_bias_index(order, len(order))
    return Moments(
        moments.gram[rows[:, None], rows], moments.cross[:, rows], moments.target_energy, moments.absolute_sum[order]
    )


def copy_empty(moments: Moments) -> Moments:
    """Return empty moments of the same sizes, dtypes and device."""
    return Moments(
        *(torch.zeros_like(part) for part in (moments.gram, moments.cross, moments.target_energy, moments.absolute_sum))
    )


def add_moments(moments: Moments, others: Moments) -> None:
    """Add the moments of other tokens, in place."""
    moments.gram.add_(others.gram)
    moments.cross.add_(others.cross)
    moments.target_energy.add_(others.target_energy)
    moments.absolute_sum.add_(others.absolute_sum)


def subtract_moments(moments: Moments, part: Moments) -> Moments:
    """Return the float64 moments of the tokens that are in the first but not in the second, which are a part of them."""
    return Moments(
        gram=moments.gram.double() - part.gram,
        cross=moments.cross.double() - part.cross,
        target_energy=moments.target_energy - part.target_energy,
        absolute_sum=moments.absolute_sum - part.absolute_sum,
    )


def is_finite(moments: Moments) -> bool:
    """Tell whether every calibration token was finite; the diagonal of H and tr(Y Y^T) show it."""
    return bool(moments.gram.diagonal().isfinite().all() and moments.target_energy.isfinite())


def append_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [W, b] in float64, shape [d, n + 1] (b = 0 where the linear has none)."""
    column = torch.zeros_like(weight[:, 0]) if bias is None else bias
    return torch.cat([weight, column[:, None]], dim=1).to(torch.float64)


def measure_error(moments: Moments, weight: Tensor, columns: Tensor | None = None) -> float:
    """Return ``||Y - W P||^2`` of any weight from the moments alone.

    ``||Y - W P||^2 = tr(Y Y^T) - 2 tr(W C^T) + tr(W H W^T)``.
    Source: method.md section 2.

    :param weight: shape [d, k + 1], bias last, float64
    :param columns: inputs that the weight reads, shape [k]; all n where None
    :return: sum of squares over outputs and tokens, at least 0
    """
    gram, cross = moments.gram, moments.cross
    if columns is not None:
        rows = with_bias_index(columns, gram.shape[0] - 1)
        gram, cross = gram[rows[:, None], rows], cross[:, rows]
    gram, cross = gram.double(), cross.double()
    error = moments.target_energy - 2 * (weight * cross).sum() + (weight * (weight @ gram)).sum()
    return max(float(error), 0.0)


def with_bias_index(columns: Tensor, bias_index: int) -> Tensor:
    """Append the bias' row to a set of input columns, shape [k] -> [k + 1]."""
    return torch.cat([columns, columns.new_tensor([bias_index])])
