"""One step of training under one decoder layer: forward, losses, backward, and every layer's update as its gradient is there."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from struprune_plugin.device.ranks import count_ranks, sum_over_ranks
from struprune_plugin.recovery.choices import Clipping
from struprune_plugin.recovery.head import HeadLosses, measure_head
from struprune_plugin.recovery.layered import Flow, LayeredModel, Weights
from struprune_plugin.recovery.samples import stack_teacher
from struprune_plugin.recovery.states import REST, TrainedStates


@dataclass(frozen=True)
class Objective:
    """What is lowered: a weighted sum of losses a predicted token.

    :param cross_entropy: weight of the cross entropy with the text
    :param kl: of the divergence from the teacher's distribution
    :param hidden: of the distance of every layer's output from the dense one's, mean over layers
    :param temperature: of the divergence
    :param fisher: weights of squared distances, half of their sum a token, shape [layers, d]; cosine distances where None
    """

    cross_entropy: float = 0.0
    kl: float = 0.0
    hidden: float = 0.0
    temperature: float = 1.0
    fisher: Tensor | None = None

    def sum_up(self, losses: Mapping[str, float]) -> float:
        """Return the weighted sum of the losses by name."""
        return sum(getattr(self, name) * value for name, value in losses.items())


@dataclass(frozen=True)
class StepSettings:
    """How a step is taken.

    :param resident: the whole model is on the device: every layer's graph is kept there instead of running the layer again, and
        what is trained is moved there
    :param held_sums: bytes of a layer's gradients that are added up on the device, the largest first; the others are on the
        host. All of them where None
    :param holds: gradients are few enough to be held, so that a global norm needs no second backward pass
    :param dropout: whether a layer's runs draw random numbers
    """

    max_norm: float
    clipping: Clipping = "layer"
    resident: bool = False
    held_sums: int | None = None
    holds: bool = False
    dropout: bool = False
    seed: int = 0


Sums = dict[str, Tensor]
Sink = Callable[
    [str, Sums], None
]  # takes the gradients of a layer, or of what stands on the last, by their names there


class Stepper:
    """Takes steps, and measures losses.

    :param model: runs the layers
    :param states: what is trained; names are ``<layer>.<name within it>`` and ``rest.<name within the base model>``
    """

    def __init__(self, model: LayeredModel, states: TrainedStates, objective: Objective, settings: StepSettings):
        self._model, self._states, self._objective, self._settings = model, states, objective, settings
        self._trained: dict[str, list[str]] = {}
        self._live: dict[int, Weights] = {}  # of layers whose graphs are kept
        for name in states.parameters:
            owner, _, leaf = name.partition(".")
            self._trained.setdefault(owner, []).append(leaf)
        self._lowest = min((int(owner) for owner in self._trained if owner != REST), default=len(model.layers))

    # -- one step -------------------------------------------------------------------------------------------------

    def take(self, flows: Sequence[Flow], num_targets: int, step: int, rate: float) -> dict[str, float]:
        """Move what is trained by one batch; return its losses before, a predicted token.

        :param flows: this process' part of the batch; gradients are summed over processes
        :param num_targets: predicted tokens of the whole batch
        :param step: from 1
        """
        settings, seed = self._settings, partial(self._draw, step)
        self._model.forward(flows, prepare=self._prepare if settings.resident else None, seed=seed)
        held: list[tuple[str, Sums]] = []
        norms: list[Tensor] = []
        update = partial(self._update, step, rate)

        def see(owner: str, sums: Sums) -> None:
            norms.append(_find_norm(sums))
            if settings.holds:
                held.append(
                    (owner, sums if settings.resident else {n: self._model.room.to_host(t) for n, t in sums.items()})
                )

        if settings.clipping == "layer":
            losses = self._run_backward(flows, num_targets, seed, update)
            self._live.clear()
            return losses
        losses = self._run_backward(flows, num_targets, seed, see)
        norm = torch.stack([norm.cpu() for norm in norms]).norm() if norms else torch.zeros(())
        if settings.holds:
            for owner, sums in held:
                update(owner, sums, norm)
        else:
            self._run_backward(flows, num_targets, seed, lambda owner, sums: update(owner, sums, norm))
        self._live.clear()
        return losses

    def _prepare(self, index: int, weights: Weights) -> bool:
        """Let the graphs of a layer that is trained, or lies above one, be kept, and its weights with them."""
        if index < self._lowest:
            return False
        for name in self._trained.get(str(index), []):
            weights[name].requires_grad_()
        self._live[index] = weights
        return True

    def _update(self, step: int, rate: float, owner: str, sums: Sums, norm: Tensor | None = None) -> None:
        """Clip the gradients of a layer by their own norm, or by the one given, and move its parameters.

        :raises ValueError: a gradient that is not finite; this layer has not been moved
        """
        norm = _find_norm(sums) if norm is None else norm
        if not norm.isfinite():
            raise ValueError(
                f"recovery: gradients must be finite, got NaN or Inf at step {step}. Lower learning_rate ({rate:g}), or "
                "compute in a wider dtype."
            )
        factor = min(1.0, self._settings.max_norm / (norm.item() + 1e-6))
        for name, total in sums.items():
            gradient = total if self._settings.resident else self._model.room.to_host(total)
            self._states.update(f"{owner}.{name}", gradient if factor == 1 else gradient.mul_(factor), step, rate)

    def _draw(self, step: int, index: int, number: int) -> None:
        """Seed a layer's run on a micro-batch, so that its second run draws the same."""
        if self._settings.dropout:
            text = f"{self._settings.seed} {step} {index} {number}"
            torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]))

    # -- losses ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, flows: Sequence[Flow], plain: bool = False) -> dict[str, float]:
        """Return sums of the losses over predicted tokens of this process' flows.

        :param plain: the cross entropy alone
        """
        compares = self._objective.hidden > 0 and not plain
        self._model.forward(flows, keep=compares)
        rest, losses = self._model.fetch_rest(), {"cross_entropy": 0.0} if plain else self._zero_losses()
        for flow in flows:
            final = self._model.finish(flow, self._model.room.to_device(flow.hidden[-1], self._model.device), rest)
            self._add(losses, self._measure_head(flow, final, None))
            for index in range(len(self._model.layers)) if compares else ():
                output = self._model.room.to_device(flow.hidden[index + 1], self._model.device)
                losses["hidden"] += self._measure_distance(index, flow, output).item()
        return losses

    def _zero_losses(self) -> dict[str, float]:
        names = ("cross_entropy", *(name for name in ("kl", "hidden") if getattr(self._objective, name)))
        return dict.fromkeys(names, 0.0)

    def _add(self, losses: dict[str, float], found: HeadLosses) -> None:
        losses["cross_entropy"] += found.cross_entropy
        if "kl" in losses:
            losses["kl"] += found.divergence

    def _measure_head(self, flow: Flow, final: Tensor, weights: tuple[float, float] | None) -> HeadLosses:
        model, objective = self._model, self._objective
        labels = model.room.to_device(flow.tokens[:, 1:].flatten(), model.device)
        asked = objective.kl and all(sample.teacher for sample in flow.samples)
        teacher = stack_teacher(flow.samples, model.device).flatten() if asked else None
        return measure_head(
            final[:, :-1].flatten(0, 1), labels, teacher, model.make_head(), objective.temperature, weights
        )

    def _measure_distance(self, index: int, flow: Flow, output: Tensor) -> Tensor:
        """Return the distance of a layer's output from the dense one's, summed over the tokens that predict, mean over layers."""
        assert flow.wanted is not None
        dtype = torch.promote_types(output.dtype, torch.float32)
        found = output[:, :-1].to(dtype)
        wanted = self._model.room.to_device(flow.wanted[index], self._model.device)[:, :-1].to(dtype)
        fisher = self._objective.fisher
        if fisher is None:
            distance = (1 - F.cosine_similarity(found, wanted, dim=-1)).sum()
        else:
            weights = self._model.room.to_device(fisher[index], self._model.device).to(dtype)
            distance = 0.5 * ((found - wanted).square() * weights).sum()
        return distance / len(self._model.layers)

    # -- backward -------------------------------------------------------------------------------------------------

    def _run_backward(
        self, flows: Sequence[Flow], num_targets: int, seed: Callable[[int, int], None], sink: Sink
    ) -> dict[str, float]:
        """Run all layers backwards and give each one's gradients, summed over the batch, to the sink as soon as they are there."""
        losses = self._run_head(flows, num_targets, sink)
        order = range(len(self._model.layers) - 1, self._lowest - 1, -1)
        for index, weights in ((i, self._live[i]) for i in order) if self._live else self._model.visit(order):
            trained = self._trained.get(str(index), [])
            with self._watch_gradients(weights, trained) as sums:
                for number, flow in enumerate(flows):
                    seed(index, number)
                    distance = self._run_layer_backward(index, weights, flow, num_targets)
                    if self._objective.hidden:
                        losses["hidden"] += distance
            del weights
            if trained:
                sink(str(index), sums)
        return self._share(losses, num_targets)

    def _run_head(self, flows: Sequence[Flow], num_targets: int, sink: Sink) -> dict[str, float]:
        """Find the losses at the head, and the gradient at every flow's last hidden states."""
        model, objective, losses = self._model, self._objective, self._zero_losses()
        rest, trained = model.fetch_rest(), self._trained.get(REST, [])
        with self._watch_gradients(rest, trained) as sums:
            for flow in flows:
                with torch.enable_grad():
                    leaf = model.room.to_device(flow.hidden[-1], model.device).detach().requires_grad_()
                    final = model.finish(flow, leaf, rest)
                found = self._measure_head(flow, final.detach(), (objective.cross_entropy, objective.kl))
                assert found.gradient is not None
                above = torch.zeros_like(final)
                above[:, :-1] = (found.gradient / num_targets).view_as(above[:, :-1])
                torch.autograd.backward([final], [above])
                assert leaf.grad is not None
                flow.above = model.room.park(leaf.grad)
                self._add(losses, found)
        if trained:
            sink(REST, sums)
        return losses

    def _run_layer_backward(self, index: int, weights: Weights, flow: Flow, num_targets: int) -> float:
        """Run one layer backwards on one micro-batch; return its distance from the dense layer, 0 where it is not asked for."""
        room, objective = self._model.room, self._objective
        assert flow.above is not None
        with torch.enable_grad():
            if self._settings.resident:
                hidden, output = flow.graphs[index - self._lowest]
                hidden.grad = None  # of a first pass for the norm
            else:
                hidden = room.to_device(flow.hidden[index], self._model.device).detach().requires_grad_()
                output = self._model.run(index, weights, flow, hidden)
            outputs: list[Tensor] = [output]
            distance = 0.0
            if objective.hidden:
                outputs.append(self._measure_distance(index, flow, output))
                distance = outputs[-1].item()
        gradients = [room.to_device(flow.above, self._model.device)]
        gradients += [torch.full_like(part, objective.hidden / num_targets) for part in outputs[1:]]
        torch.autograd.backward(outputs, gradients, retain_graph=self._keeps_graphs)
        assert hidden.grad is not None
        flow.above = room.park(hidden.grad)
        return distance

    @property
    def _keeps_graphs(self) -> bool:
        """Whether a second backward pass needs the graphs of the first."""
        return self._settings.resident and self._settings.clipping == "global" and not self._settings.holds

    def _choose_held(self, leaves: Weights) -> set[str]:
        """Return the names of those whose gradients are added up on the device."""
        left, held = self._settings.held_sums, set()
        for name in sorted(leaves, key=lambda name: -leaves[name].numel()):
            taken = leaves[name].numel() * max(4, leaves[name].element_size())
            if left is None or taken <= left:
                held.add(name)
                left = None if left is None else left - taken
        return held

    @contextmanager
    def _watch_gradients(self, weights: Weights, trained: Sequence[str]) -> Iterator[Sums]:
        """Give the gradients of weights, each added up as soon as it is there; over all processes once the block is over."""
        sums: Sums = {}
        room, held = self._model.room, self._choose_held({name: weights[name] for name in trained})

        def add(name: str, leaf: Tensor) -> None:
            assert leaf.grad is not None
            gradient, leaf.grad = leaf.grad, None
            part = gradient if name in held else room.to_host(gradient)
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

    def _share(self, losses: dict[str, float], num_targets: int) -> dict[str, float]:
        """Return losses a predicted token, of all processes."""
        if count_ranks() > 1:
            total = sum_over_ranks(torch.tensor(list(losses.values()), dtype=torch.float64))
            losses = dict(zip(losses, total.tolist(), strict=True))
        return {name: value / num_targets for name, value in losses.items()}


def _find_norm(sums: Sums) -> Tensor:
    """Return the norm of gradients together, float64."""
    parts = [torch.linalg.vector_norm(total, dtype=torch.float64).cpu() for total in sums.values()]
    return torch.stack(parts).norm() if parts else torch.tensor(math.nan, dtype=torch.float64)
