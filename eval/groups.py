"""Groups of units by the short forms of a recipe, for evaluations and tests."""

from collections.abc import Sequence

from torch import nn

from struprune_plugin.allocation.rounding import GroupSize, find_group_sparsity, round_kept_counts
from struprune_plugin.model.groups import list_groups
from struprune_plugin.model.unit_kind import UnitGroup, list_kinds


def find_groups(
    model: nn.Module,
    attention_unit: str,
    prune_ffn: bool = True,
    targets: Sequence[str] = ("re:.*",),
    ignore: Sequence[str] = (),
    prune_experts: bool = False,
) -> list[UnitGroup]:
    """Return :func:`list_groups` of the kinds of units that a recipe's short forms ask for."""
    kinds = list_kinds(attention_unit=attention_unit, prune_ffn=prune_ffn, prune_experts=prune_experts)
    return list_groups(model, kinds, targets, ignore)


def keep_evenly(groups: Sequence[UnitGroup], num_prunable: int, sparsity: float) -> dict[str, int]:
    """Return the units that every group keeps if all lose the same share, by name.

    :param num_prunable: parameters of all linears of the decoder layers
    :raises ValueError: so much cannot go
    """
    sizes = [GroupSize(g.name, g.unit.pool, g.num_units, g.unit_cost, 1) for g in groups]
    share = find_group_sparsity(sizes, num_prunable, sparsity)
    counts = round_kept_counts(sizes, [share] * len(sizes))
    return {group.name: count for group, count in zip(groups, counts, strict=True)}
