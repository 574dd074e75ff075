"""Choices that rounding does not sway: what differs by less than a margin is a tie, and the first of those that tie wins.

The last digits of a sum depend on the order of its terms, and that on the processor and the number of threads. Among units that
are truly alike (copies, dead inputs) they alone would decide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-7}  # of a sum: below it its small parts are rounding
MARGIN = 1e-9  # relative; above the rounding of float64 solves, far below any difference that matters


def argmin_with_ties(values: Sequence[float], margin: float = 0.0) -> int:
    """Return the index of the first value that exceeds the least by no more than a margin.

    :param values: at least one
    :param margin: absolute, at least 0; :data:`MARGIN` of the least comes on top
    """
    least = min(values)
    most = least + margin + MARGIN * abs(least)
    return next((i for i, value in enumerate(values) if value == least or value <= most), 0)


def argmin_tensor_with_ties(costs: Tensor, margin: Tensor | float = 0.0) -> int:
    """Return the flat index of the first entry that exceeds the least by no more than a margin, without a loop.

    Parameters as in :func:`argmin_with_ties`; the least is finite.
    """
    least = costs.min()
    most = torch.add(least + margin, least.abs(), alpha=MARGIN)
    return int((costs <= most).view(torch.uint8).argmax())


def order_scores(scores: Tensor, descending: bool = False) -> Tensor:
    """Order by score along the last dimension; scores that tie go by index.

    Neighbours in the sorted row tie where they differ by no more than :data:`MARGIN` of the larger one.

    :param scores: shape [..., n]; may hold infinities
    :return: indices, the same shape, int64
    """
    values, order = torch.sort(scores, dim=-1, descending=descending, stable=True)
    low, high = values[..., :-1], values[..., 1:]
    close = (high - low).abs() <= MARGIN * torch.maximum(high.abs(), low.abs())  # of an infinity to anything
    ties = (low == high) | (close & low.isfinite() & high.isfinite())
    rank = torch.nn.functional.pad((~ties).long().cumsum(-1), (1, 0))
    return torch.empty_like(rank).scatter_(-1, order, rank).argsort(dim=-1, stable=True)


def round_off(value: float) -> float:
    """Return a number to nine significant digits, as a key to sort by."""
    return float(f"{value:.8e}")
