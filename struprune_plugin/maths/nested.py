"""Re-solve the weights of one linear for many numbers of kept units at once, from moments alone.

Legend as in ``solve.py``. The kept units of a smaller number are among those of a larger one, so that one Cholesky factor, of the
units in the order in which they stay longest, serves all of them: that of the first k is its leading block.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from struprune_plugin.maths.elimination import expand_units
from struprune_plugin.maths.solve import factorize_in_place
from struprune_plugin.maths.statistics import Moments


def solve_nested_weights(
    damped: Moments, order: Tensor, width: int, counts: Iterable[int], where: str
) -> dict[int, Tensor]:
    """Return the least-squares weights on the last k units of an order, for every number k, zeros elsewhere.

    :param damped: from :func:`~struprune_plugin.maths.solve.damp_moments`
    :param order: units, the first to go first, shape [units]
    :param width: columns of a unit
    :param where: name of the linear, for errors
    :return: by k, shape [d, n + 1], float64, bias last
    :raises ValueError: the damped system is singular
    """
    size = damped.gram.shape[0] - 1
    rows = torch.cat([order.new_tensor([size]), expand_units(order.flip(0), width)])  # the bias stays longest
    factor = factorize_in_place(damped.gram[rows[:, None], rows], where)
    half = torch.linalg.solve_triangular(factor, damped.cross[:, rows].T, upper=False)
    found = {}
    for count in counts:
        kept = 1 + count * width
        weight = torch.zeros_like(damped.cross)
        weight[:, rows[:kept]] = torch.linalg.solve_triangular(factor[:kept, :kept].mT, half[:kept], upper=True).T
        found[count] = weight
    return found
