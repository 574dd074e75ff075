"""Targets of a solve, and the dense path that yields them (method.md section 2)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from struprune_plugin.layerwise.calls import LayerCall, States
from struprune_plugin.layerwise.capture import ModuleTensors, measure_rms, record
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext


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
        with record(layer, plain if mixture is None else [*plain, mixture]) as tensors:
            self._states[index] = call.run(layer, self._context, before).map(self._context.offload)
        if before is not None:
            self._context.discard(before.hidden)
        for group in plain:
            if not self._repairs(group):  # for which the stream after the sum is stored
                if self._is_residual(group):
                    wanted = tensors.read_added(group) + tensors.read_residual(group)
                else:
                    wanted = tensors.outputs[group.consumer].float()
                self._wanted[group.name, index] = self._context.offload(wanted)
        if mixture is not None:
            self._wanted[mixture.join.block, index] = self._context.offload(tensors.read_sum(mixture))

    def find_target(self, group: UnitGroup, tensors: ModuleTensors, index: int) -> tuple[Tensor, Tensor | None]:
        """Return a consumer's target, shape [tokens, d], float32, on the device, and factors on the tokens' errors, None for ones.

        The target is the same at every visit of a group; a ``local`` one is its output at the first. A group that is not visited
        again gives up the dense output.
        """
        key, now = (group.name, index), tensors.outputs[group.consumer].float()
        if (missing := self.find_missing(group, tensors, index)) is not None:
            return now + missing[0], missing[1]
        factors = tensors.read_factors(group)
        if key in self._asked:
            return self._context.to_device(self._asked[key], now.device), factors
        wanted = now
        if self.target.is_dense:
            if key not in self._wanted:
                raise ValueError(
                    f"importance: must set `revisits = True` to visit the batches of a group ({group.name}) itself. Add it to "
                    "the class."
                )
            held = self._wanted.pop(key)
            wanted = self._context.to_device(held, now.device)
            self._context.discard(held)
            if self._is_residual(group):
                wanted = wanted - tensors.read_residual(group)
                if group.join.normalizer:  # to first order, what the norm is to give more
                    short = wanted - tensors.read_added(group)
                    wanted = now + measure_rms(now)[:, None] / tensors.read_gain(group) * short
        return self._ask(key, now, wanted, self.target.share), factors

    def find_missing(self, group: UnitGroup, tensors: ModuleTensors, index: int) -> tuple[Tensor, Tensor] | None:
        """Return what a group of a mixture, or of a module beside it, has to add to its sum, so that the stream after it equals
        the dense one, shape [tokens, d], and factors on the tokens' errors, shape [tokens], float32; None where the target is
        another.

        A factor is the inverse RMS of the token's stream, which norms divide by: a text's first token may hold nine tenths of the
        energy.
        """
        if not self._repairs(group):
            return None
        key, now = (group.name, index), tensors.read_sum(group)
        if key in self._asked:
            wanted = self._context.to_device(self._asked[key], now.device)
        else:
            dense = self._context.to_device(self._wanted[group.join.block, index], now.device)
            wanted = self._ask(key, now, dense, 1.0 if self._repairs_all else self.target.share)
        return wanted - now, now.square().mean(1).clamp(min=1e-12).rsqrt()

    def _ask(self, key: tuple[str, int], now: Tensor, wanted: Tensor, share: float) -> Tensor:
        """Return what solves ask of a group on a batch: a share of the way from what it gives now to what is wanted."""
        asked = torch.lerp(now, wanted, share)
        if self._revisits:
            self._asked[key] = self._context.offload(asked)
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
            self._context.discard(held)
        self._wanted.clear()
        self._asked.clear()

    def _repairs(self, group: UnitGroup) -> bool:
        """Return whether a group belongs to experts, or is beside them, and repairs the layer's inherited error."""
        return bool(group.join.block) and self._is_residual(group)

    def _is_residual(self, group: UnitGroup) -> bool:
        """Return whether a group's target is the dense residual stream; where neither a sum nor a norm is known to lie between, it
        is the dense output."""
        return self.target.is_residual and (group.join.is_direct or bool(group.join.normalizer))
