"""Losses at a language model's head, computed in pieces of the vocabulary.

Only the logits of one piece are held at a time; the gradient is computed explicitly, in a second pass over the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.layerwise.logits import LogitShape, measure_logits
from struprune_plugin.layerwise.samples import TeacherTargets
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


@dataclass(frozen=True)
class HeadLosses:
    """Losses summed over tokens.

    :param gradient: gradient of the weighted sum with respect to the hidden states, shape [tokens, d]; None where not requested
    """

    cross_entropy: float
    divergence: float
    gradient: Tensor | None


@torch.no_grad()
def measure_head(
    hidden: Tensor,
    labels: Tensor,
    teacher: TeacherTargets | None,
    head: Head,
    temperature: float,
    weights: tuple[float, float] | None,
) -> HeadLosses:
    """Return ``sum -log p(label)`` and the divergence from a teacher, summed over tokens.

    The divergence is ``T^2 * sum_o p_o (log p_o - log q_o)`` over the outcomes o: the teacher's k likeliest tokens, and one
    bucket that holds the rest of the vocabulary on both sides. p is renormalised over them, so that rounding in the cache
    cancels; q = softmax(logits / T). It is the full KL divergence where every token is kept, never more where fewer are, and
    zero where student and teacher agree. T^2 keeps the size of the gradients (Hinton et al., 2015).

    :param hidden: inputs of the head, shape [tokens, d]
    :param labels: shape [tokens]
    :param teacher: shape [tokens, k + 1], or [tokens, V]; None without a teacher
    :param weights: weights of the two losses in the gradient; None where no gradient is requested
    """
    found = _Normalisers(hidden, labels, teacher, temperature)
    for start, logits, _weight in head.compute_logits(hidden):
        found.add(start, logits)
    del logits, _weight  # or the last piece would stay allocated during the second pass
    entropy, divergence = found.compute_losses()
    if weights is None:
        return HeadLosses(entropy, divergence, None)
    gradient = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
    for start, logits, weight in head.compute_logits(hidden):
        above = found.compute_gradient(start, logits, *weights) * head.shape.compute_slope(logits)
        gradient += (above.to(weight.dtype) @ weight).to(gradient.dtype)
    return HeadLosses(entropy, divergence, gradient)


class _Normalisers:
    """Normalisers from the first pass over the pieces, for the second pass.

    With z the logits, I the teacher's kept tokens and T the temperature: ``log sum exp z``, the label's z, and for the divergence
    ``log sum exp z / T`` over all tokens and over all but I, and the z of I.
    """

    def __init__(self, hidden: Tensor, labels: Tensor, teacher: TeacherTargets | None, temperature: float):
        tokens, dtype = len(hidden), torch.promote_types(hidden.dtype, torch.float32)
        self._labels, self._temperature = labels[:, None], temperature
        self._whole = hidden.new_full((tokens, 1), -math.inf, dtype=dtype)
        self._label = hidden.new_zeros((tokens, 1), dtype=dtype)
        self._kept: Tensor | None = None
        if teacher is not None:
            self._wanted = F.log_softmax(teacher.log_probs.to(dtype), dim=-1)
            size = self._wanted.shape[-1]
            kept = torch.arange(size, device=hidden.device).expand(tokens, -1)
            self._has_rest = teacher.indices is not None
            self._kept = kept if teacher.indices is None else teacher.indices.long()
            self._values = hidden.new_zeros(self._kept.shape, dtype=dtype)
            self._warm, self._rest = self._whole.clone(), self._whole.clone()

    def add(self, start: int, logits: Tensor) -> None:
        total = logits.logsumexp(-1, keepdim=True)
        self._whole = torch.logaddexp(self._whole, total)
        at, inside = _locate(self._labels, start, logits.shape[-1])
        self._label += logits.gather(-1, at) * inside
        if self._kept is None:
            return
        at, inside = _locate(self._kept, start, logits.shape[-1])
        self._values += logits.gather(-1, at) * inside
        warm = logits / self._temperature
        total = total if self._temperature == 1 else warm.logsumexp(-1, keepdim=True)
        self._warm = torch.logaddexp(self._warm, total)
        if self._has_rest:
            others = _fill(warm, at, inside, -math.inf).logsumexp(-1, keepdim=True)
            self._rest = torch.logaddexp(self._rest, others)

    def compute_losses(self) -> tuple[float, float]:
        entropy = (self._whole - self._label).sum().item()
        if self._kept is None:
            return entropy, 0.0
        found = self._values / self._temperature - self._warm
        if self._has_rest:
            found = torch.cat([found, self._rest - self._warm], dim=-1)
        divergence = (self._wanted.exp() * (self._wanted - found)).sum()
        return entropy, self._temperature**2 * divergence.item()

    def compute_gradient(self, start: int, logits: Tensor, entropy: float, divergence: float) -> Tensor:
        """Return the gradient of the weighted losses with respect to one piece's logits.

        ``p_j - [j = label]``, and ``T (p_j - w_j)`` for j in I and ``T (p_j - w_rest r_j)`` else, with w the teacher's
        probabilities, and p and r the student's at T: over all tokens, and over those that are not in I.
        """
        gradient = torch.zeros_like(logits)
        if entropy:
            at, inside = _locate(self._labels, start, logits.shape[-1])
            gradient.add_((logits - self._whole).exp_(), alpha=entropy)
            gradient.scatter_add_(-1, at, -entropy * inside.to(gradient.dtype))
        if divergence and self._kept is not None:
            factor, warm = divergence * self._temperature, logits / self._temperature
            at, inside = _locate(self._kept, start, logits.shape[-1])
            gradient.add_((warm - self._warm).exp_(), alpha=factor)
            wanted = self._wanted.exp()
            if self._has_rest:
                rest = _fill((warm - self._rest).exp_(), at, inside, 0.0)
                gradient.addcmul_(wanted[:, -1:], rest, value=-factor)
                wanted = wanted[:, :-1]
            gradient.scatter_add_(-1, at, -factor * wanted * inside)
        return gradient


def _locate(indices: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the indices of tokens within a piece, 0 for tokens outside, and which tokens are inside."""
    at = indices - start
    inside = (at >= 0) & (at < width)
    return at.where(inside, 0), inside


def _fill(values: Tensor, at: Tensor, inside: Tensor, value: float) -> Tensor:
    """Set the located entries of a piece to a value, in place, and return the piece.

    :param values: shape [tokens, rows]
    """
    row, place = inside.nonzero(as_tuple=True)
    values[row, at[row, place]] = value
    return values


@torch.no_grad()
def compress_head(hidden: Tensor, head: Head, top_k: int, temperature: float) -> TeacherTargets:
    """Return the ``top_k`` likeliest tokens of every distribution, and the total probability of all others.

    With p = softmax(logits / T) and I the ``top_k`` largest: ``log p_i, i in I`` and ``log(sum_{j not in I} p_j)``.

    :param hidden: inputs of the head, shape [tokens, d]
    :param top_k: number of outcomes to keep; all where it is the vocabulary or more
    :param temperature: T
    """
    whole = hidden.new_full((len(hidden), 1), -math.inf, dtype=torch.promote_types(hidden.dtype, torch.float32))
    best, where = whole[:, :0], torch.zeros_like(whole[:, :0], dtype=torch.int64)
    for start, logits, _ in head.compute_logits(hidden):
        logits = logits / temperature
        whole = torch.logaddexp(whole, logits.logsumexp(-1, keepdim=True))
        values, at = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
        best, where = torch.cat([best, values], -1), torch.cat([where, at + start], -1)
        if start:
            best, order = best.topk(min(top_k, best.shape[-1]), dim=-1)
            where = where.gather(-1, order)
    if top_k >= head.num_tokens:
        return TeacherTargets((best - whole).scatter(-1, where, best - whole), None)
    found = best - whole
    rest = torch.log1p(-found.exp().sum(-1, keepdim=True).clamp_max(1 - torch.finfo(found.dtype).eps))
    return TeacherTargets(torch.cat([found, rest], -1), where)
