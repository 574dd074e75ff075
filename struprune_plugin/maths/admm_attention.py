"""ADMM on the kept heads of one attention module: per-sequence variables, moments, and ridge solves of its weights.

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

One outer step: for every sequence :func:`update_attention_variables` and :func:`accumulate_attention_moments`, then
once :func:`solve_attention_weights`. The maps of all sequences would not fit, so none outlives its sequence's visit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from struprune_plugin.maths.solve import damp_moments, solve_kept_weights
from struprune_plugin.maths.statistics import Moments, accumulate_moments, make_moments

_MASKED_BELOW = -1e4  # an additive mask hides what lies below: -inf and the minimum of every float dtype
_ADAM_BETAS = (0.9, 0.999)
_ADAM_EPSILON = 1e-12  # gradients scale with alpha and beta; torch's 1e-8 would make small ones count for less


def _keep_position(heads: Tensor) -> Tensor:
    """Rotate nothing: learned or absent position embeddings."""
    return heads


@dataclass(frozen=True)
class AttentionWeights:
    """Weights of the kept heads, any float dtype, bias last (a column of zeros where the linear has none).

    :param query: W_Q, shape [H * dh, d + 1]
    :param key: W_K, shape [H * dh, d + 1]
    :param value: W_V, shape [H * dv, d + 1]
    :param output: W_O, shape [d_out, H * dv + 1]
    :param num_heads: H, at least 1
    :raises ValueError: the shapes contradict each other
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    num_heads: int

    def __post_init__(self) -> None:
        heads, inputs = self.num_heads, self.query.shape[1]
        fits = self.query.shape == self.key.shape and self.value.shape[1] == inputs
        fits = fits and self.output.shape[1] == len(self.value) + 1
        if heads < 1 or len(self.query) % heads or len(self.value) % heads or not fits:
            shapes = {f.name: tuple(getattr(self, f.name).shape) for f in fields(self) if f.name != "num_heads"}
            raise ValueError(
                "AttentionWeights: weights must be [H*dh, d+1], [H*dh, d+1], [H*dv, d+1] and [d_out, H*dv+1], got "
                f"{shapes} (H={heads}). Cut the same heads from all four, and append the bias as last column."
            )


@dataclass(frozen=True)
class AttentionSample:
    """One sequence. The dtype of ``inputs`` (float32 or float64) is the one everything is computed in.

    :param inputs: X, shape [T, d], finite
    :param targets: Y, shape [T, d_out], any float dtype
    :param mask: additive, shape [T, T] (queries, keys), any float dtype; below -1e4 a pair is hidden
    :param query_rows: the tokens whose outputs count, shape [valid], int64; all T where None. Padding tokens are left
        out here; as keys they count only where the mask shows them to a valid query
    :param rotate: applied to queries and to keys, [H, T, dh] -> [H, T, dh], before the logits. It must be linear and,
        for method 1, orthogonal (RoPE is both)
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    query_rows: Tensor | None = None
    rotate: Callable[[Tensor], Tensor] = _keep_position


@dataclass(frozen=True)
class AttentionVariables:
    """The per-token variables of one sequence that outlive an outer step; the method is told by which are there.

    :param mixed: shape [T, H * dv]
    :param query: method 2: z_Q before the rotation, shape [T, H * dh]
    :param key: method 2: z_K before the rotation, shape [T, H * dh]
    :param logits: method 1: z after the rotation and the division by sqrt(dh), before the mask, shape [H, T, T];
        0 where the mask hides the pair. A sequence then takes H * T^2 numbers on the host
    """

    mixed: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    logits: Tensor | None = None


@dataclass(frozen=True)
class AttentionSettings:
    """How the variables of a sequence are updated.

    :param alpha: weight of the linear terms, above 0
    :param beta: weight of the softmax term, above 0
    :param inner_steps: Adam steps per sub-step, at least 0
    :param learning_rate: Adam's first, above 0, relative to the root mean square of what is updated (a map's row, a
        head's queries, keys or logits); it then adapts to every row or head
    :param exact_maps: solve the a-step in closed form instead of with Adam. The objective then never rises from one
        outer step to the next (method 2), although no map is kept
    :raises ValueError: a value out of its range
    """

    alpha: float
    beta: float
    inner_steps: int
    learning_rate: float
    exact_maps: bool = False

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"AttentionSettings: {name} must be above 0 and finite, got {getattr(self, name)}. "
                    "To leave a term nearly out, give it a small weight."
                )
        if self.inner_steps < 0:
            raise ValueError(f"AttentionSettings: inner_steps must be at least 0, got {self.inner_steps}. Raise it.")


@dataclass(frozen=True)
class AttentionMoments:
    """Sums over sequences for the four weight solves; the tensors grow in place.

    :param query: X -> z_Q (method 1: the recovered queries)
    :param key: X -> z_K (method 1: the recovered keys)
    :param value: per head i: a_i [X, 1] -> mixed_i. The last column is a_i 1, which is 1 only while the rows of a_i
        sum to 1, so ``num_tokens`` has no meaning here
    :param output: mixed -> Y
    """

    query: Moments
    key: Moments
    value: tuple[Moments, ...]
    output: Moments


@dataclass(frozen=True)
class AttentionObjective:
    """The weighted terms of the objective, each at least 0; ``sum(objectives, AttentionObjective())`` adds sequences.

    :param output: ``alpha ||Y - W_O [mixed, 1]||^2``
    :param mixed: ``alpha ||mixed - concat_i(a_i V_i)||^2``
    :param maps: ``beta ||a - s||^2``
    :param query: ``alpha ||z_Q - W_Q [X, 1]||^2`` (method 2)
    :param key: ``alpha ||z_K - W_K [X, 1]||^2`` (method 2)
    :param logits: ``alpha ||z - (W_Q [X, 1]) (W_K [X, 1])^T / sqrt(dh)||^2`` over the pairs in sight (method 1)
    """

    output: float = 0.0
    mixed: float = 0.0
    maps: float = 0.0
    query: float = 0.0
    key: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))

    def __add__(self, other: AttentionObjective) -> AttentionObjective:
        return AttentionObjective(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class _Sight:
    """Which pairs and tokens of one sequence count.

    :param pairs: query t counts and sees key s, shape [T, T], bool
    :param queries: query t counts, shape [T], bool
    :param keys: a query that counts sees key s, shape [T], bool
    """

    pairs: Tensor
    queries: Tensor
    keys: Tensor


@torch.no_grad()
def initialize_attention_variables(
    sample: AttentionSample, weights: AttentionWeights, method: Literal[1, 2] = 2
) -> AttentionVariables:
    """Return the variables that the weights themselves give: every term but the output's is then 0.

    Source: Algorithm `alg:sparse_llm`, SparseLLM2, first line.
    Differs from the source: its variables start at the dense module's; here at those of the weights given, which may
    already be cut and re-solved (the FFN's reading, method.md section 7, step 1).

    :param method: which variables stand for the logits (R13)
    :return: variables in the dtype and on the device of ``sample.inputs``
    :raises ValueError: a method other than 1 and 2
    """
    if method not in (1, 2):
        raise ValueError(f"initialize_attention_variables: method must be 1 or 2, got {method}. Choose 2, the default.")
    sight = _see(sample)
    query, key = _project(sample.inputs, weights.query), _project(sample.inputs, weights.key)
    logits = _multiply_heads(_split(query, weights), _split(key, weights), sample).masked_fill(~sight.pairs, 0)
    mixed = _join(_soften(logits, sample, sight) @ _split(_project(sample.inputs, weights.value), weights))
    if method == 1:
        return AttentionVariables(mixed, logits=logits)
    return AttentionVariables(mixed, query=query, key=key)


@torch.no_grad()
def update_attention_variables(
    sample: AttentionSample, variables: AttentionVariables, weights: AttentionWeights, settings: AttentionSettings
) -> tuple[AttentionVariables, Tensor]:
    """Update a, then mixed, then z_Q and z_K (method 1: z) of one sequence; no sub-step raises the objective.

    Source: struprune.tex, Eq. `85`, `86`, `87` (labels; method 2) and their counterparts of method 1.
    Differs from the source: the branch on the sign of z after Eq. 87 belongs to the FFN's ReLU and is left out (as
    R11); the mixed-step is exact; an Adam step that would raise its objective is not taken; the maps start anew from
    softmax of the logits at every visit (R12). From variables as initialised, the first visit moves only ``mixed``
    and the second the rest: a and z are already optimal until ``mixed`` asks for something else.

    :param variables: as the last visit returned them, any float dtype
    :return: variables in the dtype of ``sample.inputs``; and the maps a, shape [H, T, T], 0 where hidden, wanted by
        :func:`accumulate_attention_moments` and :func:`measure_attention_objective` and then to be dropped
    """
    sight, values = _see(sample), _split(_project(sample.inputs, weights.value), weights)
    logits = _read_logits(sample, variables, weights).masked_fill(~sight.pairs, 0)
    soft = _soften(logits, sample, sight)
    mixed = _split(variables.mixed.to(sample.inputs), weights)
    if settings.exact_maps:
        maps = _solve_maps(soft, mixed, values, sight, settings)
    else:
        maps = _descend_maps(soft, mixed, values, sight, settings)
    updated = _solve_mixed(sample, _join(maps @ values), weights)
    if variables.logits is not None:
        logits = _descend_logits(sample, logits, maps, weights, sight, settings)
        return AttentionVariables(updated, logits=logits), maps
    query, key = _descend_query_key(sample, variables, maps, weights, sight, settings)
    return AttentionVariables(updated, query=query, key=key), maps


def make_attention_moments(
    weights: AttentionWeights, device: torch.device | str, dtype: torch.dtype
) -> AttentionMoments:
    """Return empty moments for the four solves.

    :param dtype: accumulation dtype, float32 or float64
    """
    rows, inputs = weights.query.shape[0], weights.query.shape[1] - 1
    outputs, channels = weights.output.shape[0], weights.value.shape[0]
    heads = weights.num_heads
    return AttentionMoments(
        query=make_moments(inputs, rows, device, dtype),
        key=make_moments(inputs, rows, device, dtype),
        value=tuple(make_moments(inputs, channels // heads, device, dtype) for _ in range(heads)),
        output=make_moments(channels, outputs, device, dtype),
    )


@torch.no_grad()
def accumulate_attention_moments(
    moments: AttentionMoments,
    sample: AttentionSample,
    variables: AttentionVariables,
    maps: Tensor,
    weights: AttentionWeights,
    damping: float = 0.01,
) -> None:
    """Add one sequence. Sums, not means: the order and the grouping of sequences change nothing.

    Differs from the source: for method 1 the paper recovers ``W_Q = z a^+`` from a product of two weights; here the
    queries that fit z best given the keys, then the keys given those queries, are what W_Q and W_K are regressed on.

    :param moments: grown in place
    :param variables: as updated
    :param maps: the same update's maps, shape [H, T, T]
    :param damping: method 1: pull of the recovered queries and keys towards W_Q [X, 1] and W_K [X, 1], relative to
        the mean diagonal of their system, above 0
    """
    sight, inputs = _see(sample), sample.inputs
    if variables.logits is None:
        assert variables.query is not None
        assert variables.key is not None
        query, key = variables.query, variables.key
    else:
        query, key = _recover_query_key(sample, variables.logits, weights, sight, damping)
    accumulate_moments(moments.query, inputs[sight.queries], query[sight.queries])
    accumulate_moments(moments.key, inputs[sight.keys], key[sight.keys])
    accumulate_moments(moments.output, variables.mixed[sight.queries], sample.targets[sight.queries])
    targets = _split(variables.mixed, weights)
    with_ones = torch.nn.functional.pad(inputs, (0, 1), value=1.0)
    for head, total in enumerate(moments.value):
        blended = (maps[head].to(inputs) @ with_ones)[sight.queries].to(total.gram.dtype)
        target = targets[head, sight.queries].to(total.gram.dtype)
        total.gram.addmm_(blended.T, blended)
        total.cross.addmm_(target.T, blended)
        total.target_energy.add_(target.square().sum(dtype=torch.float64))
        total.absolute_sum.add_(blended[:, :-1].abs().sum(0))


@torch.no_grad()
def solve_attention_weights(
    moments: AttentionMoments,
    weights: AttentionWeights,
    damping: float,
    has_bias: bool = True,
    where: str = "attention",
) -> AttentionWeights:
    """Solve the four regressions, each pulled towards the current weights, so that none raises its own error.

    ``argmin_W ||targets - W P||^2 + damping * mean(diag P P^T) * ||W - W_current||^2``, the bias not pulled.
    Source: struprune.tex, "Recovering weight matrices"; method.md section 7, step 4.
    Differs from the source: ridge solves on streamed moments for its pseudo-inverses and its SGD (R12).
    With method 1 what cannot rise is the error towards the recovered queries and keys; the term of z itself, a product
    of both weights, is expected to fall with them but may rise: compare objectives.

    :param weights: current weights
    :param damping: at least 0, relative to the mean diagonal of each Gram matrix
    :param has_bias: False for linears without bias: all four biases then come back as 0
    :param where: name of the module, for the error
    :return: float64 weights
    :raises ValueError: a system is singular or its condition number exceeds 1e12
    """

    def solve(total: Moments, weight: Tensor, name: str) -> Tensor:
        damped = damp_moments(total, weight.double(), damping, has_bias)
        columns = torch.arange(weight.shape[1] - 1, device=weight.device)
        return solve_kept_weights(damped, columns, f"{where}, {name}").weight

    heads = weights.value.chunk(weights.num_heads)
    pairs = enumerate(zip(moments.value, heads, strict=True))
    values = [solve(total, weight, f"values of kept head {i}") for i, (total, weight) in pairs]
    return AttentionWeights(
        query=solve(moments.query, weights.query, "queries"),
        key=solve(moments.key, weights.key, "keys"),
        value=torch.cat(values),
        output=solve(moments.output, weights.output, "output"),
        num_heads=weights.num_heads,
    )


@torch.no_grad()
def measure_attention_objective(
    sample: AttentionSample,
    variables: AttentionVariables,
    weights: AttentionWeights,
    alpha: float,
    beta: float,
    maps: Tensor | None = None,
) -> AttentionObjective:
    """Return the terms of one sequence's objective, summed in float64.

    :param maps: shape [H, T, T]; softmax of the logits, where the next visit would start, if None
    """
    sight, inputs = _see(sample), sample.inputs
    logits = _read_logits(sample, variables, weights)
    soft = _soften(logits, sample, sight)
    maps = soft if maps is None else maps.to(inputs)
    mixed = variables.mixed.to(inputs)
    blended = _join(maps @ _split(_project(inputs, weights.value), weights))

    def energy(residual: Tensor, counts: Tensor) -> float:
        return float(torch.where(counts, residual, 0).square().sum(dtype=torch.float64))

    queries, keys = sight.queries[:, None], sight.keys[:, None]
    query, key = _project(inputs, weights.query), _project(inputs, weights.key)
    output = energy(sample.targets.to(inputs) - _project(mixed, weights.output), queries)
    terms = {"output": alpha * output, "mixed": alpha * energy(mixed - blended, queries)}
    terms["maps"] = beta * energy(maps - soft, sight.pairs)
    if variables.logits is not None:
        product = _multiply_heads(_split(query, weights), _split(key, weights), sample)
        return AttentionObjective(**terms, logits=alpha * energy(logits - product, sight.pairs))
    assert variables.query is not None
    assert variables.key is not None
    terms["query"] = alpha * energy(variables.query.to(inputs) - query, queries)
    terms["key"] = alpha * energy(variables.key.to(inputs) - key, keys)
    return AttentionObjective(**terms)


def _see(sample: AttentionSample) -> _Sight:
    """Read off the mask and the valid rows which pairs and tokens count."""
    queries = torch.ones(len(sample.inputs), dtype=torch.bool, device=sample.inputs.device)
    if sample.query_rows is not None:
        queries = torch.zeros_like(queries).index_fill_(0, sample.query_rows, True)
    pairs = (sample.mask > _MASKED_BELOW) & queries[:, None]
    return _Sight(pairs, queries, pairs.any(0))


def _project(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return ``W [inputs, 1]`` token by token, shape [T, n] -> [T, rows], in the inputs' dtype."""
    weight = weight.to(inputs)
    return torch.addmm(weight[:, -1], inputs, weight[:, :-1].T)


def _split(tokens: Tensor, weights: AttentionWeights) -> Tensor:
    """Return [T, H * w] as [H, T, w]."""
    return tokens.unflatten(1, (weights.num_heads, -1)).transpose(0, 1)


def _join(heads: Tensor) -> Tensor:
    """Return [H, T, w] as [T, H * w]."""
    return heads.transpose(0, 1).flatten(1)


def _multiply_heads(query: Tensor, key: Tensor, sample: AttentionSample) -> Tensor:
    """Return ``rotate(query) rotate(key)^T / sqrt(dh)``, shapes [H, T, dh] -> [H, T, T]."""
    return sample.rotate(query) @ sample.rotate(key).mT / math.sqrt(query.shape[-1])


def _soften(logits: Tensor, sample: AttentionSample, sight: _Sight) -> Tensor:
    """Return softmax(logits + mask) over keys, exactly 0 where hidden, also in rows that see nothing."""
    lowest = torch.finfo(logits.dtype).min  # not -inf: a row that sees nothing must stay finite
    return torch.where(sight.pairs, logits + sample.mask.to(logits), lowest).softmax(-1) * sight.pairs


def _read_logits(sample: AttentionSample, variables: AttentionVariables, weights: AttentionWeights) -> Tensor:
    """Return the logits that the variables stand for, shape [H, T, T]."""
    if variables.logits is not None:
        return variables.logits.to(sample.inputs)
    assert variables.query is not None
    assert variables.key is not None
    query, key = (_split(v.to(sample.inputs), weights) for v in (variables.query, variables.key))
    return _multiply_heads(query, key, sample)


def _descend(
    start: Tensor, unit: Tensor, measure: Callable[[Tensor], Tensor], inner_steps: int, learning_rate: float
) -> Tensor:
    """Lower every independent part of an objective with safeguarded Adam steps; none of them rises.

    A step that does not lower its part is not taken, and that part's rate is divided by 4; otherwise it doubles. The
    start is thus an iterate, the last iterate is the best one, and the learning rate is a first guess: maps, logits
    and queries want rates that differ by orders of magnitude with alpha / beta and the sequence length.

    :param start: where to begin
    :param unit: what a step of 1 means, broadcastable to ``start``: makes the learning rate relative
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
    """Return the root mean square over ``dims``, of the entries that count only; 0 where none does."""
    counts = counts.expand_as(variable)
    energy = torch.where(counts, variable, 0).square().sum(dims, keepdim=True)
    return (energy / counts.sum(dims, keepdim=True).clamp(min=1)).sqrt()


def _descend_maps(soft: Tensor, mixed: Tensor, values: Tensor, sight: _Sight, settings: AttentionSettings) -> Tensor:
    """Lower ``alpha ||mixed - a V||^2 + beta ||a - s||^2`` over the pairs in sight, row by row, from a = s.

    :param soft: s, shape [H, T, T]
    :param mixed: shape [H, T, dv]
    :param values: V, shape [H, T, dv]
    :return: a, shape [H, T, T], 0 where hidden
    """

    def measure(maps: Tensor) -> Tensor:
        fit = (mixed - maps @ values).square().sum(-1)
        return settings.alpha * fit + settings.beta * (maps - soft).square().sum(-1)

    unit = _measure_unit(soft, sight.pairs, (-1,)) * sight.pairs  # hidden pairs never move
    return _descend(soft, unit, measure, settings.inner_steps, settings.learning_rate)


def _solve_maps(soft: Tensor, mixed: Tensor, values: Tensor, sight: _Sight, settings: AttentionSettings) -> Tensor:
    """Return the minimiser of what :func:`_descend_maps` lowers.

    With V_t the values that query t sees, ``a_t = s_t + V_t (V_t^T V_t + (beta / alpha) I)^-1 (mixed_t - V_t^T s_t)``:
    a system of dv, not T, unknowns per row. Parameters and return value as in :func:`_descend_maps`.
    """
    seen = sight.pairs.to(values)
    ridge = settings.beta / settings.alpha * torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
    maps = []
    for s, target, v in zip(soft, mixed, values, strict=True):  # head by head: T matrices of dv x dv at a time
        products = (v[:, :, None] * v[:, None, :]).flatten(1)
        factor = torch.linalg.cholesky((seen @ products).unflatten(1, ridge.shape) + ridge)
        pull = torch.cholesky_solve((target - s @ v)[..., None], factor)[..., 0]
        maps.append(s + torch.where(sight.pairs, pull @ v.T, 0))
    return torch.stack(maps)


def _solve_mixed(sample: AttentionSample, blended: Tensor, weights: AttentionWeights) -> Tensor:
    """Return the minimiser of ``||Y - W_O [mixed, 1]||^2 + ||mixed - blended||^2`` (alpha cancels).

    ``mixed = ((Y - b_O) W_O + blended) (W_O^T W_O + I)^-1``.
    Source: struprune.tex, Eq. `86` (label).

    :param blended: concat_i(a_i V_i), shape [T, H * dv]
    :return: shape [T, H * dv]
    """
    weight, bias = weights.output[:, :-1].to(blended), weights.output[:, -1].to(blended)
    system = weight.T @ weight
    system.diagonal().add_(1)
    wanted = (sample.targets.to(blended) - bias) @ weight + blended
    return torch.cholesky_solve(wanted.T, torch.linalg.cholesky(system)).T.contiguous()


def _descend_logits(
    sample: AttentionSample,
    logits: Tensor,
    maps: Tensor,
    weights: AttentionWeights,
    sight: _Sight,
    settings: AttentionSettings,
) -> Tensor:
    """Lower ``beta ||a - softmax(z + mask)||^2 + alpha ||z - product||^2`` over the pairs in sight, row by row.

    Source: struprune.tex, method 1, "Updating outputs".

    :param logits: z, shape [H, T, T]
    :return: z, shape [H, T, T]
    """
    query, key = (_split(_project(sample.inputs, w), weights) for w in (weights.query, weights.key))
    product = _multiply_heads(query, key, sample)

    def measure(z: Tensor) -> Tensor:
        fit = (maps - _soften(z, sample, sight)).square().sum(-1)
        return settings.beta * fit + settings.alpha * torch.where(sight.pairs, z - product, 0).square().sum(-1)

    unit = _measure_unit(logits, sight.pairs, (-2, -1)) * sight.pairs
    return _descend(logits, unit, measure, settings.inner_steps, settings.learning_rate)


def _descend_query_key(
    sample: AttentionSample,
    variables: AttentionVariables,
    maps: Tensor,
    weights: AttentionWeights,
    sight: _Sight,
    settings: AttentionSettings,
) -> tuple[Tensor, Tensor]:
    """Lower ``beta ||a - softmax(z_Q z_K^T / sqrt(dh) + mask)||^2 + alpha (||z_Q - W_Q X||^2 + ||z_K - W_K X||^2)``.

    z_Q and z_K move together, head by head. Source: struprune.tex, Eq. `87` (label). Differs from the source: R13.

    :return: z_Q and z_K, shape [T, H * dh] each
    """
    assert variables.query is not None
    assert variables.key is not None
    inputs = sample.inputs
    start = torch.stack([_split(v.to(inputs), weights) for v in (variables.query, variables.key)], 1)
    anchor = torch.stack([_split(_project(inputs, w), weights) for w in (weights.query, weights.key)], 1)
    counts = torch.stack([sight.queries, sight.keys])[..., None]

    def measure(z: Tensor) -> Tensor:  # z [H, 2, T, dh]
        soft = _soften(_multiply_heads(z[:, 0], z[:, 1], sample), sample, sight)
        fit = (maps - soft).square().sum((1, 2))
        return settings.beta * fit + settings.alpha * torch.where(counts, z - anchor, 0).square().sum((1, 2, 3))

    unit = _measure_unit(start, counts, (2, 3))
    best = _descend(start, unit, measure, settings.inner_steps, settings.learning_rate)
    return _join(best[:, 0]), _join(best[:, 1])


def _recover_query_key(
    sample: AttentionSample, logits: Tensor, weights: AttentionWeights, sight: _Sight, damping: float
) -> tuple[Tensor, Tensor]:
    """Return queries, then keys given those, that fit the logits of method 1 per head.

    With Q, K rotated and c = 1 / sqrt(dh): ``Q* = argmin ||z - c Q* K^T||^2 + lambda ||Q* - Q||^2``, which is
    ``Q + c R K (c^2 K^T K + lambda I)^-1`` with the residual R set to 0 at hidden pairs (they count as fitted, so
    they only hold Q* back); then K* the same way, given Q*. Recovered side by side instead, each would remove the
    whole residual and the two together would overshoot.

    :param logits: z, shape [H, T, T]
    :return: queries and keys before the rotation, shape [T, H * dh] each
    """
    query, key = (_split(_project(sample.inputs, w), weights) for w in (weights.query, weights.key))
    rotated_query = torch.where(sight.queries[:, None], sample.rotate(query), 0)
    rotated_key = torch.where(sight.keys[:, None], sample.rotate(key), 0)
    scale = 1 / math.sqrt(query.shape[-1])

    def correct(left: Tensor, right: Tensor, wanted: Tensor, pairs: Tensor) -> Tensor:
        residual = torch.where(pairs, wanted - scale * left @ right.mT, 0)
        system = scale**2 * right.mT @ right
        diagonal = system.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(damping * diagonal.mean(-1, keepdim=True) + torch.finfo(system.dtype).tiny)
        return torch.cholesky_solve(scale * (residual @ right).mT, torch.linalg.cholesky(system)).mT

    logits = logits.to(sample.inputs)
    moved_query = correct(rotated_query, rotated_key, logits, sight.pairs)
    moved_key = correct(rotated_key, rotated_query + moved_query, logits.mT, sight.pairs.T)
    return _join(query + _unrotate(moved_query, sample)), _join(key + _unrotate(moved_key, sample))


def _unrotate(heads: Tensor, sample: AttentionSample) -> Tensor:
    """Undo the rotation, shape [H, T, dh]: the inverse of an orthogonal map is its transpose, which is its gradient."""
    with torch.enable_grad():
        probe = torch.zeros_like(heads, requires_grad=True)
        return torch.autograd.grad(sample.rotate(probe), probe, heads)[0]
