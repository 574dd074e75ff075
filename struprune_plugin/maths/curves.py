"""Error curves: the error for every number of kept units along one order of removal, from moments alone.

Legend as in ``statistics.py``: H gram [n + 1, n + 1], C cross [d, n + 1], W weights [d, n + 1] with the bias last.
Every solve works on *damped* moments (:func:`~struprune_plugin.maths.solve.damp_moments`), in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from struprune_plugin.maths.elimination import expand_units
from struprune_plugin.maths.solve import factorize_in_place
from struprune_plugin.maths.statistics import Moments


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
    factor = factorize_in_place(damped.gram[rows[:, None], rows], where)
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
