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
_GONE = 1 / 16  # share of removed units that the matrices may carry along, a copy being dearer


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
        _uncouple_bias(gram, cross)
    energy = moments.target_energy + strength * weight[:, :-1].square().sum()
    return Moments(gram, cross, energy, moments.absolute_sum)


def _uncouple_bias(gram: Tensor, cross: Tensor) -> None:
    """Make every solve give a bias of 0, in place."""
    gram[-1], gram[:, -1], cross[:, -1] = 0, 0, 0
    gram[-1, -1] = 1


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
    factor = _factorize_in_place(damped.gram[rows[:, None], rows], where)
    condition = _estimate_condition(factor)
    if not condition <= MAX_CONDITION:
        raise _describe_singular(where, condition, len(columns))
    weight = _solve_factorized(factor, damped.cross[:, rows].T).T
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
    rows = with_bias_index(columns, weight.shape[1] - 1)
    scale = float((moments.gram.diagonal()[:-1].double() - held.gram.diagonal()[:-1]).mean())
    held = _restrict_moments(held, rows)
    rest = subtract_moments(_restrict_moments(moments, rows), held)
    if not has_bias:
        _uncouple_bias(rest.gram, rest.cross)
    dense = torch.nn.functional.pad(weight[:, columns], (0, 1))  # the bias is not damped
    system = torch.empty_like(rest.gram)

    def measure(damping: float) -> float:
        system.copy_(rest.gram).diagonal()[:-1].add_(damping * scale)
        cross = torch.add(rest.cross, dense, alpha=damping * scale)
        return measure_error(held, _solve_factorized(_factorize_in_place(system, where), cross.T).T)

    return min(_DAMPINGS, key=measure)


def _restrict_moments(moments: Moments, rows: Tensor) -> Moments:
    """Return the float64 moments of some inputs, a copy."""
    gram, cross = moments.gram[rows[:, None], rows].double(), moments.cross[:, rows].double()
    return replace(moments, gram=gram, cross=cross)


def _factorize_in_place(system: Tensor, where: str) -> Tensor:
    """Return the lower Cholesky factor of a damped system within its own storage, or raise with its name."""
    factor = system.mT  # the same matrix, by columns, as LAPACK wants it
    info = torch.empty((), dtype=torch.int32, device=system.device)
    torch.linalg.cholesky_ex(factor, out=(factor, info))
    if int(info) or not factor.diagonal().isfinite().all():
        raise _describe_singular(where, float("inf"), len(system) - 1)
    return factor


def _solve_factorized(factor: Tensor, right: Tensor) -> Tensor:
    """Return ``H^-1 B`` from the Cholesky factor of H; ``torch.cholesky_solve`` would copy it."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def invert_in_place(gram: Tensor, where: str) -> Tensor:
    """Return the inverse of a damped Gram matrix within its own storage.

    :raises ValueError: it is singular; the message names ``where``
    """
    factor = _factorize_in_place(gram, where)
    return torch.cholesky_inverse(factor, out=factor)


def _describe_singular(where: str, condition: float, num_inputs: int) -> ValueError:
    return ValueError(
        f"{where}: the least-squares system must have a condition number of at most {MAX_CONDITION:.0e}, "
        f"got {condition:.3g} ({num_inputs} inputs). Raise damping, or calibrate with more text."
    )


def _estimate_condition(factor: Tensor, iterations: int = 12) -> float:
    """Estimate the 2-norm condition number of a matrix from its Cholesky factor, by power iterations."""
    vector = torch.ones(len(factor), 1, dtype=factor.dtype, device=factor.device)
    inverse_vector = vector / vector.norm()
    vector = inverse_vector
    for _ in range(iterations):
        vector = factor @ (factor.mT @ (vector / vector.norm()))
        inverse_vector = _solve_factorized(factor, inverse_vector / inverse_vector.norm())
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
    inverse = invert_in_place(damped.gram.clone(), where)
    left = _Remaining(inverse, inverse @ damped.cross.T, columns_per_unit, num_blocks)
    waiting = torch.ones(num_blocks, dtype=torch.bool, device=inverse.device)  # blocks yet to lose one this round
    block_size = num_units // num_blocks
    order, increases = [], []
    for _ in range(num_units if num_remove is None else num_remove):
        costs = left.measure_costs()
        if num_blocks > 1:
            costs.masked_fill_(~waiting[left.units // block_size], torch.inf)
        u = int(costs.argmin())
        order.append(int(left.units[u]))
        increases.append(costs[u])
        left.remove(u)
        waiting[order[-1] // block_size] = False
        if num_blocks > 1 and not waiting.any():
            waiting[:] = True
    removed = torch.tensor(order, dtype=torch.int64, device=inverse.device)
    return Elimination(removed, torch.stack(increases) if increases else inverse.new_zeros(0))


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
        size = len(self.units) * self._width
        index = torch.arange(size, device=self.units.device).view(-1, self._width)
        self._within = self._inverse[index[:, :, None], index[:, None, :]]
        parts = self._weight[:-1].view(-1, self._width, self._weight.shape[1])
        self._energy = parts @ parts.mT
        columns = min(max(_PANEL, self._width), size)
        self._sizes = [size + 1, size + 1, self._weight.shape[1]]
        self._pending = self._inverse.new_empty(columns, sum(self._sizes))  # rows: V^T, A^T W at the panel's start, A^T
        self._num_pending = 0
        self._multiply_cheapest(columns // self._width)

    def _multiply_cheapest(self, num_removals: int) -> None:
        """Make the rows of ``W^T W`` of twice as many units as the panel removes, in the order that they would go now."""
        scores = self._energy.new_full((self._num_units,), torch.inf)
        scores[self.units] = self.measure_costs()
        cheapest = order_units(scores, self._num_blocks)
        cheapest = cheapest[scores[cheapest].isfinite()][: 2 * num_removals if num_removals > 1 else 0]
        at = torch.searchsorted(self.units, cheapest)
        self._products = self._weight[expand_units(at, self._width)] @ self._weight.T
        self._places = {u: slice(i * self._width, (i + 1) * self._width) for i, u in enumerate(at.tolist())}

    def measure_costs(self) -> Tensor:
        """Return ``tr(W_U [(H^-1)_UU]^-1 W_U^T)`` of every unit, infinite where it is gone, shape [units]."""
        if self._width == 1:
            costs = (self._energy / self._within).flatten()
        else:
            costs = torch.linalg.solve_ex(self._within, self._energy).result.diagonal(dim1=1, dim2=2).sum(1)
        return costs.masked_fill(~self._alive, torch.inf)

    def remove(self, u: int) -> None:
        """Remove the unit at a position of ``units``; positions may change thereafter."""
        unit, pending = slice(u * self._width, (u + 1) * self._width), self._pending[: self._num_pending]
        weight = self._weight[unit]
        products = self._products[self._places[u]] if u in self._places else weight @ self._weight.T
        rows = torch.cat([self._inverse[unit], products, weight], dim=1)
        rows.addmm_(pending[:, unit].T, pending, alpha=-1)
        if self._width == 1:
            rows /= self._within[u].sqrt()
        else:
            rows = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(self._within[u]).L, rows, upper=False)
        reach, shared, moved = rows.split(self._sizes, dim=1)
        past, _, past_moved = pending.split(self._sizes, dim=1)
        self._update_within(reach, torch.addmm(shared, moved @ past_moved.T, past, alpha=-1), moved @ moved.T)
        self._pending[self._num_pending : self._num_pending + self._width] = rows
        self._num_pending += self._width
        self._alive[u] = False
        if self._num_pending + self._width > len(self._pending):
            self._apply_panel()

    def _update_within(self, reach: Tensor, shared: Tensor, energy: Tensor) -> None:
        """Downdate the parts by V^T, A^T W and A^T A of one removal."""
        part, shared = (rows[:, :-1].view(self._width, -1, self._width).movedim(0, 1) for rows in (reach, shared))
        multiply = torch.mul if self._width == 1 else torch.matmul  # the same, without a call for every unit
        cross = multiply(part.mT, shared - multiply(energy / 2, part))
        self._energy -= cross + cross.mT
        self._within -= multiply(part.mT, part)

    def _apply_panel(self) -> None:
        """Downdate the matrices by all removals of the panel, and drop what is gone."""
        reach, _, moved = self._pending[: self._num_pending].split(self._sizes, dim=1)
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
        matrix[start : start + len(part), : len(rows)] = matrix[part][:, rows]
        start += len(part)
    return matrix[:start, :start]


def swap_units(
    damped: Moments,
    keep: Tensor,
    where: str,
    num_blocks: int = 1,
    max_swaps: int = 0,
) -> tuple[Tensor, int]:
    """Exchange a kept column for a removed one, each time the pair that lowers the re-solved error most, until none does.

    Pairs are made of the 512 columns cheapest to drop and the 512 that gain most when added: all, in small modules.

    With S kept, the sweep operator holds ``-H_SS^-1``, ``B = H_SS^-1 H_SR`` and the Schur complement s of the removed in one
    matrix, and the weights W_S with the residual correlations r_R, transposed, in another. Adding u and then dropping v changes the
    error by ``-|r_u|^2 / s_uu + |W_v - r_u b_uv / s_uu|^2 / ((H_SS^-1)_vv + b_uv^2 / s_uu)``, exactly, for all pairs at
    once; a swap is one update of rank two. Source: the local search of OSSCAR (Meng et al., 2024), over single columns.

    :param keep: sorted kept columns, shape [k], int64, one unit each
    :param num_blocks: a swap stays within one of so many equal runs of columns
    :param max_swaps: stop after so many
    :return: (kept columns, sorted; swaps made)
    """
    if not max_swaps:
        return keep, 0
    size = damped.gram.shape[0] - 1
    kept = torch.zeros(size + 1, dtype=torch.bool, device=keep.device)
    kept[with_bias_index(keep, size)] = True
    table, values = _sweep_all(damped.gram, damped.cross, kept, where)
    block = torch.arange(size, device=keep.device) // (size // num_blocks)
    least = -1e-9 * (values[kept].T * damped.cross[:, kept]).sum()  # of what is explained: below it is rounding
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
        _sweep_pair(table, values, u, v)
        kept[u], kept[v] = True, False
        swaps += 1
    return kept[:-1].nonzero().flatten(), swaps


def _sweep_all(gram: Tensor, cross: Tensor, kept: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """Return (table, values) of :func:`swap_units`, shapes [n + 1, n + 1] and [n + 1, d], with ``kept`` swept in."""
    rows, rest = kept.nonzero().flatten(), (~kept).nonzero().flatten()
    between = gram[rows[:, None], rest]
    inverse = invert_in_place(gram[rows[:, None], rows], where)
    values = cross.new_empty(cross.T.shape)
    values[rows] = inverse @ cross[:, rows].T
    values[rest] = torch.addmm(cross[:, rest].T, between.T, values[rows], alpha=-1)
    reach = inverse @ between
    table = torch.empty_like(gram)
    table[rows[:, None], rows] = inverse.neg_()
    del inverse
    table[rows[:, None], rest], table[rest[:, None], rows] = reach, reach.T
    table[rest[:, None], rest] = gram[rest[:, None], rest].addmm_(between.T, reach, alpha=-1)
    return table, values


def _find_candidates(table: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kept columns that are cheapest to drop, and the removed ones that gain most, at most 512 of each."""
    worth = torch.linalg.vector_norm(values[:-1], dim=1).square() / table.diagonal()[:-1].abs()
    inside = worth.masked_fill(~kept, torch.inf).argsort(stable=True)[: min(int(kept.sum()), _MAX_CANDIDATES)]
    outside = worth.masked_fill(kept, -1).argsort(descending=True, stable=True)
    return inside, outside[: min(int((~kept).sum()), _MAX_CANDIDATES)]


def _find_changes(table: Tensor, values: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Return what every swap does to the error, shape [removed, kept]."""
    schur, inverse = table.diagonal()[outside, None], -table.diagonal()[inside]
    ratio = table[outside[:, None], inside] / schur
    residual, weight = values[outside], values[inside]
    gain = residual.square().sum(1, keepdim=True)
    left = weight.square().sum(1) - 2 * ratio * (residual @ weight.T) + ratio.square() * gain
    return left.clamp(min=0) / (inverse + ratio.square() * schur) - gain / schur


def _sweep_pair(table: Tensor, values: Tensor, u: int, v: int) -> None:
    """Take column u into the kept set and v out of it, in place: the sweep operator on both at once.

    With ``K = {u, v}``, ``P = T_KK`` and ``R = T_K:``, the table loses ``R^T P^-1 R``, and its rows K become ``+-P^-1 R``.
    """
    pair = torch.tensor([u, v], device=table.device)
    signs = table.new_tensor([1, -1])
    rows, old = table[pair], values[pair]
    pivot = torch.linalg.inv(rows[:, pair])
    gain = pivot @ rows
    values.addmm_(gain.T, old, alpha=-1)
    table.addmm_(gain.T, rows, alpha=-1)
    gain *= signs[:, None]
    values[pair], table[pair], table[:, pair] = signs[:, None] * (pivot @ old), gain, gain.T
    table[pair[:, None], pair] = -signs[:, None] * pivot * signs


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
    factor = _factorize_in_place(damped.gram[rows[:, None], rows], where)
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
    weight = weight[:, rows]
    products = damped.gram[rows[:, None], rows].mul_(weight.T @ weight)
    added = 2 * products.tril_().sum(1) - products.diagonal()
    linear = (weight * damped.cross[:, rows]).sum(0)
    return (damped.target_energy + (added - 2 * linear).cumsum(0))[::columns_per_unit].clamp(min=0)


def find_root(matrix: Tensor) -> Tensor:
    """Return the symmetric square root of a positive semidefinite matrix, shape [d, d], float64."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
