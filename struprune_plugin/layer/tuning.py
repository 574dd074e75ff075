"""Tune all weights of one pruned decoder layer towards the output of the dense one, by gradient descent on that layer alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.offload import remove_dispatch
from llmcompressor.modifiers.utils.hooks import HooksMixin
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from struprune_plugin.device.room import Room
from struprune_plugin.layer.calls import LayerCall, take_hidden
from struprune_plugin.model.layers import QUANTISER_PARAMETERS
from struprune_plugin.model.surgery import set_parameter

_FLOOR = 1e-3  # of a parameter's root mean square, so that a bias of zeros learns too


@dataclass(frozen=True)
class TuningSettings:
    """Fields of the recipe, see :class:`~struprune_plugin.modifiers.pruning.StruPruneModifier`."""

    epochs: int
    learning_rate: float
    holdout: float = 0.125


@dataclass(frozen=True)
class TuningRecord:
    """What the manifest tells of a tuned layer.

    :param holdout: held-out error of every epoch, relative to the energy of the target, epoch 0 first
    :param best_epoch: whose parameters the layer has
    """

    holdout: list[float]
    best_epoch: int


def tune_layer(
    layer: nn.Module,
    calls: Sequence[LayerCall],
    wanted: Sequence[Tensor],
    settings: TuningSettings,
    where: str,
    room: Room,
) -> TuningRecord:
    """Train all parameters of a layer on ``||layer(x) - y||^2`` in float32, and leave those of the best epoch in it.

    Adam with a rate that is relative to each parameter's root mean square and falls along a half cosine; one recorded
    batch a step. The last batches are held out; epoch 0 is the layer as it was.

    :param calls: what the layer is called with on the pruned path
    :param wanted: output of the dense layer on the dense path, one a call, on the host, shape [batch, sequence, d]
    """
    num_held = max(1, round(settings.holdout * len(calls))) if len(calls) > 1 else 0
    pairs = list(zip(calls, wanted, strict=True))
    train, held = pairs[: len(pairs) - num_held], pairs[len(pairs) - num_held :] or pairs
    with HooksMixin.disable_hooks(), torch.enable_grad():
        student = _copy_float(layer, calls[0].device, room)
        parameters = list(student.parameters())
        optimizer = torch.optim.Adam(
            [
                {"params": [p], "lr": 0.0, "scale": max(p.detach().square().mean().sqrt().item(), _FLOOR)}
                for p in parameters
            ]
        )
        curve = [_measure(student, held, room)]
        best, best_epoch = _read_state(student, room), 0
        num_steps, step = settings.epochs * len(train), 0
        for epoch in tqdm(range(1, settings.epochs + 1), desc=f"tuning {where}"):
            for call, target in train:
                rate = settings.learning_rate * 0.5 * (1 + math.cos(math.pi * step / num_steps))
                for group in optimizer.param_groups:
                    group["lr"] = rate * group["scale"]
                loss = _find_loss(student, call, target, room)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                step += 1
            curve.append(_measure(student, held, room))
            if curve[-1] < curve[best_epoch]:
                best, best_epoch = _read_state(student, room), epoch
        student.to("meta")  # hooks hold it in cycles, and its memory with it
    if best_epoch:
        _write_state(layer, best)
    return TuningRecord(curve, best_epoch)


def _copy_float(layer: nn.Module, device: torch.device, room: Room) -> nn.Module:
    """Return a plain float32 copy of a layer, free of the host's offloading and a quantiser's parameters, all of it trainable."""
    student = copy.deepcopy(layer)
    remove_dispatch(student)
    for module in student.modules():
        for name in QUANTISER_PARAMETERS & module._parameters.keys():  # those of one later in the recipe: no values yet
            del module._parameters[name]
    student = student.to(dtype=torch.float32)
    for module in student.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(room.to_device(parameter.detach(), device)))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, room.to_device(buffer, device))
    return student


def _find_loss(student: nn.Module, call: LayerCall, target: Tensor, room: Room) -> Tensor:
    """Return the squared error over the tokens that are no padding, relative to the target's energy."""
    difference, energy = _compare(student, call, target, room)
    return difference.square().sum() / energy


def _compare(student: nn.Module, call: LayerCall, target: Tensor, room: Room) -> tuple[Tensor, Tensor]:
    def widen(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return room.to_device(value, call.device, torch.float32 if value.is_floating_point() else value.dtype)

    output = student(widen(call.hidden), *tree_map(widen, call.args), **tree_map(widen, call.kwargs))
    output = take_hidden(output).flatten(0, -2)
    target = widen(target).flatten(0, -2)
    if call.tokens is not None:
        tokens = room.to_device(call.tokens, output.device)
        output, target = output[tokens], target[tokens]
    return output - target, target.square().sum()


@torch.no_grad()
def _measure(student: nn.Module, pairs: Sequence[tuple[LayerCall, Tensor]], room: Room) -> float:
    parts = [_compare(student, call, target, room) for call, target in pairs]
    return sum(float(d.square().sum()) for d, _ in parts) / max(sum(float(e) for _, e in parts), 1e-300)


def _read_state(student: nn.Module, room: Room) -> dict[str, Tensor]:
    return {name: room.to_host(parameter).clone() for name, parameter in student.named_parameters()}


def _write_state(layer: nn.Module, state: dict[str, Tensor]) -> None:
    """Give a layer new parameters, in their dtype."""
    for name, value in state.items():
        set_parameter(layer, name, value)
