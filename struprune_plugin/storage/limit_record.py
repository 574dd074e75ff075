"""The manifest's record of one budget. This module imports nothing heavy."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LimitRecord:
    """One budget beside parameters alone; ``asked``, ``planned`` and ``met`` are in the recipe's terms.

    :param name: ``parameters``, ``bytes``, ``cache``, or ``speedup`` with its phase and engine
    :param met: by the pruned model itself; None where that is not known before it is measured
    :param dense: what the model took before: parameters, bytes, bytes a token, seconds
    :param fixed: of that, what stays however few units do
    :param modules: what every module is planned to take, the same unit
    """

    name: str
    asked: float
    planned: float
    met: float | None
    dense: float
    fixed: float
    modules: dict[str, float]
