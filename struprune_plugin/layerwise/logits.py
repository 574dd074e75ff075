"""Measurement of the scale and soft cap that a model's forward pass applies to the output of its head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.ends import bypass_layers, taste_layer
from struprune_plugin.model.layers import find_decoder_layers

_REACH = 80.0  # largest logit of the test input
_SHOWN = 64  # number of logits in a first comparison


@dataclass(frozen=True)
class LogitShape:
    """Map from the linear's output z to logits ``c tanh(z f / (s c))``.

    :param scale: s
    :param factor: f
    :param cap: c; None without a soft cap
    """

    scale: float = 1.0
    factor: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the model's logits, given the linear's output."""
        logits = logits if self.scale == 1 else logits / self.scale
        logits = logits if self.factor == 1 else logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def compute_slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of the model's logits with respect to the linear's output."""
        slope = self.factor / self.scale
        return slope if self.cap is None else (1 - (logits / self.cap).square()) * slope


@torch.no_grad()
def measure_logits(model: PreTrainedModel) -> LogitShape:
    """Return the map from the output embeddings' output to the model's logits, whose numbers are values of the configuration.

    Neither a decoder layer nor the output embeddings run: the model's forward pass receives test logits instead.

    :raises ValueError: the map has another form, or the output embeddings are not a linear
    """
    head: Any = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"model: its output embeddings must be a linear, got {type(head).__name__}. Choose another model."
        )
    shown = torch.linspace(-_REACH, _REACH, head.out_features)
    found = _show(model, head, shown).flatten()
    if found.shape == shown.shape:
        for shape in _list_shapes(model):
            if _agrees(shape, shown, found):
                return shape
    raise ValueError(
        f"model: logits must be what {type(model).__name__}'s output embeddings give, at most scaled and soft-capped by numbers "
        "of the configuration, got others. Choose another model."
    )


def _show(model: PreTrainedModel, head: nn.Module, shown: Tensor) -> Tensor:
    """Return the model's logits for one token, given the output ``shown`` of its output embeddings, float32, on the host."""

    def give(inputs: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return shown.to(inputs.device).expand(*inputs.shape[:-1], -1)

    layers = [layer for _, layer in find_decoder_layers(model)]
    batch = {"input_ids": torch.ones(1, 1, dtype=torch.int64, device=model.device)}
    taste_layer(model, batch, layers[0])
    with ExitStack() as stack:
        stack.enter_context(bypass_layers(layers, None))
        stack.enter_context(patch_attr(head, "forward", give))
        return model(**batch, use_cache=False).logits.float().cpu()


def _agrees(shape: LogitShape, shown: Tensor, found: Tensor) -> bool:
    """Return whether a shape reproduces the logits found; a few of them are compared first."""
    few = slice(None, None, max(1, len(shown) // _SHOWN))
    return all(torch.allclose(shape(shown[part]), found[part], rtol=1e-6, atol=1e-6) for part in (few, slice(None)))


def _list_shapes(model: PreTrainedModel) -> Iterator[LogitShape]:
    """Yield the candidate shapes, the simplest first."""
    numbers = sorted(set(_list_numbers(model.config.to_dict())))
    yield LogitShape()
    scales = [LogitShape(scale=number) for number in numbers] + [LogitShape(factor=number) for number in numbers]
    yield from scales
    caps = [number for number in numbers if number > 0]
    yield from (LogitShape(cap=cap) for cap in caps)
    yield from (LogitShape(one.scale, one.factor, cap) for one, cap in product(scales, caps))


def _list_numbers(value: Any) -> Iterator[float]:
    """Yield the numbers of a configuration and its parts, except 0 and 1."""
    if isinstance(value, dict):
        for part in value.values():
            yield from _list_numbers(part)
    elif (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value not in (0, 1)
    ):
        yield float(value)
