"""``snip``: first-order change of the loss by the removal of a unit, from gradients of the whole dense model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from torch import Tensor

from struprune_plugin.pruning.importance.criterion import IMPORTANCES
from struprune_plugin.pruning.importance.gradients import GradientImportance, LinearGradient


@IMPORTANCES.register
class SNIP(GradientImportance):
    """Absolute sum of weights times gradients: ``|sum w * dloss/dw|`` over all rows and columns of a unit.

    A column's weights give ``sum_o W_oi dloss/dW_oi = sum_t x_it dloss/dx_it``; a row's weights give the same for its output
    without bias. Activations and their gradients are thus sufficient. Source: paper, table "Other structured methods" (Lee et
    al. 2018).
    """

    at_consumer_inputs: ClassVar[bool] = True
    method: Literal["snip"] = "snip"

    def find_terms(self, part: LinearGradient) -> Iterable[Tensor]:
        """Return activations times gradients per sequence, which does not depend on the batching; of an expert, per batch."""
        is_consumer = part.name == part.group.consumer
        value = part.inputs if is_consumer else part.outputs
        if not is_consumer and part.linear.bias is not None:
            value = value - part.linear.bias.detach()  # a producer's bias does not count as a weight
        products = value.double() * part.gradient.double()
        if part.group.experts:  # may have seen no token
            return [products.sum(0)]
        return products.view(len(part.inputs), -1, value.shape[-1]).sum(1)

    def finish(self, scores: Tensor) -> Tensor:
        return scores.abs()
