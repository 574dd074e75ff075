"""Budget of a run on a given model: the share of parameters to remove, or the seconds that may remain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from transformers import PreTrainedModel

from struprune_plugin.allocation.cost_table import CostTable, read_table
from struprune_plugin.linalg.budget import Limit
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.model.layers import count_weight_bytes
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.records import LimitRecord


@dataclass(frozen=True)
class Target:
    """Budget of a recipe on a model.

    :param sparsity: share of the prunable parameters to remove; 0 under a speed-up
    :param limit: seconds of all groups under a speed-up, in the order of the sizes
    :param table: table of these seconds
    :param num_experts: whole experts that stay in every layer; None where all do
    """

    sparsity: float
    limit: Limit | None = None
    table: CostTable | None = None
    num_experts: int | None = None


def find_target(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    groups: Sequence[UnitGroup],
    sizes: Sequence[GroupSize],
    num_prunable: int,
) -> Target:
    """Return the budget of a recipe on a model.

    :param sizes: sizes of the groups
    :param num_prunable: parameters that ``sparsity`` is a share of
    :raises ValueError: a method does not support the budget; bytes that cannot be reached; a bad cost table
    """
    budget = modifier.budget
    if budget is None:
        return Target(modifier.sparsity or 0.0)
    if modifier.importance.aims:
        raise ValueError(
            f"budget: `importance: {modifier.importance.method}` needs sparsity, on which its scores depend. Give sparsity "
            "instead, or choose another importance."
        )
    if budget.bytes is not None:
        return Target(_find_sparsity(model, budget.bytes, sizes, num_prunable))
    if modifier.experts is not None and modifier.experts.drops:
        raise ValueError(
            f"budget: `experts: {modifier.experts.units}` cannot meet a speedup. Give sparsity instead, or set `experts: channels`."
        )
    assert budget.speedup is not None
    assert budget.costs is not None
    if modifier.allocation.measures and not modifier.allocation.weighs_errors:
        raise ValueError(
            f"budget: `allocation: {modifier.allocation.rule}` cannot meet a speedup. Give sparsity instead, or set "
            "`allocation: error_curve`."
        )
    table, by_name = read_table(budget.costs, model), {group.name: group for group in groups}
    costs = []
    for size in sizes:
        members = [(by_name[name], factor) for name, factor in size.members or ((size.name, 1),)]
        costs.append(torch.stack([table.list_costs(model, group)[::factor] for group, factor in members]).sum(0))
    return Target(0.0, Limit(costs, table.dense / budget.speedup - table.rest), table)


def check_bytes(modifier: StructuredModifier, later: Sequence[Modifier]) -> None:
    """Raise if a quantiser follows a budget of bytes, which are those of unquantised weights.

    :param later: modifiers that follow in the recipe
    :raises ValueError: in that case
    """
    counts = modifier.budget is not None and modifier.budget.bytes is not None
    if counts and any(isinstance(other, QuantizationMixin) for other in later):
        raise ValueError(
            "budget: bytes are counted before quantisation, got a quantiser behind. Give sparsity instead."
        )


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


def describe_target(
    modifier: StructuredModifier,
    target: Target,
    held: int,
    sizes: Sequence[GroupSize],
    kept: Mapping[str, int],
) -> LimitRecord | None:
    """Return the manifest's record of a budget of bytes or time; None under one of parameters.

    :param held: bytes of the pruned weights
    :param kept: kept units by group name
    """
    budget, table = modifier.budget, target.table
    if budget is None:
        return None
    if table is None or target.limit is None:
        return LimitRecord("bytes", float(budget.bytes or 0), float(held))
    seconds = table.rest + target.limit.add_up([kept[size.name] for size in sizes])
    return LimitRecord("speedup", budget.speedup or 1.0, table.dense / seconds)
