"""One step of training: forward, losses, backward, and the update; under one decoder layer as each layer's gradient is there."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from struprune_plugin.layerwise.calls import States, pair_gradients
from struprune_plugin.layerwise.runner import LayerwiseRunner, MicroBatch, Weights
from struprune_plugin.recovery.objective import Objective
from struprune_plugin.recovery.recovery_config import RecoveryConfig
from struprune_plugin.recovery.states import REST, TrainedStates
from struprune_plugin.runtime.distributed import count_ranks, sum_over_ranks

Seed = Callable[[int, int], None]  # called with the numbers of layer and micro-batch before each run
Sums = dict[str, Tensor]
Sink = Callable[
    [str, Sums], None
]  # takes the gradients of a layer, or of what stands on the last, by their names there


class Stepper:
    """Optimizer steps.

    Under ``memory: layer`` a layer runs a second time in the backward pass, from its input, which waits on the host. Under
    ``memory: model`` the graph of one micro-batch is kept instead.

    :param states: what is trained; names are ``<layer>.<name within it>`` and ``rest.<name within the base model>``
    :param held_sums: bytes of a layer's gradients that are added up on the device, the largest first; the others are on the
        host. All of them where None
    """

    def __init__(
        self,
        runner: LayerwiseRunner,
        states: TrainedStates,
        objective: Objective,
        config: RecoveryConfig,
        held_sums: int | None = None,
    ):
        self.runner, self.states, self.objective = runner, states, objective
        self._config, self._held_sums = config, held_sums
        self._trained: dict[str, list[str]] = {}
        for name in states.parameters:
            owner, _, leaf = name.partition(".")
            self._trained.setdefault(owner, []).append(leaf)
        self._lowest = min((int(owner) for owner in self._trained if owner != REST), default=len(runner.layers))

    # -- one step -------------------------------------------------------------------------------------------------

    def take(self, micro_batches: Sequence[MicroBatch], num_targets: int, step: int, rate: float) -> dict[str, float]:
        """Update the trained parameters by one batch; return the batch's losses per predicted token before the update.

        :param micro_batches: this process' part of the batch; gradients are summed over processes
        :param num_targets: predicted tokens of the whole batch
        :param step: from 1
        """
        seed, update = partial(self._seed, step), partial(self._update, step, rate)
        run = self._run_whole if self._config.memory == "model" else self._run_layerwise
        if self._config.optimizer.clipping == "layer":
            return run(micro_batches, num_targets, seed, update)
        held: list[tuple[str, Sums]] = []  # until the norm of all is known
        norms: list[Tensor] = []

        def hold(owner: str, sums: Sums) -> None:
            norms.append(_measure_norm(sums))
            own = {name: total for name, total in sums.items() if self.states.holds(f"{owner}.{name}")}
            held.append((owner, {name: self._to_states(total) for name, total in own.items()}))

        losses = run(micro_batches, num_targets, seed, hold)
        norm = torch.stack(norms).norm() if norms else torch.zeros(())
        for owner, sums in held:
            update(owner, sums, norm)
        return losses

    def _to_states(self, gradient: Tensor) -> Tensor:
        """Return a gradient on the device of the parameter that it updates."""
        return gradient if self._config.memory == "model" else self.runner.context.to_host(gradient)

    def _update(self, step: int, rate: float, owner: str, sums: Sums, norm: Tensor | None = None) -> None:
        """Clip the gradients of a layer by their own norm or by ``norm``, and update its parameters.

        :raises ValueError: a gradient that is not finite; this layer has not been moved
        """
        norm = _measure_norm(sums) if norm is None else norm
        if not norm.isfinite():
            raise ValueError(
                f"recovery: gradients must be finite, got NaN or Inf at step {step}. Lower schedule.learning_rate ({rate:g}), "
                "or compute in a wider dtype."
            )
        factor = min(1.0, self._config.optimizer.max_grad_norm / (norm.item() + 1e-6))
        for name, total in sums.items():
            gradient = self._to_states(total)
            self.states.update(f"{owner}.{name}", gradient if factor == 1 else gradient.mul_(factor), step, rate)
        self.states.share(f"{owner}.{name}" for name in self._trained[owner])

    def _seed(self, step: int, index: int, number: int) -> None:
        """Seed a layer's run on a micro-batch, so that a second run draws the same dropout."""
        if self._config.adapters and self._config.adapters.dropout:
            text = f"{self._config.seed} {step} {index} {number}"
            torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]))

    # -- backward -------------------------------------------------------------------------------------------------

    def _run_layerwise(
        self, micro_batches: Sequence[MicroBatch], num_targets: int, seed: Seed, sink: Sink
    ) -> dict[str, float]:
        """Run the batch forward, then layer by layer backward; pass each layer's summed gradients to the sink at once."""
        self.runner.forward(micro_batches, seed=seed)
        losses, rest = self.objective.make_zeros(), self.runner.fetch_rest()
        with self._watch_gradients(rest, self._trained.get(REST, [])) as sums:
            for micro_batch in micro_batches:
                self._run_head_backward(losses, rest, micro_batch, num_targets)
        self._pass_on(REST, sums, sink)
        for index, weights in self.runner.stream_layers(range(len(self.runner.layers) - 1, self._lowest - 1, -1)):
            with self._watch_gradients(weights, self._trained.get(str(index), [])) as sums:
                for number, micro_batch in enumerate(micro_batches):
                    seed(index, number)
                    step = self._run_layer(index, weights, micro_batch, micro_batch.states[index])
                    self._run_layer_backward(losses, index, step, micro_batch, num_targets)
                    del step
            del weights
            self._pass_on(str(index), sums, sink)
        return self.objective.average(losses, num_targets)

    def _run_whole(
        self, micro_batches: Sequence[MicroBatch], num_targets: int, seed: Seed, sink: Sink
    ) -> dict[str, float]:
        """Run each micro-batch forward and backward with its graph kept; then pass all summed gradients to the sink."""
        losses, rest = self.objective.make_zeros(), self.runner.fetch_rest()
        layers = dict(self.runner.stream_layers(range(len(self.runner.layers))))
        owners = {REST: rest, **{str(index): weights for index, weights in reversed(layers.items())}}
        with ExitStack() as stack:
            sums = {
                owner: stack.enter_context(self._watch_gradients(weights, self._trained.get(owner, [])))
                for owner, weights in owners.items()
            }
            for number, micro_batch in enumerate(micro_batches):
                graph: dict[int, tuple[States, States]] = {}
                for index, weights in layers.items():
                    seed(index, number)
                    graph[index] = self._run_layer(index, weights, micro_batch, micro_batch.states[-1])
                    micro_batch.states = [graph[index][1].map(Tensor.detach)]
                self._run_head_backward(losses, rest, micro_batch, num_targets)
                for index in range(len(layers) - 1, self._lowest - 1, -1):
                    self._run_layer_backward(losses, index, graph.pop(index), micro_batch, num_targets)
        for owner, summed in sums.items():
            self._pass_on(owner, summed, sink)
        return self.objective.average(losses, num_targets)

    def _pass_on(self, owner: str, sums: Sums, sink: Sink) -> None:
        if owner in self._trained:
            sink(owner, sums)

    def _run_head_backward(
        self, losses: dict[str, float], rest: Weights, micro_batch: MicroBatch, num_targets: int
    ) -> None:
        """Add the losses at the head; compute the gradient at the last layer's output."""
        runner = self.runner
        with torch.enable_grad():
            leaf = runner.context.to_device(micro_batch.states[-1].hidden, runner.device)
            leaf = leaf.detach().requires_grad_()
            final = runner.finish(micro_batch, leaf, rest)
        gradient = self.objective.add_head(losses, micro_batch, final.detach(), with_gradient=True)
        assert gradient is not None
        above = torch.zeros_like(final)
        above[:, :-1] = gradient / num_targets
        torch.autograd.backward([final], [above])
        assert leaf.grad is not None
        micro_batch.above = [runner.context.park(leaf.grad)]

    def _run_layer(
        self, index: int, weights: Weights, micro_batch: MicroBatch, states: States
    ) -> tuple[States, States]:
        """Run one layer; return its inputs and outputs, with a graph from the lowest trained layer on."""
        with torch.set_grad_enabled(index >= self._lowest):
            entered = states.map(partial(self.runner.context.to_device, device=self.runner.device))
            entered = entered.watch() if index >= self._lowest else entered
            return entered, self.runner.run(index, weights, micro_batch, entered)

    def _run_layer_backward(
        self,
        losses: dict[str, float],
        index: int,
        step: tuple[States, States],
        micro_batch: MicroBatch,
        num_targets: int,
    ) -> None:
        """Run one layer backward on one micro-batch; add its distance from the dense layer if that loss is used.

        :param step: what :meth:`_run_layer` returned
        """
        context, weight = self.runner.context, self.objective.hidden_weight
        entered, left = step
        assert micro_batch.above is not None
        with torch.enable_grad():
            above = [context.to_device(gradient, self.runner.device) for gradient in micro_batch.above]
            outputs, gradients = pair_gradients(left, above)
            if weight:
                outputs.append(self.objective.measure_distance(index, micro_batch, left.hidden))
                gradients.append(torch.full_like(outputs[-1], weight / num_targets))
        torch.autograd.backward(outputs, gradients)
        below = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in entered.list_learning()]
        micro_batch.above = [context.park(gradient) for gradient in below]
        if weight:
            losses["hidden"] += outputs[-1].item()

    def _choose_held(self, leaves: Weights) -> set[str]:
        """Return the names of the weights whose gradients are summed on the device."""
        left, held = self._held_sums, set()
        for name in sorted(leaves, key=lambda name: -leaves[name].numel()):
            taken = leaves[name].numel() * max(4, leaves[name].element_size())
            if left is None or taken <= left:
                held.add(name)
                left = None if left is None else left - taken
        return held

    @contextmanager
    def _watch_gradients(self, weights: Weights, trained: Sequence[str]) -> Iterator[Sums]:
        """Yield the summed gradients of weights; they are summed over processes when the block ends."""
        sums: Sums = {}
        context, held = self.runner.context, self._choose_held({name: weights[name] for name in trained})

        def add(name: str, leaf: Tensor) -> None:
            assert leaf.grad is not None
            gradient, leaf.grad = leaf.grad, None
            part = gradient if name in held else context.to_host(gradient)
            wide = torch.promote_types(part.dtype, torch.float32)
            sums[name] = sums[name].add_(part) if name in sums else part.to(wide)

        leaves = {name: weights[name].requires_grad_() for name in trained}
        handles = [leaf.register_post_accumulate_grad_hook(partial(add, name)) for name, leaf in leaves.items()]
        try:
            yield sums
        finally:
            for handle in handles:
                handle.remove()
        if count_ranks() > 1:
            for name, leaf in leaves.items():  # a process without a share of the batch adds nothing
                wide = torch.promote_types(leaf.dtype, torch.float32)
                sums[name] = sum_over_ranks(sums.pop(name, torch.zeros_like(leaf, dtype=wide, requires_grad=False)))


def _measure_norm(sums: Sums) -> Tensor:
    """Return the joint norm of gradients, float64, in host memory."""
    parts = [torch.linalg.vector_norm(total, dtype=torch.float64).cpu() for total in sums.values()]
    return torch.stack(parts).norm() if parts else torch.tensor(math.nan, dtype=torch.float64)
