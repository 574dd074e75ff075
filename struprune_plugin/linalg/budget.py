"""Spread a budget over the groups of all layers: the rules of method.md section 5."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.linalg.ties import round_off

MAX_SPARSITY = 0.95  # paper, Algorithms 2 and 3: the clip of a module's sparsity


def spread_sparsity(weights: Tensor, sizes: Tensor, sparsity: float, max_sparsity: float = MAX_SPARSITY) -> Tensor:
    """Return ``min(s * weights, max_sparsity)`` with the scale s that removes ``sparsity`` of all (water-filling, R6).

    :param weights: above 0, shape [layers]
    :param sizes: parameters of each module, shape [layers]
    :param sparsity: wanted mean over parameters, at most max_sparsity
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


def spread_by_kind(
    groups: Sequence[GroupSize], weights: Sequence[float], spread: Callable[[Tensor, Tensor], Tensor]
) -> list[float]:
    """Return the sparsity of every group, each kind of modules spread on its own.

    :param spread: sparsities of one kind's modules from (weights, parameters), each of shape [modules]
    """
    shares = [0.0] * len(groups)
    for kind in {group.kind for group in groups}:
        members = [i for i, group in enumerate(groups) if group.kind == kind]
        own = torch.tensor([weights[i] for i in members], dtype=torch.float64)
        found = spread(own, torch.tensor([groups[i].num_parameters for i in members]))
        for i, share in zip(members, found.tolist(), strict=True):
            shares[i] = share
    return shares


def allocate_error_curves(
    groups: Sequence[GroupSize], curves: Sequence[Tensor], budget: float, max_sparsity: float = MAX_SPARSITY
) -> list[int]:
    """Choose kept counts that minimise ``sum_g E_g(k_g)`` while ``sum_g k_g c_g <= budget``, c_g the cost of a unit.

    Steps along the lower convex hulls are taken in the order of error saved a parameter; that is optimal wherever
    they end on the budget. Where the next does not fit, what is left is filled by the best steps that do, hull or not. At
    least one step stays in every group, and no group loses more than ``max_sparsity``, to within one step; or all units of it go,
    with what goes then beside them, where that is allowed (:attr:`~struprune_plugin.linalg.rounding.GroupSize.rest`).
    Source: method.md section 5, ``error_curve``.

    :param curves: error with k = 0 ... num_units units kept, comparable between groups, one a group, shape [num_units + 1]
    :param budget: parameters to keep at most
    :return: kept units of each group, a multiple of its step
    """
    if budget >= sum(group.num_parameters for group in groups):
        return [group.num_units for group in groups]
    best = tried = _allocate(groups, curves, budget, max_sparsity)
    groups = list(groups)
    while gone := [
        g for g, kept in enumerate(tried.kept) if not kept
    ]:  # the first step from nothing is a large one: where it
        last = max(gone, key=lambda g: tried.savings[g])  # did not fit, the others may do better to make room for it
        groups[last] = replace(groups[last], rest=None)
        tried = _allocate(groups, curves, budget, max_sparsity)
        best = min(best, tried, key=lambda choice: choice.error)
    return best.kept


@dataclass(frozen=True)
class _Choice:
    """Kept counts, one a group.

    :param savings: the error saved a parameter by every group's first step along its hull
    :param error: of all
    """

    kept: list[int]
    savings: list[float]
    error: float


def _allocate(groups: Sequence[GroupSize], curves: Sequence[Tensor], budget: float, max_sparsity: float) -> _Choice:
    """Return the choice that steps along the hulls lead to."""
    counts = [list_counts(group, max_sparsity) for group in groups]
    errors = [curve.double().cpu()[ks].tolist() for curve, ks in zip(curves, counts, strict=True)]
    costs = [[group.find_cost(k) for k in ks] for group, ks in zip(groups, counts, strict=True)]
    at = [0] * len(groups)  # the index of every group's choice among its counts
    left = budget - sum(cost[0] for cost in costs)
    steps = [  # along each hull, saved error a parameter falls, so that a sort over all keeps every group's own order
        (round_off((errors[g][i] - errors[g][j]) / (costs[g][j] - costs[g][i])), g, i, j)
        for g in range(len(groups))
        for i, j in itertools.pairwise(_find_hull(costs[g], errors[g]))
    ]
    for _, g, i, j in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        if at[g] == i and costs[g][j] - costs[g][i] <= left:
            at[g] = j
            left -= costs[g][j] - costs[g][i]
    left = _fill_budget(costs, errors, at, left)
    if left > max(group.step * group.unit_cost for group in groups):
        _fill_evenly(costs, at, left)
    savings = [0.0] * len(groups)
    for saving, g, _, _ in reversed(steps):
        savings[g] = saving
    error = sum(errors[g][i] for g, i in enumerate(at)) if left >= 0 else math.inf
    return _Choice([ks[i] for ks, i in zip(counts, at, strict=True)], savings, error)


def list_counts(group: GroupSize, max_sparsity: float) -> list[int]:
    """Return the kept counts that a group may have, fewest first; rounded down, so that the least of all groups fit."""
    step = min(group.step, group.num_units)
    fewest = max(math.floor((1 - max_sparsity) * group.num_units / step + 1e-9), 1) * step
    none = [] if group.rest is None else [0]
    return [
        *none,
        *range(fewest, group.num_units + 1, step),
    ]  # not all where these are no multiple: nobody could take that


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
    costs: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], at: list[int], left: float
) -> float:
    """Spend what is left on the growth of one group after the other that saves most and fits, in place; return the rest."""
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


def _fill_evenly(costs: Sequence[Sequence[int]], at: list[int], left: float) -> None:
    """Spend what no error tells how to spend, in place: whoever has lost the largest share gets the next step that fits.

    Units that the others replace to within rounding have curves that end flat at zero: nothing is saved by keeping them, and
    yet they are not to go where less was asked for.
    """
    while True:
        growing = [
            (costs[g][i] / costs[g][-1], g)
            for g, i in enumerate(at)
            if i + 1 < len(costs[g]) and costs[g][i + 1] - costs[g][i] <= left
        ]
        if not growing:
            return
        _, g = min(growing)
        left -= costs[g][at[g] + 1] - costs[g][at[g]]
        at[g] += 1
