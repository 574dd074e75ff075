"""Search around a plan: blocks of modules lose more or less of their units while the measured divergence of the output falls.

Error curves of different modules are compared by a sensitivity of second order, which is rough at high sparsity. A block's odds of
removal, s / (1 - s) with the sparsity s, are doubled or halved; all modules then change by one common factor that keeps the total
of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from struprune_plugin.allocation.probes import Block
from struprune_plugin.allocation.rules.rule import Sizes
from struprune_plugin.linalg.rounding import round_kept_counts
from struprune_plugin.pruning.config import UnitAllocation

_LEAST = 0.01  # sparsity from which a module that keeps all units starts
_RANGE, _HALVINGS = 2.0**10, 40  # range and bisections of the common factor
_TOGETHER = 3  # most blocks that change together, besides all that gain alone

Shifts = Mapping[Block, int]  # doublings of a block's odds of removal


def shift_blocks(sizes: Sizes, counts: Sequence[int], shifts: Shifts, most: float) -> list[int]:
    """Return kept units with the odds of removal of some blocks multiplied by powers of two, and the same total of parameters.

    :param counts: kept units of every size, at least one
    :param most: maximum sparsity of a module
    """
    sparsities = [1 - count / size.num_units for count, size in zip(counts, sizes, strict=True)]
    total = sum(sparsity * size.num_parameters for sparsity, size in zip(sparsities, sizes, strict=True))
    bounded = [min(max(sparsity, _LEAST), most) for sparsity in sparsities]
    odds = [sparsity / (1 - sparsity) for sparsity in bounded]
    for block, doublings in shifts.items():
        for place in block:
            odds[place] *= 2.0**doublings

    def scale(factor: float) -> list[float]:
        return [min(factor * one / (1 + factor * one), most) for one in odds]

    low, high = 1 / _RANGE, _RANGE
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        removed = sum(share * size.num_parameters for share, size in zip(scale(middle), sizes, strict=True))
        low, high = (middle, high) if removed < total else (low, middle)
    return round_kept_counts(sizes, scale(low))


def search_blocks(
    start: UnitAllocation,
    blocks: Sequence[Block],
    make: Callable[[Shifts], UnitAllocation | None],
    measure: Callable[[Sequence[UnitAllocation]], Sequence[float]],
) -> UnitAllocation:
    """Return the plan of least divergence among ``start``, one per block and direction, and those that change together the
    blocks that gain most alone.

    :param make: returns the plan with some blocks shifted; None where it does not meet the budget
    :param measure: returns the divergence of every plan, in nats
    """
    alone = _make_all([{block: doublings} for block in blocks for doublings in (1, -1)], make)
    before, *values = measure([start, *(plan for plan, _ in alone)])
    best, gains = (before, start), dict[Block, Shifts]()
    for value, (plan, shifts) in sorted(zip(values, alone, strict=True), key=lambda one: one[0]):
        (block,) = shifts
        if value < before:
            best = min(best, (value, plan), key=lambda one: one[0])
            gains.setdefault(block, shifts)
    order = list(gains.values())
    numbers = [number for number in sorted({*range(2, _TOGETHER + 1), len(order)}) if 2 <= number <= len(order)]
    merged = [{block: by for one in order[:number] for block, by in one.items()} for number in numbers]
    if together := [plan for plan, _ in _make_all(merged, make)]:
        best = min([best, *zip(measure(together), together, strict=True)], key=lambda one: one[0])
    return best[1]


def _make_all(
    proposed: Sequence[Shifts], make: Callable[[Shifts], UnitAllocation | None]
) -> list[tuple[UnitAllocation, Shifts]]:
    return [(plan, shifts) for shifts in proposed if (plan := make(shifts)) is not None]
