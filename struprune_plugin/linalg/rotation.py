"""Rotation of the values of every head, so that few channels carry what matters, and the order in which channels are removed.

A head's values V and the columns O of the linear that reads them may be rotated by any orthogonal R, ``(R V, O R^T)``, without
changing the function. Removing a rotated channel removes a *direction* of the head's value space.
Columns of the consumer are in unit order, [blocks, width, copies]: blocks are the value heads, width the channels per head,
copies the query heads per value head.
"""

import torch
from torch import Tensor

from struprune_plugin.linalg.elimination import RankedUnits
from struprune_plugin.linalg.second_moments import SecondMoments, stack
from struprune_plugin.linalg.solve import Where, factorize_in_place

_PREFERENCE = 1e-6  # the last channel counts as dearer than the first by this share, so that rounding decides no tie


def find_directions(damped: SecondMoments, num_blocks: int, copies: int, where: Where) -> RankedUnits:
    """Return an orthogonal basis of every head whose first directions cost least to remove, and the order of the directions.

    The score of a direction is the increase of the least-squares error at its removal, if the blocks lose one each in turn.
    Removing the directions U of one block means ``W_b U = 0``, which raises ``min_W ||Y - W P||^2`` by
    ``tr[(U^T W_b^T W_b U) (U^T (H^-1)_bb U)^-1]``, with W the least-squares weights. Whatever their number, the span of the first
    generalised eigenvectors of ``(W_b^T W_b, (H^-1)_bb)`` costs least: one eigendecomposition orders all directions of a block.
    That the other blocks lose directions, too, is left out of the choice, not of the increase. Copies share one direction: both
    matrices are summed over them.
    Source: method.md section 3, ``obs``, with directions in place of columns; the increase is of the sum of squares.

    :param damped: of one linear, or of several of one shape, each worked on alone
    :raises ValueError: H is singular
    """
    if damped.gram.dim() > 2:
        linears = zip(*vars(damped).values(), where, strict=True)
        ranked = [find_directions(SecondMoments(*sums), num_blocks, copies, name) for *sums, name in linears]
        return RankedUnits(*(stack([getattr(each, name) for each in ranked]) for name in ("order", "scores", "basis")))
    width = (len(damped.gram) - 1) // (num_blocks * copies)
    inverse = factorize_in_place(damped.gram.clone(), where)
    torch.cholesky_inverse(inverse, out=inverse)
    weight = damped.cross @ inverse
    parts = weight[:, :-1].T.reshape(num_blocks, width, -1)
    spread = inverse[:-1, :-1].view(num_blocks, width, copies, num_blocks, width, copies)
    spread = spread.diagonal(dim1=0, dim2=3).diagonal(dim1=1, dim2=3).sum(-1).movedim(2, 0)
    basis = _order_span(parts @ parts.mT, spread)
    inverse, weight = (rotate_columns(part, basis, copies) for part in (inverse, weight))
    inverse = rotate_columns(inverse.T, basis, copies)
    columns = torch.arange(len(inverse) - 1, device=inverse.device).view(num_blocks, width, copies)
    rounds = columns.transpose(0, 1).flatten()  # one direction of every block a round, its copies side by side
    factor = factorize_in_place(inverse[rounds[:, None], rounds], where)
    paid = torch.linalg.solve_triangular(factor, weight[:, rounds].T, upper=False).square().sum(1)
    increase = paid.view(width, num_blocks, copies).sum(2).T
    directions = torch.arange(num_blocks * width, device=basis.device).view(num_blocks, width)
    return RankedUnits(directions.T.flatten(), increase.flatten(), basis)


def _order_span(energy: Tensor, spread: Tensor) -> Tensor:
    """Return orthonormal rows whose first k span the k least generalised eigenvectors of (W_b^T W_b, (H^-1)_bb), for every k."""
    width = energy.shape[-1]
    scale = energy.diagonal(dim1=1, dim2=2).mean()
    prefer = torch.linspace(0, _PREFERENCE, width, dtype=energy.dtype, device=energy.device)
    energy = energy + torch.diag(prefer * scale)
    factor = torch.linalg.cholesky_ex(spread).L
    half = torch.linalg.solve_triangular(factor, energy, upper=False)
    whitened = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    vectors = torch.linalg.eigh((whitened + whitened.mT) / 2).eigenvectors
    basis = torch.linalg.qr(torch.linalg.solve_triangular(factor.mT, vectors, upper=True)).Q.mT
    largest = basis.abs().argmax(2, keepdim=True)  # a direction has no sign of its own
    return (basis * basis.gather(2, largest).sign()).contiguous()


def rotate_columns(matrix: Tensor, basis: Tensor, copies: int) -> Tensor:
    """Return ``A R^T`` for a matrix over the consumer's inputs and the bias, shape [..., rows, n + 1], float64."""
    if matrix.dim() > 2:
        return stack([rotate_columns(*pair, copies) for pair in zip(matrix, basis, strict=True)])
    num_blocks, width = basis.shape[:2]
    parts = matrix[:, :-1].reshape(-1, num_blocks, width, copies).permute(1, 0, 3, 2)
    inner = parts.reshape(num_blocks, -1, width) @ basis.mT  # one product per block: thirty times faster than per row
    inner = inner.view(num_blocks, len(matrix), copies, width).permute(1, 0, 3, 2)
    return torch.cat([inner.reshape(len(matrix), -1), matrix[:, -1:]], dim=1)


def rotate_moments(moments: SecondMoments, basis: Tensor, copies: int) -> SecondMoments:
    """Return the moments of rotated inputs; sums of absolute values become NaN."""
    gram = rotate_columns(rotate_columns(moments.gram.double(), basis, copies).mT, basis, copies).mT
    cross = rotate_columns(moments.cross.double(), basis, copies)
    return SecondMoments(gram, cross, moments.target_energy, torch.full_like(moments.absolute_sum, torch.nan))
