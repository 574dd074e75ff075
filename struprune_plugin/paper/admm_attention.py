"""ADMM on the kept heads of one attention module, sequence by sequence.

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

One outer step: for every sequence :func:`update_attention_variables` and :func:`accumulate_attention_moments`, then once
:func:`solve_attention_weights`. The maps of all sequences would not fit in memory, so those of a sequence are dropped after its
visit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments, accumulate_moments
from struprune_plugin.paper.admm_ffn import ADMMSettings, Sample, Variables, solve_ridge, update_activations

_MASKED_BELOW = -1e4  # an additive mask hides lower values: -inf and the minimum of every float dtype
_ADAM_BETAS = (0.9, 0.999)
_ADAM_EPSILON = 1e-12  # gradients scale with alpha and beta; torch's 1e-8 would make small ones count for less


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
    :param queries: tokens whose outputs count, shape [T], bool. Padding tokens are left out; as keys they count only where the
        mask shows them to a valid query
    """

    mask: Tensor
    queries: Tensor

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


@torch.no_grad()
def initialize_attention_variables(sample: AttentionSample, weights: AttentionWeights, method: int = 2) -> Variables:
    """Return the variables computed from the weights: every term but the output's is then 0.

    Source: Algorithm `alg:sparse_llm`, SparseLLM2, first line.
    Differs from the source: its variables start at those of the dense module; here at those of the given weights, which may
    already be cut and re-solved (the FFN's reading, method.md section 7, step 1).

    :param method: 1 or 2: which variables represent the logits (R13)
    :return: variables in the dtype and on the device of ``sample.inputs``
    """
    query, key = project_query_key(sample, weights)
    logits = multiply_heads(query, key).masked_fill(~sample.pairs, 0)
    mixed = join_heads(soften(logits, sample) @ split_heads(project(sample.inputs, weights.value), weights))
    return Variables(mixed, (logits,) if method == 1 else (join_heads(query), join_heads(key)))


@torch.no_grad()
def update_attention_variables(
    sample: AttentionSample, variables: Variables, weights: AttentionWeights, settings: ADMMSettings
) -> tuple[Variables, Tensor]:
    """Update a, then mixed, then z_Q and z_K (method 1: z) of one sequence; no sub-step raises the objective.

    Source: struprune.tex, Eq. `85`, `86`, `87` (labels; method 2) and their counterparts of method 1.
    Differs from the source: the branch on the sign of z after Eq. 87 belongs to the FFN's ReLU and is left out (as R11); the
    mixed-step is exact; an Adam step that would raise its objective is not taken; the maps start anew from softmax of the
    logits at every visit (R12). From the initial variables, the first visit changes only ``mixed`` and the second the rest: a
    and z are already optimal until ``mixed`` changes.

    :param variables: as the last visit returned them, any float dtype
    :return: variables in the dtype of ``sample.inputs``; and the maps a, shape [H, T, T], 0 where hidden, which
        :func:`accumulate_attention_moments` and :func:`measure_attention_objective` need, to be dropped afterwards
    """
    inputs = sample.inputs
    values = split_heads(project(inputs, weights.value), weights)
    logits = read_logits(sample, variables, weights).masked_fill(~sample.pairs, 0)
    mixed = split_heads(variables.activations.to(inputs), weights)
    maps = _solve_maps(soften(logits, sample), mixed, values, sample.pairs, settings)
    blended, output = join_heads(maps @ values), weights.output.to(inputs)
    updated = update_activations(blended, sample.targets.to(inputs), output, 1.0, 1.0).contiguous()  # alpha cancels
    if len(variables.preactivations) == 1:
        return Variables(updated, (_descend_logits(sample, logits, maps, weights, settings),)), maps
    return Variables(updated, _descend_query_key(sample, variables, maps, weights, settings)), maps


def _descend(
    start: Tensor, unit: Tensor, measure: Callable[[Tensor], Tensor], inner_steps: int, learning_rate: float
) -> Tensor:
    """Return a start point after safeguarded Adam steps, which lower the independent parts of an objective; none rises.

    A step that does not lower its part is not taken, and that part's rate is divided by 4; otherwise the rate doubles. The last
    iterate is thus the best one, never worse than the start, and the learning rate is a first guess: maps, logits and queries
    need rates that differ by orders of magnitude with alpha / beta and the sequence length.

    :param start: initial point
    :param unit: size of a step of 1, broadcastable to ``start``: makes the learning rate relative
    :param measure: the objective of every independent part; its shape is that of the leading dimensions of ``start``
    """
    best, lowest = start, measure(start)
    first, second = torch.zeros_like(start), torch.zeros_like(start)
    rate = torch.full_like(lowest, learning_rate)
    trailing = [1] * (start.ndim - lowest.ndim)
    for step in range(1, inner_steps + 1):
        with torch.enable_grad():
            point = best.detach().requires_grad_()
            gradient = unit * torch.autograd.grad(measure(point).sum(), point)[0]
        first.lerp_(gradient, 1 - _ADAM_BETAS[0])
        second.lerp_(gradient.square(), 1 - _ADAM_BETAS[1])
        size = (second / (1 - _ADAM_BETAS[1] ** step)).sqrt_().add_(_ADAM_EPSILON)
        direction = first / (1 - _ADAM_BETAS[0] ** step) / size
        trial = best - unit * rate.view(*rate.shape, *trailing) * direction
        parts = measure(trial)
        better = parts < lowest
        best = torch.where(better.view(*better.shape, *trailing), trial, best)
        lowest = torch.where(better, parts, lowest)
        rate = torch.where(better, rate * 2, rate / 4)
    return best


def _measure_unit(variable: Tensor, counts: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the root mean square over ``dims`` of the entries that count; 0 if none does."""
    counts = counts.expand_as(variable)
    energy = torch.where(counts, variable, 0).square().sum(dims, keepdim=True)
    return (energy / counts.sum(dims, keepdim=True).clamp(min=1)).sqrt()


def _solve_maps(soft: Tensor, mixed: Tensor, values: Tensor, pairs: Tensor, settings: ADMMSettings) -> Tensor:
    """Return the minimiser of ``alpha ||mixed - a V||^2 + beta ||a - s||^2`` over the visible pairs, row by row.

    With V_t the values that query t sees, ``a_t = s_t + V_t (V_t^T V_t + (beta / alpha) I)^-1 (mixed_t - V_t^T s_t)``:
    a system of dv, not T, unknowns per row. The objective then never rises from one outer step to the next (method 2).

    :param soft: s, shape [H, T, T]
    :param mixed: shape [H, T, dv]
    :param values: V, shape [H, T, dv]
    :param pairs: visible pairs, shape [T, T]
    :return: a, shape [H, T, T], 0 where hidden
    """
    seen = pairs.to(values)
    ridge = settings.beta / settings.alpha * torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
    maps = []
    for s, target, v in zip(soft, mixed, values, strict=True):  # head by head: T matrices of dv x dv at a time
        products = (v[:, :, None] * v[:, None, :]).flatten(1)
        factor = torch.linalg.cholesky((seen @ products).unflatten(1, ridge.shape) + ridge)
        pull = torch.cholesky_solve((target - s @ v)[..., None], factor)[..., 0]
        maps.append(s + torch.where(pairs, pull @ v.T, 0))
    return torch.stack(maps)


def _descend_logits(
    sample: AttentionSample, logits: Tensor, maps: Tensor, weights: AttentionWeights, settings: ADMMSettings
) -> Tensor:
    """Lower ``beta ||a - softmax(z + mask)||^2 + alpha ||z - product||^2`` over the visible pairs, row by row.

    Source: struprune.tex, method 1, "Updating outputs".

    :param logits: z, shape [H, T, T]
    :return: z, shape [H, T, T]
    """
    product = multiply_heads(*project_query_key(sample, weights))

    def measure(z: Tensor) -> Tensor:
        fit = (maps - soften(z, sample)).square().sum(-1)
        return settings.beta * fit + settings.alpha * torch.where(sample.pairs, z - product, 0).square().sum(-1)

    unit = _measure_unit(logits, sample.pairs, (-2, -1)) * sample.pairs
    return _descend(logits, unit, measure, settings.inner_steps, settings.learning_rate)


def _descend_query_key(
    sample: AttentionSample, variables: Variables, maps: Tensor, weights: AttentionWeights, settings: ADMMSettings
) -> tuple[Tensor, Tensor]:
    """Lower ``beta ||a - softmax(z_Q z_K^T / sqrt(dh) + mask)||^2 + alpha (||z_Q - W_Q X||^2 + ||z_K - W_K X||^2)``.

    z_Q and z_K move together, head by head. Source: struprune.tex, Eq. `87` (label). Differs from the source: R13.

    :return: z_Q and z_K, shape [T, H * dh] each
    """
    start = torch.stack([split_heads(z.to(sample.inputs), weights) for z in variables.preactivations], 1)
    anchor = torch.stack(project_query_key(sample, weights), 1)
    counts = torch.stack([sample.queries, sample.keys])[..., None]

    def measure(z: Tensor) -> Tensor:  # z [H, 2, T, dh]
        soft = soften(multiply_heads(z[:, 0], z[:, 1]), sample)
        fit = (maps - soft).square().sum((1, 2))
        return settings.beta * fit + settings.alpha * torch.where(counts, z - anchor, 0).square().sum((1, 2, 3))

    unit = _measure_unit(start, counts, (2, 3))
    best = _descend(start, unit, measure, settings.inner_steps, settings.learning_rate)
    return join_heads(best[:, 0]), join_heads(best[:, 1])


@torch.no_grad()
def accumulate_attention_moments(
    moments: Sequence[SecondMoments],
    sample: AttentionSample,
    variables: Variables,
    maps: Tensor,
    weights: AttentionWeights,
    damping: float = 0.01,
) -> None:
    """Add one sequence to the moments. These are sums, not means: order and grouping of sequences do not matter.

    Differs from the source: for method 1 the paper recovers ``W_Q = z a^+`` from a product of two weights; here W_Q is
    regressed on the queries that fit z best given the keys, and W_K on the keys that fit best given those queries.

    :param moments: updated in place: X -> queries, X -> keys, per head i ``a_i [X, 1] -> mixed_i``, mixed -> Y. The last column
        of ``a_i [X, 1]`` is a_i 1, which is 1 only while the rows of a_i sum to 1, so ``num_tokens`` has no meaning there
    :param variables: updated variables
    :param maps: maps of the same update, shape [H, T, T]
    :param damping: method 1: pull of the recovered queries and keys towards W_Q [X, 1] and W_K [X, 1], relative to
        the mean diagonal of their system, above 0
    """
    inputs, mixed = sample.inputs, variables.activations
    of_query, of_key, *of_values, of_output = moments
    if len(variables.preactivations) == 1:
        query, key = _recover_query_key(sample, variables.preactivations[0], weights, damping)
    else:
        query, key = variables.preactivations
    accumulate_moments(of_query, inputs[sample.queries], query[sample.queries])
    accumulate_moments(of_key, inputs[sample.keys], key[sample.keys])
    accumulate_moments(of_output, mixed[sample.queries], sample.targets[sample.queries])
    with_ones = torch.nn.functional.pad(inputs, (0, 1), value=1.0)
    for total, head_maps, targets in zip(of_values, maps, split_heads(mixed, weights), strict=True):
        blended = (head_maps.to(inputs) @ with_ones)[sample.queries].to(total.gram.dtype)
        target = targets[sample.queries].to(total.gram.dtype)
        total.gram.addmm_(blended.T, blended)
        total.cross.addmm_(target.T, blended)
        total.target_energy.add_(target.square().sum(dtype=torch.float64))
        total.absolute_sum.add_(blended[:, :-1].abs().sum(0))


@torch.no_grad()
def solve_attention_weights(
    moments: Sequence[SecondMoments],
    weights: AttentionWeights,
    damping: float,
    has_bias: bool = True,
    where: str = "attention",
) -> AttentionWeights:
    """Solve the regressions of all weights, see :func:`~struprune_plugin.paper.admm_variables.solve_ridge`.

    With method 1, the error towards the recovered queries and keys cannot rise. The term of z itself, a product of both
    weights, is expected to fall with it but may rise: compare objectives.

    :param weights: current weights
    :param where: name of the module, for errors
    :return: float64 weights
    """
    names = ["queries", "keys", *(f"values of kept head {i}" for i in range(weights.num_heads)), "output"]
    labels = [f"{where}, {name}" for name in names]
    query, key, *values, output = solve_ridge(moments, weights.list_regressed(), damping, has_bias, labels)
    return replace(weights, query=query, key=key, value=torch.cat(values), output=output)


def _recover_query_key(
    sample: AttentionSample, logits: Tensor, weights: AttentionWeights, damping: float
) -> tuple[Tensor, Tensor]:
    """Return queries, and keys given those queries, that fit the logits of method 1 per head.

    With c = 1 / sqrt(dh): ``Q* = argmin ||z - c Q* K^T||^2 + lambda ||Q* - Q||^2``, which is
    ``Q + c R K (c^2 K^T K + lambda I)^-1`` with the residual R set to 0 at hidden pairs (they count as fitted, so they only
    hold Q* back); then K* the same way, given Q*. Recovered independently, each would remove the whole residual, and both
    together would overshoot.

    :param logits: z, shape [H, T, T]
    :return: queries and keys, shape [T, H * dh] each
    """
    query, key = project_query_key(sample, weights)
    seen_query = torch.where(sample.queries[:, None], query, 0)
    seen_key = torch.where(sample.keys[:, None], key, 0)
    scale = 1 / math.sqrt(query.shape[-1])

    def correct(left: Tensor, right: Tensor, wanted: Tensor, pairs: Tensor) -> Tensor:
        residual = torch.where(pairs, wanted - scale * left @ right.mT, 0)
        system = scale**2 * right.mT @ right
        diagonal = system.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(damping * diagonal.mean(-1, keepdim=True) + torch.finfo(system.dtype).tiny)
        return torch.cholesky_solve(scale * (residual @ right).mT, torch.linalg.cholesky(system)).mT

    logits = logits.to(sample.inputs)
    moved_query = correct(seen_query, seen_key, logits, sample.pairs)
    moved_key = correct(seen_key, seen_query + moved_query, logits.mT, sample.pairs.T)
    return join_heads(query + moved_query), join_heads(key + moved_key)
