"""Re-solve the weights that remain, from moments alone.

Legend: H gram [n + 1, n + 1], C cross [d, n + 1], W weights [d, n + 1] with the bias last.
Every solve works on ``damped`` moments (:func:`damp_moments`), in float64; ``where`` names the linear in errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments, select_inputs, subtract_moments
from struprune_plugin.linalg.ties import argmin_with_ties

MAX_CONDITION = 1e12  # beyond it a float64 solve keeps fewer than four digits
DAMPING = 0.01  # where none was chosen
_EVEN = 1e-6  # of the target's energy: what differs by less is rounding of float32 sums, or does not matter
_SMALL = 1024  # inputs
_INEXACT = 0.01  # of a probe: what a factor in float32 may leave of it
_DIRECTIONS = 64  # of the outputs, at random, that held-out errors are measured in where there are many more
_DAMPINGS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)  # to choose among


@dataclass(frozen=True)
class SolvedWeights:
    """Weights re-solved on the kept inputs.

    :param weight: shape [d, k + 1], float64, bias last
    :param condition_number: estimate of the 2-norm condition number of the damped system
    """

    weight: Tensor
    condition_number: float


def damp_moments(moments: SecondMoments, weight: Tensor, damping: float, has_bias: bool = True) -> SecondMoments:
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
    return SecondMoments(gram, cross, energy, moments.absolute_sum)


def _uncouple_bias(gram: Tensor, cross: Tensor) -> None:
    """Make every solve give a bias of 0, in place."""
    gram[-1], gram[:, -1], cross[:, -1] = 0, 0, 0
    gram[-1, -1] = 1


def weigh_outputs(damped: SecondMoments, root: Tensor, weight: Tensor) -> SecondMoments:
    """Return moments under which an error e of the output counts as ``||R e||^2``.

    The re-solved weights do not depend on R (theirs are R W); which units should go, and the error of a choice, do. The
    energy is that of the target that the given weights reproduce exactly, ``tr(R C W^T R^T)``: the ``local`` one, of which C is
    W H. For other targets it is off by a constant, which changes no order.

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
    """Return the weights of the kept inputs times the factor that leaves the least error, and the factor, in [0.5, 2].

    For a module that saw too few tokens to be solved.

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
    """Return the damping whose solve on the other tokens has the least error on the held-out ones, the lowest of those that tie.

    :param moments: of all tokens
    :param held: of a part of them
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
    if len(dense) > 4 * _DIRECTIONS:  # errors are sums over outputs: a few directions tell which is less
        some = _draw(_DIRECTIONS, len(dense), dense.device) / _DIRECTIONS**0.5
        rest, held = (replace(part, cross=some @ part.cross) for part in (rest, held))
        dense = some @ dense
    if len(rest.gram) > _SMALL:
        single = [replace(part, gram=part.gram.float(), cross=part.cross.float()) for part in (rest, held)]
        with suppress(ValueError):  # a damping that float32 cannot tell from none
            return _search_damping(single[0], single[1], dense.float(), scale, where)
    return _search_damping(rest, held, dense, scale, where)


def _draw(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """Return normal numbers that are the same in every run, shape [rows, columns], float64."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64).to(device)


def _search_damping(rest: SecondMoments, held: SecondMoments, dense: Tensor, scale: float, where: str) -> float:
    """Return the damping of least held-out error; parameters as in :func:`_measure_damped`.

    :param scale: strength of a damping of one
    """

    def measure(dampings: Sequence[float]) -> list[float]:
        strengths = [damping * scale for damping in dampings]
        together = len(strengths) if _solves_together(rest.gram) else 1
        parts = (strengths[start : start + together] for start in range(0, len(strengths), together))
        return [error for part in parts for error in _measure_damped(rest, held, dense, part, where)]

    return _descend(measure, margin=_EVEN * float(held.target_energy))


def _solves_together(system: Tensor) -> bool:
    """Return whether several systems of one size are solved in one call: where each by itself would leave a card idle."""
    return system.is_cuda and len(system) <= _SMALL


def _measure_damped(
    rest: SecondMoments, held: SecondMoments, dense: Tensor, strengths: Sequence[float], where: str
) -> list[float]:
    """Return the held-out error of every solve, damped by so much, less the target's energy, in one batch.

    :param dense: dense weights of these inputs, that of the bias zero, shape [d, k + 1]
    """
    damping = dense.new_tensor(strengths)[:, None, None]
    systems = rest.gram.repeat(len(strengths), 1, 1)
    systems.diagonal(dim1=1, dim2=2)[:, :-1].add_(damping[:, 0])
    cross = rest.cross + damping * dense
    weight = _solve_factorized(factorize_in_place(systems, where), cross.mT).mT
    return (weight * (weight @ held.gram - 2 * held.cross)).sum((1, 2), dtype=torch.float64).tolist()


def _descend(measure: Callable[[Sequence[float]], list[float]], margin: float) -> float:
    """Return the damping of least error, the lowest of those that tie: the best of a few far apart, then its neighbours.

    The error falls and rises once along the dampings, so that some need no measuring: from the strongest down, two far apart at a
    time, until the best so far is not the lowest that was measured.
    """
    errors: dict[int, float] = {}

    def add(indices: Sequence[int]) -> int:
        """Measure these; return the best so far."""
        errors.update(zip(indices, measure([_DAMPINGS[index] for index in indices]), strict=True))
        known = sorted(errors)
        return known[argmin_with_ties([errors[index] for index in known], margin)]

    last = len(_DAMPINGS) - 1
    best = add([last, last - 2])
    if best < last:
        best = add(range(last - 4, -1, -2))
    return _DAMPINGS[add([index for index in (best - 1, best + 1) if 0 <= index <= last])]


def factorize_in_place(system: Tensor, where: str) -> Tensor:
    """Return the lower Cholesky factor of a damped system, or of several, within its own storage, or raise with its name.

    :param system: shape [..., n, n]
    """
    size = system.shape[-1]
    alive = (system.diagonal(dim1=-2, dim2=-1) > 0).sum(-1)
    factor = system.mT  # the same matrix, by columns, as LAPACK wants it
    info = torch.empty(system.shape[:-2], dtype=torch.int32, device=system.device)
    torch.linalg.cholesky_ex(factor, out=(factor, info))
    if not ((info == 0) & factor.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)).all():
        if int(alive.min()) <= 1 < size:  # no input but the bias was ever other than zero
            raise ValueError(
                f"{where}: inputs must not all be zero on the calibration data, got {size - 1} that are: units are dead, or "
                "nothing reaches them. Leave the module out by ignore, or calibrate with other text."
            )
        raise _describe_singular(where, float("inf"), size - 1)
    return factor


def factorize_fast(system: Tensor, where: str) -> Tensor:
    """Return the lower Cholesky factor of a damped system: of a large one in float32, where that solves a probe.

    For choices and trials, not for weights that are kept: float32 takes half the seconds on a CPU, a thirtieth on most cards.

    :param system: shape [n, n], float64; stays as it is
    :raises ValueError: it is singular
    """
    if len(system) > _SMALL:
        with suppress(ValueError):
            factor = factorize_in_place(system.float(), where)
            probe = _draw(len(system), 1, system.device)
            left = system @ _solve_factorized(factor, probe.float()).double() - probe
            if left.norm() <= _INEXACT * probe.norm():
                return factor
    return factorize_in_place(system.clone(), where)


def _solve_factorized(factor: Tensor, right: Tensor) -> Tensor:
    """Return ``H^-1 B`` from the Cholesky factor of H; ``torch.cholesky_solve`` would copy it."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def invert_in_place(gram: Tensor, where: str) -> Tensor:
    """Return the inverse of a damped Gram matrix within its own storage.

    :raises ValueError: it is singular; the message names ``where``
    """
    factor = factorize_in_place(gram, where)
    return torch.cholesky_inverse(factor, out=factor)


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
    """Return R with ``R^T R`` a positive semidefinite matrix, shape [d, d], float64.

    The Cholesky factor, a hundred times cheaper than eigenvectors; the symmetric root where the matrix has no full rank.
    """
    factor, info = torch.linalg.cholesky_ex(matrix.double())
    if not int(info) and factor.isfinite().all():
        return factor.mT.contiguous()
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
