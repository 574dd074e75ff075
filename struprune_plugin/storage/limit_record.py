"""Manifest record of one budget. This module imports nothing heavy."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LimitRecord:
    """Record of one budget, if others than parameters are given; ``asked``, ``planned`` and ``met`` are in the recipe's terms.

    :param name: ``parameters``, ``bytes``, ``cache``, or ``speedup`` with its phase and engine
    :param met: value of the pruned model; None if it is only known once measured
    :param dense: cost of the model before pruning: parameters, bytes, bytes per token or seconds
    :param fixed: cost that does not depend on the number of kept units, in the same unit
    :param modules: planned cost of every module, in the same unit
    """

    name: str
    asked: float
    planned: float
    met: float | None
    dense: float
    fixed: float
    modules: dict[str, float]
