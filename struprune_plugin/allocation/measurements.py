"""Measurements of the whole dense model that a run makes once: its sensitivity to errors, and the saliency of its units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.helpers import DisableQuantization
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.sensitivity import measure_fisher
from struprune_plugin.linalg.solve import sqrt_psd
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.importance import Importance, Sensitivity
from struprune_plugin.runtime.device_context import DeviceContext


@dataclass(frozen=True)
class Asked:
    """Measurements of the dense model that a run needs.

    :param importance: importance whose saliency is measured, if it needs one
    :param samples: sequences for the Fisher information; None where it is not needed
    """

    importance: Importance
    samples: int | None


def measure_sensitivity(
    model: PreTrainedModel,
    loader: Iterable[dict[str, Tensor]],
    groups: Sequence[UnitGroup],
    context: DeviceContext,
    asked: Asked,
    known: Sensitivity | None = None,
) -> Sensitivity:
    """Return the measurements that a run needs; known ones are not repeated.

    :raises ValueError: too little memory for gradients
    """
    known = known or Sensitivity()
    saliency, fisher_sqrt = known.saliency, known.fisher_sqrt
    if asked.importance.gradients and not saliency:
        with context.stage("gradients"):
            saliency = asked.importance.measure(model, loader, groups)
    if asked.samples is not None and not fisher_sqrt:
        with context.stage("sensitivity"), DisableQuantization(model):
            fisher = measure_fisher(model, loader, groups, asked.samples, context)
            fisher_sqrt = {name: _sqrt_psd(matrix, context) for name, matrix in fisher.items()}
    return Sensitivity(fisher_sqrt, saliency)


def _sqrt_psd(matrix: Tensor, context: DeviceContext) -> Tensor:
    """Return the root of a matrix, on the host, computed on the device unless solves run on the host."""
    if context.offload:
        with context.on_host():
            return sqrt_psd(matrix)
    return context.to_host(sqrt_psd(context.to_device(matrix, get_main_device())))
