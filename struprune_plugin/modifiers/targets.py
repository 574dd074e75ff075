"""Budgets of a run on a given model: the cost of every group by its number of kept units, and the permitted total."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from llmcompressor.modifiers import Modifier
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.costs.cost_table import find_costs
from struprune_plugin.allocation.costs.engines import find_table
from struprune_plugin.allocation.costs.measure_costs import Run
from struprune_plugin.linalg.knapsack import Limit, find_least, fit_shares
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.model.layers import count_prunable_parameters
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.budget_fields import BudgetConfig
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.weight_bytes import (
    count_cache_bytes,
    count_weight_bytes,
    measure_group_bytes,
    measure_group_cache,
)
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.limit_record import LimitRecord

_LEAST = 1e-9  # relative tolerance of a budget, for sums in float64


@dataclass(frozen=True)
class Target:
    """One budget of a run, with the costs that count against it.

    :param name: ``parameters``, ``bytes``, ``cache``, or ``speedup`` with its phase and engine
    :param asked: requested value, in the recipe's terms
    :param dense: cost of the model before it is pruned
    :param fixed: cost that does not depend on the number of kept units
    :param most: upper bound on the total cost
    :param costs: costs of every group of a plan, in the order of its sizes, see :class:`~struprune_plugin.linalg.knapsack.Limit`
    """

    name: str
    asked: float
    dense: float
    fixed: float
    most: float
    costs: Sequence[Tensor]

    @property
    def limit(self) -> Limit:
        """The budget as a limit of the allocation."""
        return Limit(self.name, self.costs, self.most - self.fixed)

    def tell(self, total: float) -> float:
        """Return a total cost in the recipe's terms."""
        if self.name == "parameters":
            return 1 - total / self.dense
        return total if self.name == "bytes" else total / self.dense if self.name == "cache" else self.dense / total

    def show(self, value: float) -> str:
        """Return a value in the recipe's terms as text."""
        return format_bytes(value) if self.name == "bytes" else f"{value:.4g}"


def find_targets(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    groups: Sequence[UnitGroup],
    sizes: Sequence[GroupSize],
    later: Sequence[Modifier],
    dtype: torch.dtype,
) -> tuple[Target, ...]:
    """Return the budgets of a recipe; empty if it gives the sparsity alone, which needs no costs but parameters.

    :param later: modifiers that follow in the recipe
    :param dtype: dtype of the loaded weights
    :raises ValueError: the groups cannot meet a budget, or the rule does not support it
    """
    if not modifier.budget:
        return ()
    _check_methods(modifier)
    by_name, item = {group.name: group for group in groups}, dtype.itemsize
    targets = []
    if modifier.sparsity is not None:
        prunable = count_prunable_parameters(model, modifier.experts is not None)
        costs = [s.unit_cost * torch.arange(s.num_units + 1, dtype=torch.float64) for s in sizes]
        targets.append(_place("parameters", modifier.sparsity, prunable, (1 - modifier.sparsity) * prunable, costs))
    for part in modifier.budget:
        if part.bytes is not None:
            costs = _add_up(sizes, by_name, lambda group: measure_group_bytes(model, group, item, later))
            targets.append(_place("bytes", part.bytes, count_weight_bytes(model, item, later), part.bytes, costs))
        if part.cache is not None:
            costs, dense = (
                _add_up(sizes, by_name, lambda group: measure_group_cache(model, group, item, later)),
                count_cache_bytes(model, item, ()),
            )
            quantised = count_cache_bytes(model, item, later)
            targets.append(_place("cache", part.cache, quantised, part.cache * dense, costs, dense))
        if part.speedup is not None and not getattr(modifier, "replay", None):  # a replayed plan needs no timing
            targets.append(_find_speed_target(part, model, sizes, by_name, dtype))
    for target in targets:
        _check_reach(target, sizes, modifier.allocation.most or 1.0)
    return tuple(targets)


def _find_speed_target(
    part: BudgetConfig,
    model: PreTrainedModel,
    sizes: Sequence[GroupSize],
    groups: Mapping[str, UnitGroup],
    dtype: torch.dtype,
) -> Target:
    """Return the budget for the time of one phase.

    :raises ValueError: there is no cost table of this model and phase, and none can be measured
    """
    assert part.speedup is not None
    kinds = list(dict.fromkeys(group.kind for group in groups.values()))
    table = find_table(part.engine, model, dtype, kinds, Run((part.phase,), part.batch, part.length))
    phase = table.find_phase(part.phase, part.batch, part.length, part.engine)
    costs = _add_up(sizes, groups, lambda group: find_costs(phase, model, group, part.engine))
    name = f"speedup, {part.phase}, {table.engine}"
    return _place(name, part.speedup, phase.whole, phase.dense / part.speedup, costs, phase.dense)


def _check_methods(modifier: StructuredModifier) -> None:
    """Raise if a method does not support budgets other than parameters.

    :raises ValueError: in that case
    """
    named = {
        name for part in modifier.budget for name in ("bytes", "cache", "speedup") if getattr(part, name) is not None
    }
    told = ", ".join(sorted(named))
    if not modifier.allocation.keeps_limits:
        raise ValueError(
            f"budget: `allocation: {modifier.allocation.rule}` can meet a budget of parameters only, got {told}. Give sparsity "
            "instead, or set `allocation: error_curve`."
        )
    if modifier.experts is not None and modifier.experts.drops:
        raise ValueError(
            f"budget: `experts: {modifier.experts.units}` can meet a budget of parameters only, got {told}. Give sparsity instead, "
            "or set `experts: channels`."
        )
    if modifier.importance.aims and modifier.sparsity is None:
        raise ValueError(
            f"budget: `importance: {modifier.importance.method}` needs sparsity, on which its scores depend, got {told} alone. Add "
            "sparsity, or choose another importance."
        )


def _place(
    name: str, asked: float, whole: float, most: float, costs: Sequence[Tensor], dense: float | None = None
) -> Target:
    """Return a target; costs that the groups do not account for are fixed.

    :param whole: cost of the model with all units kept
    :param dense: cost of the model as it is, if that differs because no quantiser has run yet
    """
    fixed = whole - sum(float(cost[-1]) for cost in costs)
    return Target(name, asked, whole if dense is None else dense, fixed, most * (1 + _LEAST), costs)


def _add_up(
    sizes: Sequence[GroupSize], groups: Mapping[str, UnitGroup], measure: Callable[[UnitGroup], Tensor]
) -> list[Tensor]:
    """Return the costs of every size, summed over its members."""
    found = []
    for size in sizes:
        members = size.members or ((size.name, 1),)
        found.append(torch.stack([measure(groups[name])[::factor] for name, factor in members]).sum(0))
    return found


def _check_reach(target: Target, sizes: Sequence[GroupSize], most: float) -> None:
    """Raise if even the fewest units exceed a budget.

    :raises ValueError: in that case; the message says what can be reached
    """
    least = find_least(sizes, most)
    if not target.limit.fits(least):
        reached = target.tell(target.fixed + target.limit.add_up(least))
        order = "at most" if target.name == "parameters" or target.name.startswith("speedup") else "at least"
        raise ValueError(
            f"budget: {target.name} must be {order} {target.show(reached)}, the value with the fewest units that may stay, got "
            f"{target.show(target.asked)}. Relax the budget, or prune more kinds of units."
        )


def find_mean_sparsity(sizes: Sequence[GroupSize], targets: Sequence[Target], most: float | None) -> float:
    """Return the mean sparsity at which a uniform allocation meets every budget.

    :param most: upper bound on a module's sparsity; None for no bound
    """
    kept = fit_shares(sizes, [0.0] * len(sizes), [target.limit for target in targets], most or 1.0)
    left = sum(count * size.unit_cost for count, size in zip(kept, sizes, strict=True))
    return 1 - left / sum(size.num_parameters for size in sizes)


def describe_targets(
    targets: Sequence[Target], sizes: Sequence[GroupSize], kept: Mapping[str, int], met: Mapping[str, float]
) -> list[LimitRecord]:
    """Return the manifest's records of the requested, planned and achieved value of every budget.

    :param kept: kept units by group name
    :param met: total costs of the pruned model, by target name; a target without an entry is not known yet
    """
    counts = [kept[size.name] for size in sizes]
    records = []
    for target in targets:
        modules = {s.name: float(cost[k]) for s, cost, k in zip(sizes, target.costs, counts, strict=True)}
        total = target.fixed + sum(modules.values())
        told = met.get(target.name)
        records.append(
            LimitRecord(
                name=target.name,
                asked=target.asked,
                planned=target.tell(total),
                met=None if told is None else target.tell(told),
                dense=target.dense,
                fixed=target.fixed,
                modules=modules,
            )
        )
    return records


def measure_met(model: PreTrainedModel, targets: Sequence[Target], later: Sequence[Modifier]) -> dict[str, float]:
    """Return the costs of the pruned model for the budgets that can be counted, by target name."""
    item, names = model.dtype.itemsize, {target.name for target in targets}
    found: dict[str, float] = {}
    if "bytes" in names:
        found["bytes"] = count_weight_bytes(model, item, later)
    if "cache" in names:
        found["cache"] = count_cache_bytes(model, item, later)
    return found
