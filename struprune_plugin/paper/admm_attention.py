"""ADMM on the kept heads of one attention module, sequence by sequence.

Legend (one sequence of T tokens, H kept heads of width dh for queries and keys and dv for values):
    X [T, d]        inputs of W_Q, W_K, W_V             Y [T, d_out]       target output of W_O
    z_Q, z_K        queries and keys, [H, T, dh]        z [H, T, T]        logits / sqrt(dh) before the mask (method 1 only)
    a [H, T, T]     attention maps                      mixed [T, H * dv]  concat_i(a_i V_i), the input of W_O
    variables (mixed, z_Q, z_K), with method 1 (mixed, z); weights [W_Q, W_K, W_V of every head, W_O], [rows, n + 1], bias last

Objective, summed over sequences, with V = W_V [X, 1] and s = softmax(logits + mask):
    alpha ||Y - W_O [mixed, 1]||^2 + alpha ||mixed - concat_i(a_i V_i)||^2 + beta ||a - s||^2
    method 2: + alpha ||z_Q - W_Q [X, 1]||^2 + alpha ||z_K - W_K [X, 1]||^2,     logits = z_Q z_K^T / sqrt(dh)
    method 1: + alpha ||z - (W_Q [X, 1]) (W_K [X, 1])^T / sqrt(dh)||^2,           logits = z
Source: struprune.tex, appendix "Computation on Multi-Head Attention layers"; method.md section 7 (R12, R13).

The maps of all sequences would not fit in memory: those of a sequence are computed anew at every visit and dropped after it.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments, accumulate_moments
from struprune_plugin.paper.admm_ffn import ADMMSettings, Variables, update_activations

_MASKED_BELOW = -1e4  # an additive mask hides lower values: -inf and the minimum of every float dtype
_ADAM_BETAS = (0.9, 0.999)
_ADAM_EPSILON = 1e-12  # gradients scale with alpha and beta; torch's 1e-8 would make small ones count for less


class AttentionSample(NamedTuple):
    """One sequence, X and Y, and its attention mask.

    :param mask: additive, shape [T, T] (queries, keys); below -1e4 a pair is hidden, in rows of padding all pairs
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor

    @property
    def pairs(self) -> Tensor:
        """Mask of queries t that see key s, shape [T, T], bool. Queries and keys of no pair do not count."""
        return self.mask > _MASKED_BELOW


def project_heads(inputs: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the queries, keys and values computed from the weights, shape [H, T, dh or dv] each."""
    query, key, *values, _ = weights
    projected = (torch.addmm(w[:, -1], inputs, w[:, :-1].T) for w in (query, key, torch.cat(values)))
    return [split_heads(tokens, len(values)) for tokens in projected]


def split_heads(tokens: Tensor, num_heads: int) -> Tensor:
    """Return [T, H * w] as [H, T, w]."""
    return tokens.unflatten(1, (num_heads, -1)).transpose(0, 1)


def join_heads(heads: Tensor) -> Tensor:
    """Return [H, T, w] as [T, H * w]."""
    return heads.transpose(0, 1).flatten(1)


def multiply_heads(query: Tensor, key: Tensor) -> Tensor:
    """Return ``query key^T / sqrt(dh)``, shapes [H, T, dh] -> [H, T, T]."""
    return query @ key.mT / math.sqrt(query.shape[-1])


def soften(logits: Tensor, sample: AttentionSample) -> Tensor:
    """Return softmax(logits + mask) over keys, exactly 0 at hidden pairs, also in rows without a visible key."""
    lowest = torch.finfo(logits.dtype).min  # not -inf: a row without a visible key must stay finite
    return torch.where(sample.pairs, logits + sample.mask, lowest).softmax(-1) * sample.pairs


def make_maps(sample: AttentionSample, variables: Variables) -> Tensor:
    """Return s, the maps of the logits that the variables represent, shape [H, T, T]."""
    _, *logits = variables
    return soften(logits[0] if len(logits) == 1 else multiply_heads(*logits), sample)


def initialize_attention_variables(sample: AttentionSample, weights: Sequence[Tensor], method: int) -> Variables:
    """Return the variables computed from the weights: every term but the output's is then 0.

    Source: Algorithm `alg:sparse_llm`, SparseLLM2, first line. Differs from the source: these are the given weights, which may
    already be cut and re-solved, not the dense module's (the FFN's reading, method.md section 7, step 1).

    :param method: 1 or 2: which variables represent the logits (R13)
    """
    query, key, values = project_heads(sample.inputs, weights)
    logits = multiply_heads(query, key)
    return (join_heads(soften(logits, sample) @ values), *((logits,) if method == 1 else (query, key)))


def update_attention_variables(
    sample: AttentionSample, variables: Variables, weights: Sequence[Tensor], settings: ADMMSettings
) -> tuple[Variables, Tensor]:
    """Update a, then mixed, then z_Q and z_K (method 1: z) of one sequence; no sub-step raises the objective.

    Source: struprune.tex, Eq. `85`, `86`, `87` (labels; method 2) and their counterparts of method 1.
    Differs from the source: the branch on the sign of z after Eq. 87 belongs to the FFN's ReLU and is left out (as R11); the
    mixed-step is exact; an Adam step that would raise its objective is not taken; the maps start anew from softmax of the
    logits at every visit (R12). From the initial variables, the first visit changes only ``mixed`` and the second the rest: a
    and z are already optimal until ``mixed`` changes.

    :return: variables; and the maps a, shape [H, T, T], 0 where hidden
    """
    mixed, *before = variables
    query, key, values = project_heads(sample.inputs, weights)
    maps = _solve_maps(make_maps(sample, variables), split_heads(mixed, len(values)), values, sample.pairs, settings)
    mixed = update_activations(join_heads(maps @ values), sample.targets, weights[-1], 1.0, 1.0)  # alpha cancels
    if len(before) == 1:
        moved = [_descend_logits(sample, before[0], multiply_heads(query, key), maps, settings)]
    else:
        start, anchor = torch.stack(before, 1), torch.stack([query, key], 1)
        moved = list(_descend_query_key(sample, start, anchor, maps, settings).unbind(1))
    return (mixed.contiguous(), *moved), maps


def _descend(start: Tensor, counts: Tensor, measure: Callable[[Tensor], Tensor], settings: ADMMSettings) -> Tensor:
    """Return a start point after safeguarded Adam steps, which lower the independent parts of an objective; none rises.

    A step that does not lower its part is not taken, and that part's rate is divided by 4; otherwise the rate doubles: the rates
    that maps, logits and queries need differ by orders of magnitude with alpha / beta and the sequence length.

    :param counts: entries that may move, broadcastable to ``start``
    :param measure: the objective of every independent part; its shape is that of the leading dimensions of ``start``
    """
    best, lowest = start, measure(start)
    energy = torch.where(counts, start, 0).square().sum((-2, -1), keepdim=True)
    number = counts.expand_as(start).sum((-2, -1), keepdim=True).clamp(min=1)
    unit = (energy / number).sqrt() * counts  # makes the learning rate relative
    first, second = torch.zeros_like(start), torch.zeros_like(start)
    rate = torch.full_like(lowest, settings.learning_rate)
    trailing = [1] * (start.ndim - lowest.ndim)
    for step in range(1, settings.inner_steps + 1):
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


def _solve_maps(soft: Tensor, mixed: Tensor, values: Tensor, pairs: Tensor, settings: ADMMSettings) -> Tensor:
    """Return the minimiser of ``alpha ||mixed - a V||^2 + beta ||a - s||^2`` over the visible pairs, row by row, 0 where hidden.

    With V_t the values that query t sees, ``a_t = s_t + V_t (V_t^T V_t + (beta / alpha) I)^-1 (mixed_t - V_t^T s_t)``:
    a system of dv, not T, unknowns per row. The objective then never rises from one outer step to the next (method 2).

    :param mixed: shape [H, T, dv]
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
    sample: AttentionSample, start: Tensor, product: Tensor, maps: Tensor, settings: ADMMSettings
) -> Tensor:
    """Lower ``beta ||a - softmax(z + mask)||^2 + alpha ||z - product||^2`` over the visible pairs, row by row; return z.

    Source: struprune.tex, method 1, "Updating outputs".
    """

    def measure(z: Tensor) -> Tensor:
        error = (maps - soften(z, sample)).square().sum(-1)
        return settings.beta * error + settings.alpha * torch.where(sample.pairs, z - product, 0).square().sum(-1)

    return _descend(start, sample.pairs, measure, settings)


def _descend_query_key(
    sample: AttentionSample, start: Tensor, anchor: Tensor, maps: Tensor, settings: ADMMSettings
) -> Tensor:
    """Lower ``beta ||a - softmax(z_Q z_K^T / sqrt(dh) + mask)||^2 + alpha (||z_Q - W_Q X||^2 + ||z_K - W_K X||^2)``, by head.

    Source: struprune.tex, Eq. `87` (label). Differs from the source: R13.

    :param start: z_Q and z_K, shape [H, 2, T, dh], as returned; ``anchor`` has those computed from the weights
    """
    counts = torch.stack([sample.pairs.any(1), sample.pairs.any(0)])[..., None]

    def measure(z: Tensor) -> Tensor:
        error = (maps - soften(multiply_heads(z[:, 0], z[:, 1]), sample)).square().sum((1, 2))
        return settings.beta * error + settings.alpha * torch.where(counts, z - anchor, 0).square().sum((1, 2, 3))

    return _descend(start, counts, measure, settings)


def accumulate_attention_moments(
    moments: Sequence[SecondMoments],
    sample: AttentionSample,
    variables: Variables,
    maps: Tensor | None,
    weights: Sequence[Tensor],
    settings: ADMMSettings,
    dampening_frac: float = 0.01,
) -> float:
    """Add one sequence to the moments; return the terms of the objective that they do not hold.

    These are that of the maps and, with method 1, that of z. Differs from the source: for method 1 the paper recovers
    ``W_Q = z a^+`` from a product of two weights; here W_Q is regressed on the queries that fit z best given the keys, and W_K on
    the keys that fit best given those queries. Their errors cannot rise; the term of z is expected to fall with them but may rise.

    :param moments: updated in place: X -> queries, X -> keys, per head i ``a_i [X, 1] -> mixed_i``, mixed -> Y. The last column
        of ``a_i [X, 1]`` is a_i 1, which is 1 only while the rows of a_i sum to 1, so ``num_tokens`` has no meaning there
    :param maps: a, as :func:`update_attention_variables` returned it; None for s
    :param dampening_frac: method 1: pull of the recovered queries and keys towards W_Q [X, 1] and W_K [X, 1], relative to
        the mean diagonal of their system, above 0
    """
    inputs, targets, _ = sample
    mixed, *logits = variables
    of_query, of_key, *of_values, of_output = moments
    queries, keys = sample.pairs.any(1), sample.pairs.any(0)
    soft = make_maps(sample, variables)
    maps = soft if maps is None else maps
    residual = settings.beta * (maps - soft).square().sum(dtype=torch.float64)
    if len(logits) == 1:
        query, key, _ = project_heads(inputs, weights)
        away = torch.where(sample.pairs, logits[0] - multiply_heads(query, key), 0)
        residual += settings.alpha * away.square().sum(dtype=torch.float64)
        logits = _recover_query_key(sample, logits[0], query, key, dampening_frac)
    accumulate_moments(of_query, inputs[queries], join_heads(logits[0])[queries])
    accumulate_moments(of_key, inputs[keys], join_heads(logits[1])[keys])
    accumulate_moments(of_output, mixed[queries], targets[queries])
    with_ones = torch.nn.functional.pad(inputs, (0, 1), value=1.0)
    for total, head, wanted in zip(of_values, maps, split_heads(mixed, len(maps)), strict=True):
        blended = (head @ with_ones)[queries]
        accumulate_moments(total, blended[:, :-1], wanted[queries], blended[:, -1:])
    return float(residual)


def _recover_query_key(
    sample: AttentionSample, logits: Tensor, query: Tensor, key: Tensor, dampening_frac: float
) -> list[Tensor]:
    """Return queries, and keys given those queries, that fit the logits of method 1 per head, shape [H, T, dh] each.

    With c = 1 / sqrt(dh): ``Q* = argmin ||z - c Q* K^T||^2 + lambda ||Q* - Q||^2``, which is
    ``Q + c R K (c^2 K^T K + lambda I)^-1`` with the residual R set to 0 at hidden pairs, which hold Q* back; then K* the same
    way, given Q*: recovered independently, both together would overshoot.
    """
    seen_query = torch.where(sample.pairs.any(1)[:, None], query, 0)
    seen_key = torch.where(sample.pairs.any(0)[:, None], key, 0)
    scale = 1 / math.sqrt(query.shape[-1])

    def correct(left: Tensor, right: Tensor, wanted: Tensor, pairs: Tensor) -> Tensor:
        residual = torch.where(pairs, wanted - scale * left @ right.mT, 0)
        system = scale**2 * right.mT @ right
        diagonal = system.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(dampening_frac * diagonal.mean(-1, keepdim=True) + torch.finfo(system.dtype).tiny)
        return torch.cholesky_solve(scale * (residual @ right).mT, torch.linalg.cholesky(system)).mT

    moved_query = correct(seen_query, seen_key, logits, sample.pairs)
    moved_key = correct(seen_key, seen_query + moved_query, logits.mT, sample.pairs.T)
    return [query + moved_query, key + moved_key]
