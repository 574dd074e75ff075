"""Measurements of the whole dense model, made once and passed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Sensitivity:
    """Measurements of the dense model, on the host; empty where not requested.

    :param fisher_sqrt: R with ``R^T R`` the Fisher information of a module's output, by :attr:`UnitGroup.output_name`, shape
        [d, d], float64
    :param saliency: score of every unit from gradients, by group name, for importances that need one, shape [units], float64
    """

    fisher_sqrt: Mapping[str, Tensor] = field(default_factory=dict)
    saliency: Mapping[str, Tensor] = field(default_factory=dict)

    def summarize_fisher(self) -> dict[str, float]:
        """Return the mean diagonal of the Fisher information of every module's output."""
        return {name: float(root.square().sum() / root.shape[-1]) for name, root in self.fisher_sqrt.items()}
