"""Budget of a run on a given model: the share of parameters to remove, or the seconds that may remain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from transformers import PreTrainedModel

from struprune_plugin.allocation.cost_table import CostTable, read_table
from struprune_plugin.allocation.rules import Budget
from struprune_plugin.allocation.whole_experts import Mixture
from struprune_plugin.linalg.budget import Limit, meet_budget
from struprune_plugin.linalg.rounding import GroupSize, find_group_sparsity
from struprune_plugin.model.layers import count_prunable_parameters, count_weight_bytes
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.mixtures import split_budget
from struprune_plugin.modifiers.widths import Rounding, measure_groups
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.manifest import LimitRecord


@dataclass(frozen=True)
class ModelBudget(Budget):
    """Budget of a recipe on a model.

    :param table: table of the seconds of a limit
    :param num_experts: whole experts that stay in every layer; None where all do
    """

    table: CostTable | None = None
    num_experts: int | None = None


def find_budget(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    groups: Sequence[UnitGroup],
    roundings: Mapping[str, Rounding],
    mixture: Mixture | None,
    later: Sequence[Modifier],
) -> tuple[list[GroupSize], ModelBudget]:
    """Return the sizes of the groups besides whole experts, and the budget.

    :param roundings: rounding of kept counts, by group name
    :param mixture: whole experts that may be removed; None if none may
    :param later: modifiers that follow in the recipe
    :raises ValueError: a method does not support the budget; it cannot be met; a bad cost table; a quantiser behind a budget of
        bytes, which are those of unquantised weights
    """
    sizes = measure_groups([group for group in groups if mixture is None or not group.experts], roundings)
    asked, sparsity = modifier.budget, modifier.sparsity or 0.0
    num_prunable = count_prunable_parameters(model, modifier.experts is not None)
    weighed = "none" if modifier.sensitivity is None else "fisher"
    if asked is not None and modifier.importance.aims:
        raise ValueError(
            f"budget: `importance: {modifier.importance.method}` needs sparsity, on which its scores depend. Give sparsity "
            "instead, or choose another importance."
        )
    if asked is not None and asked.speedup is not None:
        table = read_table(str(asked.costs), model)
        limit = _find_limit(modifier, model, groups, sizes, table)
        kept = meet_budget(sizes, [0.0] * len(sizes), 0.0, limit)
        left = sum(count * size.unit_cost for count, size in zip(kept, sizes, strict=True))
        share = 1 - left / sum(size.num_parameters for size in sizes)
        return sizes, ModelBudget(0.0, num_prunable, share, weighed, limit, table)
    if asked is not None and asked.bytes is not None:
        if any(isinstance(other, QuantizationMixin) for other in later):
            raise ValueError(
                "budget: bytes are counted before quantisation, got a quantiser behind. Give sparsity instead."
            )
        sparsity = _find_sparsity(model, asked.bytes, sizes, num_prunable)
    if mixture is None:
        return sizes, ModelBudget(sparsity, num_prunable, find_group_sparsity(sizes, num_prunable, sparsity), weighed)
    num_left, share = split_budget(mixture, sizes, sparsity * num_prunable)
    num_experts = num_left if num_left < mixture.counts[0] else None
    return sizes, ModelBudget(sparsity, num_prunable, share, weighed, num_experts=num_experts)


def _find_limit(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    groups: Sequence[UnitGroup],
    sizes: Sequence[GroupSize],
    table: CostTable,
) -> Limit:
    """Return the seconds of all groups that a speed-up leaves, in the order of the sizes.

    :raises ValueError: the allocation or whole experts cannot meet one
    """
    name = remedy = ""
    if modifier.experts is not None and modifier.experts.drops:
        name, remedy = f"experts: {modifier.experts.units}", "experts: channels"
    elif modifier.allocation.measures and not modifier.allocation.weighs_errors:
        name, remedy = f"allocation: {modifier.allocation.rule}", "allocation: error_curve"
    if name:
        raise ValueError(f"budget: `{name}` cannot meet a speedup. Give sparsity instead, or set `{remedy}`.")
    by_name, costs = {group.name: group for group in groups}, []
    for size in sizes:
        members = [(by_name[name], factor) for name, factor in size.members or ((size.name, 1),)]
        costs.append(torch.stack([table.list_costs(model, group)[::factor] for group, factor in members]).sum(0))
    assert modifier.budget is not None
    return Limit(costs, table.dense / (modifier.budget.speedup or 1.0) - table.rest)


def _find_sparsity(model: PreTrainedModel, most: int, sizes: Sequence[GroupSize], num_prunable: int) -> float:
    """Return the share of the prunable parameters whose removal leaves at most so many bytes of weights.

    :raises ValueError: the fewest units that may stay take more
    """
    held, item = count_weight_bytes(model), model.dtype.itemsize
    least = held - item * sum(size.max_removable for size in sizes)
    if most < least:
        raise ValueError(
            f"budget: bytes must be at least {format_bytes(least)}, the size with the fewest units that may stay, got "
            f"{format_bytes(most)}. Relax the budget, or prune more kinds of units."
        )
    return max(held - most, 0) / item / num_prunable


def describe_limit(
    modifier: StructuredModifier,
    budget: ModelBudget,
    held: int,
    sizes: Sequence[GroupSize],
    kept: Mapping[str, int],
) -> LimitRecord | None:
    """Return the manifest's record of a budget of bytes or time; None under one of parameters.

    :param held: bytes of the pruned weights
    :param kept: kept units by group name
    """
    asked, table = modifier.budget, budget.table
    if asked is None:
        return None
    if table is None or budget.limit is None:
        return LimitRecord("bytes", float(asked.bytes or 0), float(held))
    seconds = table.rest + budget.limit.add_up([kept[size.name] for size in sizes])
    return LimitRecord("speedup", asked.speedup or 1.0, table.dense / seconds)
