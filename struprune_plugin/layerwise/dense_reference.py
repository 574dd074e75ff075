"""Targets of a solve, and the dense path that yields them (method.md section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from struprune_plugin.layerwise.calls import LayerCall, States
from struprune_plugin.layerwise.capture import Seen, Stream, measure_rms, record
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext


@dataclass(frozen=True)
class Repair:
    """Error that a layer's mixture, or a module beside it, has to repair.

    :param error: error to be added to its output, shape [tokens, d], float32
    :param factors: factors on the tokens' errors, shape [tokens], float32
    """

    error: Tensor
    factors: Tensor

    @classmethod
    def of(cls, wanted: Tensor, now: Tensor) -> Repair:
        """Return the difference between two streams; a token's factor is the inverse RMS of its stream, which norms divide by.

        The first token of a text may hold nine tenths of the energy.

        :param wanted: stream of the dense model, shape [tokens, d], float32
        :param now: present stream, shape [tokens, d], float32
        """
        return cls(wanted - now, now.square().mean(1).clamp(min=1e-12).rsqrt())


@dataclass(frozen=True)
class Target:
    """Target of a solve.

    :param is_dense: whether the target is from the dense model, whose path is propagated beside the pruned one, or from the present
        layer on the pruned path
    :param is_residual: whether it is the residual stream after the module, so that inherited error is repaired, or its output
    :param share: share of the way from the present output to that target that a solve asks for
    """

    is_dense: bool
    is_residual: bool
    share: float = 1.0


TARGETS = {  # name in recipes
    "half_residual": Target(is_dense=True, is_residual=True, share=0.5),
    "residual": Target(is_dense=True, is_residual=True),
    "block": Target(is_dense=True, is_residual=False),
    "local": Target(is_dense=False, is_residual=False),
}


class DenseReference:
    """States of the dense model, one decoder layer after the other, and the targets derived from them.

    :param revisits: whether groups are visited more than once, so that their targets are stored
    """

    def __init__(self, target: Target, context: DeviceContext, revisits: bool = False):
        self.target = target
        self._context, self._revisits = context, revisits
        self._repairs_all = False  # whether the layer has lost experts
        # by batch: inputs of the current layer or, once it has run on the batch, its outputs
        self._states: dict[int, States] = {}
        # dense outputs by group, or block of experts, and batch; the residual is not yet subtracted
        self._wanted: dict[tuple[str, int], Tensor] = {}
        self._asked: dict[tuple[str, int], Tensor] = {}  # what solves ask for, by group and batch

    def run(self, layer: nn.Module, groups: Sequence[UnitGroup], call: LayerCall, index: int) -> None:
        """Run the still dense layer on a batch's dense hidden states, and store targets and output.

        :param call: call of the layer on the pruned path, whose hidden states are the dense ones in the first layer
        :param index: of the batch
        """
        if not self.target.is_dense:
            return
        plain, before = [group for group in groups if not group.mixture], self._states.get(index)
        mixture = next((group for group in groups if self._repairs(group)), None)
        with record(layer, plain if mixture is None else [*plain, mixture]) as seen:
            self._states[index] = call.run(layer, self._context, before).map(self._context.park)
        if before is not None:
            self._context.release(before.hidden)
        for group in plain:
            if not self._repairs(group):  # for which the stream after the sum is stored
                stream = seen.read(group)
                wanted = stream.output.float()
                if self._is_residual(group):
                    added = wanted if stream.normed is None else stream.normed
                    wanted = added + _read_residual(group, stream)
                self._wanted[group.name, index] = self._context.park(wanted)
        if mixture is not None:
            self._wanted[mixture.join.block, index] = self._context.park(seen.read_sum(mixture))

    def find_target(self, group: UnitGroup, stream: Stream, index: int) -> Tensor:
        """Return a consumer's target, the same at every visit of a group; a ``local`` target is its output at the first one.

        A group that is not visited again gives up the dense output.

        :return: shape [tokens, d], float32, on the device
        """
        key, now = (group.name, index), stream.output.float()
        if key in self._asked:
            return self._context.to_device(self._asked[key], now.device)
        wanted = now
        if self.target.is_dense:
            if key not in self._wanted:
                raise ValueError(
                    f"importance: must set `revisits = True` to visit the batches of a group ({group.name}) itself. Add it to "
                    "the class."
                )
            held = self._wanted.pop(key)
            wanted = self._context.to_device(held, now.device)
            self._context.release(held)
            if self._is_residual(group):
                wanted = wanted - _read_residual(group, stream)
                if (
                    stream.normed is not None and stream.gain is not None
                ):  # to first order, what the norm is to give more
                    wanted = now + measure_rms(now)[:, None] / stream.gain * (wanted - stream.normed)
        return self._ask(key, now, wanted, self.target.share)

    def find_repair(self, group: UnitGroup, seen: Seen, index: int) -> Repair | None:
        """Return the error that experts have to add to their sum, so that the stream after it equals the dense one; None where the
        targets are the present outputs.

        :param group: a group of an expert, or of a module beside the experts
        """
        if not self._repairs(group):
            return None
        key, now = (group.name, index), seen.read_sum(group)
        if key in self._asked:
            return Repair.of(self._context.to_device(self._asked[key], now.device), now)
        wanted = self._context.to_device(self._wanted[group.join.block, index], now.device)
        return Repair.of(self._ask(key, now, wanted, 1.0 if self._repairs_all else self.target.share), now)

    def _ask(self, key: tuple[str, int], now: Tensor, wanted: Tensor, share: float) -> Tensor:
        """Return what solves ask of a group on a batch: a share of the way from what it gives now to what is wanted."""
        asked = torch.lerp(now, wanted, share)
        if self._revisits:
            self._asked[key] = self._context.park(asked)
        return asked

    def repair_all(self, groups: Sequence[UnitGroup]) -> None:
        """Let experts make up for all of the layer's error: what removed experts leave is not inherited from layers before.

        :param groups: groups of the layer before the removal
        """
        self._repairs_all = True
        names = {group.name for group in groups if group.join.block}
        self._asked = {key: asked for key, asked in self._asked.items() if key[0] not in names}

    def finish_layer(self) -> None:
        """Drop the layer's targets; its outputs become the next layer's inputs."""
        self._repairs_all = False
        for held in self._wanted.values():
            self._context.release(held)
        self._wanted.clear()
        self._asked.clear()

    def _repairs(self, group: UnitGroup) -> bool:
        """Return whether a group belongs to experts, or is beside them, and repairs the layer's inherited error."""
        return bool(group.join.block) and self._is_residual(group)

    def _is_residual(self, group: UnitGroup) -> bool:
        """Return whether a group's target is the dense residual stream; where neither a sum nor a norm is known to lie between, it
        is the dense output."""
        return self.target.is_residual and (group.join.is_direct or bool(group.join.normalizer))


def _read_residual(group: UnitGroup, stream: Stream) -> Tensor:
    """Return the residual stream in units of what is added to it, shape [tokens, d], float32."""
    residual = stream.residual.float()
    return residual if group.join.scale == 1 else residual / group.join.scale
