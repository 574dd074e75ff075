"""``snip``: what the loss would feel of a unit that goes, from gradients of the whole dense model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.model.surgery import sum_rows
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.gradients import LinearGradient, check_gradient_memory, visit_gradients
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance, Ranking, sum_columns
from struprune_plugin.runtime.distributed import gather, sum_over_ranks


@IMPORTANCES.register
class SNIP(Importance):
    """Absolute sum of weights times gradients, see :func:`score_snip`."""

    gradients: ClassVar[bool] = True
    keeps_budget: ClassVar[bool] = False
    method: Literal["snip"] = "snip"

    def score(self, ranking: Ranking, dense: Tensor, columns: Tensor) -> Tensor:
        return ranking.module.context.place(ranking.sensitivity.saliency[ranking.group.name], dense)

    def measure(
        self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup]
    ) -> dict[str, Tensor]:
        check_gradient_memory(model, next(iter(loader))["input_ids"].shape, "snip")
        return measure_snip(model, loader, groups)


def measure_snip(
    model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup]
) -> dict[str, Tensor]:
    """Return :func:`score_snip` of every unit of every group, by group name."""
    sums: dict[tuple[str, str], Tensor] = {}
    counted = 0
    for num_tokens, parts in visit_gradients(model, loader, groups, "snip gradients", at_consumer_inputs=True):
        counted += num_tokens
        for part in parts:
            _add_products(sums, part)
    num_tokens = max(sum(gather(counted)), 1)
    for key, total in sums.items():
        sums[key] = sum_over_ranks(total) / num_tokens
    return {group.name: _score(group, sums) for group in groups}


def _add_products(sums: dict[tuple[str, str], Tensor], part: LinearGradient) -> None:
    """Add one batch's activations times gradients, sequence by sequence, however these are batched."""
    is_consumer = part.name == part.group.consumer
    value = part.inputs if is_consumer else part.outputs
    if not is_consumer and part.linear.bias is not None:
        value = value - part.linear.bias.detach()  # a producer's bias is no weight
    products = (value.double() * part.gradient.double()).view(len(part.inputs), -1, value.shape[-1])
    key = part.group.name, part.name
    for total in products.sum(1):
        sums[key] = sums[key] + total if key in sums else total


def _score(group: UnitGroup, sums: dict[tuple[str, str], Tensor]) -> Tensor:
    consumer = group.to_unit_order(sums[group.name, group.consumer])
    units = torch.arange(group.num_units, device=consumer.device)
    producers = [sum_rows(group, name, sums[group.name, name]) for name in group.producers]
    return score_snip(consumer, unit_columns(units, group.columns_per_unit).view(group.num_units, -1), producers)


def score_snip(saliency: Tensor, unit_columns: Tensor, producer_saliency: Sequence[Tensor]) -> Tensor:
    """Return ``|sum w * dloss/dw|`` over all rows and columns of every unit.

    A column's weights give ``sum_o W_oi dloss/dW_oi = sum_t x_it dloss/dx_it``: activations and their gradients suffice.
    Source: paper, table "Other structured methods" (Lee et al. 2018).

    :param saliency: ``sum_t x_it dloss/dx_it`` of the consumer's inputs, shape [n]
    :param unit_columns: shape [units, columns_per_unit], int64
    :param producer_saliency: ``sum_t y_jt dloss/dy_jt`` of every producer's outputs without bias, summed over a unit's
        rows, shape [units] each
    :return: shape [units], float64
    """
    columns = sum_columns(saliency.double(), unit_columns)
    return (columns + sum((part.double() for part in producer_saliency), torch.zeros_like(columns))).abs()
