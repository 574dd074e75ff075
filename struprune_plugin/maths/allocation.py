"""Spread a budget over the groups of all layers: the rules of method.md section 5."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from struprune_plugin.maths.rounding import GroupSize, round_kept_counts
from struprune_plugin.maths.ties import find_least, order_scores, round_off

MAX_SPARSITY = 0.95  # paper, Algorithms 2 and 3: the clip of a module's sparsity


def allocate_softmax(
    importance: Tensor,
    sizes: Tensor,
    sparsity: float,
    temperature: float,
    max_sparsity: float = MAX_SPARSITY,
    as_printed: bool = False,
) -> Tensor:
    """Allocate by ``w = softmax(-I / T)``, ``r_l = r L w_l``, clipped to [0, max_sparsity], mean r.

    Source: paper, Algorithm 2, step 2; T relative to std(I) (R8).
    Differs from the source: what the clip takes is spread over the unclipped layers until the budget holds (R6), and
    layers count by their parameters; ``as_printed`` takes plain means, skips the rescaling as soon as one layer is
    clipped, and so misses the budget.

    :param importance: of one module kind, shape [layers]
    :param sizes: parameters of each module, shape [layers]
    :param sparsity: mean sparsity, in [0, 1)
    :param temperature: relative, above 0
    :return: sparsity of every layer, shape [layers], float64
    """
    weights = _softmin(importance, temperature)
    if not as_printed:
        return spread_sparsity(weights, sizes, sparsity, max_sparsity)
    shares = (sparsity * len(weights) * weights).clamp(0, max_sparsity)
    if (shares < max_sparsity).all():
        shares = (shares * sparsity / shares.mean().clamp(min=1e-300)).clamp(0, max_sparsity)
    return shares


def allocate_softmax_inverse(
    importance: Tensor,
    sizes: Tensor,
    sparsity: float,
    temperature: float,
    max_sparsity: float = MAX_SPARSITY,
    as_printed: bool = False,
) -> Tensor:
    """Allocate one module kind after Algorithm 3.

    Source: paper, Algorithm 3, step 2; T relative to std(I) (R8), under which a common factor of I (rho) cancels.
    Differs from the source: ``r_l`` is proportional to w_l, so that layers of low (decayed) importance lose more, as
    the paper's text says (R7), with the budget kept by spreading (R6); ``as_printed`` keeps ``1 - w_l`` and the clip.

    Parameters and return value as in :func:`allocate_softmax`.
    """
    weights = _softmin(importance, temperature)
    if not as_printed:
        return spread_sparsity(weights, sizes, sparsity, max_sparsity)
    complement = 1 - weights if len(weights) > 1 else weights
    return (sparsity * len(weights) * complement / complement.sum()).clamp(0, max_sparsity)


def _softmin(importance: Tensor, temperature: float) -> Tensor:
    importance = importance.double()
    spread = importance.std(correction=0)
    if not spread > 1e-12 * importance.abs().max():  # constant importance: uniform (R8)
        return torch.full_like(importance, 1 / len(importance))
    return torch.softmax(-importance / (temperature * spread), dim=0)


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


def allocate_global_threshold(groups: Sequence[GroupSize], scores: Sequence[Tensor], sparsity: float) -> list[float]:
    """Keep the units of highest score over all groups until the retained parameters are used up.

    Source: paper, Lemma 1 and Algorithm 1 (the threshold tau), K counting retained units weighted by their cost (R5).

    :param scores: of every unit, one tensor of shape [units] a group; ties go to the earlier group and unit
    :param sparsity: of the groups' own parameters, from :func:`find_group_sparsity`
    :return: sparsity of every group
    """
    costs = torch.cat([torch.full((len(s),), g.unit_cost) for g, s in zip(groups, scores, strict=True)])
    owner = torch.cat([torch.full((len(s),), i) for i, s in enumerate(scores)])
    order = order_scores(torch.cat([s.double().cpu() for s in scores]), descending=True)
    kept = owner[order[costs[order].cumsum(0) <= (1 - sparsity) * costs.sum()]]
    counts = torch.bincount(kept, minlength=len(groups)).tolist()
    return [1 - count / group.num_units for count, group in zip(counts, groups, strict=True)]


def allocate_error_curves(
    groups: Sequence[GroupSize], curves: Sequence[Tensor], budget: float, max_sparsity: float = MAX_SPARSITY
) -> list[int]:
    """Choose kept counts that minimise ``sum_g E_g(k_g)`` while ``sum_g k_g c_g <= budget``, c_g the cost of a unit.

    Steps along the lower convex hulls are taken in the order of error saved a parameter; that is optimal wherever
    they end on the budget. Where the next does not fit, what is left is filled by the best steps that do, hull or not. At
    least one step stays in every group, and no group loses more than ``max_sparsity``, to within one step.
    Source: method.md section 5, ``error_curve``.

    :param curves: error with k = 0 ... num_units units kept, comparable between groups, one a group, shape [num_units + 1]
    :param budget: parameters to keep at most
    :return: kept units of each group, a multiple of its step
    """
    if budget >= sum(group.num_parameters for group in groups):
        return [group.num_units for group in groups]
    counts = [_list_counts(group, max_sparsity) for group in groups]
    errors = [curve.double().cpu()[ks].tolist() for curve, ks in zip(curves, counts, strict=True)]
    costs = [[k * group.unit_cost for k in ks] for group, ks in zip(groups, counts, strict=True)]
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
    return [ks[i] for ks, i in zip(counts, at, strict=True)]


def _list_counts(group: GroupSize, max_sparsity: float) -> list[int]:
    """Return the kept counts that a group may have, fewest first; rounded down, so that the least of all groups fit."""
    step = min(group.step, group.num_units)
    fewest = max(math.floor((1 - max_sparsity) * group.num_units / step + 1e-9), 1) * step
    return list(
        range(fewest, group.num_units + 1, step)
    )  # not all units where these are no multiple: nobody could take that


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


@dataclass(frozen=True)
class Candidate:
    """One temperature of a search.

    :param loss: reconstruction error summed over all groups, read off their error curves
    """

    temperature: float
    kept: tuple[int, ...]
    loss: float


def search_temperature(
    groups: Sequence[GroupSize],
    importance: Sequence[float],
    curves: Sequence[Tensor],
    sparsity: float,
    temperatures: Sequence[float],
    rule: Callable[..., Tensor],
    max_sparsity: float = MAX_SPARSITY,
    as_printed: bool = False,
) -> tuple[Candidate, list[Candidate]]:
    """Allocate at every temperature, each module kind apart, and return the candidate of least error, and all.

    Source: paper, Algorithms 2 and 3, the outer loop and step 5, the losses read off the moments (R9).

    :param curves: error with k = 0 ... num_units units kept, one a group, shape [num_units + 1]
    :param sparsity: of the groups' own parameters, from :func:`find_group_sparsity`
    :param rule: :func:`allocate_softmax` or :func:`allocate_softmax_inverse`
    """
    candidates = []
    for temperature in temperatures:
        shares = [0.0] * len(groups)
        for kind in {group.kind for group in groups}:
            members = [i for i, group in enumerate(groups) if group.kind == kind]
            allocated = rule(
                torch.tensor([importance[i] for i in members], dtype=torch.float64),
                torch.tensor([groups[i].num_parameters for i in members]),
                sparsity,
                temperature,
                max_sparsity,
                as_printed,
            )
            for i, share in zip(members, allocated.tolist(), strict=True):
                shares[i] = share
        kept = round_kept_counts(groups, shares)
        loss = sum(float(curve[count]) for curve, count in zip(curves, kept, strict=True))
        candidates.append(Candidate(temperature, tuple(kept), loss))
    return candidates[find_least([candidate.loss for candidate in candidates])], candidates
