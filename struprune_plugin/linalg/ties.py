"""Choices that do not depend on rounding: values that differ by less than a margin tie, and the first one wins.

The last digits of a sum depend on the order of its terms, and thus on the processor and the number of threads. Among identical
units (copies, dead inputs) these digits alone would decide.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-7}  # relative error of a sum: smaller parts of it are rounding
MARGIN = 1e-9  # relative; above the rounding of float64 solves, far below any difference that matters


def argmin_with_ties(values: Sequence[float], margin: float = 0.0) -> int:
    """Return the index of the first value that exceeds the least by no more than an absolute margin, plus its :data:`MARGIN`."""
    least = min(values)
    most = least + margin + MARGIN * abs(least)
    return next((i for i, value in enumerate(values) if value == least or value <= most), 0)


def order_scores(scores: Tensor) -> Tensor:
    """Return the order by score along the last dimension, int64; ties go by index. Scores may be infinite.

    Neighbours in the sorted row tie where they differ by no more than :data:`MARGIN` of the larger one.
    """
    values, order = torch.sort(scores, dim=-1, stable=True)
    low, high = values[..., :-1], values[..., 1:]
    larger = torch.maximum(high.abs(), low.abs())
    ties = (low == high) | (((high - low).abs() <= MARGIN * larger) & (larger < torch.inf))
    rank = torch.nn.functional.pad((~ties).long().cumsum(-1), (1, 0))
    return torch.empty_like(rank).scatter_(-1, order, rank).argsort(dim=-1, stable=True)


def round_off(value: float) -> float:
    """Return a number rounded to nine significant digits, as a sort key."""
    return float(f"{value:.8e}")
