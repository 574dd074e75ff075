"""Backward elimination of units, each time the one whose removal raises the re-solved error least.

Legend as in ``solve.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments, with_bias_index
from struprune_plugin.linalg.solve import factorize_fast
from struprune_plugin.linalg.ties import ROUNDING, argmin_tensor_with_ties, order_scores

_PANEL = 32  # columns removed per downdate of the matrices
_LINE = 16  # float32 numbers per cache line
_GONE = 1 / 4  # share of removed units that the matrices may still hold, because a copy costs more


@dataclass(frozen=True)
class Elimination:
    """Removal order of greedy backward elimination, and the cost of each removal.

    :param order: unit indices, first removed first, shape [removed], int64
    :param increase: increase of the least-squares error at that removal, shape [removed], float64
    """

    order: Tensor
    increase: Tensor


def order_units(scores: Tensor, num_blocks: int) -> Tensor:
    """Return the removal order of units, lowest score first; ties go by index (:func:`~struprune_plugin.linalg.ties.order_scores`).

    With several blocks, a round removes the next unit of every block, so that any whole number of rounds leaves the blocks
    equally large.

    :param scores: shape [units]
    :param num_blocks: number of equal runs of units, each of which must keep the same number of units
    :return: unit indices, first removed first, shape [units], int64
    """
    per_block = scores.view(num_blocks, -1)
    within = order_scores(per_block)
    offsets = torch.arange(num_blocks, device=scores.device)[:, None] * per_block.shape[1]
    return (within + offsets).T.reshape(-1)


def keep_last(order: Tensor, num_units: int, num_keep: int) -> Tensor:
    """Return the sorted indices of the ``num_keep`` units that remain after the first units of an order are removed.

    :param order: units, first removed first, shape [at least num_units - num_keep]
    """
    left = torch.ones(num_units, dtype=torch.bool, device=order.device)
    left[order[: num_units - num_keep]] = False
    return left.nonzero().flatten()


def unit_columns(units: Tensor, width: int) -> Tensor:
    """Return the rows or columns of units that are ``width`` wide each, shape [units * width]."""
    return (units[:, None] * width + torch.arange(width, device=units.device)).reshape(-1)


def eliminate_units(
    damped: SecondMoments, columns_per_unit: int, where: str, num_blocks: int = 1, num_remove: int | None = None
) -> Elimination:
    """Remove units one by one, each time the one whose removal raises the re-solved error least; on a tie, the first one.

    The search covers the units that were cheapest at the last update (:class:`_Remaining`), which on real FFNs changes the
    error by at most one part in a thousand; with many units it runs in float32
    (:func:`~struprune_plugin.linalg.solve.factorize_fast`).
    Removing unit u with columns U raises ``min_W ||Y - W P||^2`` by ``tr(W_U [(H^-1)_UU]^-1 W_U^T)``, with W the current
    least-squares weights; then W and H^-1 are downdated. The bias always stays.
    Source: method.md section 3, ``obs`` (twice its value: an increase of the sum of squares, without the half).

    :param columns_per_unit: consecutive input columns of one unit
    :param num_blocks: number of equal runs of units, each of which must keep the same number of units (see :func:`order_units`)
    :param num_remove: units to remove; None removes all, for curves over every prefix
    :return: removal order and costs, shape [num_remove] each
    :raises ValueError: H is singular
    """
    num_units = (damped.gram.shape[0] - 1) // columns_per_unit
    num_remove = num_units if num_remove is None else num_remove
    factor = factorize_fast(damped.gram, where)
    inverse = _align(torch.cholesky_inverse(factor, out=factor))
    left = _Remaining(inverse, inverse @ damped.cross.T.to(inverse.dtype), columns_per_unit, num_blocks)
    order, increases = [inverse.new_zeros(0, dtype=torch.int64)], [inverse.new_zeros(0)]
    count = 0
    while count < num_remove:
        units, costs = left.remove_cheapest(num_remove - count)
        order.append(units)
        increases.append(costs)
        count += len(units)
    return Elimination(torch.cat(order), torch.cat(increases).double())


def _align(matrix: Tensor) -> Tensor:
    """Return a matrix with rows that start at cache lines: float32 products on n + 1 columns then take a third of the time."""
    num_columns = matrix.shape[1]
    if matrix.dtype != torch.float32 or num_columns % _LINE == 0:
        return matrix
    aligned = matrix.new_empty(len(matrix), -(-num_columns // _LINE) * _LINE)
    return aligned[:, :num_columns].copy_(matrix)


class _Remaining:
    """Matrices W and H^-1 of the units not yet removed, downdated by one panel of removals at a time.

    A panel chooses among twice as many units as it removes, the cheapest ones at its start (:class:`_Candidates`). Costs rise
    as units are removed and rarely fall, so that hardly any other unit would be cheaper.

    :param inverse: H^-1, shape [n + 1, n + 1], float64 or float32; changed in place
    :param weight: W^T, shape [n + 1, d], same dtype; changed in place
    """

    def __init__(self, inverse: Tensor, weight: Tensor, width: int, num_blocks: int):
        self._inverse, self._weight, self._width = inverse, weight, width
        num_units = (len(inverse) - 1) // width
        self._units = torch.arange(num_units, device=inverse.device)  # original index of every unit held
        self._alive = torch.ones_like(self._units, dtype=torch.bool)
        self._lost = torch.zeros(num_blocks, dtype=torch.int64)  # removed units per block, on the host
        self._block_size = num_units // num_blocks
        self._rounding = ROUNDING[inverse.dtype] * float(self._measure_costs().sum())

    def remove_cheapest(self, most: int) -> tuple[Tensor, Tensor]:
        """Remove a panel of at most ``most`` units; return their original indices and their costs, in order.

        The host chooses among narrow units: a device would launch every operation on their tiny matrices.
        """
        panel = max(_PANEL // self._width, 1)
        at = self._find_candidates(2 * panel // len(self._lost) + 2)  # no block can lose more in one panel
        blocks = (self._units[at] // self._block_size).cpu()
        place = torch.device("cpu") if panel > 1 else at.device
        candidates = _Candidates(self._inverse, self._weight, unit_columns(at, self._width), self._width, place)
        chosen: list[int] = []
        paid: list[Tensor] = []
        while len(chosen) < min(panel, most, len(at)):
            costs = candidates.measure_costs()
            if len(self._lost) > 1:
                waits = self._lost == self._lost.min()  # blocks that have lost no unit this round
                costs.masked_fill_(~waits[blocks].to(place), torch.inf)
            u = argmin_tensor_with_ties(costs, self._rounding)
            chosen.append(u)
            paid.append(costs[u])
            candidates.remove(u)
            if len(self._lost) > 1:
                self._lost[blocks[u]] += 1
        removed = at[torch.tensor(chosen, device=at.device)]
        units = self._units[removed]
        self._drop(removed)
        return units, torch.stack(paid).to(units.device)

    def _measure_costs(self) -> Tensor:
        """Return the cost of every unit that the matrices hold, infinite if removed, shape [units]."""
        columns = torch.arange(len(self._inverse) - 1, device=self._inverse.device).view(-1, self._width)
        parts = self._weight[:-1].view(-1, self._width, self._weight.shape[1])
        costs = _measure_costs(self._inverse[columns[:, :, None], columns[:, None]], parts @ parts.mT)
        return costs.masked_fill(~self._alive, torch.inf)

    def _find_candidates(self, per_block: int) -> Tensor:
        """Return the sorted positions of each block's cheapest units."""
        scores = self._inverse.new_full((len(self._lost) * self._block_size,), torch.inf)
        scores[self._units] = self._measure_costs()
        order = order_units(scores, len(self._lost))[: per_block * len(self._lost)]
        return torch.searchsorted(self._units, order[scores[order].isfinite()].sort().values)

    def _drop(self, removed: Tensor) -> None:
        """Downdate the matrices by the units at these positions, and compact them once many units are removed."""
        columns = unit_columns(removed, self._width)
        root = torch.linalg.cholesky_ex(self._inverse[columns[:, None], columns]).L
        reach, moved = (_solve_lower(root, part[columns]) for part in (self._inverse, self._weight))
        self._inverse.addmm_(reach.T, reach, alpha=-1)
        self._weight.addmm_(reach.T, moved, alpha=-1)
        self._alive[removed] = False
        left = self._alive.nonzero().flatten()
        if len(left) < (1 - _GONE) * len(self._units):
            stay = with_bias_index(unit_columns(left, self._width), len(self._inverse) - 1)
            self._inverse, self._weight = _restrict(self._inverse, stay), self._weight[stay]
            self._units, self._alive = self._units[left], self._alive[left]


class _Candidates:
    """Restriction of H^-1 and ``W^T W`` to a few units, updated while these are removed one by one.

    A removal of U changes ``H^-1`` by ``-V V^T`` and ``W`` by ``-A V^T``, with ``V = (H^-1)_:U L^-T``, ``A = W_U L^-T`` and
    ``L L^T = (H^-1)_UU``.

    :param place: device of the restriction
    """

    def __init__(self, inverse: Tensor, weight: Tensor, columns: Tensor, width: int, place: torch.device):
        weight, size = weight[columns], len(columns)
        self._both = torch.cat([inverse[columns[:, None], columns], weight @ weight.T], dim=1).to(place)
        self._inverse, self._energy = self._both[:, :size], self._both[:, size:]
        self._width = width
        index = torch.arange(size, device=place).view(-1, width)
        self._within = (index[:, :, None], index[:, None])
        self._gone = torch.zeros(len(index), dtype=torch.bool, device=place)

    def measure_costs(self) -> Tensor:
        """Return the cost of every unit, infinite if removed, shape [units]."""
        if self._width == 1:  # views: this runs for every removed unit
            costs = self._energy.diagonal() / self._inverse.diagonal()
        else:
            costs = _measure_costs(self._inverse[self._within], self._energy[self._within])
        return costs.masked_fill_(self._gone, torch.inf)

    def remove(self, u: int) -> None:
        """Remove the unit at a position."""
        unit = slice(u * self._width, (u + 1) * self._width)
        block = self._inverse[unit, unit]
        root = block.sqrt() if self._width == 1 else torch.linalg.cholesky_ex(block).L
        rows = _solve_lower(root, self._both[unit])
        reach, shared = rows.chunk(2, dim=1)  # V^T, A^T W
        shared -= _solve_lower(root, shared[:, unit].mT) / 2 @ reach
        self._both.addmm_(reach.mT, rows, alpha=-1)
        self._energy.addmm_(shared.mT, reach, alpha=-1)
        self._gone[u] = True


def _measure_costs(within: Tensor, energy: Tensor) -> Tensor:
    """Return ``tr(W_U [(H^-1)_UU]^-1 W_U^T)`` of every unit, shape [units].

    :param within: (H^-1)_UU, shape [units, width, width]
    :param energy: W_U^T W_U, the same shape
    """
    if within.shape[-1] == 1:
        return (energy / within).flatten()
    return torch.linalg.solve_ex(within, energy).result.diagonal(dim1=1, dim2=2).sum(1)


def _solve_lower(root: Tensor, right: Tensor) -> Tensor:
    """Return ``L^-1 B``."""
    if len(root) == 1:  # a number: this runs for every removed unit
        return right / root
    return torch.linalg.solve_triangular(root, right, upper=False)


def _restrict(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return the given sorted rows and the same columns of a square matrix, within its own storage."""
    start = 0
    for part in rows.split(64):  # fits the cache; no row is before its destination, so none is overwritten
        matrix[start : start + len(part), : len(rows)] = matrix[part].T[rows].T  # twice as fast as columns of the part
        start += len(part)
    return matrix[:start, :start]
