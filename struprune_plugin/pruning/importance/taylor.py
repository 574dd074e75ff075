"""``taylor``: the first-order change of the loss, weight by weight, from gradients of the whole dense model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_weight, sum_rows
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.gradients import check_gradient_memory, visit_gradients
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance, Ranking, sum_columns
from struprune_plugin.runtime.distributed import gather, sum_over_ranks


@IMPORTANCES.register
class Taylor(Importance):
    """``sum |w * dloss/dw|`` over all rows and columns of a unit.

    Source: LLM-Pruner (Ma et al. 2023), Eq. 5, first order, elements summed over a group. Holds a gradient per weight of the
    linears to prune, in float32.
    """

    gradients: ClassVar[bool] = True
    keeps_budget: ClassVar[bool] = False
    method: Literal["taylor"] = "taylor"

    def score(self, ranking: Ranking, dense: Tensor, columns: Tensor) -> Tensor:
        return ranking.module.context.place(ranking.sensitivity.saliency[ranking.group.name], dense)

    def measure(
        self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup]
    ) -> dict[str, Tensor]:
        layers = {group.name: model.get_submodule(group.layer_name) for group in groups}
        linears = [find_linear(layers[g.name], name) for g in groups for name in (g.consumer, *g.producers)]
        needed = 4 * sum(linear.in_features * linear.out_features for linear in linears)
        check_gradient_memory(model, next(iter(loader))["input_ids"].shape, "taylor", needed)
        sums: dict[tuple[str, str], Tensor] = {}
        counted = 0
        for num_tokens, parts in visit_gradients(model, loader, groups, "taylor gradients"):
            counted += num_tokens
            for part in parts:
                found = part.gradient.flatten(0, -2).float().mT @ part.inputs.flatten(0, -2).float()
                key = part.group.name, part.name
                sums[key] = sums[key].add_(found) if key in sums else found
        num_tokens = max(sum(gather(counted)), 1)
        return {
            group.name: _score(
                group, {n: _weigh(layers[group.name], n, sums[group.name, n]) / num_tokens for n in names}
            )
            for group in groups
            for names in [(group.consumer, *group.producers)]
        }


def _weigh(layer: torch.nn.Module, name: str, gradient: Tensor) -> Tensor:
    """Return ``|w * dloss/dw|`` of one linear, of all processes' batches, shape [rows, n], float64."""
    total = sum_over_ranks(gradient).double()
    return (read_weight(find_linear(layer, name))[0].to(total) * total).abs()


def _score(group: UnitGroup, weighed: dict[str, Tensor]) -> Tensor:
    """Return the score of every unit, shape [units].

    :param weighed: of every linear of the group, by name
    """
    consumer = group.to_unit_order(weighed[group.consumer].sum(0))
    columns = unit_columns(torch.arange(group.num_units, device=consumer.device), group.columns_per_unit)
    total = sum_columns(consumer, columns.view(group.num_units, -1))
    return total + sum((sum_rows(group, n, weighed[n].sum(1)) for n in group.producers), torch.zeros_like(total))
