"""Allocation of a budget over the groups of all layers: the rules of method.md section 5."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from struprune_plugin.allocation.rounding import GroupSize, check_budget, round_kept_counts
from struprune_plugin.linalg.ties import round_off

MAX_SPARSITY = 0.95  # paper, Algorithms 2 and 3: the clip of a module's sparsity


def meet_budget(groups: Sequence[GroupSize], shares: Sequence[float], share: float) -> list[int]:
    """Round the groups' sparsities, in [0, 1), to kept counts, multiples of their steps, that meet a budget.

    :param share: sparsity over all groups' parameters
    :raises ValueError: the counts miss the budget
    """
    num_keep = round_kept_counts(groups, shares)
    check_budget(groups, num_keep, share)
    return num_keep


def spread_sparsity(weights: Tensor, sizes: Tensor, sparsity: float, max_sparsity: float = MAX_SPARSITY) -> Tensor:
    """Return ``min(s * weights, max_sparsity)`` for the scale s that removes the share ``sparsity`` of all (water-filling, R6).

    :param weights: above 0, shape [layers]; ``sizes`` has each module's parameters
    :return: shape [layers], float64
    :raises ValueError: ``sparsity`` exceeds ``max_sparsity``
    """
    if sparsity > max_sparsity:
        raise ValueError(
            f"sparsity: the mean over these {len(weights)} modules must be at most max_sparsity={max_sparsity}, "
            f"got {sparsity:.4g}. Lower sparsity, raise max_sparsity or prune more kinds of units."
        )
    weights, sizes = weights.double().clamp(min=1e-12), sizes.double()
    full = torch.zeros_like(weights, dtype=torch.bool)
    while True:
        left = sparsity * sizes.sum() - max_sparsity * sizes[full].sum()
        rest = weights.masked_fill(full, 0)
        shares = torch.where(full, max_sparsity, rest * left / (rest * sizes).sum().clamp(min=1e-300))
        over = (shares > max_sparsity) & ~full
        if not over.any():
            return shares
        full |= over


def allocate_error_curves(
    groups: Sequence[GroupSize], curves: Sequence[Tensor], budget: float, max_sparsity: float = MAX_SPARSITY
) -> list[int]:
    """Return kept counts that minimise ``sum_g E_g(k_g)`` under ``sum_g c_g k_g <= budget``, c_g parameters per unit.

    Steps along the lower convex hulls are taken in the order of error saved per parameter, which is optimal wherever they end
    exactly on the budget. Where the next step does not fit, the remaining budget is spent on the best steps that fit, on the
    hull or not. Where half or more of a coarse step (of experts that share one width) would fit, the others make room for it.
    Every group keeps at least one step, and no group loses more than ``max_sparsity``, to within one step.
    Source: method.md section 5, ``error_curve``.

    :param curves: error with k = 0 ... num_units units kept, comparable between groups, shape [num_units + 1]
    :param budget: maximum number of parameters to keep
    """
    everything = [group.num_units for group in groups]
    if sum(group.num_parameters for group in groups) <= budget * (1 + 1e-9):
        return everything
    counts = [list_counts(group, max_sparsity) for group in groups]
    errors = [curve.double().cpu()[ks].tolist() for curve, ks in zip(curves, counts, strict=True)]
    costs = [[float(k * group.unit_cost) for k in ks] for group, ks in zip(groups, counts, strict=True)]
    at, left = _spend_budget(costs, errors, budget)
    finest = min((cost[1] - cost[0] for cost in costs if len(cost) > 1), default=0.0)
    for g, cost in enumerate([*costs]):
        i, rest = at[g] + 1, sum(one[0] for one in costs) - cost[0]
        if i < len(cost) and finest < left < cost[i] - cost[i - 1] <= 2 * left and rest + cost[i] <= budget:
            counts[g], costs[g], errors[g] = counts[g][i:], cost[i:], errors[g][i:]
            at, left = _spend_budget(costs, errors, budget)
    return [ks[i] for ks, i in zip(counts, at, strict=True)]


def _spend_budget(
    costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], budget: float
) -> tuple[list[int], float]:
    """Return the index of every group's choice among its costs, and the budget that is left."""
    at = [0] * len(costs)
    left = budget - sum(cost[0] for cost in costs)
    steps = [  # the error saved per cost falls along each hull, so that a global sort keeps the order in each group
        (round_off((errors[g][i] - errors[g][j]) / (costs[g][j] - costs[g][i])), g, i, j)
        for g in range(len(costs))
        for i, j in itertools.pairwise(_find_hull(costs[g], errors[g]))
    ]
    for _, g, i, j in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        if at[g] == i and costs[g][j] - costs[g][i] <= left:
            at[g] = j
            left -= costs[g][j] - costs[g][i]
    left = _fill_budget(costs, errors, at, left)
    if left > max((b - a for cost in costs for a, b in itertools.pairwise(cost)), default=0):
        _fill_evenly(costs, at, left)
    return at, left


def list_counts(group: GroupSize, max_sparsity: float) -> list[int]:
    """Return the allowed kept counts of a group, ascending; the least is rounded down, so that the least of all groups fit."""
    step = min(group.step, group.num_units)
    fewest = max(math.floor((1 - max_sparsity) * group.num_units / step + 1e-9), 1) * step
    # num_units itself is not allowed where it is no multiple of the step: that width would be unusable.
    return [*range(fewest, group.num_units + 1, step)]


def _find_hull(costs: Sequence[float], errors: Sequence[float]) -> list[int]:
    """Return the indices of the points on the lower convex hull of an error curve, up to its minimum."""
    hull: list[int] = []

    def saving(i: int, j: int) -> float:
        return (errors[i] - errors[j]) / (costs[j] - costs[i])

    for i in range(len(costs)):
        if hull and errors[i] >= errors[hull[-1]]:
            continue
        while len(hull) > 1 and saving(hull[-2], hull[-1]) <= saving(hull[-1], i):
            hull.pop()
        hull.append(i)
    return hull


def _fill_budget(
    costs: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], at: list[int], left: float
) -> float:
    """Spend the remaining budget, in place, each time on the growth of one group that fits and saves most; return the rest."""
    while True:
        best = (0.0, 0, 0)
        for g, i in enumerate(at):
            for j in range(i + 1, len(costs[g])):
                if costs[g][j] - costs[g][i] > left:
                    break
                best = max(best, (round_off(errors[g][i] - errors[g][j]), -g, -j))
        saved, g, j = best[0], -best[1], -best[2]
        if saved <= 0:
            return left
        left -= costs[g][j] - costs[g][at[g]]
        at[g] = j


def _fill_evenly(costs: Sequence[Sequence[float]], at: list[int], left: float) -> None:
    """Spend the budget that saves no error, because curves end flat, on the group that has lost most, in place, step by step."""
    while growing := [
        (costs[g][i] / costs[g][-1], g)
        for g, i in enumerate(at)
        if i + 1 < len(costs[g]) and costs[g][i + 1] - costs[g][i] <= left
    ]:
        _, g = min(growing)
        left -= costs[g][at[g] + 1] - costs[g][at[g]]
        at[g] += 1
