"""Least-squares solves of the remaining weights, from second moments alone.

Legend: H gram [n + 1, n + 1], C cross [d, n + 1], W weights [d, n + 1] with the bias last.
Every solve works on ``damped`` moments (:func:`damp_moments`), in float64; ``where`` names the linear in errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments, select_inputs, subtract_moments
from struprune_plugin.linalg.ties import argmin_with_ties

MAX_CONDITION = 1e12  # beyond it a float64 solve keeps fewer than four digits
DAMPING = 0.01  # where none is chosen
_EVEN = 1e-6  # share of the target's energy: smaller differences are rounding of float32 sums, or irrelevant
_SMALL = 1024  # inputs up to which a system counts as small
_INEXACT = 0.01  # relative residual of a probe that a float32 factor may leave
_DIRECTIONS = 64  # random directions of the outputs for held-out errors, where there are many more outputs
_DAMPINGS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)  # candidates


@dataclass(frozen=True)
class SolvedWeights:
    """Weights re-solved on the kept inputs.

    :param weight: shape [d, k + 1], float64, bias last
    :param condition_number: estimate of the 2-norm condition number of the damped system
    """

    weight: Tensor
    condition_number: float


def damp_moments(moments: SecondMoments, weight: Tensor, damping: float, has_bias: bool = True) -> SecondMoments:
    """Return moments damped towards the given weights, with strength ``lambda = damping * mean(diag H)``.

    They are ``H + lambda I``, ``C + lambda W`` and ``tr(Y Y^T) + lambda ||W||^2``, the bias undamped. The minimiser of the
    damped error is that of ``||Y - W' P||^2 + lambda ||W' - W||^2``; elimination, error curves and solves use the damped
    moments alone.
    Differs from the source: method.md section 6 damps towards zero, which shrinks every solve; damped towards the dense
    weights, an unpruned layer with a local target stays unchanged.

    :param weight: dense weights, shape [d, n + 1], float64, bias last
    :param damping: at least 0, relative to the mean diagonal of H
    :param has_bias: False for a linear without bias: every solve then gives a bias of 0
    :return: float64 moments
    """
    gram, cross = (part.to(torch.float64, copy=True) for part in (moments.gram, moments.cross))
    strength = damping * gram.diagonal()[:-1].mean()
    gram.diagonal()[:-1].add_(strength)
    cross[:, :-1].add_(strength * weight[:, :-1])
    if not has_bias:
        _uncouple_bias(gram, cross)
    energy = moments.target_energy + strength * weight[:, :-1].square().sum()
    return SecondMoments(gram, cross, energy, moments.absolute_sum)


def _uncouple_bias(gram: Tensor, cross: Tensor) -> None:
    """Change moments, in place, so that every solve gives a bias of 0."""
    gram[-1], gram[:, -1], cross[:, -1] = 0, 0, 0
    gram[-1, -1] = 1


def weigh_outputs(damped: SecondMoments, root: Tensor, weight: Tensor) -> SecondMoments:
    """Return moments under which an error e of the output counts as ``||R e||^2``.

    The re-solved weights do not depend on R (they become R W); the choice of units and its error do. The energy is that of the
    target that the given weights reproduce exactly, ``tr(R C W^T R^T)``: the ``local`` target, where C is W H. For other
    targets it is off by a constant, which changes no order.

    :param root: R, shape [d, d], float64
    :param weight: dense weights, shape [d, n + 1], float64, bias last
    """
    cross = root @ damped.cross
    return replace(damped, cross=cross, target_energy=(cross * (root @ weight)).sum())


def solve_kept_weights(damped: SecondMoments, columns: Tensor, where: str) -> SolvedWeights:
    """Solve ``W = C_S H_SS^-1`` on the kept inputs S and the bias, by Cholesky.

    Source: method.md section 6, ``least_squares``.

    :param columns: kept input columns, sorted, shape [k], int64
    :raises ValueError: the damped system is singular or its condition number exceeds 1e12
    """
    kept = select_inputs(damped, columns)
    factor = factorize_in_place(kept.gram, where)
    condition = _estimate_condition(factor)
    if not condition <= MAX_CONDITION:
        raise _describe_singular(where, condition, len(columns))
    weight = _solve_factorized(factor, kept.cross.T).T
    return SolvedWeights(weight.contiguous(), condition)


def scale_weights(moments: SecondMoments, weight: Tensor, columns: Tensor) -> tuple[Tensor, float]:
    """Return the weights of the kept inputs times the factor of least error, and that factor, in [0.5, 2].

    Used for a module with too few tokens for a solve.

    :param weight: dense weights of the kept inputs, shape [d, k + 1], float64, bias last
    :param columns: kept input columns, sorted, shape [k], int64
    """
    kept = select_inputs(moments, columns)
    given = float((weight * (weight @ kept.gram.double())).sum())
    factor = float((weight * kept.cross.double()).sum()) / given if given > 0 else 1.0
    factor = min(max(factor, 0.5), 2.0)
    return weight * factor, factor


def choose_damping(
    moments: SecondMoments, held: SecondMoments, weight: Tensor, columns: Tensor, has_bias: bool, where: str
) -> float:
    """Return the damping of least error on the held-out tokens, solved on the other ones; on a tie, the lowest.

    :param moments: moments of all tokens
    :param held: moments of the held-out part of them
    :param weight: dense weights, shape [d, n + 1], float64, bias last
    :param columns: kept input columns, sorted, shape [k]
    """
    scale = float((moments.gram.diagonal()[:-1].double() - held.gram.diagonal()[:-1]).mean())
    held = select_inputs(held, columns)
    held = replace(held, gram=held.gram.double(), cross=held.cross.double())
    rest = subtract_moments(select_inputs(moments, columns), held)
    if not has_bias:
        _uncouple_bias(rest.gram, rest.cross)
    dense = torch.nn.functional.pad(weight[:, columns], (0, 1))  # the bias is not damped
    if len(dense) > 4 * _DIRECTIONS:  # errors are sums over outputs: a few directions suffice to compare
        some = _draw(_DIRECTIONS, len(dense), dense.device) / _DIRECTIONS**0.5
        rest, held = (replace(part, cross=some @ part.cross) for part in (rest, held))
        dense = some @ dense
    if len(rest.gram) > _SMALL:
        single = [replace(part, gram=part.gram.float(), cross=part.cross.float()) for part in (rest, held)]
        with suppress(ValueError):  # float32 cannot resolve a small damping
            return _search_damping(single[0], single[1], dense.float(), scale, where)
    return _search_damping(rest, held, dense, scale, where)


@lru_cache(4)
def _draw(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """Return normal random numbers, the same in every run, shape [rows, columns], float64."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64).to(device)


def _search_damping(rest: SecondMoments, held: SecondMoments, dense: Tensor, scale: float, where: str) -> float:
    """Return the damping of least held-out error; parameters as in :func:`_measure_damped`.

    :param scale: strength of a damping of 1
    """

    def measure(dampings: Sequence[float]) -> list[float]:
        strengths = [damping * scale for damping in dampings]
        together = len(strengths) if _solves_together(rest.gram) else 1
        parts = (strengths[start : start + together] for start in range(0, len(strengths), together))
        return [error for part in parts for error in _measure_damped(rest, held, dense, part, where)]

    return _descend(measure, margin=_EVEN * float(held.target_energy))


def _solves_together(system: Tensor) -> bool:
    """Return whether several systems of one size are solved in one call, because one alone would leave the GPU idle."""
    return system.is_cuda and len(system) <= _SMALL


def _measure_damped(
    rest: SecondMoments, held: SecondMoments, dense: Tensor, strengths: Sequence[float], where: str
) -> list[float]:
    """Return the held-out error at every damping strength, minus the target's energy, solved in one batch.

    It is infinite where float64 does not resolve the damping: float32 sums of strongly correlated inputs are not quite definite.

    :param dense: dense weights of these inputs with a bias of 0, shape [d, k + 1]
    :raises ValueError: float32 does not resolve a damping
    """
    damping = dense.new_tensor(strengths)[:, None, None]
    systems = rest.gram.repeat(len(strengths), 1, 1)
    systems.diagonal(dim1=1, dim2=2)[:, :-1].add_(damping[:, 0])
    cross = rest.cross + damping * dense
    factor, resolved = _factorize(systems)
    if dense.dtype is torch.float32 and not resolved.all():
        raise _describe_singular(where, float("inf"), dense.shape[1] - 1)
    weight = _solve_factorized(factor, cross.mT).mT
    errors = (weight * (weight @ held.gram - 2 * held.cross)).sum((1, 2), dtype=torch.float64)
    return errors.masked_fill(~resolved, torch.inf).tolist()


def _descend(measure: Callable[[Sequence[float]], list[float]], margin: float) -> float:
    """Return the damping of least error, the lowest on a tie: the best of a coarse grid, then of its neighbours.

    The error falls and rises once along the dampings, so that not all are measured: first two strong ones; if the weaker of
    them is better, every second weaker one.
    """
    errors: dict[int, float] = {}

    def add(indices: Sequence[int]) -> int:
        """Measure the dampings at these indices; return the index of the best so far."""
        errors.update(zip(indices, measure([_DAMPINGS[index] for index in indices]), strict=True))
        known = sorted(errors)
        return known[argmin_with_ties([errors[index] for index in known], margin)]

    last = len(_DAMPINGS) - 1
    best = add([last, last - 2])
    if best < last:
        best = add(range(last - 4, -1, -2))
    return _DAMPINGS[add([index for index in (best - 1, best + 1) if 0 <= index <= last])]


def factorize_in_place(system: Tensor, where: str) -> Tensor:
    """Return the lower Cholesky factor of one or several damped systems, within their own storage.

    :param system: shape [..., n, n]
    :raises ValueError: a system is singular; the message names ``where``
    """
    size = system.shape[-1]
    alive = (system.diagonal(dim1=-2, dim2=-1) > 0).sum(-1)
    factor, definite = _factorize(system)
    if not definite.all():
        if int(alive.min()) <= 1 < size:  # only the bias is nonzero
            raise ValueError(
                f"{where}: inputs must not all be zero on the calibration data, got {size - 1} inputs that are: units are dead, or "
                "no token reaches them. Add the module to ignore, or calibrate with other text."
            )
        raise _describe_singular(where, float("inf"), size - 1)
    return factor


def _factorize(system: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the lower Cholesky factors of systems, within their own storage; whether each system is positive definite)."""
    factor = system.mT  # the same matrix in column-major order, as LAPACK expects it
    info = torch.empty(system.shape[:-2], dtype=torch.int32, device=system.device)
    torch.linalg.cholesky_ex(factor, out=(factor, info))
    return factor, (info == 0) & factor.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)


def factorize_fast(system: Tensor, where: str) -> Tensor:
    """Return the lower Cholesky factor of a damped system; that of a large one in float32, if it solves a probe.

    Used for choices and trials, not for final weights: float32 takes half the time on a CPU, a thirtieth on most GPUs.

    :param system: shape [..., n, n], float64; not modified
    :raises ValueError: it is singular
    """
    if system.shape[-1] > _SMALL:
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


def _describe_singular(where: str, condition: float, num_inputs: int) -> ValueError:
    return ValueError(
        f"{where}: the least-squares system must have a condition number of at most {MAX_CONDITION:.0e}, "
        f"got {condition:.3g} ({num_inputs} inputs). Raise dampening_frac, or calibrate with more text."
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


def sqrt_psd(matrix: Tensor) -> Tensor:
    """Return R such that ``R^T R`` is the given positive semidefinite matrix, shape [d, d], float64.

    R is the Cholesky factor, a hundred times cheaper than eigenvectors, or the symmetric root if the matrix is rank-deficient.
    """
    factor, info = torch.linalg.cholesky_ex(matrix.double())
    if not int(info) and factor.isfinite().all():
        return factor.mT.contiguous()
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
