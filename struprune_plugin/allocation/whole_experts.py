"""Removal order of whole experts, and its cost: the error that the remaining experts cannot compensate."""

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
_DIRECTIONS = 64  # random directions of the output; norms are preserved on average
_TRIED = 16  # experts per step, those of least energy


@dataclass(frozen=True)
class Mixture:
    """Whole experts of a model that may be removed, equally many of every layer.

    :param routing: parts that are removed with an expert besides its linears
    :param lists: the groups of every list of experts, in order, by the list's full name
    :param counts: numbers of experts that a layer may keep, descending
    :param num_groups: number of equal runs of experts that keep the same number each
    :param cost: parameters of the linears that are removed with one expert of every layer
    """

    routing: Routing
    lists: Mapping[str, Sequence[UnitGroup]]
    counts: Sequence[int]
    num_groups: int
    cost: int

    def count_gone(self, left: int) -> int:
        """Return the parameters removed when ``left`` experts of a layer remain."""
        return (self.counts[0] - left) * self.cost


@dataclass(frozen=True)
class DropOrder:
    """Removal order of the experts of one list.

    :param steps: experts that are removed together, first removed first
    :param errors: error of the list's output, by number of steps taken
    """

    steps: Sequence[Sequence[int]]
    errors: Sequence[float]

    def list_kept(self, num_steps: int) -> list[int]:
        """Return the experts that remain after some steps, sorted."""
        gone = {expert for step in self.steps[:num_steps] for expert in step}
        return [expert for expert in range(sum(map(len, self.steps))) if expert not in gone]


def order_drops(
    mixture: Mixture, scores: Sequence[float], tried: int, measure: Callable[[list[int]], float]
) -> DropOrder:
    """Return a removal order of experts: each step removes the one of least resulting error from every group.

    :param scores: score of every expert; only those of least score in a group are tried
    :param tried: number of experts tried per group
    :param measure: function that returns the error if only some experts remain
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
    """Measurer of the removal order of every list's experts, on the dense model, which is not changed. One process.

    :param criterion: ``error``: the error that the remaining experts cannot compensate; ``reap``: REAP's score, computed once
    :param solves: whether the remaining experts are re-solved: errors are then those that remain after each expert is re-scaled
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
        """Return the orders by the full name of a list, with one decoder layer on the device at a time."""
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
        """Return a group and the view of its list of experts, with output errors weighted by the sensitivity."""
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
