"""Passes over the decoder layers of a model. A pass is an object; the host's events, or a plain loop, drive it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel


class Pass(Protocol):
    """One pass over the layers, on calibration data that flows through them.

    The layers are called in order. For each: its calls with all batches, seen by ``before_layer`` and ``after_layer``,
    then ``end_layer``.
    """

    def begin(self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]]) -> None:
        """Prepare; no layer has been called yet."""

    def see_tokens(self, tokens: Tensor) -> None:
        """Take in the token indices of the next batch, shape [sequences, tokens]."""

    def before_layer(self, name: str, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Take in the arguments of a layer's call."""

    def after_layer(self, output: Any) -> None:
        """Take in what that call returned."""

    def end_layer(self, name: str, layer: nn.Module) -> None:
        """Do the work on a layer that all batches have gone through."""

    def finish(self) -> None:
        """Conclude, once all layers are done."""

    def abort(self) -> None:
        """Let go of everything, at any time; what was to be given back is."""
