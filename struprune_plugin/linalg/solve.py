"""Least-squares solves of the remaining weights, from second moments alone; legend as in ``second_moments.py``.

Moments of several linears of one shape, as of a mixture's experts, have a first dimension more, and are solved together.
Every solve works on ``damped`` moments (:func:`damp_moments`): final weights in float64, choices of units and dampenings may use
float32. ``where`` names the linear, or every one, in errors.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from operator import itemgetter

import torch
from torch import Tensor

from struprune_plugin.linalg.second_moments import (
    SecondMoments,
    move_moments,
    select_inputs,
    take_columns,
    with_bias_index,
)
from struprune_plugin.linalg.ties import argmin_with_ties

MAX_CONDITION = 1e12  # beyond it a float64 solve keeps fewer than four digits
DAMPENING = 0.01  # where none is chosen
_EVEN = 1e-6  # share of the target's energy: smaller differences are rounding of float32 sums, or irrelevant
_EXACT = 256  # inputs up to which systems are solved in float64 alone
_SMALL = 1024  # inputs up to which several systems are solved in one call
_INEXACT = 0.01  # relative residual of a probe that a float32 factor may leave
_DIRECTIONS = 64  # random directions of the outputs for held-out errors, where there are many more outputs
_DAMPENINGS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)  # candidates
Where = str | Sequence[str]


def damp_moments(
    moments: SecondMoments, weight: Tensor, dampening: float | Tensor, has_bias: bool = True
) -> SecondMoments:
    """Return moments damped towards the given weights, with strength ``lambda = dampening * mean(diag H)``.

    They are ``H + lambda I``, ``C + lambda W`` and ``tr(Y Y^T) + lambda ||W||^2``, the bias undamped, in float64. The minimiser
    of the damped error is that of ``||Y - W' P||^2 + lambda ||W' - W||^2`` (method.md section 6).

    :param weight: present weights, shape [..., d, n + 1], float64, bias last
    :param dampening: at least 0, of all linears, or of each, shape [...]
    :param has_bias: False for a linear without bias: every solve then gives a bias of 0
    """
    gram, cross = (part.to(torch.float64, copy=True) for part in (moments.gram, moments.cross))
    strength = dampening * _view_diagonal(gram).mean(-1)
    _view_diagonal(gram).add_(strength[..., None])
    cross[..., :-1].add_(strength[..., None, None] * weight[..., :-1])
    if not has_bias:
        _uncouple_bias(gram, cross)
    energy = moments.target_energy + strength * weight[..., :-1].square().sum((-2, -1))
    return SecondMoments(gram, cross, energy, moments.absolute_sum)


def _view_diagonal(gram: Tensor) -> Tensor:
    """Return the diagonal without the bias, shape [..., n]."""
    return gram.diagonal(dim1=-2, dim2=-1)[..., :-1]


def _uncouple_bias(gram: Tensor, cross: Tensor) -> None:
    """Change moments, in place, so that every solve gives a bias of 0."""
    gram[..., -1, :], gram[..., -1], cross[..., -1] = 0, 0, 0
    gram[..., -1, -1] = 1


def weigh_outputs(damped: SecondMoments, root: Tensor) -> SecondMoments:
    """Return moments under which an error e of the output counts as ``||R e||^2``.

    The re-solved weights do not depend on R (they become R W); the choice of units and its error do. The target's energy, on
    which no choice depends, is NaN.

    :param root: R, shape [d, d], float64
    """
    dtype = torch.float32 if damped.gram.shape[-1] > _EXACT else torch.float64
    weighed = (root.to(dtype) @ damped.cross.to(dtype)).double()
    return replace(damped, cross=weighed, target_energy=torch.full_like(damped.target_energy, torch.nan))


def solve_kept_weights(damped: SecondMoments, columns: Tensor, where: Where) -> tuple[Tensor, Tensor]:
    """Solve ``W = C_S H_SS^-1`` on the kept inputs S and the bias, by Cholesky. Source: method.md section 6, ``least_squares``.

    :param columns: kept input columns, sorted, shape [..., k], int64
    :return: W, shape [..., d, k + 1], float64, bias last; estimated 2-norm condition number, shape [...], on the host
    :raises ValueError: a damped system is singular or its condition number exceeds 1e12
    """
    kept = select_inputs(damped, columns)
    factor = factorize_in_place(kept.gram, where)
    condition = _estimate_condition(factor).cpu()
    if (high := ~(condition <= MAX_CONDITION)).any():
        raise _describe_singular(where, high, float(condition[high][0]), columns.shape[-1])
    return _solve_factorized(factor, kept.cross.mT).mT.contiguous(), condition


def measure_solved_error(
    moments: SecondMoments, solved: Tensor, weight: Tensor, columns: Tensor, dampening: Tensor
) -> Tensor:
    """Return ``||Y - W P||^2`` of solved weights, at least 0, shape [...], without a product with H.

    A solve leaves ``W H = C + lambda (W_0 - W)``, the bias undamped, so that the error of
    :func:`~struprune_plugin.linalg.second_moments.measure_error` is ``tr(Y Y^T) - tr(W C^T) + lambda tr(W (W_0 - W)^T)``.

    :param moments: not damped
    :param solved: W of :func:`solve_kept_weights`, shape [..., d, k + 1]
    :param weight: W_0, which the moments were damped towards, of the kept inputs, shape [..., d, k + 1]
    :param columns: kept input columns, sorted, shape [..., k]
    :param dampening: of each linear, shape [...]
    """
    cross = take_columns(moments.cross, with_bias_index(columns, moments.gram.shape[-1] - 1))
    strength = dampening * _view_diagonal(moments.gram).mean(-1, dtype=torch.float64)
    pulled = (solved * (weight - solved))[..., :-1].sum((-2, -1))
    return (moments.target_energy - (solved * cross).sum((-2, -1)) + strength * pulled).clamp(min=0)


def scale_weights(moments: SecondMoments, weight: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of the kept inputs times the factor of least error, and that factor, in [0.5, 2], shape [...].

    For a module with too few tokens for a solve.

    :param weight: dense weights of the kept inputs, shape [..., d, k + 1], float64, bias last
    :param columns: kept input columns, sorted, shape [..., k], int64
    """
    kept = select_inputs(moments, columns)
    energy = (weight * (weight @ kept.gram.double())).sum((-2, -1))
    factor = (weight * kept.cross.double()).sum((-2, -1)) / energy
    factor = torch.where(energy > 0, factor, 1.0).clamp(0.5, 2.0)
    return weight * factor[..., None, None], factor


def choose_dampening(
    moments: SecondMoments, held: SecondMoments, weight: Tensor, columns: Tensor, has_bias: bool
) -> list[float]:
    """Return the dampenings of least error on the held-out tokens, solved on the other ones; on a tie, the lowest.

    :param moments: of all tokens, of several linears
    :param held: of the held-out ones among them
    :param weight: dense weights, shape [linears, d, n + 1], float64, bias last
    :param columns: kept input columns, sorted, shape [linears, k]
    """
    scale = (_view_diagonal(moments.gram).double() - _view_diagonal(held.gram)).mean(-1)
    held = select_inputs(held, columns)
    held = replace(held, gram=held.gram.double(), cross=held.cross.double())
    every = select_inputs(moments, columns)
    rest = replace(held, gram=every.gram.double() - held.gram, cross=every.cross.double() - held.cross)
    if not has_bias:
        _uncouple_bias(rest.gram, rest.cross)
    dense = torch.nn.functional.pad(take_columns(weight, columns), (0, 1))  # the bias is not damped
    if dense.shape[1] > 4 * _DIRECTIONS:  # errors are sums over outputs: a few directions suffice to compare
        some = _draw(_DIRECTIONS, dense.shape[1], dense.device) / _DIRECTIONS**0.5
        rest, held = (replace(part, cross=some @ part.cross) for part in (rest, held))
        dense = some @ dense
    if rest.gram.shape[-1] > _EXACT:
        single = [replace(part, gram=part.gram.float(), cross=part.cross.float()) for part in (rest, held)]
        with suppress(ValueError):  # float32 cannot resolve a small dampening
            return _search_dampening(single[0], single[1], dense.float(), scale)
    return _search_dampening(rest, held, dense, scale)


@lru_cache(4)
def _draw(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """Return normal random numbers, the same in every run, shape [rows, columns], float64."""
    seeded = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, num_columns, generator=seeded, dtype=torch.float64).to(device)


def _search_dampening(rest: SecondMoments, held: SecondMoments, dense: Tensor, scale: Tensor) -> list[float]:
    """Return the dampening of least held-out error of every linear: the best of a coarse grid, then of its neighbours.

    The error falls and rises once along the dampenings, so that not all are measured: first two strong ones; if the weaker of
    them is better, every second weaker one.

    :param scale: strength of a dampening of 1, shape [linears]
    """
    scales, energies = torch.stack([scale, held.target_energy]).tolist()
    errors = [[math.inf] * len(_DAMPENINGS) for _ in scales]

    def add(wanted: Sequence[Sequence[int]]) -> list[int]:
        """Measure the dampenings of these indices, by linear; return the index of the best so far of each, the lowest on a tie."""
        pairs = [(linear, index) for linear, indices in enumerate(wanted) for index in indices]
        together = max(len(pairs), 1) if _solves_together(rest.gram) else 1
        for start in range(0, len(pairs), together):
            part = pairs[start : start + together]
            first, strengths = part[0][0], [_DAMPENINGS[index] * scales[linear] for linear, index in part]
            linears = torch.tensor([linear for linear, _ in part], device=dense.device)
            pick = itemgetter(slice(first, first + 1) if len(part) == 1 else linears)  # of one alone, a view
            measured = _measure_damped(move_moments(rest, pick), move_moments(held, pick), pick(dense), strengths)
            for (linear, index), error in zip(part, measured, strict=True):
                errors[linear][index] = error
        return [argmin_with_ties(values, _EVEN * energy) for values, energy in zip(errors, energies, strict=True)]

    last = len(_DAMPENINGS) - 1
    best = add([(last, last - 2)] * len(scales))
    best = add([range(last - 4, -1, -2) if index < last else () for index in best])
    best = add([[near for near in (index - 1, index + 1) if 0 <= near <= last] for index in best])
    return [_DAMPENINGS[index] for index in best]


def _solves_together(systems: Tensor) -> bool:
    """Return whether several systems of one size are solved in one call, because one alone would leave the GPU idle."""
    return systems.is_cuda and systems.shape[-1] <= _SMALL


def _measure_damped(rest: SecondMoments, held: SecondMoments, dense: Tensor, strengths: Sequence[float]) -> list[float]:
    """Return the held-out error of every linear at its dampening strength, minus the target's energy, solved in one batch.

    It is infinite where float64 does not resolve the dampening: float32 sums of strongly correlated inputs are not quite definite.

    :raises ValueError: float32 does not resolve one
    """
    dampening = dense.new_tensor(strengths)[:, None, None]
    systems = rest.gram.clone()
    _view_diagonal(systems).add_(dampening[:, 0])
    cross = rest.cross + dampening * dense
    factor, resolved = _factorize(systems)
    if dense.dtype is torch.float32 and not resolved.all():
        raise ValueError("a dampening must be resolved in float32")
    weight = _solve_factorized(factor, cross.mT).mT
    errors = (weight * (weight @ held.gram - 2 * held.cross)).sum((1, 2), dtype=torch.float64)
    return errors.masked_fill(~resolved, torch.inf).tolist()


def factorize_in_place(system: Tensor, where: Where) -> Tensor:
    """Return the lower Cholesky factor of one or several damped systems, shape [..., n, n], within their own storage.

    :raises ValueError: a system is singular; the message names ``where``
    """
    factor, definite = _factorize(system)
    if not definite.all():
        raise _describe_singular(where, ~definite, math.inf, system.shape[-1] - 1)
    return factor


def _factorize(system: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the lower Cholesky factors of systems, within their own storage; whether each system is positive definite)."""
    factor = system.mT  # the same matrix in column-major order, as LAPACK expects it
    info = torch.empty(system.shape[:-2], dtype=torch.int32, device=system.device)
    torch.linalg.cholesky_ex(factor, out=(factor, info))
    return factor, (info == 0) & factor.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)


def factorize_fast(system: Tensor, where: Where) -> Tensor:
    """Return the lower Cholesky factor of a damped system, shape [..., n, n]; that of a large one in float32, if it solves a probe.

    For choices and trials, not for final weights: float32 takes half the time on a CPU, a thirtieth on most GPUs.

    :raises ValueError: it is singular
    """
    if system.shape[-1] > _EXACT:
        with suppress(ValueError):
            factor = factorize_in_place(system.float(), where)
            probe = _draw(system.shape[-1], 1, system.device)
            left = system @ _solve_factorized(factor, probe.float()).double() - probe
            if left.norm() <= _INEXACT * probe.norm():
                return factor
    return factorize_in_place(system.clone(), where)


def _solve_factorized(factor: Tensor, right: Tensor) -> Tensor:
    """Return ``H^-1 B`` from the Cholesky factor of H; ``torch.cholesky_solve`` would copy it."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def _describe_singular(where: Where, failed: Tensor, condition: float, num_inputs: int) -> ValueError:
    name = where if isinstance(where, str) else where[int(failed.nonzero()[0])]  # of the first linear that failed
    return ValueError(
        f"{name}: the least-squares system must have a condition number of at most {MAX_CONDITION:.0e}, got {condition:.3g} "
        f"({num_inputs} inputs). Raise dampening_frac, or calibrate with more text; if all inputs are 0, add the module to ignore."
    )


def _estimate_condition(factor: Tensor) -> Tensor:
    """Estimate the 2-norm condition number of matrices from their Cholesky factors, by 12 power iterations, shape [...]."""
    measure = partial(torch.linalg.vector_norm, dim=(-2, -1), keepdim=True)
    vector = inverse_vector = factor.new_full((*factor.shape[:-1], 1), factor.shape[-1] ** -0.5)
    for _ in range(12):
        vector = factor @ (factor.mT @ (vector / measure(vector)))
        inverse_vector = _solve_factorized(factor, inverse_vector / measure(inverse_vector))
    return (measure(vector) * measure(inverse_vector)).squeeze((-2, -1))


def sqrt_psd(matrix: Tensor) -> Tensor:
    """Return R such that ``R^T R`` is the given positive semidefinite matrix, shape [d, d], float64.

    R is the Cholesky factor, a hundred times cheaper than eigenvectors, or the symmetric root if the matrix is rank-deficient.
    """
    factor, info = torch.linalg.cholesky_ex(matrix.double())
    if not int(info) and factor.isfinite().all():
        return factor.mT.contiguous()
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
