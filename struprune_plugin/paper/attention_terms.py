"""Terms of the ADMM objective on the kept heads of one attention module, sequence by sequence.

Legend (one sequence of T tokens, H kept heads of width dh for queries and keys and dv for values):
    X [T, d]        inputs of W_Q, W_K, W_V             Y [T, d_out]       target output of W_O
    z_Q, z_K        queries and keys, [T, H * dh]       z [H, T, T]        logits (method 1 only)
    a [H, T, T]     attention maps                      mixed [T, H * dv]  concat_i(a_i V_i), the input of W_O
    W [rows, n + 1] weights, bias last; the rows of W_Q, W_K, W_V are head-major: head i owns [i * w, (i + 1) * w)

Objective, summed over sequences, with V = W_V [X, 1] and s = softmax(logits + mask):
    alpha ||Y - W_O [mixed, 1]||^2 + alpha ||mixed - concat_i(a_i V_i)||^2 + beta ||a - s||^2
    method 2: + alpha ||z_Q - W_Q [X, 1]||^2 + alpha ||z_K - W_K [X, 1]||^2,     logits = z_Q z_K^T / sqrt(dh)
    method 1: + alpha ||z - (W_Q [X, 1]) (W_K [X, 1])^T / sqrt(dh)||^2,           logits = z
Source: struprune.tex, appendix "Computation on Multi-Head Attention layers"; method.md section 7 (R12, R13).

:mod:`~struprune_plugin.paper.attention_steps` updates the variables and solves the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from struprune_plugin.paper.admm_variables import Sample, Variables

_MASKED_BELOW = -1e4  # an additive mask hides lower values: -inf and the minimum of every float dtype


@dataclass(frozen=True)
class AttentionWeights:
    """Weights of the kept heads, any float dtype, bias last (a column of zeros where the linear has none).

    :param query: W_Q, shape [H * dh, d + 1]
    :param key: W_K, shape [H * dh, d + 1]
    :param value: W_V, shape [H * dv, d + 1]
    :param output: W_O, shape [d_out, H * dv + 1]
    :param num_heads: H, at least 1
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    num_heads: int

    def list_regressed(self) -> list[Tensor]:
        """Return one weight per regression: W_Q, W_K, W_V of every head, W_O."""
        return [self.query, self.key, *self.value.chunk(self.num_heads), self.output]


@dataclass(frozen=True)
class AttentionSample(Sample):
    """One sequence and its attention mask.

    :param mask: additive, shape [T, T] (queries, keys), any float dtype; below -1e4 a pair is hidden
    :param query_rows: tokens whose outputs count, shape [valid], int64; all T where None. Padding tokens are left out; as keys
        they count only where the mask shows them to a valid query
    """

    mask: Tensor
    query_rows: Tensor | None = None

    @cached_property
    def queries(self) -> Tensor:
        """Mask of queries t that count, shape [T], bool."""
        if self.query_rows is None:
            return torch.ones(len(self.inputs), dtype=torch.bool, device=self.inputs.device)
        counts = torch.zeros(len(self.inputs), dtype=torch.bool, device=self.inputs.device)
        return counts.index_fill_(0, self.query_rows, True)

    @cached_property
    def pairs(self) -> Tensor:
        """Mask of queries t that count and see key s, shape [T, T], bool."""
        return (self.mask > _MASKED_BELOW) & self.queries[:, None]

    @cached_property
    def keys(self) -> Tensor:
        """Mask of keys s that a counting query sees, shape [T], bool."""
        return self.pairs.any(0)


@torch.no_grad()
def measure_attention_objective(
    sample: AttentionSample,
    variables: Variables,
    weights: AttentionWeights,
    alpha: float,
    beta: float,
    maps: Tensor | None = None,
) -> dict[str, float]:
    """Return the weighted terms of one sequence's objective by name, each at least 0, summed in float64.

    They are ``output``, ``mixed`` and ``maps``, then ``query`` and ``key`` (method 2) or ``logits`` (method 1), in the order of
    the module's docstring.

    :param maps: shape [H, T, T]; if None, softmax of the logits, where the next visit would start
    """
    inputs = sample.inputs
    soft = soften(read_logits(sample, variables, weights), sample)
    maps = soft if maps is None else maps.to(inputs)
    mixed, preactivations = variables.activations.to(inputs), [z.to(inputs) for z in variables.preactivations]
    blended = join_heads(maps @ split_heads(project(inputs, weights.value), weights))
    means = [project(inputs, weight) for weight in (weights.query, weights.key)]

    def energy(residual: Tensor, counts: Tensor) -> float:
        return float(torch.where(counts, residual, 0).square().sum(dtype=torch.float64))

    queries, keys = sample.queries[:, None], sample.keys[:, None]
    terms = {
        "output": alpha * energy(sample.targets.to(inputs) - project(mixed, weights.output), queries),
        "mixed": alpha * energy(mixed - blended, queries),
        "maps": beta * energy(maps - soft, sample.pairs),
    }
    if len(preactivations) == 1:
        product = multiply_heads(*(split_heads(mean, weights) for mean in means))
        return terms | {"logits": alpha * energy(preactivations[0] - product, sample.pairs)}
    query, key = (z - mean for z, mean in zip(preactivations, means, strict=True))
    return terms | {"query": alpha * energy(query, queries), "key": alpha * energy(key, keys)}


def project(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return ``W [inputs, 1]`` token by token, shape [T, n] -> [T, rows], in the inputs' dtype."""
    weight = weight.to(inputs)
    return torch.addmm(weight[:, -1], inputs, weight[:, :-1].T)


def split_heads(tokens: Tensor, weights: AttentionWeights) -> Tensor:
    """Return [T, H * w] as [H, T, w]."""
    return tokens.unflatten(1, (weights.num_heads, -1)).transpose(0, 1)


def join_heads(heads: Tensor) -> Tensor:
    """Return [H, T, w] as [T, H * w]."""
    return heads.transpose(0, 1).flatten(1)


def multiply_heads(query: Tensor, key: Tensor) -> Tensor:
    """Return ``query key^T / sqrt(dh)``, shapes [H, T, dh] -> [H, T, T]."""
    return query @ key.mT / math.sqrt(query.shape[-1])


def soften(logits: Tensor, sample: AttentionSample) -> Tensor:
    """Return softmax(logits + mask) over keys, exactly 0 at hidden pairs, also in rows without a visible key."""
    lowest = torch.finfo(logits.dtype).min  # not -inf: a row without a visible key must stay finite
    return torch.where(sample.pairs, logits + sample.mask.to(logits), lowest).softmax(-1) * sample.pairs


def read_logits(sample: AttentionSample, variables: Variables, weights: AttentionWeights) -> Tensor:
    """Return the logits that the variables represent, shape [H, T, T]."""
    preactivations = [z.to(sample.inputs) for z in variables.preactivations]
    if len(preactivations) == 1:
        return preactivations[0]
    return multiply_heads(*(split_heads(z, weights) for z in preactivations))


def project_query_key(sample: AttentionSample, weights: AttentionWeights) -> list[Tensor]:
    """Return the queries and keys computed from the weights, shape [H, T, dh] each."""
    return [split_heads(project(sample.inputs, weight), weights) for weight in (weights.query, weights.key)]
