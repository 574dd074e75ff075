"""Multiple-choice knapsack: the least sum of errors under several budgets of any cost (method.md section 5, ``error_curve``).

Every group chooses one of its kept counts; each count has an error and a cost under every budget. Lagrange multipliers, one per
budget, find the choices on the convex hull. Single moves and exchanges then spend what is left of a budget, or save what
exceeds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from struprune_plugin.linalg.budget import MAX_SPARSITY, list_counts
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.linalg.ties import round_off

_ROUNDS, _HALVINGS, _EXCHANGES = 30, 48, 200  # rounds over all multipliers, bisections of one, moves of a repair
_STARTS = (1.0, 0.5, 0.8, 1.25, 2.0)  # factors on the multipliers, so that repairs start on either side
_NEAR, _PAIRS = 8, 4096  # moves of a repair: steps of 1 to 8, 16, 32, …; most moves searched for exchanges
_GAP = 1e-3  # relative gap to the dual's bound below which no further repair is tried
_ROUNDING = 1e-12  # relative error of a sum of costs


@dataclass(frozen=True)
class Limit:
    """Budget on the total cost of all groups.

    :param name: name in messages
    :param costs: cost of every group with k = 0 ... num_units units kept, never falling, shape [num_units + 1], float64; entry
        0 is the cost that remains once the module is removed
    :param most: maximum total cost of all groups, in the same unit
    """

    name: str
    costs: Sequence[Tensor]
    most: float

    def add_up(self, kept: Sequence[int]) -> float:
        """Return the total cost of kept counts, given in the order of the groups."""
        return sum(float(cost[count]) for cost, count in zip(self.costs, kept, strict=True))

    def fits(self, kept: Sequence[int]) -> bool:
        """Return whether kept counts are within the budget."""
        return self.add_up(kept) <= self.most + _ROUNDING * abs(self.most)


def find_least(groups: Sequence[GroupSize], max_sparsity: float = MAX_SPARSITY) -> list[int]:
    """Return the minimum number of kept units of every group."""
    return [list_counts(group, max_sparsity)[0] for group in groups]


def allocate_under_limits(
    groups: Sequence[GroupSize],
    curves: Sequence[Tensor],
    limits: Sequence[Limit],
    max_sparsity: float = MAX_SPARSITY,
) -> list[int]:
    """Return kept counts that minimise ``sum_g E_g(k_g)`` with ``sum_g C_bg(k_g)`` within every budget b.

    Everett's multipliers: every group takes the count of least ``E_g(k) + sum_b lambda_b C_bg(k)``, and each lambda_b in turn
    is set to the least value that meets its budget, until none changes. An exact repair follows, from these choices and from
    those of larger and smaller multipliers, until no single move and no exchange between two groups (by 1 to 8, 16, 32, …
    steps) that fits lowers the error. Budget that saves no error goes to the group that has lost the largest share.

    :param curves: error with k = 0 ... num_units units kept, one per group, shape [num_units + 1]
    :return: kept units of each group, a multiple of its step
    :raises ValueError: even the fewest units exceed a budget
    """
    choices = _Choices.of(groups, curves, limits, max_sparsity)
    multipliers = _find_multipliers(choices)
    bound = choices.bound(multipliers)
    best, least = choices.pick(multipliers), torch.inf
    for factor in _STARTS:
        at = choices.pick(factor * multipliers)
        _shrink(choices, at)
        _improve(choices, at)
        error = round_off(choices.add_errors(at))
        best, least = (at, error) if error < least else (best, least)
        if least - bound <= _GAP * abs(bound):
            break
    _fill_evenly(groups, choices, best)
    return choices.read(best)


def fit_shares(
    groups: Sequence[GroupSize],
    shares: Sequence[float],
    limits: Sequence[Limit],
    max_sparsity: float = MAX_SPARSITY,
) -> list[int]:
    """Return the kept counts nearest to given sparsities that meet every budget; all sparsities are shifted together.

    Sparsities s become ``s + t (1 - s)`` for t > 0 and ``(1 + t) s`` below, with the least t that fits. The remaining budget
    goes to the group that has lost the largest share.

    :param shares: sparsity of every group; all 0 gives the uniform allocation
    :return: kept units of each group, as in :func:`allocate_under_limits`
    :raises ValueError: even the fewest units exceed a budget
    """
    choices = _Choices.of(groups, [torch.zeros(group.num_units + 1) for group in groups], limits, max_sparsity)
    totals = torch.tensor([float(group.num_units) for group in groups], dtype=torch.float64)
    wanted = torch.tensor(shares, dtype=torch.float64)

    def choose(shift: float) -> Tensor:
        moved = wanted + shift * (1 - wanted) if shift > 0 else (1 + shift) * wanted
        return ((choices.counts <= ((1 - moved) * totals + 1e-9)[:, None]).sum(1) - 1).clamp(min=0)

    low, high = -1.0, 1.0
    if choices.fit(choose(low)):
        high = low
    for _ in range(_HALVINGS if high > low else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if choices.fit(choose(middle)) else (middle, high)
    at = choose(high)
    _fill_evenly(groups, choices, at)
    return choices.read(at)


@dataclass(frozen=True)
class _Choices:
    """Choices of every group, fewest units first; rows are padded with choices of infinite error.

    :param counts: kept units, shape [groups, choices]
    :param errors: error of each choice, the same shape, float64
    :param costs: cost of each choice above the group's least, as a share of what each budget leaves for that, shape
        [budgets, groups, choices], float64
    """

    counts: Tensor
    errors: Tensor
    costs: Tensor

    @classmethod
    def of(
        cls, groups: Sequence[GroupSize], curves: Sequence[Tensor], limits: Sequence[Limit], max_sparsity: float
    ) -> _Choices:
        """Return the choices that the groups, their curves and the budgets define.

        :raises ValueError: even the fewest units exceed a budget
        """
        least = find_least(groups, max_sparsity)
        for limit in limits:
            if not limit.fits(least):
                raise ValueError(
                    f"budget: {limit.name} must leave the modules at least {limit.add_up(least):.6g}, which "
                    f"the fewest units that may stay take, got {limit.most:.6g}. Relax the budget, or prune more kinds of units."
                )
        counts = [list_counts(group, max_sparsity) for group in groups]
        width = max(map(len, counts))
        padded = torch.tensor([row + [row[-1]] * (width - len(row)) for row in counts])
        valid = torch.arange(width) < torch.tensor([[len(row)] for row in counts])

        def read(parts: Sequence[Tensor]) -> Tensor:
            return torch.stack([part.double().cpu()[row] for part, row in zip(parts, padded, strict=True)])

        costs = []
        for limit in limits:
            table = read(limit.costs)
            above = table - table.min(1, keepdim=True).values  # the least may be negative, and so may the most
            room = limit.most - float((table - above)[:, 0].sum())
            costs.append(above / (max(room, _ROUNDING * float(above.sum())) or 1.0))
        return cls(padded, read(curves).masked_fill(~valid, torch.inf), torch.stack(costs))

    def pick(self, multipliers: Tensor) -> Tensor:
        """Return the choices of least error plus weighted cost, the one of most units on a tie, shape [groups]."""
        total = self.errors + torch.einsum("b,bgk->gk", multipliers, self.costs)
        least = total.min(1, keepdim=True).values
        ties = total <= least + _ROUNDING * least.abs()
        return (ties * torch.arange(total.shape[1])).max(1).values

    def use(self, at: Tensor) -> Tensor:
        """Return the share of each budget that choices use, 1 for all of it, shape [budgets]."""
        return self.costs.gather(2, at.expand(len(self.costs), -1)[..., None]).sum((1, 2))

    def fit(self, at: Tensor) -> bool:
        """Return whether choices are within every budget."""
        return bool((self.use(at) <= 1 + _ROUNDING).all())

    def compare(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the changes that all other choices make: errors [groups, choices], costs [budgets, groups, choices]."""
        costs = self.costs - self.costs.gather(2, at.expand(len(self.costs), -1)[..., None])
        return self.errors - self.errors.gather(1, at[:, None]), costs

    def bound(self, multipliers: Tensor) -> float:
        """Return the dual's value, a lower bound on the error of all choices within the budgets."""
        total = self.errors + torch.einsum("b,bgk->gk", multipliers, self.costs)
        return float(total.min(1).values.sum() - multipliers.sum())

    def add_errors(self, at: Tensor) -> float:
        """Return the sum of the errors of choices."""
        return float(self.errors.gather(1, at[:, None]).sum())

    def read(self, at: Tensor) -> list[int]:
        """Return the kept counts of choices."""
        return self.counts.gather(1, at[:, None]).flatten().tolist()


def _find_multipliers(choices: _Choices) -> Tensor:
    """Return one multiplier per budget, 0 where the others meet it, by coordinate ascent of the dual."""
    multipliers = torch.zeros(len(choices.costs), dtype=torch.float64)
    finite = choices.errors.masked_fill(choices.errors.isinf(), 0.0)
    start = max(float(finite.max() - finite.min()), 1e-300)
    for _ in range(_ROUNDS):
        before = multipliers.clone()
        for budget in range(len(multipliers)):
            multipliers[budget] = _find_multiplier(choices, multipliers.clone(), budget, start)
        if torch.allclose(multipliers, before, rtol=1e-9, atol=0.0):
            break
    return multipliers


def _find_multiplier(choices: _Choices, multipliers: Tensor, budget: int, start: float) -> float:
    """Return the least multiplier that meets one budget, with the other multipliers fixed."""

    def meets(value: float) -> bool:
        multipliers[budget] = value
        return bool(choices.use(choices.pick(multipliers))[budget] <= 1 + _ROUNDING)

    if meets(0.0):
        return 0.0
    high = start
    while not meets(high):
        high *= 16
        if high > 1e30 * start:
            return high
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5 if low else high / 16
        low, high = (low, middle) if meets(middle) else (middle, high)
        if low and high / low < 1 + 1e-10:
            break
    return high


def _shrink(choices: _Choices, at: Tensor) -> None:
    """Make choices fit, in place, where the multipliers of several budgets do not: least error per excess removed first."""
    while not choices.fit(at):
        used = choices.use(at)
        errors, costs = choices.compare(at)
        over = (used[:, None, None] + costs - 1).clamp(min=0).sum(0)
        saved = (used - 1).clamp(min=0).sum() - over
        price = torch.where((saved > 0) & errors.isfinite(), errors / saved.clamp(min=1e-300), torch.inf)
        group, choice = divmod(int(price.argmin()), price.shape[1])
        at[group] = choice


def _improve(choices: _Choices, at: Tensor) -> None:
    """Apply single moves and exchanges of two groups that fit and lower the error, best first, in place."""
    tiny = _ROUNDING * float(choices.errors.masked_fill(choices.errors.isinf(), 0.0).abs().sum())
    for _ in range(_EXCHANGES):
        errors, costs = choices.compare(at)
        left = 1 + _ROUNDING - choices.use(at)
        single = errors.masked_fill((costs > left[:, None, None]).any(0), torch.inf)
        best = float(single.min())
        if best < -tiny:
            group, choice = divmod(int(single.argmin()), single.shape[1])
            at[group] = choice
            continue
        groups, picks = _list_moves(choices, at)
        error, cost = errors[groups, picks], costs[:, groups, picks]
        pairs = error[:, None] + error
        pairs.masked_fill_((cost[:, :, None] + cost[:, None, :] > left[:, None, None]).any(0), torch.inf)
        pairs.masked_fill_(groups[:, None] == groups, torch.inf)
        if not pairs.numel() or float(pairs.min()) >= -tiny:
            return
        for move in divmod(int(pairs.argmin()), len(groups)):
            at[groups[move]] = picks[move]


def _list_moves(choices: _Choices, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return (groups, choices) of the moves allowed in an exchange, small steps first if there are too many."""
    width = choices.errors.shape[1]
    sizes = [*range(1, _NEAR + 1), *(2**power for power in range(4, width.bit_length()))]
    steps = torch.tensor([sign * size for size in sizes for sign in (1, -1)])[: max(2, _PAIRS // len(at))]
    picks = at + steps[:, None]
    groups = torch.arange(len(at)).expand_as(picks)
    inside = (picks >= 0) & (picks < width)
    groups, picks = groups[inside], picks[inside]
    valid = choices.errors[groups, picks].isfinite()
    return groups[valid][:_PAIRS], picks[valid][:_PAIRS]


def _fill_evenly(groups: Sequence[GroupSize], choices: _Choices, at: Tensor) -> None:
    """Spend the budget that saves no error, in place: the group that has lost the largest share gets the next step that fits."""
    totals = torch.tensor([float(group.num_units) for group in groups], dtype=torch.float64)
    last = choices.errors.isfinite().sum(1) - 1
    while True:
        more = torch.minimum(at + 1, last)
        errors, costs = choices.compare(at)
        added = costs.gather(2, more.expand(len(costs), -1)[..., None])[..., 0]
        fits = (added <= (1 + _ROUNDING - choices.use(at))[:, None]).all(0) & (more > at)
        harmless = errors.gather(1, more[:, None])[:, 0] <= 0
        if not (fits & harmless).any():
            return
        kept = choices.counts.gather(1, at[:, None])[:, 0] / totals
        group = int(kept.masked_fill(~(fits & harmless), torch.inf).argmin())
        at[group] += 1
