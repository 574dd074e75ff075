"""Rounding of sparsities to kept counts, so that the budget is exact (method.md section 1)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from struprune_plugin.model.unit_kind import ListEntries


@dataclass(frozen=True)
class GroupSize:
    """Sizes of one group of coupled units, for the allocation.

    :param pool: of its kind of units, such as attention; groups of one pool are allocated together
    :param unit_cost: parameters that one unit frees
    :param step: kept counts are multiples of it
    :param tied: names of the tied groups that this one represents, each with the number of its units per unit here; costs
        are summed; empty for a single group
    """

    name: str
    pool: str
    num_units: int
    unit_cost: int
    step: int
    tied: tuple[tuple[str, int], ...] = ()

    @property
    def members(self) -> tuple[tuple[str, int], ...]:
        """The groups that it stands for: itself, or those that are tied, each with the number of its units per unit here."""
        return self.tied or ((self.name, 1),)

    @property
    def num_parameters(self) -> int:
        return self.num_units * self.unit_cost

    @property
    def max_removable(self) -> int:
        """Parameters freed when a single step of units remains."""
        return (self.num_units - min(self.step, self.num_units)) * self.unit_cost


def expand_counts(groups: Sequence[GroupSize], counts: Sequence[int]) -> dict[str, int]:
    """Return kept counts by the name of every group."""
    return {name: count * factor for group, count in zip(groups, counts, strict=True) for name, factor in group.members}


def find_group_sparsity(groups: Sequence[GroupSize], num_prunable: int, sparsity: float) -> float:
    """Return the mean sparsity of the groups that removes the fraction ``sparsity`` of all prunable parameters.

    Groups may hold fewer parameters than are prunable: value channels leave out Q and K, ``none`` all of attention.

    :param num_prunable: parameters of all linears of the modules that hold units
    :raises ValueError: the groups hold too few parameters; the message states the sparsity that they can reach
    """
    removable = sum(group.max_removable for group in groups)
    asked = sparsity * num_prunable
    if asked > removable + 0.5:  # a share of whole parameters is rounded
        raise ValueError(
            f"sparsity={sparsity}: the chosen units must hold at least the {asked:,.0f} parameters to remove, got "
            f"{removable:,} removable of {num_prunable:,} (one unit or one multiple stays in every module). "
            f"Lower sparsity to at most {math.floor(1000 * removable / num_prunable) / 1000} or prune more kinds of units."
        )
    return asked / sum(group.num_parameters for group in groups)


def split_budget(
    entries: ListEntries, groups: Sequence[GroupSize], num_prunable: int, sparsity: float
) -> tuple[int, float]:
    """Return the number of entries that stay in every list, and the share of the other groups' parameters to remove beside them.

    Of the numbers nearest to the budget, it is the one at which entries lose a share nearest to that of all parameters.

    :param groups: those besides the entries
    :param num_prunable: parameters of all linears of the modules that hold units
    :raises ValueError: that many parameters cannot be removed, to within half a step of the entries of every list
    """
    total, most = sum(group.num_parameters for group in groups), sum(group.max_removable for group in groups)
    asked, first, last = sparsity * num_prunable, entries.counts[0], entries.counts[-1]
    even = asked / (first * entries.cost + total)
    wanted = {count: asked - (first - count) * entries.cost for count in entries.counts}
    taken = {count: min(max(rest, 0.0), most) for count, rest in wanted.items()}
    misses = {count: abs(wanted[count] - taken[count]) for count in entries.counts}
    if wanted[last] > most + (entries.counts[-2] - last) * entries.cost / 2:
        largest = math.floor(1e4 * (most + entries.max_removable) / num_prunable) / 1e4
        raise ValueError(
            f"sparsity: must be at most {largest:.4f}, at which {last} of {first} {entries.label} of a layer stay, the fewest that "
            f"may, got {sparsity:.4f}. Lower it, prune more kinds of units, or {entries.remedy}."
        )
    near = [count for count in entries.counts if misses[count] <= min(misses.values()) + 0.5]
    num_keep = min(near, key=lambda count: abs(1 - count / first - even))
    return num_keep, taken[num_keep] / total if total else 0.0


def round_kept_counts(groups: Sequence[GroupSize], sparsity: Sequence[float]) -> list[int]:
    """Round sparsities to kept counts by largest remainder, so that the total of parameters is exact.

    Pools are rounded from the coarsest step to the finest (heads before channels). The excess or shortfall of one pool is
    carried into the next, so that the total misses by less than one step of the finest pool, unless a bound (at least one step,
    at most all units) forbids it. Ties keep the earlier layer larger. A group of sparsity 0 keeps every unit, at any step.
    """
    num_keep = [group.num_units for group in groups]
    carry = 0.0  # parameters kept beyond the ideal so far
    pools = {group.pool: max(g.step * g.unit_cost for g in groups if g.pool == group.pool) for group in groups}
    for pool in sorted(pools, key=lambda name: -pools[name]):
        members = [i for i, group in enumerate(groups) if group.pool == pool and sparsity[i] > 0]
        ideal = {i: (1 - sparsity[i]) * groups[i].num_units for i in members}
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
        carry = -gap
        for i in members:
            num_keep[i] = min(count[i] * steps[i], groups[i].num_units)
    return num_keep


def round_uniform_counts(
    groups: Sequence[GroupSize], sparsity: float, allowed: Callable[[str, int], bool]
) -> list[int]:
    """Round one sparsity to kept counts that are equal for all groups of one pool and size.

    Searches pairs of counts: of the pool with the fewest allowed counts and of the pool with the most. Of the pairs that meet
    the budget to within :func:`measure_uniform_slack`, returns the one closest to equal sparsities; if none does, the pair that
    misses it least. Other pools keep the count nearest to the sparsity.

    :param allowed: returns whether a pool's groups may keep that many units
    """
    pools = _sort_equal(groups)
    costs = [sum(group.unit_cost for group in members) for members in pools]
    totals = [members[0].num_units for members in pools]
    counts = [_list_allowed(members[0], sparsity, allowed) for members in pools]
    wanted, slack = sparsity * sum(group.num_parameters for group in groups), measure_uniform_slack(groups)
    first, *others, last = sorted(range(len(pools)), key=lambda i: len(counts[i])) * (2 if len(pools) == 1 else 1)
    nearest = {i: min(counts[i], key=lambda n: abs(n - (1 - sparsity) * totals[i])) for i in others}

    def judge(count: int) -> tuple[float, float, dict[int, int]]:
        known = {**nearest, first: count} if first != last else {}
        left = wanted - sum((totals[i] - known[i]) * costs[i] for i in known)
        other = min(counts[last], key=lambda n: abs((totals[last] - n) * costs[last] - left))
        num_keep = {first: count, **known, last: other}
        miss = abs(sum((totals[i] - num_keep[i]) * costs[i] for i in num_keep) - wanted)
        unequal = abs((totals[first] - count) * costs[first] - sparsity * totals[first] * costs[first])
        return miss if miss > slack else 0.0, unequal, num_keep

    _, _, num_keep = min(map(judge, counts[first]), key=lambda candidate: candidate[:2])
    return [next(num_keep[i] for i, members in enumerate(pools) if group in members) for group in groups]


def _sort_equal(groups: Sequence[GroupSize]) -> list[list[GroupSize]]:
    """Return the groups of each pool and size."""
    members: dict[tuple[str, int, int], list[GroupSize]] = {}
    for group in groups:
        members.setdefault((group.pool, group.num_units, group.step), []).append(group)
    return list(members.values())


def _list_allowed(group: GroupSize, sparsity: float, allowed: Callable[[str, int], bool]) -> list[int]:
    steps = range(group.step, group.num_units, group.step) if sparsity else ()
    return [n for n in (*steps, group.num_units) if allowed(group.pool, n)]


def measure_uniform_slack(groups: Sequence[GroupSize]) -> int:
    """Return the parameters by which counts equal in all layers may miss a budget: one step of the finest pool."""
    return min(sum(group.step * group.unit_cost for group in members) for members in _sort_equal(groups))


def check_budget(groups: Sequence[GroupSize], num_keep: Sequence[int], share: float, slack: int | None = None) -> None:
    """Raise if kept counts miss the budget by more than a step of the largest pool.

    :param share: wanted sparsity over all groups' parameters
    :param slack: parameters by which they may miss it, in place of that step
    :raises ValueError: they do, because of bounds or a coarse multiple
    """
    total = sum(group.num_parameters for group in groups)
    removed = total - sum(group.unit_cost * count for group, count in zip(groups, num_keep, strict=True))
    allowed = max(group.step * group.unit_cost for group in groups) if slack is None else slack
    if abs(removed - share * total) > allowed:
        raise ValueError(
            f"width_multiple: must let the modules remove {share * total:,.0f} parameters to within {allowed:,}, got "
            f"{removed:,} with widths that are multiples of {max(group.step for group in groups)}. "
            "Lower width_multiple (or a later quantiser's group size), change sparsity, or with output: uniform prune another "
            "kind of units: its stock class may allow few head counts."
        )
