"""Backward elimination: the order in which units go, each time the one whose removal raises the re-solved error least.

Legend as in ``statistics.py``: H gram [n + 1, n + 1], C cross [d, n + 1], W weights [d, n + 1] with the bias last.
Every solve works on *damped* moments (:func:`~struprune_plugin.maths.solve.damp_moments`), in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from struprune_plugin.maths.solve import invert_in_place
from struprune_plugin.maths.statistics import Moments, with_bias_index
from struprune_plugin.maths.ties import ROUNDING, find_least_of, order_scores

_PANEL = 64  # columns whose removal changes the matrices at once
_GONE = 1 / 16  # share of removed units that the matrices may carry along, a copy being dearer


@dataclass(frozen=True)
class Elimination:
    """The order in which greedy backward elimination removes units, and what each removal costs.

    :param order: unit indices, first removed first, shape [removed], int64
    :param increase: increase of the least-squares error at that removal, shape [removed], float64
    """

    order: Tensor
    increase: Tensor


def order_units(scores: Tensor, num_blocks: int) -> Tensor:
    """Order units for removal, lowest score first; those that tie go by index (:func:`~struprune_plugin.maths.ties.order_scores`).

    With several blocks, a round removes the next unit of every block, so that any whole number of rounds leaves the
    blocks equally large.

    :param scores: shape [units]
    :param num_blocks: equal runs of units that must keep the same number each
    :return: unit indices, first removed first, shape [units], int64
    """
    per_block = scores.view(num_blocks, -1)
    within = order_scores(per_block)
    offsets = torch.arange(num_blocks, device=scores.device)[:, None] * per_block.shape[1]
    return (within + offsets).T.reshape(-1)


def keep_last(order: Tensor, num_units: int, num_keep: int) -> Tensor:
    """Return the sorted indices of the ``num_keep`` units that are left once an order's first units are removed.

    :param order: units, first removed first, shape [at least num_units - num_keep]
    """
    left = torch.ones(num_units, dtype=torch.bool, device=order.device)
    left[order[: num_units - num_keep]] = False
    return left.nonzero().flatten()


def expand_units(units: Tensor, width: int) -> Tensor:
    """Return the rows or columns of units that are ``width`` wide each, shape [units * width]."""
    return (units[:, None] * width + torch.arange(width, device=units.device)).reshape(-1)


def eliminate_units(
    damped: Moments,
    columns_per_unit: int,
    where: str,
    num_blocks: int = 1,
    num_remove: int | None = None,
) -> Elimination:
    """Remove units one by one, each time the one whose removal raises the re-solved error least, the first of those that tie.

    Removing unit u with columns U raises ``min_W ||Y - W P||^2`` by ``tr(W_U [(H^-1)_UU]^-1 W_U^T)``, with W the
    current least-squares weights; then W and H^-1 are downdated (:class:`_Remaining`). The bias always stays.
    Source: method.md section 3, ``obs`` (twice its value: an increase of the sum of squares, without the half).

    :param damped: from :func:`damp_moments`
    :param columns_per_unit: consecutive input columns of one unit
    :param where: name of the linear, for the error
    :param num_blocks: equal runs of units that must keep the same number each (see :func:`order_units`)
    :param num_remove: units to remove; all where None, for curves that read off every prefix
    :return: the order, shape [num_remove]
    :raises ValueError: H is singular
    """
    num_units = (damped.gram.shape[0] - 1) // columns_per_unit
    inverse = invert_in_place(damped.gram.clone(), where)
    left = _Remaining(inverse, inverse @ damped.cross.T, columns_per_unit, num_blocks)
    waiting = torch.ones(num_blocks, dtype=torch.bool, device=inverse.device)  # blocks yet to lose one this round
    num_waiting, block_size = num_blocks, num_units // num_blocks
    rounding = ROUNDING * left.measure_costs().sum()
    order, increases = [], []
    for _ in range(num_units if num_remove is None else num_remove):
        costs = left.measure_costs()
        if num_blocks > 1:
            costs.masked_fill_(~waiting[left.units // block_size], torch.inf)
        u = find_least_of(costs, rounding)  # the one number a removal that a card must tell the host
        order.append(left.names[u])
        increases.append(costs[u])
        left.remove(u)
        if num_blocks > 1:
            waiting[order[-1] // block_size] = False
            num_waiting -= 1
            if not num_waiting:
                num_waiting = num_blocks
                waiting.fill_(True)
    removed = torch.tensor(order, dtype=torch.int64, device=inverse.device)
    return Elimination(removed, torch.stack(increases) if increases else inverse.new_zeros(0))


@dataclass
class _Panel:
    """Removals that the matrices have not seen yet.

    :param rows: V^T, A^T W at the panel's start and A^T side by side, a row a removed column
    :param sizes: columns of the three
    :param products: rows of ``W^T W`` at the panel's start, of the units that it probably removes
    :param places: where in ``products`` a unit's rows are, by position
    :param filled: rows in use
    """

    rows: Tensor
    sizes: list[int]
    products: Tensor
    places: dict[int, slice]
    filled: int = 0


class _Remaining:
    """W and H^-1 on the units not yet removed, downdated a panel of removals at a time.

    A removal of U changes ``H^-1`` by ``-V V^T`` and ``W`` by ``-A V^T``, with ``V = (H^-1)_:U L^-T``, ``A = W_U L^-T`` and
    ``L L^T = (H^-1)_UU``. Costs need only what lies within each unit, ``(H^-1)_UU`` and ``W_U^T W_U``, which V and ``W^T A``
    keep up to date; the matrices get the V and A of several removals as one product.

    Of ``W^T W`` only the columns of removed units are ever read. A panel makes those of the units that are cheapest when it
    starts as one product, and any other when its unit goes.

    :param inverse: H^-1, shape [n + 1, n + 1], float64; changed in place
    :param weight: W^T, shape [n + 1, d], float64; the same
    """

    def __init__(self, inverse: Tensor, weight: Tensor, width: int, num_blocks: int):
        self._inverse, self._weight, self._width, self._num_blocks = inverse, weight, width, num_blocks
        self._num_units = (len(inverse) - 1) // width
        self.units = torch.arange(self._num_units, device=inverse.device)  # original index of every unit here
        self._alive = torch.ones_like(self.units, dtype=torch.bool)
        self._start_panel()

    def _start_panel(self) -> None:
        """Read off the parts within units, and empty the panel."""
        self.names = self.units.tolist()  # the same, where asking costs nothing
        size = len(self.units) * self._width
        index = torch.arange(size, device=self.units.device).view(-1, self._width)
        self._within = self._inverse[index[:, :, None], index[:, None, :]]
        parts = self._weight[:-1].view(-1, self._width, self._weight.shape[1])
        self._energy = parts @ parts.mT
        columns = min(max(_PANEL, self._width), size)
        sizes = [size + 1, size + 1, self._weight.shape[1]]
        rows = self._inverse.new_empty(columns, sum(sizes))
        self._panel = _Panel(rows, sizes, *self._multiply_cheapest(columns // self._width))

    def _multiply_cheapest(self, num_removals: int) -> tuple[Tensor, dict[int, slice]]:
        """Make the rows of ``W^T W`` of twice as many units as the panel removes, in the order that they would go now."""
        scores = self._energy.new_full((self._num_units,), torch.inf)
        scores[self.units] = self.measure_costs()
        cheapest = order_units(scores, self._num_blocks)
        cheapest = cheapest[scores[cheapest].isfinite()][: 2 * num_removals if num_removals > 1 else 0]
        at = torch.searchsorted(self.units, cheapest)
        products = self._weight[expand_units(at, self._width)] @ self._weight.T
        return products, {u: slice(i * self._width, (i + 1) * self._width) for i, u in enumerate(at.tolist())}

    def measure_costs(self) -> Tensor:
        """Return ``tr(W_U [(H^-1)_UU]^-1 W_U^T)`` of every unit, infinite where it is gone, shape [units]."""
        if self._width == 1:
            costs = (self._energy / self._within).flatten()
        else:
            costs = torch.linalg.solve_ex(self._within, self._energy).result.diagonal(dim1=1, dim2=2).sum(1)
        return costs.masked_fill(~self._alive, torch.inf)

    def remove(self, u: int) -> None:
        """Remove the unit at a position of ``units``; positions may change thereafter."""
        panel, unit = self._panel, slice(u * self._width, (u + 1) * self._width)
        pending, weight = panel.rows[: panel.filled], self._weight[unit]
        products = panel.products[panel.places[u]] if u in panel.places else weight @ self._weight.T
        rows = torch.cat([self._inverse[unit], products, weight], dim=1)
        rows.addmm_(pending[:, unit].T, pending, alpha=-1)
        if self._width == 1:
            rows /= self._within[u].sqrt()
        else:
            rows = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(self._within[u]).L, rows, upper=False)
        reach, shared, moved = rows.split(panel.sizes, dim=1)
        past, _, past_moved = pending.split(panel.sizes, dim=1)
        self._update_within(reach, torch.addmm(shared, moved @ past_moved.T, past, alpha=-1), moved @ moved.T)
        panel.rows[panel.filled : panel.filled + self._width] = rows
        panel.filled += self._width
        self._alive[u] = False
        if panel.filled + self._width > len(panel.rows):
            self._apply_panel()

    def _update_within(self, reach: Tensor, shared: Tensor, energy: Tensor) -> None:
        """Downdate the parts by V^T, A^T W and A^T A of one removal."""
        if self._width == 1:  # numbers, the same without a view for each: this runs for every unit that goes
            part = reach[0, :-1]
            self._energy.view(-1).sub_(part * (shared[0, :-1] - energy[0] / 2 * part), alpha=2)
            self._within.view(-1).sub_(part * part)
            return
        part, shared = (rows[:, :-1].view(self._width, -1, self._width).movedim(0, 1) for rows in (reach, shared))
        cross = part.mT @ (shared - energy / 2 @ part)
        self._energy -= cross + cross.mT
        self._within -= part.mT @ part

    def _apply_panel(self) -> None:
        """Downdate the matrices by all removals of the panel, and drop what is gone."""
        reach, _, moved = self._panel.rows[: self._panel.filled].split(self._panel.sizes, dim=1)
        self._inverse.addmm_(reach.T, reach, alpha=-1)
        self._weight.addmm_(reach.T, moved, alpha=-1)
        left = self._alive.nonzero().flatten()
        if len(left) < (1 - _GONE) * len(self.units):
            stay = with_bias_index(expand_units(left, self._width), len(self._inverse) - 1)
            self._inverse = _restrict(self._inverse, stay)
            self._weight, self.units, self._alive = self._weight[stay], self.units[left], self._alive[left]
        self._start_panel()


def _restrict(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return the sorted rows, and the same columns, of a square matrix within its own storage."""
    start = 0
    for part in rows.split(64):  # few enough for the cache; none lies before where it goes, so that nothing is lost
        matrix[start : start + len(part), : len(rows)] = matrix[part].T[rows].T  # twice as fast as columns of the part
        start += len(part)
    return matrix[:start, :start]
