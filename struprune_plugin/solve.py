"""Choose which units stay and re-solve the weights that remain, from moments alone.

Legend as in ``statistics.py``: H gram [n + 1, n + 1], C cross [d, n + 1], W weights [d, n + 1] with the bias last.
Every solve works on *damped* moments (:func:`damp_moments`), in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from struprune_plugin.statistics import Moments, measure_error, subtract_moments, with_bias_index

MAX_CONDITION = 1e12  # beyond it a float64 solve keeps fewer than four digits
DAMPING = 0.01  # where none was chosen
_DAMPINGS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)  # to choose among
_MAX_CANDIDATES = 512  # a swap looks at so many columns on either side
_PANEL = 64  # columns whose removal changes the matrices at once


@dataclass(frozen=True)
class Elimination:
    """The order in which greedy backward elimination removes units, and what each removal costs.

    :param order: unit indices, first removed first, shape [removed], int64
    :param increase: increase of the least-squares error at that removal, shape [removed], float64
    """

    order: Tensor
    increase: Tensor


@dataclass(frozen=True)
class SolvedWeights:
    """Weights re-solved on the kept inputs.

    :param weight: shape [d, k + 1], float64, bias last
    :param condition_number: estimate of the 2-norm condition number of the damped system
    """

    weight: Tensor
    condition_number: float


def damp_moments(moments: Moments, weight: Tensor, damping: float, has_bias: bool = True) -> Moments:
    """Add ``lambda = damping * mean(diag H)`` worth of pseudo-tokens that say "the given weights are right".

    ``H + lambda I``, ``C + lambda W``, ``tr(Y Y^T) + lambda ||W||^2``, the bias undamped: the minimiser of the
    damped error is that of ``||Y - W' P||^2 + lambda ||W' - W||^2``, and elimination, error curves and solves all
    follow from the damped moments alone.
    Differs from the source: method.md section 6 damps towards zero, which shrinks every solve; damped towards the
    dense weights, an unpruned layer with a local target stays as it is.

    :param weight: dense weights, shape [d, n + 1], float64, bias last
    :param damping: at least 0, relative to the mean diagonal of H
    :param has_bias: False for a linear without bias: every solve then gives it a bias of 0
    :return: float64 moments
    """
    gram, cross = (part.to(torch.float64, copy=True) for part in (moments.gram, moments.cross))
    strength = damping * gram.diagonal()[:-1].mean()
    gram.diagonal()[:-1].add_(strength)
    cross[:, :-1].add_(strength * weight[:, :-1])
    if not has_bias:
        gram[-1], gram[:, -1], cross[:, -1] = 0, 0, 0
        gram[-1, -1] = 1
    energy = moments.target_energy + strength * weight[:, :-1].square().sum()
    return Moments(gram, cross, energy, moments.absolute_sum)


def weigh_outputs(damped: Moments, root: Tensor, weight: Tensor) -> Moments:
    """Return moments under which an error e of the output counts as ``||R e||^2``.

    The re-solved weights do not depend on R (theirs are R W); which units should go, and the error of a choice, do. The
    energy is that of the target that the given weights reproduce exactly, ``tr(R W H W^T R^T)``: the ``local`` one. For other
    targets it is off by a constant, which changes no order.

    :param root: R, shape [d, d], float64
    :param weight: dense weights, shape [d, n + 1], float64, bias last
    """
    moved = root @ weight
    return replace(damped, cross=root @ damped.cross, target_energy=(moved @ damped.gram * moved).sum())


def solve_kept_weights(damped: Moments, columns: Tensor, where: str) -> SolvedWeights:
    """Solve ``W = C_S H_SS^-1`` on the kept inputs S and the bias, by Cholesky.

    Source: method.md section 6, ``least_squares``.

    :param damped: from :func:`damp_moments`
    :param columns: kept input columns, sorted, shape [k], int64
    :param where: name of the linear, for the error
    :raises ValueError: the damped system is singular or its condition number exceeds 1e12
    """
    rows = with_bias_index(columns, damped.gram.shape[0] - 1)
    system = damped.gram[rows[:, None], rows]
    factor = _factorize(system, where)
    condition = _estimate_condition(system, factor)
    if not condition <= MAX_CONDITION:
        raise _describe_singular(where, condition, len(columns))
    weight = torch.cholesky_solve(damped.cross[:, rows].T, factor).T
    return SolvedWeights(weight.contiguous(), condition)


def choose_damping(
    moments: Moments, held: Moments, weight: Tensor, columns: Tensor, has_bias: bool, where: str
) -> float:
    """Return the damping whose solve on the other tokens has the least error on the held-out ones.

    :param moments: of all tokens
    :param held: of a part of them
    :param weight: dense weights, shape [d, n + 1], float64, bias last
    :param columns: kept input columns, sorted, shape [k]
    """
    rest = subtract_moments(moments, held)

    def measure(damping: float) -> float:
        damped = damp_moments(rest, weight, damping, has_bias)
        return measure_error(held, solve_kept_weights(damped, columns, where).weight, columns)

    return min(_DAMPINGS, key=measure)


def _factorize(system: Tensor, where: str) -> Tensor:
    """Return the Cholesky factor of a damped system, or raise with its name."""
    factor, info = torch.linalg.cholesky_ex(system)
    if int(info) or not factor.isfinite().all():
        raise _describe_singular(where, float("inf"), len(system) - 1)
    return factor


def invert_gram(gram: Tensor, where: str) -> Tensor:
    """Return the inverse of a damped Gram matrix.

    :raises ValueError: it is singular; the message names ``where``
    """
    return torch.cholesky_inverse(_factorize(gram, where))


def _describe_singular(where: str, condition: float, num_inputs: int) -> ValueError:
    return ValueError(
        f"{where}: the least-squares system must have a condition number of at most {MAX_CONDITION:.0e}, "
        f"got {condition:.3g} ({num_inputs} inputs). Raise damping, or calibrate with more text."
    )


def _estimate_condition(system: Tensor, factor: Tensor, iterations: int = 12) -> float:
    """Estimate the 2-norm condition number of a symmetric positive definite matrix by power iterations."""
    vector = torch.ones(len(system), 1, dtype=system.dtype, device=system.device)
    inverse_vector = vector / vector.norm()
    vector = inverse_vector
    for _ in range(iterations):
        vector = system @ (vector / vector.norm())
        inverse_vector = torch.cholesky_solve(inverse_vector / inverse_vector.norm(), factor)
    return float(vector.norm() * inverse_vector.norm())


def order_units(scores: Tensor, num_blocks: int) -> Tensor:
    """Order units for removal, lowest score first.

    With several blocks, a round removes the next unit of every block, so that any whole number of rounds leaves the
    blocks equally large.

    :param scores: shape [units]
    :param num_blocks: equal runs of units that must keep the same number each
    :return: unit indices, first removed first, shape [units], int64
    """
    per_block = scores.view(num_blocks, -1)
    within = torch.argsort(per_block, dim=1, stable=True)
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
    """Remove units one by one, each time the one whose removal raises the re-solved error least.

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
    inverse = invert_gram(damped.gram, where)
    left = _Remaining(inverse, damped.cross @ inverse, columns_per_unit)
    waiting = torch.ones(num_blocks, dtype=torch.bool, device=inverse.device)  # blocks yet to lose one this round
    block_size = num_units // num_blocks
    order, increases = [], []
    for _ in range(num_units if num_remove is None else num_remove):
        costs = left.measure_costs().masked_fill(~waiting[left.units // block_size], torch.inf)
        u = int(costs.argmin())
        order.append(int(left.units[u]))
        increases.append(costs[u])
        left.remove(u)
        waiting[order[-1] // block_size] = False
        if not waiting.any():
            waiting[:] = True
    removed = torch.tensor(order, dtype=torch.int64, device=inverse.device)
    return Elimination(removed, torch.stack(increases) if increases else inverse.new_zeros(0))


class _Remaining:
    """W and H^-1 on the units not yet removed, downdated a panel of removals at a time.

    A removal of U changes ``H^-1`` by ``-V V^T`` and ``W`` by ``-A V^T``, with ``V = (H^-1)_:U L^-T``, ``A = W_U L^-T`` and
    ``L L^T = (H^-1)_UU``. Costs need only what lies within each unit, ``(H^-1)_UU`` and ``W_U^T W_U``, which is kept up to date;
    the matrices get the V and A of several removals as one product, and lose the rows that are gone.

    :param inverse: H^-1, shape [n + 1, n + 1], float64; changed in place
    :param weight: W, shape [d, n + 1], float64; the same
    """

    def __init__(self, inverse: Tensor, weight: Tensor, width: int):
        self._inverse, self._weight, self._width = inverse, weight, width
        self.units = torch.arange(
            (len(inverse) - 1) // width, device=inverse.device
        )  # original index of every unit here
        self._start_panel()

    def _start_panel(self) -> None:
        """Read off the parts within units, and empty the panel."""
        size = len(self.units) * self._width
        index = torch.arange(size, device=self.units.device).view(-1, self._width)
        self._within = self._inverse[index[:, :, None], index[:, None, :]]
        parts = self._weight[:, :-1].T.reshape(-1, self._width, len(self._weight))
        self._energy = parts.square().sum(-1, keepdim=True) if self._width == 1 else parts @ parts.mT
        self._alive = torch.ones_like(self.units, dtype=torch.bool)
        self._num_pending = 0
        columns = min(max(_PANEL, self._width), size)
        self._reach = self._inverse.new_empty(size + 1, columns)  # V
        self._moved = self._weight.new_empty(len(self._weight), columns)  # A

    def measure_costs(self) -> Tensor:
        """Return ``tr(W_U [(H^-1)_UU]^-1 W_U^T)`` of every unit, infinite where it is gone, shape [units]."""
        if self._width == 1:
            costs = (self._energy / self._within).flatten()
        else:
            costs = torch.linalg.solve_ex(self._within, self._energy).result.diagonal(dim1=1, dim2=2).sum(1)
        return costs.masked_fill(~self._alive, torch.inf)

    def remove(self, u: int) -> None:
        """Remove the unit at a position of ``units``; positions may change thereafter."""
        unit, old = slice(u * self._width, (u + 1) * self._width), slice(self._num_pending)
        reach, moved = self._reach[:, old], self._moved[:, old]
        factor = torch.linalg.cholesky_ex(self._within[u]).L
        columns = torch.addmm(self._inverse[unit].T, reach, reach[unit].T, alpha=-1)
        columns = torch.linalg.solve_triangular(factor.T, columns, upper=True, left=False)
        amount = torch.addmm(self._weight[:, unit], moved, reach[unit].T, alpha=-1)
        amount = torch.linalg.solve_triangular(factor.T, amount, upper=True, left=False)
        shared = torch.addmm(self._weight.T @ amount, reach, moved.T @ amount, alpha=-1)  # W^T A, of every column
        self._update_within(columns, shared, amount.T @ amount)
        new = slice(self._num_pending, self._num_pending + self._width)
        self._reach[:, new], self._moved[:, new] = columns, amount
        self._num_pending += self._width
        self._alive[u] = False
        if self._num_pending + self._width > self._reach.shape[1]:
            self._apply_panel()

    def _update_within(self, columns: Tensor, shared: Tensor, energy: Tensor) -> None:
        part = columns[:-1].view(-1, self._width, self._width)
        cross = part @ (shared[:-1].view_as(part).mT - energy / 2 @ part.mT)
        self._energy -= cross + cross.mT
        self._within -= part @ part.mT

    def _apply_panel(self) -> None:
        """Downdate the matrices by all removals of the panel, and drop what is gone."""
        pending = self._reach[:, : self._num_pending]
        self._inverse.addmm_(pending, pending.T, alpha=-1)
        self._weight.addmm_(self._moved[:, : self._num_pending], pending.T, alpha=-1)
        left = self._alive.nonzero().flatten()
        stay = with_bias_index(expand_units(left, self._width), len(self._inverse) - 1)
        self._inverse, self._weight = self._inverse[stay][:, stay], self._weight[:, stay]
        self.units = self.units[left]
        self._start_panel()


def swap_units(
    damped: Moments,
    keep: Tensor,
    where: str,
    num_blocks: int = 1,
    max_swaps: int = 0,
    output_root: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Exchange a kept column for a removed one, each time the pair that lowers the re-solved error most, until none does.

    Pairs are made of the 512 columns cheapest to drop and the 512 that gain most when added: all, in small modules.

    With S kept, the sweep operator holds ``-H_SS^-1``, ``B = H_SS^-1 H_SR`` and the Schur complement s of the removed in one
    matrix, and the weights W_S with the residual correlations r_R in another. Adding u and then dropping v changes the
    error by ``-|r_u|^2 / s_uu + |W_v - r_u b_uv / s_uu|^2 / ((H_SS^-1)_vv + b_uv^2 / s_uu)``, exactly, for all pairs at
    once; a swap is two rank-one updates. Source: the local search of OSSCAR (Meng et al., 2024), over single columns.

    :param keep: sorted kept columns, shape [k], int64, one unit each
    :param num_blocks: a swap stays within one of so many equal runs of columns
    :param max_swaps: stop after so many
    :return: (kept columns, sorted; swaps made)
    """
    size = damped.gram.shape[0] - 1
    kept = torch.zeros(size + 1, dtype=torch.bool, device=keep.device)
    kept[with_bias_index(keep, size)] = True
    table, values = _sweep_all(damped.gram, damped.cross, kept, where)
    block = torch.arange(size, device=keep.device) // (size // num_blocks)
    least = -1e-9 * (values[:, kept] * damped.cross[:, kept]).sum()  # of what is explained: below it is rounding
    swaps = 0
    while swaps < max_swaps:
        inside, outside = _find_candidates(table, values, kept[:-1])
        if not len(inside) or not len(outside):
            break
        change = _find_changes(table, values, inside, outside)
        change = change.masked_fill(block[outside][:, None] != block[inside], torch.inf)
        best = int(change.argmin())
        if not change.flatten()[best] < least:
            break
        u, v = int(outside[best // len(inside)]), int(inside[best % len(inside)])
        _sweep(table, values, u, add=True)
        _sweep(table, values, v, add=False)
        kept[u], kept[v] = True, False
        swaps += 1
    return kept[:-1].nonzero().flatten(), swaps


def _sweep_all(gram: Tensor, cross: Tensor, kept: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """Return (table, values) of :func:`swap_units`, shapes [n + 1, n + 1] and [d, n + 1], with ``kept`` swept in."""
    inverse = invert_gram(gram[kept][:, kept], where)
    reach, weight = inverse @ gram[kept][:, ~kept], cross[:, kept] @ inverse
    table, values = torch.empty_like(gram), torch.empty_like(cross)
    rows, rest = kept.nonzero(), (~kept).nonzero()
    table[rows, rows.T], table[rows, rest.T], table[rest, rows.T] = -inverse, reach, reach.T
    table[rest, rest.T] = gram[~kept][:, ~kept] - gram[~kept][:, kept] @ reach
    values[:, kept], values[:, ~kept] = weight, cross[:, ~kept] - weight @ gram[kept][:, ~kept]
    return table, values


def _find_candidates(table: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kept columns that are cheapest to drop, and the removed ones that gain most, at most 512 of each."""
    worth = values[:, :-1].square().sum(0) / table.diagonal()[:-1].abs()
    inside = worth.masked_fill(~kept, torch.inf).argsort(stable=True)[: min(int(kept.sum()), _MAX_CANDIDATES)]
    outside = worth.masked_fill(kept, -1).argsort(descending=True, stable=True)
    return inside, outside[: min(int((~kept).sum()), _MAX_CANDIDATES)]


def _find_changes(table: Tensor, values: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Return what every swap does to the error, shape [removed, kept]."""
    schur, inverse = table.diagonal()[outside, None], -table.diagonal()[inside]
    ratio = table[outside][:, inside] / schur
    residual, weight = values[:, outside], values[:, inside]
    gain = residual.square().sum(0)[:, None]
    left = weight.square().sum(0) - 2 * ratio * (residual.T @ weight) + ratio.square() * gain
    return left.clamp(min=0) / (inverse + ratio.square() * schur) - gain / schur


def _sweep(table: Tensor, values: Tensor, k: int, add: bool) -> None:
    """Take one column into the kept set, or out of it, in place."""
    pivot, row, value = table[k, k].clone(), table[k].clone(), values[:, k].clone()
    sign = 1 if add else -1
    values.addr_(value, row / pivot, alpha=-1)
    table.addr_(row, row / pivot, alpha=-1)
    values[:, k], table[k], table[:, k] = sign * value / pivot, sign * row / pivot, sign * row / pivot
    table[k, k] = -1 / pivot


def measure_restored_curve(damped: Moments, order: Tensor, columns_per_unit: int, where: str) -> Tensor:
    """Return the re-solved error for every number of kept units, along one elimination order.

    With the inputs in the reverse of that order, one Cholesky factor L of H gives them all:
    ``E(k) = tr(Y Y^T) - sum_{i <= k} ||(C L^-T)_:i||^2``.
    Source: method.md section 2 (no second pass) and section 5 (``error_curve``).

    :param order: units, first removed first, shape [units]
    :param where: name of the linear, for the error
    :return: damped error with k = 0 ... units kept, shape [units + 1], float64, never increasing
    """
    columns = expand_units(order.flip(0), columns_per_unit)
    bias = damped.gram.shape[0] - 1
    rows = torch.cat([columns.new_tensor([bias]), columns])
    factor = _factorize(damped.gram[rows[:, None], rows], where)
    explained = torch.linalg.solve_triangular(factor, damped.cross[:, rows].T, upper=False).square().sum(1)
    return (damped.target_energy - explained.cumsum(0)[::columns_per_unit]).clamp(min=0)


def measure_deletion_curve(damped: Moments, weight: Tensor, order: Tensor, columns_per_unit: int) -> Tensor:
    """Return ``||Y - W_S P_S||^2`` for every number of kept units, the weights left as they are.

    Parameters and return value as in :func:`measure_restored_curve`.

    :param weight: shape [d, n + 1], float64, bias last
    """
    columns = expand_units(order.flip(0), columns_per_unit)
    bias = damped.gram.shape[0] - 1
    rows = torch.cat([columns.new_tensor([bias]), columns])
    products = (weight[:, rows].T @ weight[:, rows]) * damped.gram[rows[:, None], rows]
    quadratic = products.cumsum(0).cumsum(1).diagonal()
    linear = (weight[:, rows] * damped.cross[:, rows]).sum(0).cumsum(0)
    return (damped.target_energy - 2 * linear + quadratic)[::columns_per_unit].clamp(min=0)


def find_root(matrix: Tensor) -> Tensor:
    """Return the symmetric square root of a positive semidefinite matrix, shape [d, d], float64."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
