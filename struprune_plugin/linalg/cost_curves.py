"""Cost curves through measured points: smooth, rising, linear in between, and higher at widths that kernels handle badly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_STIFFNESS = [10 ** (power / 2) for power in range(-6, 13)]  # from a line through all points to a straight line
_FEWEST = 4  # points that a fit needs
_TIE = 1.1  # factor on the least leave-one-out error: the stiffest line within it is used


def fit_rising(values: Tensor) -> Tensor:
    """Return the nondecreasing values nearest in least squares (pool adjacent violators), shape as given, float64."""
    pools: list[tuple[float, int]] = []  # mean, members
    for value in values.double().tolist():
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, members = pools.pop()
            mean, count = (mean * count + before * members) / (count + members), count + members
        pools.append((mean, count))
    return torch.tensor([mean for mean, count in pools for _ in range(count)], dtype=torch.float64)


def interpolate(points: Sequence[int], values: Tensor, num_units: int) -> Tensor:
    """Return the linear interpolation through points at k = 1 ... num_units, at least 0; 0 at k = 0.

    The first line is extended below its first point. A removed module costs nothing.

    :param points: numbers of units, ascending, at least two, the last num_units
    :param values: values at the points
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
    """Return the factor by which each width costs more than the line through aligned widths.

    :param per_block: units per channel of the width that a kernel sees: k units make a width of ``k / per_block``
    :param penalties: factor by the largest power of two that divides a width; a power without an entry uses that of the next
        smaller one
    :return: for k = 0 ... num_units units, shape [num_units + 1], float64
    """
    widths = torch.arange(num_units + 1) // per_block
    factors = torch.ones(num_units + 1, dtype=torch.float64)
    for power in sorted(penalties):
        factors = torch.where(widths % power == 0, penalties[power], factors)
    return factors


def fit_smooth(points: Sequence[int], values: Tensor) -> tuple[Tensor, float]:
    """Return a smooth line through noisy points and its error: the root mean square at points left out of the fit.

    Weighs squared distances against squared changes of slope (Whittaker smoothing, at any spacing of points) and uses the
    stiffest line whose error is within a tenth of the least: a straight trend stays straight at any noise.

    :param points: positions, ascending
    :return: the line at the points, float64, and its error; with fewer than four points, the values and 0, as no error can be
        estimated
    """
    xs, ys = torch.tensor(points, dtype=torch.float64), values.double()
    if len(xs) < _FEWEST:
        return ys, 0.0
    gaps, identity = xs.diff(), torch.eye(len(xs), dtype=torch.float64)
    bends = ((identity.diff(dim=0) / gaps[:, None]) * gaps.mean()).diff(dim=0)
    fits = []
    for stiffness in _STIFFNESS:
        hat = torch.linalg.inv(identity + stiffness * bends.mT @ bends)
        line = hat @ ys
        fits.append((line, float(((ys - line) / (1 - hat.diagonal())).square().mean().sqrt())))
    least = min(error for _, error in fits)
    return next(fit for fit in reversed(fits) if fit[1] <= _TIE * least)


def fit_penalties(penalties: Mapping[int, float], noise: float) -> dict[int, float]:
    """Return the nearest factors, in least squares, that never rise with the power of two, set to 1 where noise explains them.

    :param penalties: measured factor by the power of two
    :param noise: noise of a factor
    """
    powers = sorted(penalties, reverse=True)
    rising = fit_rising(torch.tensor([penalties[power] for power in powers], dtype=torch.float64)).tolist()
    return {
        power: factor if factor > 1 + 2 * noise else 1.0 for power, factor in sorted(zip(powers, rising, strict=True))
    }
