"""In which order whole experts go, and what that costs: what the experts that are left cannot make up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.expert_choice import ExpertChoice
from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.layerwise.statistics import LayerStatistics
from struprune_plugin.linalg.ties import argmin_with_ties
from struprune_plugin.model.structure.routing import Routing
from struprune_plugin.model.units.group import UnitGroup, select_groups
from struprune_plugin.pruning.signals import Sensitivity
from struprune_plugin.runtime.device_context import DeviceContext

Criterion = Literal["error", "reap"]
_DIRECTIONS = 64  # of the output, drawn; norms are kept on the average
_TRIED = 16  # experts a step, those of least energy


@dataclass(frozen=True)
class Mixture:
    """The whole experts of a model that may go, of every layer as many.

    :param routing: what goes with an expert beside its linears
    :param lists: the groups of every list of experts, in order, by the list's full name
    :param counts: how many experts of a layer may stay, the most first
    :param num_groups: equal runs of experts that keep the same number each
    :param cost: parameters of the linears that go with one expert of every layer
    """

    routing: Routing
    lists: Mapping[str, Sequence[UnitGroup]]
    counts: Sequence[int]
    num_groups: int
    cost: int

    def count_gone(self, left: int) -> int:
        """Return the parameters that have gone once so many experts of a layer are left."""
        return (self.counts[0] - left) * self.cost


@dataclass(frozen=True)
class DropOrder:
    """In which order the experts of one list go.

    :param steps: experts that go together, the first to go first
    :param errors: of the list's output, with so many steps taken
    """

    steps: Sequence[Sequence[int]]
    errors: Sequence[float]

    def list_kept(self, num_steps: int) -> list[int]:
        """Return the experts that are left after some steps, sorted."""
        gone = {expert for step in self.steps[:num_steps] for expert in step}
        return [expert for expert in range(sum(map(len, self.steps))) if expert not in gone]


def order_drops(
    mixture: Mixture, scores: Sequence[float], tried: int, measure: Callable[[list[int]], float]
) -> DropOrder:
    """Return an order in which experts go, each time the one whose loss leaves the least error; one of every group together.

    :param scores: of every expert; only those of least score in a group are tried
    :param tried: how many
    :param measure: the error if only some experts are left
    """
    total, steps = mixture.counts[0], list[list[int]]()
    groups = [list(part) for part in torch.arange(total).view(mixture.num_groups, -1).tolist()]
    errors = [measure(list(range(total)))]
    for _ in mixture.counts[1:]:
        going = [min(group, key=scores.__getitem__) for group in groups]
        for place, group in enumerate(groups):
            options = sorted(group, key=scores.__getitem__)[:tried]
            found = [
                measure([e for g in groups for e in g if e not in (*going[:place], option, *going[place + 1 :])])
                for option in options
            ]
            best = argmin_with_ties(found)
            going[place] = options[best]
        groups = [[e for e in group if e != gone] for group, gone in zip(groups, going, strict=True)]
        steps.append(going)
        errors.append(found[best])
    return DropOrder([*steps, [e for group in groups for e in group]], errors)


class DropMeasurer:
    """Measures, on the dense model, which stays as it is, in which order the experts of every list go. One process.

    :param criterion: ``error``, what the experts that are left cannot make up; or REAP's score, once for all
    :param solves: whether experts that are left are solved anew: errors are then what is left of them once each is re-scaled
    """

    def __init__(
        self,
        mixture: Mixture,
        criterion: Criterion,
        sensitivity: Sensitivity,
        context: DeviceContext,
        solves: bool = True,
    ):
        self._mixture, self._criterion, self._sensitivity = mixture, criterion, sensitivity
        self._context, self._solves = context, solves

    @torch.no_grad()
    def measure(self, model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> dict[str, DropOrder]:
        """Return the orders by the full name of a list, one decoder layer on the device at a time."""
        first, found = [groups[0] for groups in self._mixture.lists.values()], dict[str, DropOrder]()
        statistics = LayerStatistics(TARGETS["local"], self._context)
        for step in stream_layers(model, batches, self._context, "experts"):
            own = [self._view(step.layer, group) for group in select_groups(first, step.name)]
            if not own:
                for _ in step.observe(statistics, []):
                    pass
            for group, choice in own:
                with choice.watch() as take:
                    for call, _ in step.observe(statistics, []):
                        take(call)
                choice.finish()
                found[group.output_name] = self._order(choice)
            statistics.finish_layer()
        return found

    def _view(self, layer: nn.Module, group: UnitGroup) -> tuple[UnitGroup, ExpertChoice]:
        """Return what a list is seen by; errors of its output count by the sensitivity."""
        consumer = layer.get_submodule(group.consumer)
        weight: Tensor = consumer.weight  # type: ignore[assignment]
        size, root = weight.shape[0], self._sensitivity.fisher_sqrt.get(group.output_name)
        drawn = torch.randn(_DIRECTIONS, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        projection = drawn / _DIRECTIONS**0.5 @ (torch.eye(size, dtype=torch.float64) if root is None else root)
        on_device = self._context.to_device(projection.float(), weight.device)
        return group, ExpertChoice(layer, self._mixture.routing, group.experts, on_device)

    def _order(self, choice: ExpertChoice) -> DropOrder:
        wanted = choice.combine(range(choice.num_experts))

        def measure(keep: list[int]) -> float:
            return float((choice.combine(keep) - wanted).square().sum(dtype=torch.float64))

        energy, reap = (scores.tolist() for scores in choice.count_loads())
        scores, tried = (reap, 1) if self._criterion == "reap" else (energy, _TRIED)
        order = order_drops(self._mixture, scores, tried, measure)
        if not self._solves:
            return order
        kept = (order.list_kept(steps) for steps in range(1, len(order.errors)))
        return replace(order, errors=[0.0, *(choice.measure_rescaled(keep, wanted) for keep in kept)])
