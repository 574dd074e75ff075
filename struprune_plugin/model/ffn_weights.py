"""FFN computation, separate from its decoder layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from struprune_plugin.linalg.second_moments import append_bias
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_weight, set_weight
from struprune_plugin.model.units.group import UnitGroup


class FFN:
    """FFN ``W2 phi(W1 x)``, gated where there are two W1.

    :param first: (weight, bias, parts) of the linears that produce the channels; two parts are a fused gate and up projection
    :param second: (weight, bias) of the linear that reads the channels
    :param activation: its name in transformers
    """

    def __init__(
        self,
        first: Sequence[tuple[Tensor, Tensor | None, int]],
        second: tuple[Tensor, Tensor | None],
        activation: str,
    ):
        self.first, self.second, self.activation = first, second, activation
        self._act = ACT2FN[activation]

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the output, shape [tokens, d] -> [tokens, d]."""
        parts = [part for weight, bias, count in self.first for part in linear(inputs, weight, bias).chunk(count, -1)]
        hidden = self._act(parts[0])
        return linear(hidden * parts[1] if len(parts) > 1 else hidden, *self.second)

    def copy(self, dtype: torch.dtype | None = None) -> FFN:
        """Return a copy in which all weights require gradients, cast to ``dtype`` where given."""

        def hold(part: Tensor | None) -> Tensor | None:
            return None if part is None else part.detach().to(dtype or part.dtype, copy=True).requires_grad_()

        first = [(hold(weight), hold(bias), count) for weight, bias, count in self.first]
        return FFN(first, (hold(self.second[0]), hold(self.second[1])), self.activation)  # type: ignore[arg-type]

    def list_parameters(self) -> list[Tensor]:
        """Return the weights and the existing biases."""
        return [p for pair in (*self.first, self.second) for p in pair[:2] if isinstance(p, Tensor)]


def read_ffn(layer: nn.Module, group: UnitGroup) -> FFN:
    """Return a copy of the layer's present FFN; later changes of the layer do not affect it."""

    def copy(name: str) -> tuple[Tensor, Tensor | None]:
        return read_weight(find_linear(layer, name), lambda part: part.detach().clone())

    first = [(*copy(name), len(parts)) for name, parts in group.producers.items()]
    return FFN(first, copy(group.consumer), group.activation)


def write_ffn(layer: nn.Module, group: UnitGroup, ffn: FFN) -> None:
    """Write the FFN's weights to the layer's linears, cast to their dtype."""
    names = (*group.producers, group.consumer)
    with torch.no_grad():
        for name, (weight, bias) in zip(names, (*(p[:2] for p in ffn.first), ffn.second), strict=True):
            set_weight(find_linear(layer, name), append_bias(weight, bias))
