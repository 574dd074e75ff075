"""Rotation of the values of every head, so that few channels carry what matters, and the order in which channels are removed.

A head's values V and the columns O of the linear that reads them may be rotated by any orthogonal R, ``(R V, O R^T)``,
without changing the function: attention mixes tokens, not channels. Removing a rotated channel removes a
*direction* of the head's value space.

Legend as in ``solve.py``. Columns of the consumer are in unit order, [blocks, width, copies]: blocks are the value heads,
width the channels per head, copies the query heads per value head (1 without grouped queries).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments, select_inputs
from struprune_plugin.linalg.solve import invert_in_place
from struprune_plugin.linalg.ties import MARGIN


@dataclass(frozen=True)
class Rotation:
    """Orthogonal basis of every value head, in the order of removal.

    :param basis: rows are directions, first removed first, shape [blocks, width, width], float64
    :param increase: increase of the least-squares error when every block loses its next direction, shape [width], float64;
        infinite for kept directions
    """

    basis: Tensor
    increase: Tensor


def eliminate_directions(
    damped: SecondMoments, num_blocks: int, copies: int, where: str, num_remove: int | None = None
) -> Rotation:
    """Remove one direction of every block per round, each time the one whose removal raises the re-solved error least.

    Removing direction u of a block means ``W_b u = 0``, which raises ``min_W ||Y - W P||^2`` by
    ``||W_b u||^2 / (u^T (H^-1)_bb u)``: least at the smallest generalised eigenvector of ``(W_b^T W_b, (H^-1)_bb)``, with W the
    current least-squares weights; then W and H^-1 are downdated, all blocks at once. Copies share one direction: it is chosen
    by the sums of both matrices over the copies, and the increase is still exact.
    Source: method.md section 3, ``obs``, with directions in place of columns; the increase is of the sum of squares.

    :param num_remove: directions of every block to remove; None removes all, for curves over every prefix
    """
    size = damped.gram.shape[0] - 1
    pairs = num_blocks * copies
    width = size // pairs
    columns = torch.arange(size, device=damped.gram.device).view(num_blocks, width, copies).mT.flatten()  # copy by copy
    by_copy = select_inputs(damped, columns)
    inverse = invert_in_place(by_copy.gram, where)
    weight = inverse @ by_copy.cross.T
    parts = weight[:-1].view(pairs, width, -1)
    energy = parts @ parts.mT
    # a view, which follows the downdates
    spread = inverse[:-1, :-1].view(pairs, width, pairs, width).diagonal(dim1=0, dim2=2).movedim(2, 0)
    # directions are found on the host: an accelerator's eigenvectors of matrices this small take longer than the host's
    left = torch.eye(width, dtype=inverse.dtype).expand(num_blocks, width, width)
    basis, increases = [], []
    for _ in range(width if num_remove is None else num_remove):
        sums = (part.reshape(num_blocks, copies, width, width).sum(1).cpu() for part in (spread, energy))
        direction = _find_directions(next(sums), next(sums), left)
        basis.append((left @ direction)[..., 0])
        gone = basis[-1].to(inverse.device).repeat_interleave(copies, dim=0)
        increases.append(_remove(inverse, weight, energy, gone))
        left = left @ torch.linalg.qr(direction, mode="complete").Q[..., 1:]
    basis += left.unbind(2)  # kept directions, in any basis
    increases += [inverse.new_tensor(torch.inf)] * left.shape[2]
    return Rotation(torch.stack(basis, dim=1).to(inverse.device), torch.stack(increases))


def _find_directions(spread: Tensor, energy: Tensor, left: Tensor) -> Tensor:
    """Return the cheapest direction of every block, in coordinates of ``left``, shape [blocks, rest, 1], norm 1.

    :param spread: (H^-1)_bb, shape [blocks, width, width]
    :param energy: W_b^T W_b, the same shape
    """
    factor = torch.linalg.cholesky_ex(left.mT @ spread @ left).L
    half = torch.linalg.solve_triangular(factor, left.mT @ energy @ left, upper=False)
    whitened = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    values, vectors = torch.linalg.eigh((whitened + whitened.mT) / 2)
    direction = torch.linalg.solve_triangular(factor.mT, _choose_vector(values, vectors), upper=True)
    return direction / direction.norm(dim=1, keepdim=True)


def _choose_vector(values: Tensor, vectors: Tensor) -> Tensor:
    """Return a vector of every matrix's least eigenvalue, independent of rounding, shape [blocks, rest, 1].

    An eigenvector has no defined sign, and a repeated eigenvalue no defined eigenvectors; only their span is defined. The
    vector is the longest projection of an axis on that span; on a tie, that of the first axis.

    :param values: ascending, shape [blocks, rest]
    :param vectors: in columns, shape [blocks, rest, rest]
    """
    even = values - values[:, :1] <= MARGIN * values.abs().amax(1, keepdim=True)
    span = vectors * even[:, None]
    lengths = span.square().sum(2)  # of every axis' projection, squared
    axis = (lengths >= (1 - MARGIN) * lengths.amax(1, keepdim=True)).byte().argmax(1)
    row = span.gather(1, axis[:, None, None].expand(-1, 1, span.shape[2]))
    return span @ row.mT


def _remove(inverse: Tensor, weight: Tensor, energy: Tensor, gone: Tensor) -> Tensor:
    """Remove one direction of every copy, shape [pairs, width], in place; return the increase of the error.

    :param inverse: H^-1, shape [n + 1, n + 1]
    :param weight: W^T, shape [n + 1, d]
    :param energy: diagonal blocks of ``W^T W``, one per copy, shape [pairs, width, width]
    """
    pairs, width = gone.shape

    def project(matrix: Tensor) -> Tensor:
        return (gone[:, None] @ matrix[:-1].reshape(pairs, width, -1))[:, 0]

    reach, moved = project(inverse), project(weight)
    pivot, lost = project(reach.T), moved @ moved.T
    gain = torch.linalg.solve(pivot, reach)
    # [copies, removed, width]
    part, shared = (rows.view(pairs, pairs, width).movedim(1, 0) for rows in (gain[:, :-1], moved @ weight[:-1].T))
    cross = part.mT @ (shared - lost / 2 @ part)
    energy -= cross + cross.mT
    weight.addmm_(gain.T, moved, alpha=-1)
    inverse.addmm_(gain.T, reach, alpha=-1)
    return torch.linalg.solve(pivot, lost).trace()


def order_directions(rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return (order, scores) of the rotated channels, as :func:`~struprune_plugin.linalg.elimination.order_units` orders units.

    The increase of a round is divided equally among the blocks.
    """
    num_blocks, width = rotation.basis.shape[:2]
    rounds = torch.arange(width, device=rotation.basis.device)
    order = (rounds[:, None] + torch.arange(num_blocks, device=rounds.device) * width).flatten()
    return order, (rotation.increase / num_blocks).repeat(num_blocks)


def rotate_columns(matrix: Tensor, basis: Tensor, copies: int) -> Tensor:
    """Return ``A R^T`` for a matrix over the consumer's inputs and the bias, shape [rows, n + 1], float64."""
    num_blocks, width = basis.shape[:2]
    parts = matrix[:, :-1].reshape(-1, num_blocks, width, copies).permute(1, 0, 3, 2)
    inner = parts.reshape(num_blocks, -1, width) @ basis.mT  # one product per block: thirty times faster than per row
    inner = inner.view(num_blocks, len(matrix), copies, width).permute(1, 0, 3, 2)
    return torch.cat([inner.reshape(len(matrix), -1), matrix[:, -1:]], dim=1)


def rotate_moments(moments: SecondMoments, basis: Tensor, copies: int) -> SecondMoments:
    """Return the moments of rotated inputs; sums of absolute values become NaN."""
    gram = rotate_columns(rotate_columns(moments.gram.double(), basis, copies).T, basis, copies).T
    cross = rotate_columns(moments.cross.double(), basis, copies)
    return SecondMoments(gram, cross, moments.target_energy, torch.full_like(moments.absolute_sum, torch.nan))
