"""Backward elimination of units, those first whose removal raises the re-solved error least."""

from dataclasses import dataclass

import torch
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments
from struprune_plugin.linalg.solve import Where, factorize_fast
from struprune_plugin.linalg.ties import ROUNDING, order_scores

_PANELS = 32  # downdates of the matrices until all units are removed, or as many as there are units
_GONE = 1 / 4  # share of removed units that the matrices may still hold, because a copy costs more


@dataclass(frozen=True)
class RankedUnits:
    """Units of one linear or of several, at least those to be removed, first removed first, shape [..., removed], int64, and the
    score of every unit, shape [..., units], float64, infinite where it was not removed.

    :param basis: orthogonal basis to which the heads' units are rotated first, rows are the new units, shape
        [..., blocks, width, width], float64; None without rotation
    """

    order: Tensor
    scores: Tensor
    basis: Tensor | None = None


def order_units(scores: Tensor, num_blocks: int) -> Tensor:
    """Return the units, shape [units], int64, lowest score first; ties go by index.

    With several blocks, a round removes the next unit of every block, so that any whole number of rounds leaves the blocks
    equally large.

    :param num_blocks: number of equal runs of units, each of which must keep the same number of units
    """
    per_block = scores.view(num_blocks, -1)
    within = order_scores(per_block)
    offsets = torch.arange(num_blocks, device=scores.device)[:, None] * per_block.shape[1]
    return (within + offsets).T.reshape(-1)


def keep_last(order: Tensor, num_units: int, num_keep: int) -> Tensor:
    """Return the sorted units that remain after the first of an order are removed, shape [..., num_keep], int64.

    :param order: units, first removed first, shape [..., at least num_units - num_keep]
    """
    gone = torch.zeros(*order.shape[:-1], num_units, dtype=torch.uint8, device=order.device)
    gone.scatter_(-1, order[..., : num_units - num_keep], 1)
    return gone.argsort(dim=-1, stable=True)[..., :num_keep]  # unlike nonzero, it does not wait for the device


def unit_columns(units: Tensor, width: int) -> Tensor:
    """Return the rows or columns of units that are ``width`` wide each, shape [..., units] -> [..., units * width]."""
    return (units[..., None] * width + torch.arange(width, device=units.device)).flatten(-2)


def eliminate_units(
    damped: SecondMoments, columns_per_unit: int, where: Where, num_blocks: int = 1, num_remove: int | None = None
) -> RankedUnits:
    """Remove units, a panel at a time, those first whose removal raises the re-solved error least; ties go by index.

    Removing unit u with columns U raises ``min_W ||Y - W P||^2`` by ``tr(W_U [(H^-1)_UU]^-1 W_U^T)``, with W the current
    least-squares weights; then W and H^-1 are downdated. The bias always stays. With a 32nd of the units in a panel, real FFNs
    end within two parts in a thousand of the error of one unit at a time. Many units are removed in float32.
    Source: method.md section 3, ``obs``.

    :param damped: of one linear, or of several of one shape, which are worked on together
    :param num_blocks: as in :func:`order_units`
    :param num_remove: units to remove, a multiple of ``num_blocks``; None removes all, for curves over every prefix
    :raises ValueError: H is singular
    """
    num_units = (damped.gram.shape[-1] - 1) // columns_per_unit
    rounds = (num_units if num_remove is None else num_remove) // num_blocks
    factor = factorize_fast(damped.gram, where)
    inverse = torch.cholesky_inverse(factor, out=factor).view(-1, *factor.shape[-2:])
    left = _Remaining(inverse, inverse @ damped.cross.mT.to(inverse.dtype), columns_per_unit, num_blocks)
    panel = max(num_units // num_blocks // _PANELS, 1)
    order, increase = [left.units[:, :0]], [inverse[:, 0, :0]]
    for start in range(0, rounds, panel):
        units, costs = left.remove(min(panel, rounds - start))
        order.append(units)
        increase.append(costs)
    removed, lead = torch.cat(order, 1), damped.gram.shape[:-2]
    scores = removed.new_full((len(removed), num_units), torch.inf, dtype=torch.float64)
    scores.scatter_(1, removed, torch.cat(increase, 1).double())
    return RankedUnits(removed.view(*lead, rounds * num_blocks), scores.view(*lead, num_units))


class _Remaining:
    """H^-1, shape [linears, n + 1, n + 1], and W^T, shape [linears, n + 1, d], of the units not yet removed, changed in place."""

    def __init__(self, inverse: Tensor, weight: Tensor, width: int, num_blocks: int):
        self._inverse, self._weight, self._width, self._num_blocks = inverse, weight, width, num_blocks
        num_units = (inverse.shape[1] - 1) // width
        self.units = torch.arange(num_units, device=inverse.device).expand(len(inverse), -1)  # index of every unit held
        self._gone = torch.zeros_like(self.units, dtype=torch.bool)
        self._left = num_units // num_blocks  # units left in every block
        costs = self._measure_costs()
        grain = ROUNDING[costs.dtype] * costs.sum(1, keepdim=True)  # smaller differences are rounding
        self._grain = grain.clamp(min=torch.finfo(costs.dtype).tiny)  # zero weights cost nothing

    def remove(self, rounds: int) -> tuple[Tensor, Tensor]:
        """Remove ``rounds`` units of every block; return (their indices, the increases of the error), shape [linears, removed].

        Of about twice as many candidates, one Cholesky factor of their part of H^-1 gives what each costs after all cheaper
        ones: a copy of another unit then costs what the two carry. The cheapest by that cost go.
        """
        per_block = self.units.shape[1] // self._num_blocks
        costs = self._round(self._measure_costs()).masked_fill(self._gone, torch.inf)
        cheap = order_scores(costs.unflatten(1, (-1, per_block)))[..., : min(2 * rounds - 1, self._left)]
        cheap = cheap + torch.arange(0, self.units.shape[1], per_block, device=cheap.device)[:, None]
        after = self._round(self._factorize(cheap.mT.flatten(1))[2]).unflatten(1, (-1, self._num_blocks)).mT
        chosen = order_scores(after)[..., :rounds].sort().values
        return self._drop(cheap.gather(2, chosen).mT.flatten(1))

    def _measure_costs(self) -> Tensor:
        """Return what every unit held costs by itself, shape [linears, units]."""
        if self._width == 1:
            energy = torch.linalg.vector_norm(self._weight[:, :-1], dim=2).square()
            return energy / self._inverse.diagonal(dim1=1, dim2=2)[:, :-1]
        parts = self._weight[:, :-1].unflatten(1, (-1, self._width))
        within = self._inverse[:, :-1, :-1].unflatten(2, (-1, self._width)).unflatten(1, (-1, self._width))
        within = within.diagonal(dim1=1, dim2=3).movedim(3, 1)
        root = torch.linalg.cholesky_ex(within).L  # MKL's threads fail at an LU of such blocks in float32
        return torch.linalg.solve_triangular(root, parts, upper=False).square().sum((2, 3))

    def _round(self, costs: Tensor) -> Tensor:
        """Return costs without what is rounding, so that equal ones tie."""
        return (costs.nan_to_num(torch.inf) / self._grain).round() * self._grain

    def _factorize(self, units: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (L, ``L^-1 W``, cost of each unit after those before it) of units in order, with ``L L^T`` their part of H^-1."""
        columns = unit_columns(units, self._width)
        root = torch.linalg.cholesky_ex(_take(self._inverse, columns, columns)).L
        moved = torch.linalg.solve_triangular(root, _take(self._weight, columns), upper=False)
        return root, moved, moved.square().sum(2).unflatten(1, (-1, self._width)).sum(2)

    def _drop(self, removed: Tensor) -> tuple[Tensor, Tensor]:
        """Remove units at these positions; copy the matrices without what is gone once that is a quarter."""
        root, moved, costs = self._factorize(removed)
        rows = _take(self._inverse, unit_columns(removed, self._width))
        reach = torch.linalg.solve_triangular(root, rows, upper=False)
        self._inverse.baddbmm_(reach.mT, reach, alpha=-1)
        self._weight.baddbmm_(reach.mT, moved, alpha=-1)
        units = self.units.gather(1, removed)
        self._gone = self._gone.scatter(1, removed, True)
        self._left -= removed.shape[1] // self._num_blocks
        left = self._left * self._num_blocks
        if left < (1 - _GONE) * self.units.shape[1]:
            stay = self._gone.byte().argsort(stable=True)[:, :left]
            columns = unit_columns(stay, self._width)
            columns = torch.cat([columns, columns.new_full((len(columns), 1), self._inverse.shape[1] - 1)], 1)
            self._inverse, self._weight = _take(self._inverse, columns, columns), _take(self._weight, columns)
            self.units, self._gone = self.units.gather(1, stay), self._gone.gather(1, stay)
        return units, costs


def _take(matrices: Tensor, rows: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return rows of every matrix, and of these some columns: [linears, n, m] -> [linears, rows, m or columns]."""
    taken = matrices[torch.arange(len(matrices), device=rows.device)[:, None], rows]
    return taken if columns is None else taken.gather(2, columns[:, None].expand(-1, rows.shape[1], -1))
