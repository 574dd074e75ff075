"""``taylor``: the first-order change of the loss, weight by weight, from gradients of the whole dense model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor, nn

from struprune_plugin.model.surgery import read_weight
from struprune_plugin.pruning.importance.criterion import IMPORTANCES
from struprune_plugin.pruning.importance.gradients import GradientImportance, LinearGradient


@IMPORTANCES.register
class Taylor(GradientImportance):
    """``sum |w * dloss/dw|`` over all rows and columns of a unit.

    Source: LLM-Pruner (Ma et al. 2023), Eq. 5, first order, elements summed over a group. Holds one gradient per weight of the
    linears to prune, in float32.
    """

    method: Literal["taylor"] = "taylor"

    def count_held_bytes(self, linear: nn.Linear) -> int:
        return 4 * linear.in_features * linear.out_features

    def find_terms(self, part: LinearGradient) -> Iterable[Tensor]:
        yield part.gradient.flatten(0, -2).float().mT @ part.inputs.flatten(0, -2).float()

    def weigh(self, linear: nn.Linear, total: Tensor) -> Tensor:
        total = total.double()
        return (read_weight(linear)[0].to(total) * total).abs()
