"""``whole_layers``: removal of the least important layers; the rest of the budget comes off the other layers' FFNs, equally."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar, Literal

from pydantic import Field

from struprune_plugin.allocation.rules.rule import (
    RULES,
    AllocationRule,
    Budget,
    GroupStatistics,
    Sizes,
    make_allocation,
)
from struprune_plugin.linalg.rounding import check_budget, measure_uniform_slack, round_uniform_counts
from struprune_plugin.linalg.ties import argmin_with_ties
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.storage.records import AllocationRecord


@RULES.register
class WholeLayers(AllocationRule):
    """Removal of whole layers: those whose attention and FFN contribute least to the residual stream. For each number of layers,
    the FFNs of the other layers lose the rest of the budget, all the same share; attention stays. The number chosen is the one of
    the least sum of error curves or, with trials, of the least divergence of the model's output.

    :param samples: as for ``error_curve``
    :param trial_samples: as for ``error_curve``
    """

    weighs_errors: ClassVar[bool] = True
    empties: ClassVar[bool] = True
    takes_layers: ClassVar[bool] = True
    rule: Literal["whole_layers"] = "whole_layers"
    samples: int = Field(default=16, ge=1)
    trial_samples: int = Field(default=4, ge=0)

    def decide(self, sizes: Sizes, statistics: Mapping[str, GroupStatistics], budget: Budget) -> UnitAllocation:
        curves = [statistics[size.name].curve for size in sizes]
        energies = {size.name: float(curve[0]) for size, curve in zip(sizes, curves, strict=True)}
        plans = list(_list_plans(sizes, energies, budget.share).values())
        if not plans:
            raise ValueError(
                f"`allocation: whole_layers` cannot remove {budget.share:.1%} of all units' parameters by layers and FFN channels. "
                "Lower sparsity, or set `allocation: error_curve`."
            )
        losses = [sum(float(curve[k]) for curve, k in zip(curves, kept, strict=True)) for kept in plans]
        best = argmin_with_ties(losses)
        record = AllocationRecord(self.rule, error=losses[best], sensitivity=budget.sensitivity, importance=energies)
        return make_allocation(sizes, plans[best], record)

    def propose(self, sizes: Sizes, own: UnitAllocation, share: float) -> dict[str, list[int]]:
        return {
            f"{count} layers gone": kept
            for count, kept in _list_plans(sizes, own.record.importance or {}, share).items()
        }

    def measure_slack(self, sizes: Sizes) -> int | None:
        return measure_uniform_slack([size for size in sizes if size.kind == "ffn"])


def _list_plans(sizes: Sizes, energies: Mapping[str, float], share: float) -> dict[int, list[int]]:
    """Return kept counts that meet the budget, by number of removed layers.

    :param energies: energy of every group's output, by name
    """
    layers: dict[int, list[int]] = {}
    for index, size in enumerate(sizes):
        layers.setdefault(size.layer, []).append(index)
    whole = [
        members
        for layer, members in layers.items()
        if layer >= 0 and {"attention", "ffn"} <= {sizes[i].kind for i in members if sizes[i].rest is not None}
    ]
    whole.sort(key=lambda members: sum(energies[sizes[i].name] for i in members))
    asked, plans = share * sum(size.num_parameters for size in sizes), dict[int, list[int]]()
    for count in range(len(whole) + 1):
        gone = {i for members in whole[:count] for i in members}
        left = [i for i, size in enumerate(sizes) if size.kind == "ffn" and i not in gone]
        more = asked - sum(sizes[i].num_parameters + (sizes[i].rest or 0) for i in gone)
        held = sum(sizes[i].num_parameters for i in left)
        kept = [0 if i in gone else size.num_units for i, size in enumerate(sizes)]
        with suppress(ValueError):
            if left:
                wanted = min(max(more / held, 0.0), 1.0)
                for i, units in zip(left, round_uniform_counts([sizes[i] for i in left], wanted, _allow), strict=True):
                    kept[i] = units
            check_budget(sizes, kept, share, measure_uniform_slack([size for size in sizes if size.kind == "ffn"]))
            plans[count] = kept
    return plans


def _allow(_kind: str, _count: int) -> bool:
    return True
