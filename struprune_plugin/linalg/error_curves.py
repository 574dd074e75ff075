"""Errors and weights for every number of kept units along one removal order, from second moments alone.

One Cholesky factor serves all numbers: with units sorted by how long they stay, that of the first k is its leading block.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.second_moments import SecondMoments, take_block, take_columns
from struprune_plugin.linalg.solve import Where, factorize_fast, factorize_in_place


def sum_increases(increases: Tensor) -> Tensor:
    """Return the re-solved error with k = 0 ... units kept, shape [..., units + 1], float64, never increasing.

    The error with all units kept is defined as zero: that of the dense weights against their own output.

    :param increases: increase of the error per removal, first removed first, shape [..., units], float64
    """
    return torch.nn.functional.pad(increases.clamp(min=0).cumsum(-1), (1, 0)).flip(-1)


def measure_restored_curve(damped: SecondMoments, order: Tensor, columns_per_unit: int, where: str) -> Tensor:
    """Return the damped, re-solved error with k = 0 ... units kept, shape [units + 1], float64, never increasing.

    With L the Cholesky factor of H in the reverse of the order, ``E(k) = tr(Y Y^T) - sum_{i <= k} ||(C L^-T)_:i||^2``.
    Source: method.md section 2 (no second pass) and section 5 (``error_curve``).

    :param order: units, first removed first, shape [units]
    """
    rows = _list_rows(order, columns_per_unit)
    factor = factorize_in_place(take_block(damped.gram, rows), where)
    explained = torch.linalg.solve_triangular(factor, damped.cross[:, rows].T, upper=False).square().sum(1)
    return (damped.target_energy - explained.cumsum(0)[::columns_per_unit]).clamp(min=0)


def measure_deletion_curve(damped: SecondMoments, weight: Tensor, order: Tensor, columns_per_unit: int) -> Tensor:
    """Return ``||Y - W_S P_S||^2`` by the number of kept units, with unchanged weights: the curve may rise, shape [units + 1].

    :param weight: shape [d, n + 1], float64, bias last
    """
    rows = _list_rows(order, columns_per_unit)
    weight = weight[:, rows]
    products = damped.gram[rows[:, None], rows].mul_(weight.T @ weight)
    added = 2 * products.tril_().sum(1) - products.diagonal()
    linear = (weight * damped.cross[:, rows]).sum(0)
    return (damped.target_energy + (added - 2 * linear).cumsum(0))[::columns_per_unit].clamp(min=0)


def solve_nested_weights(
    damped: SecondMoments, order: Tensor, columns_per_unit: int, counts: Iterable[int], where: Where
) -> Iterator[tuple[int, Tensor]]:
    """Yield k and the least-squares weights on the last k units of an order, for every k of ``counts``.

    These are zero elsewhere, of shape [..., d, n + 1], float64, bias last; the order is of shape [..., units].
    """
    counts = sorted(counts)
    rows = _list_rows(order, columns_per_unit)[..., : 1 + counts[-1] * columns_per_unit]
    factor = factorize_fast(take_block(damped.gram, rows), where)
    half = torch.linalg.solve_triangular(factor, take_columns(damped.cross, rows).mT.to(factor.dtype), upper=False)
    for count in counts:
        kept = 1 + count * columns_per_unit
        root, columns = factor[..., :kept, :kept].mT, rows[..., None, :kept].expand(*damped.cross.shape[:-1], -1)
        weight = torch.linalg.solve_triangular(root, half[..., :kept, :], upper=True).mT.double()
        yield count, torch.zeros_like(damped.cross).scatter_(-1, columns, weight)


def _list_rows(order: Tensor, columns_per_unit: int) -> Tensor:
    """Return the row indices of H in reverse removal order: the bias first, then the unit that is removed last."""
    columns = unit_columns(order.flip(-1), columns_per_unit)
    return torch.nn.functional.pad(columns, (1, 0), value=columns.shape[-1])
