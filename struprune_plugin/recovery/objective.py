"""Objective of a recovery: a weighted sum of losses at the head and at each layer's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from struprune_plugin.layerwise.head import measure_head
from struprune_plugin.layerwise.runner import LayerwiseRunner, MicroBatch
from struprune_plugin.layerwise.samples import stack_teacher
from struprune_plugin.recovery.recovery_config import Loss
from struprune_plugin.runtime.distributed import sum_over_ranks


class Objective:
    """The losses of micro-batches that have passed all layers.

    Losses are kept apart by name, as sums over predicted tokens; the cross entropy is told whether it is asked for or not.

    :param runner: of the model that is trained
    """

    def __init__(self, runner: LayerwiseRunner, loss: Loss):
        self._runner = runner
        self.weights = loss.weights
        self._temperature = loss.kl.temperature if loss.kl else 1.0

    @property
    def hidden_weight(self) -> float:
        """Weight of the distance between each layer's output and the dense one; 0 if that loss is not used."""
        return self.weights.get("hidden", 0.0)

    def make_zeros(self) -> dict[str, float]:
        """Return zero sums, by name of the loss."""
        return dict.fromkeys(["cross_entropy", *(name for name in ("kl", "hidden") if name in self.weights)], 0.0)

    def weigh(self, losses: Mapping[str, float]) -> float:
        """Return the weighted sum of losses by name."""
        return sum(self.weights.get(name, 0.0) * value for name, value in losses.items())

    def average(self, losses: Mapping[str, float], num_targets: int) -> dict[str, float]:
        """Return losses per predicted token over all processes, from the sums of this process.

        :param num_targets: of all processes
        """
        total = sum_over_ranks(torch.tensor(list(losses.values()), dtype=torch.float64))
        return {name: value / num_targets for name, value in zip(losses, total.tolist(), strict=True)}

    @torch.no_grad()
    def measure(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Run embedded micro-batches through all layers and return their losses."""
        runner, losses = self._runner, self.make_zeros()
        runner.forward(micro_batches, keep=self.hidden_weight > 0)
        for micro_batch, final in runner.finish_all(micro_batches):
            self.add_head(losses, micro_batch, final)
            for index in range(len(runner.layers)) if self.hidden_weight else ():
                output = runner.context.to_device(micro_batch.states[index + 1].hidden, runner.device)
                losses["hidden"] += self.measure_distance(index, micro_batch, output).item()
        return losses

    def add_head(
        self, losses: dict[str, float], micro_batch: MicroBatch, final: Tensor, with_gradient: bool = False
    ) -> Tensor | None:
        """Add the head's losses of a micro-batch; return the gradient of the weighted sum at the head's inputs if requested.

        :param final: inputs of the head, shape [batch, sequence, d], without a graph
        :return: shape [batch, sequence - 1, d]
        """
        runner = self._runner
        labels = runner.context.to_device(micro_batch.tokens[:, 1:].flatten(), runner.device)
        asked = "kl" in self.weights and all(sample.teacher for sample in micro_batch.samples)
        teacher = stack_teacher(micro_batch.samples, runner.device).flatten() if asked else None
        weights = (self.weights.get("cross_entropy", 0.0), self.weights.get("kl", 0.0)) if with_gradient else None
        hidden = final[:, :-1]
        found = measure_head(hidden.flatten(0, 1), labels, teacher, runner.make_head(), self._temperature, weights)
        losses["cross_entropy"] += found.cross_entropy
        if "kl" in losses:
            losses["kl"] += found.divergence
        return None if found.gradient is None else found.gradient.view_as(hidden)

    def measure_distance(self, index: int, micro_batch: MicroBatch, output: Tensor) -> Tensor:
        """Return one minus the cosine between a layer's output and the dense one's, over tokens that predict, mean over layers."""
        assert micro_batch.wanted is not None
        dtype = torch.promote_types(output.dtype, torch.float32)
        wanted = self._runner.context.to_device(micro_batch.wanted[index], self._runner.device)
        call = micro_batch.calls[index]
        theirs, own = (
            call.list_tokens(part).unflatten(0, call.batch_shape)[:, :-1].to(dtype) for part in (wanted, output)
        )
        distance = (1 - F.cosine_similarity(own, theirs, dim=-1)).sum()
        return distance / len(self._runner.layers)
