"""Targets of a solve, and the dense path that yields them (method.md section 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from struprune_plugin.layerwise.calls import LayerCall, States
from struprune_plugin.layerwise.capture import Stream, capture_streams
from struprune_plugin.layerwise.expert_streams import Repair, capture_sum
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext


@dataclass(frozen=True)
class Target:
    """Target of a solve.

    :param is_dense: whether the target is from the dense model, whose path is propagated beside the pruned one; else it is from
        the present layer on the pruned path
    :param is_residual: whether the target is the residual stream after the module, so that inherited error is repaired; else it is
        the module's output
    :param share: share of the distance from the present output to that target that a solve asks for: a whole repair of
        inherited errors fits the calibration data too closely
    :param is_read_again: whether a module is solved more than once; the target then stays that of its first visit
    """

    is_dense: bool
    is_residual: bool
    share: float = 1.0
    is_read_again: bool = False


TARGETS = {  # name in recipes
    "half_residual": Target(is_dense=True, is_residual=True, share=0.5),
    "residual": Target(is_dense=True, is_residual=True),
    "block": Target(is_dense=True, is_residual=False),
    "local": Target(is_dense=False, is_residual=False),
}


class DenseReference:
    """States of the dense model, one decoder layer after the other, and the targets derived from them.

    They are stored on the host; one micro-batch at a time is on the device.
    """

    def __init__(self, target: Target, context: DeviceContext):
        self.target = target
        self._context = context
        self._inputs: list[States] = []  # inputs of the current layer, by batch; empty for the first layer
        self._outputs: list[States] = []
        self._targets: dict[str, list[Tensor]] = {}  # by group and batch; the residual is not yet subtracted
        self._repairs_all = False  # whether the layer has lost experts
        self._settled: dict[str, list[Tensor]] = {}  # what solves ask for, by group and batch, where it is read again

    @property
    def is_pruned_path(self) -> bool:
        """True while the dense and the pruned path are the same, in the first layer."""
        return self.target.is_dense and not self._inputs

    def run(self, layer: nn.Module, groups: Sequence[UnitGroup], experts: UnitGroup | None, call: LayerCall) -> None:
        """Run the still dense layer on the next batch of dense hidden states, where the dense path is separate.

        :param groups: groups outside the lists of experts
        :param experts: a group of an expert, or of a module beside the experts; None without any
        """
        if not self._inputs:
            return
        with capture_streams(layer, groups) as take, capture_sum(layer, experts) as take_sum:
            output = call.run(layer, self._context, self._inputs[len(self._outputs)])
            self.keep(groups, {group.name: take(group) for group in groups}, output)
            self.keep_sum(experts, take_sum)

    def keep(self, groups: Sequence[UnitGroup], streams: Mapping[str, Stream], output: States) -> None:
        """Store the targets and the output of a dense forward pass on the host."""
        self._outputs.append(output.map(self._context.park))
        for group in groups:
            if self.repairs(group):  # the stream after the sum is stored
                continue
            stream = streams[group.name]
            assert stream.output is not None
            wanted = stream.output.float() + (_read_residual(group, stream) if self._is_residual(group) else 0)
            self._targets.setdefault(group.name, []).append(self._context.park(wanted))

    def suffices(self, group: UnitGroup, num_batches: int) -> bool:
        """Return whether the targets of all batches are known without the present output."""
        known = self._targets if self.target.share == 1 else self._settled
        return not self.repairs(group) and len(known.get(group.name, ())) == num_batches

    def find_target(self, group: UnitGroup, stream: Stream, index: int) -> Tensor:
        """Return a consumer's target; a ``local`` target is its output when the group was first visited.

        :param index: index of the batch; -1 for the last one
        :return: shape [tokens, d], float32, on the device
        """
        stored = self._targets.setdefault(group.name, [])
        if not self.target.is_dense and (index == -1 or index >= len(stored)):
            assert stream.output is not None
            stored.append(self._context.park(stream.output.float()))
        target = self._context.to_device(stored[index], stream.inputs.device)
        target = target - _read_residual(group, stream) if self._is_residual(group) else target
        return self._settle(group, index, stream.output, target)

    def _settle(self, group: UnitGroup, index: int, now: Tensor | None, wanted: Tensor) -> Tensor:
        """Return the point between present and wanted values that a solve asks for, the same at every visit of a group.

        :param now: present values, which only the first visit needs
        """
        if self.target.share == 1 or (self._repairs_all and self.repairs(group)):
            return wanted
        settled = self._settled.setdefault(group.name, [])
        if 0 <= index < len(settled):
            return self._context.to_device(settled[index], wanted.device)
        assert now is not None
        asked = torch.lerp(now.float(), wanted, self.target.share)
        if self.target.is_read_again:
            settled.append(self._context.park(asked))
        return asked

    def keep_sum(self, group: UnitGroup | None, take: Callable[[], Tensor]) -> None:
        """Store the stream after the experts' sum of a dense forward pass on the host, where the experts repair it.

        :param group: a group of an expert, or of a module beside the experts; None without any
        :param take: function that :func:`~struprune_plugin.layerwise.expert_streams.capture_sum` yields
        """
        if self.repairs(group):
            assert group is not None
            self._targets.setdefault(_name_sum(group), []).append(self._context.park(take()))

    def repairs(self, group: UnitGroup | None) -> bool:
        """Return whether a group belongs to experts, or is beside them, and repairs the layer's inherited error."""
        return group is not None and bool(group.join.block) and self.target.is_dense and self._is_residual(group)

    def find_repair(self, group: UnitGroup, take: Callable[[], Tensor], index: int) -> Repair | None:
        """Return the error that experts have to add to their sum, so that the stream after it equals the dense one.

        :param group: a group of an expert, or of a module beside the experts
        :param take: returns the present stream
        :param index: index of the batch; -1 for the last one
        :return: None where the targets are the present outputs
        """
        if not self.repairs(group):
            return None
        now = take()
        wanted = self._context.to_device(self._targets[_name_sum(group)][index], now.device)
        return Repair.of(self._settle(group, index, now, wanted), now)

    def repair_all(self) -> None:
        """Let experts make up for all of the layer's error: what removed experts leave is not inherited from layers before."""
        self._repairs_all = True

    def finish_layer(self) -> None:
        """Drop the layer's targets; its outputs become the next layer's inputs."""
        self._repairs_all = False
        self._inputs, self._outputs = self._outputs, []
        self._targets.clear()
        self._settled.clear()

    def _is_residual(self, group: UnitGroup) -> bool:
        """Return whether a group's target is the residual stream; where a norm lies between, it is the dense output."""
        return self.target.is_residual and group.join.is_direct


def _read_residual(group: UnitGroup, stream: Stream) -> Tensor:
    """Return the residual stream in units of the consumer's output, shape [tokens, d], float32."""
    return stream.residual.float() / group.join.scale


def _name_sum(group: UnitGroup) -> str:
    """Return the key under which the sum of a group's experts is stored."""
    return f"{group.layer_name}.{group.join.block}"
