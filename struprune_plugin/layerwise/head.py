"""Losses at a language model's head, computed in pieces of the vocabulary.

Only the logits of one piece are held at a time; the gradient is computed explicitly, in a second pass over the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.layerwise.logits import LogitShape, measure_logits
from struprune_plugin.model.surgery import read_weight

Piece = tuple[int, Tensor, Tensor | None]  # first row, weights [rows, d], biases [rows]


@dataclass(frozen=True)
class Head:
    """Output embeddings of a model.

    :param pieces: yields them piece by piece, on the device where they are applied
    :param shape: maps their output to the model's logits
    :param num_tokens: size of the vocabulary
    """

    pieces: Callable[[], Iterator[Piece]]
    shape: LogitShape
    num_tokens: int

    @classmethod
    def of(cls, model: PreTrainedModel, pieces: Callable[[], Iterator[Piece]] | None = None) -> Head:
        """Return a model's head, in one piece unless ``pieces`` is given; raises as :func:`measure_logits` does."""
        shape, linear = measure_logits(model), model.get_output_embeddings()
        own = pieces or (lambda: iter([(0, *read_weight(linear))]))
        return cls(own, shape, linear.out_features)

    def hold(self) -> Head:
        """Return the head with its weights on the device as long as it is referenced, for many calls."""
        pieces = list(self.pieces())
        return replace(self, pieces=lambda: iter(pieces))

    def compute_logits(self, hidden: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (first row, logits [tokens, rows] in at least float32, weights) per piece."""
        for start, weight, bias in self.pieces():
            logits = F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
            yield start, self.shape(logits), weight
