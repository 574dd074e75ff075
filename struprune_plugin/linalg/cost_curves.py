"""Curves of cost through measured points: rising, straight in between, and dearer at widths that kernels do not like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def fit_rising(values: Tensor) -> Tensor:
    """Return the nearest values, in least squares, that never fall (pool adjacent violators), shape as given, float64."""
    pools: list[tuple[float, int]] = []  # mean, members
    for value in values.double().tolist():
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, members = pools.pop()
            mean, count = (mean * count + before * members) / (count + members), count + members
        pools.append((mean, count))
    return torch.tensor([mean for mean, count in pools for _ in range(count)], dtype=torch.float64)


def interpolate(points: Sequence[int], values: Tensor, num_units: int) -> Tensor:
    """Return straight lines through points at k = 1 ... num_units, the first line continued below its first point, at least 0;
    0 at k = 0: a module that is gone costs nothing.

    :param points: units, rising, at least two, the last num_units
    :param values: at the points
    :return: shape [num_units + 1], float64
    """
    xs, ys = torch.tensor(points, dtype=torch.float64), values.double()
    at = torch.arange(num_units + 1, dtype=torch.float64)
    right = torch.searchsorted(xs, at).clamp(1, len(xs) - 1)
    left = right - 1
    line = ys[left] + (at - xs[left]) * (ys[right] - ys[left]) / (xs[right] - xs[left])
    line = line.clamp(min=0)
    line[0] = 0.0
    return line


def weigh_alignment(num_units: int, per_block: int, penalties: Mapping[int, float]) -> Tensor:
    """Return the factor by which every width costs more than the line through aligned ones.

    :param per_block: units that make one more of the width that a kernel sees: all of them together keep ``k / per_block`` wide
    :param penalties: factor by the largest power of two that divides a width; a power that is not among them is taken as the
        next smaller one that is
    :return: for k = 0 ... num_units units, shape [num_units + 1], float64
    """
    widths = torch.arange(num_units + 1) // per_block
    factors = torch.ones(num_units + 1, dtype=torch.float64)
    for power in sorted(penalties):
        factors = torch.where(widths % power == 0, penalties[power], factors)
    return factors


def measure_left_out(points: Sequence[int], values: Tensor) -> float:
    """Return how far the line through a point's neighbours is from it, the most of all inner points, in the values' unit."""
    xs, ys = torch.tensor(points, dtype=torch.float64), values.double()
    if len(xs) < 3:
        return 0.0
    share = (xs[1:-1] - xs[:-2]) / (xs[2:] - xs[:-2])
    return float((ys[:-2] + share * (ys[2:] - ys[:-2]) - ys[1:-1]).abs().max())
