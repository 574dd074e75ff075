"""Rounding of sparsities to kept counts, so that the budget is exact (method.md section 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_Alike = tuple[str, int, int]  # kind, units, step


@dataclass(frozen=True)
class GroupSize:
    """Sizes of one group of coupled units, for the allocation.

    :param name: name in messages
    :param kind: module kind (attention, FFN); groups of one kind are allocated together
    :param num_units: units before pruning
    :param unit_cost: parameters that one unit frees
    :param step: kept counts are multiples of this number of units
    :param members: names of the tied groups that this one represents, each with the number of its units per unit here; costs
        are summed; empty for a single group
    """

    name: str
    kind: str
    num_units: int
    unit_cost: int
    step: int
    members: tuple[tuple[str, int], ...] = ()

    @property
    def num_parameters(self) -> int:
        return self.num_units * self.unit_cost

    @property
    def max_removable(self) -> int:
        """Parameters freed when a single step of units remains."""
        return (self.num_units - min(self.step, self.num_units)) * self.unit_cost


def expand_counts(groups: Sequence[GroupSize], counts: Sequence[int]) -> dict[str, int]:
    """Return kept counts by the name of every group."""
    return {
        name: count * factor
        for group, count in zip(groups, counts, strict=True)
        for name, factor in group.members or ((group.name, 1),)
    }


def find_group_sparsity(groups: Sequence[GroupSize], num_prunable: int, sparsity: float) -> float:
    """Return the mean sparsity of the groups that removes the fraction ``sparsity`` of all prunable parameters.

    Groups may hold fewer parameters than are prunable: value channels leave out Q and K, ``none`` all of attention.

    :param num_prunable: parameters of all linears of the decoder layers
    :param sparsity: fraction of those to remove, in [0, 1)
    :return: fraction of the groups' own parameters, in [0, 1)
    :raises ValueError: the groups hold too few parameters; the message states the sparsity that they can reach
    """
    removable = sum(group.max_removable for group in groups)
    asked = sparsity * num_prunable
    if asked > removable:
        raise ValueError(
            f"sparsity={sparsity}: the chosen units must hold at least the {asked:,.0f} parameters to remove, got "
            f"{removable:,} removable of {num_prunable:,} (one unit or one multiple stays in every module). "
            f"Lower sparsity to at most {math.floor(1000 * removable / num_prunable) / 1000} or prune more kinds of units."
        )
    return asked / sum(group.num_parameters for group in groups)


def round_kept_counts(groups: Sequence[GroupSize], sparsity: Sequence[float]) -> list[int]:
    """Round sparsities to kept counts by largest remainder, so that the total of parameters is exact.

    Kinds are rounded from the coarsest step to the finest (heads before channels). The excess or shortfall of one kind is
    carried into the next, so that the total misses by less than one step of the finest kind, unless a bound (at least one step,
    at most all units) forbids it. Ties keep the earlier layer larger. A group of sparsity 0 keeps every unit, at any step.

    :param groups: in layer order
    :param sparsity: sparsity of each group, in [0, 1)
    :return: kept units of each group, a multiple of its step
    """
    kept = [group.num_units for group in groups]
    carry = 0.0  # parameters kept beyond the ideal so far
    kinds = {group.kind: max(g.step * g.unit_cost for g in groups if g.kind == group.kind) for group in groups}
    for kind in sorted(kinds, key=lambda name: -kinds[name]):
        members = [i for i, group in enumerate(groups) if group.kind == kind and sparsity[i] > 0]
        if members:
            ideal = {i: (1 - sparsity[i]) * groups[i].num_units for i in members}
            carry = _round_kind(groups, members, ideal, kept, carry)
    return kept


def _round_kind(
    groups: Sequence[GroupSize], members: list[int], ideal: dict[int, float], kept: list[int], carry: float
) -> float:
    """Round the members of one kind in place; return the parameters kept beyond the ideal."""
    wanted = sum(ideal[i] * groups[i].unit_cost for i in members) - carry
    steps = {i: groups[i].step for i in members}
    sizes = {i: groups[i].step * groups[i].unit_cost for i in members}
    most = {i: max(groups[i].num_units // steps[i], 1) for i in members}
    count = {i: min(max(math.floor(ideal[i] / steps[i] + 1e-9), 1), most[i]) for i in members}
    while True:
        gap = wanted - sum(count[i] * sizes[i] for i in members)
        direction = 1 if gap > 0 else -1
        movable = [i for i in members if 1 <= count[i] + direction <= most[i] and 2 * abs(gap) > sizes[i]]
        if not movable:
            break
        distance = {i: round(direction * (ideal[i] / steps[i] - count[i]), 9) for i in movable}
        count[max(movable, key=lambda i: (distance[i], -direction * i))] += direction
    for i in members:
        kept[i] = min(count[i] * steps[i], groups[i].num_units)
    return -gap


def round_uniform_counts(
    groups: Sequence[GroupSize], sparsity: float, allowed: Callable[[str, int], bool]
) -> list[int]:
    """Round one sparsity to kept counts that are equal for all groups of one kind and size.

    Searches pairs of counts: of the kind with the fewest allowed counts and of the kind with the most. Of the pairs that meet
    the budget to within :func:`measure_uniform_slack`, returns the one closest to equal sparsities; if none does, the pair that
    misses it least. Other kinds keep the count nearest to the sparsity.

    :param sparsity: fraction of all groups' parameters to remove
    :param allowed: function that returns whether a kind may keep that many units
    :return: kept units of each group
    """
    kinds = _sort_alike(groups)
    costs = {kind: sum(group.unit_cost for group in members) for kind, members in kinds.items()}
    counts = {kind: _list_allowed(members[0], sparsity, allowed) for kind, members in kinds.items()}
    totals = {kind: members[0].num_units for kind, members in kinds.items()}
    wanted, slack = sparsity * sum(group.num_parameters for group in groups), measure_uniform_slack(groups)
    first, *others, last = sorted(kinds, key=lambda kind: len(counts[kind])) * (2 if len(kinds) == 1 else 1)
    nearest = {kind: min(counts[kind], key=lambda n: abs(n - (1 - sparsity) * totals[kind])) for kind in others}

    def judge(count: int) -> tuple[float, float, dict[_Alike, int]]:
        removed = (totals[first] - count) * costs[first]
        known = {**nearest, first: count} if first != last else {}
        left = wanted - sum((totals[kind] - known[kind]) * costs[kind] for kind in known)
        other = min(counts[last], key=lambda n: abs((totals[last] - n) * costs[last] - left))
        kept = {first: count, **known, last: other}
        miss = abs(sum((totals[kind] - kept[kind]) * costs[kind] for kind in kept) - wanted)
        return miss if miss > slack else 0.0, abs(removed - sparsity * totals[first] * costs[first]), kept

    _, _, kept = min(map(judge, counts[first]), key=lambda candidate: candidate[:2])
    return [kept[_name_alike(group)] for group in groups]


def _name_alike(group: GroupSize) -> _Alike:
    return group.kind, group.num_units, group.step


def _sort_alike(groups: Sequence[GroupSize]) -> dict[_Alike, list[GroupSize]]:
    """Return the groups of each kind and size."""
    alike: dict[_Alike, list[GroupSize]] = {}
    for group in groups:
        alike.setdefault(_name_alike(group), []).append(group)
    return alike


def _list_allowed(group: GroupSize, sparsity: float, allowed: Callable[[str, int], bool]) -> list[int]:
    steps = range(group.step, group.num_units, group.step) if sparsity else ()
    return [n for n in (*steps, group.num_units) if allowed(group.kind, n)]


def measure_uniform_slack(groups: Sequence[GroupSize]) -> int:
    """Return the parameters by which counts equal in all layers may miss a budget: one step of the finest kind."""
    return min(sum(group.step * group.unit_cost for group in members) for members in _sort_alike(groups).values())


def check_budget(groups: Sequence[GroupSize], kept: Sequence[int], share: float, slack: int | None = None) -> None:
    """Raise if kept counts miss the budget by more than a step of the largest kind.

    :param share: wanted sparsity over all groups' parameters, from :func:`find_group_sparsity`
    :param slack: parameters by which they may miss it, in place of that step
    :raises ValueError: the counts miss it, because of bounds or a coarse multiple; the message states both figures
    """
    total = sum(group.num_parameters for group in groups)
    removed = total - sum(group.unit_cost * count for group, count in zip(groups, kept, strict=True))
    allowed = max(group.step * group.unit_cost for group in groups) if slack is None else slack
    if abs(removed - share * total) > allowed:
        raise ValueError(
            f"width_multiple: must let the modules remove {share * total:,.0f} parameters to within {allowed:,}, got "
            f"{removed:,} with widths that are multiples of {max(group.step for group in groups)}. "
            "Lower width_multiple (or a later quantiser's group size), change sparsity, or with output: uniform prune another "
            "kind of units: its stock class may allow few head counts."
        )
