"""Measure, once, what the whole dense model says of its modules' errors and units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.helpers import DisableQuantization
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.device.room import Room
from struprune_plugin.layer.signals import Signals
from struprune_plugin.maths.solve import find_root
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.passes.saliency import check_gradient_memory, measure_snip
from struprune_plugin.passes.sensitivity import measure_fisher


def measure_signals(
    model: PreTrainedModel,
    loader: Iterable[dict[str, Tensor]],
    groups: Sequence[UnitGroup],
    room: Room,
    gradients: bool,
    sensitivity_samples: int | None,
    known: Signals | None = None,
) -> Signals:
    """Return the signals that a run needs, of which those known already are not measured again.

    :param gradients: whether SNIP's scores are needed
    :param sensitivity_samples: sequences for the Fisher information; None where it is not needed
    :raises ValueError: too little memory for gradients
    """
    known = known or Signals()
    saliency, roots = known.saliency, known.roots
    if gradients and not saliency:
        check_gradient_memory(model, next(iter(loader))["input_ids"].shape)
        with room.stage("gradients"):
            saliency = measure_snip(model, loader, groups)
    if sensitivity_samples is not None and not roots:
        with room.stage("sensitivity"), DisableQuantization(model):
            fisher = measure_fisher(model, loader, groups, sensitivity_samples, room)
            roots = {name: _find_root(matrix, room) for name, matrix in fisher.items()}
    return Signals(roots, saliency)


def _find_root(matrix: Tensor, room: Room) -> Tensor:
    """Return the root, on the host, found on the device unless solves run on the host."""
    if room.placement.solve_on_host:
        with room.on_host():
            return find_root(matrix)
    return room.to_host(find_root(room.to_device(matrix, get_main_device())))
