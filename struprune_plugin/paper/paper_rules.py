"""Allocation rules of the paper: ``global_threshold``, ``softmax`` and ``softmax_inverse``, Algorithms 1 to 3."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from loguru import logger
from pydantic import Field, field_validator
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation import rules
from struprune_plugin.allocation.budget import MAX_SPARSITY, meet_budget, spread_sparsity
from struprune_plugin.allocation.rounding import GroupSize, check_budget, expand_counts, round_kept_counts
from struprune_plugin.allocation.rules import Budget, GroupStatistics, Sizes
from struprune_plugin.linalg.ties import argmin_with_ties, order_scores
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.manifest import AllocationRecord


@rules.RULES.register
class GlobalThreshold(rules.AllocationRule):
    """Threshold on the scores of the units of all groups (paper, Algorithm 1); requires ``importance: closed_form``."""

    rule: Literal["global_threshold"] = "global_threshold"

    def check(self, importance: str) -> None:
        if importance != "closed_form":
            raise ValueError(
                f"importance: must be closed_form for allocation: global_threshold (Algorithm 1), got {importance!r}. Set "
                "`importance: closed_form`."
            )

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        scores = [statistics[size.name].scores for size in sizes]
        num_keep = meet_budget(sizes, allocate_global_threshold(sizes, scores, budget.share), budget.share)
        retention = {s.name: min(max(float(part.mean()), 0.0), 1.0) for s, part in zip(sizes, scores, strict=True)}
        return UnitAllocation(expand_counts(sizes, num_keep), AllocationRecord(self.rule, retention=retention))


class SoftmaxRule(rules.AllocationRule):
    """Softmax over the groups' importance, at the temperature of least error.

    :param temperature: relative to std(I) (R8); a list is searched for the least error, read off every module's error curve
        (R9)
    :param max_sparsity: the clip of Algorithms 2 and 3
    :param as_printed: allocate exactly as the paper prints, and miss the budget where it does (R6, R7)
    """

    temperature: float | list[float] = Field(default_factory=lambda: [0.5, 1.0, 2.0, 4.0, 8.0, 16.0])
    max_sparsity: float = Field(default=MAX_SPARSITY, gt=0, lt=1)
    as_printed: bool = False

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float | list[float]) -> float | list[float]:
        grid = value if isinstance(value, list) else [value]
        if not grid or not all(t > 0 and math.isfinite(t) for t in grid):
            raise ValueError(f"must be above 0, one value or a list of at least one, got {value}.")
        return value

    def spread(self, share: float, temperature: float, importance: Tensor, sizes: Tensor) -> Tensor:
        """Return the sparsities of one pool's modules, see :func:`allocate_softmax`."""
        if self.as_printed:
            return allocate_softmax_as_printed(importance, share, temperature, self.max_sparsity)
        return allocate_softmax(importance, sizes, share, temperature, self.max_sparsity)

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        importance = {size.name: statistics[size.name].importance for size in sizes}
        curves = [statistics[size.name].curve for size in sizes]
        grid = self.temperature if isinstance(self.temperature, list) else [self.temperature]
        tried = search_temperature(sizes, list(importance.values()), curves, grid, partial(self.spread, budget.share))
        best = argmin_with_ties([error for _, error in tried])
        num_keep, error = tried[best]
        if self.as_printed:
            removed = sum((s.num_units - count) * s.unit_cost for s, count in zip(sizes, num_keep, strict=True))
            logger.warning(
                f"as_printed: the paper's formula removes {removed / budget.num_prunable:.4f} of the parameters in place of "
                f"{budget.sparsity} (R6). Set `as_printed: false` to meet the budget."
            )
        else:
            check_budget(sizes, num_keep, budget.share)
        logger.info(f"allocation: {self.rule} at temperature {grid[best]:g} has the error {error:.6g}")
        searched = [{"temperature": value, "error": loss} for value, (_, loss) in zip(grid, tried, strict=True)]
        record = AllocationRecord(
            self.rule, as_printed=self.as_printed, temperature=grid[best], searched=searched, importance=importance
        )
        return UnitAllocation(expand_counts(sizes, num_keep), record)


@rules.RULES.register
class Softmax(SoftmaxRule):
    """Algorithm 2: importance is the sum of the units' scores."""

    rule: Literal["softmax"] = "softmax"


@rules.RULES.register
class SoftmaxInverse(SoftmaxRule):
    """Algorithm 3: importance from the weights' norms, decayed with depth.

    :param rho: attention's factor; cancels under a relative temperature, kept for completeness
    :param gamma: decay of importance with depth
    """

    rule: Literal["softmax_inverse"] = "softmax_inverse"
    rho: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    gamma: float = Field(default=0.9, gt=0, le=1)

    def spread(self, share: float, temperature: float, importance: Tensor, sizes: Tensor) -> Tensor:
        if self.as_printed:
            return allocate_softmax_inverse_as_printed(importance, share, temperature, self.max_sparsity)
        return super().spread(share, temperature, importance, sizes)

    def weigh(self, model: PreTrainedModel, group: UnitGroup, scores: Tensor) -> float:
        layer = model.get_submodule(group.layer_name)
        weights = group.unit.list_weights(layer, group)
        decay = self.gamma**group.layer_index
        if not group.unit.is_mixer:
            return decay * measure_norms(weights, variance=0.05)
        return decay * self.rho * measure_norms(weights, variance=0.1, norm=0.01)


def allocate_global_threshold(groups: Sequence[GroupSize], scores: Sequence[Tensor], sparsity: float) -> list[float]:
    """Return every group's sparsity when units of highest score are kept until the retained parameters are used up.

    Ties go to the earlier group and unit.
    Source: paper, Lemma 1 and Algorithm 1 (the threshold tau), K counting retained units weighted by their cost (R5).
    """
    costs = torch.cat([torch.full((len(s),), g.unit_cost) for g, s in zip(groups, scores, strict=True)])
    owner = torch.cat([torch.full((len(s),), i) for i, s in enumerate(scores)])
    order = order_scores(-torch.cat([s.double().cpu() for s in scores]))
    most = (1 - sparsity) * float(costs.sum())
    # float64: int64 is compared with a Python float in float32
    kept = owner[order[costs[order].cumsum(0).double() <= most]]
    counts = torch.bincount(kept, minlength=len(groups)).tolist()
    return [1 - count / group.num_units for count, group in zip(counts, groups, strict=True)]


def allocate_softmax(
    importance: Tensor, sizes: Tensor, sparsity: float, temperature: float, max_sparsity: float = MAX_SPARSITY
) -> Tensor:
    """Return sparsities ``r_l`` proportional to ``w = softmax(-I / T)``, clipped to [0, max_sparsity], of mean r.

    Source: paper, Algorithms 2 and 3, step 2; T relative to std(I) (R8), under which a common factor of I (rho) cancels.
    Differs from the source: what the clip cuts off is spread over the unclipped layers until the budget holds (R6), layers count
    by their parameters, and in Algorithm 3, too, layers of low (decayed) importance lose more, as the paper's text says (R7).

    :param importance: of the modules of one kind, shape [layers]; ``sizes`` has their parameters
    :return: shape [layers], float64
    """
    return spread_sparsity(_softmin(importance, temperature), sizes, sparsity, max_sparsity)


def allocate_softmax_as_printed(
    importance: Tensor, sparsity: float, temperature: float, max_sparsity: float = MAX_SPARSITY
) -> Tensor:
    """Return sparsities exactly as Algorithm 2, step 2, prints: ``r_l = r L w_l``; misses the budget if a layer is clipped (R6)."""
    weights = _softmin(importance, temperature)
    shares = (sparsity * len(weights) * weights).clamp(0, max_sparsity)
    if (shares < max_sparsity).all():
        shares = (shares * sparsity / shares.mean().clamp(min=1e-300)).clamp(0, max_sparsity)
    return shares


def allocate_softmax_inverse_as_printed(
    importance: Tensor, sparsity: float, temperature: float, max_sparsity: float = MAX_SPARSITY
) -> Tensor:
    """Return sparsities exactly as Algorithm 3, step 2, prints: by ``1 - w_l``, with the clip (R6, R7)."""
    weights = _softmin(importance, temperature)
    complement = 1 - weights if len(weights) > 1 else weights
    return (sparsity * len(weights) * complement / complement.sum()).clamp(0, max_sparsity)


def _softmin(importance: Tensor, temperature: float) -> Tensor:
    importance = importance.double()
    spread = importance.std(correction=0)
    if not spread > 1e-12 * importance.abs().max():  # constant importance: uniform (R8)
        return torch.full_like(importance, 1 / len(importance))
    return torch.softmax(-importance / (temperature * spread), dim=0)


def search_temperature(
    groups: Sequence[GroupSize],
    importance: Sequence[float],
    curves: Sequence[Tensor],
    temperatures: Sequence[float],
    spread: Callable[[float, Tensor, Tensor], Tensor],
) -> list[tuple[list[int], float]]:
    """Return (kept units, error summed over all groups) of every temperature, each module kind allocated separately.

    Source: paper, Algorithms 2 and 3, the outer loop and step 5, with losses read off the moments (R9).

    :param curves: error with k = 0 ... num_units units kept, one per group, shape [num_units + 1]
    :param spread: returns the sparsities of one pool's modules from (temperature, importances, parameters)
    """
    pools, tried = {group.pool: list[int]() for group in groups}, []
    for place, group in enumerate(groups):
        pools[group.pool].append(place)
    for temperature in temperatures:
        shares = torch.zeros(len(groups), dtype=torch.float64)
        for members in pools.values():
            weights = torch.tensor([importance[i] for i in members], dtype=torch.float64)
            shares[members] = spread(temperature, weights, torch.tensor([groups[i].num_parameters for i in members]))
        num_keep = round_kept_counts(groups, shares.tolist())
        tried.append((num_keep, sum(float(curve[count]) for curve, count in zip(curves, num_keep, strict=True))))
    return tried


def measure_norms(weights: Iterable[Tensor], variance: float, norm: float = 0.0) -> float:
    """Return ``sum (||W||_1 + variance Var(W) + norm ||W||_2)`` over a module's linears, or heads (rows of Q, K, V, columns of O).

    Source: paper, Algorithm 3, step 1, without its factors gamma^l and rho.
    """
    wide = (weight.double() for weight in weights)
    return sum((w.abs().sum() + variance * w.var(correction=0)).item() + norm * w.norm().item() for w in wide)
