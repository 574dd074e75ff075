"""Shapes of calibration batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def find_largest_shape(batches: Iterable[Mapping[str, Tensor]]) -> torch.Size:
    """Return the most sequences and the most tokens per sequence of any batch."""
    return torch.Size(map(max, zip(*(batch["input_ids"].shape for batch in batches), strict=True)))
