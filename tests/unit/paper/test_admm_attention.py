import itertools
import math

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from struprune_plugin.linalg.second_moments import make_moments, measure_error
from struprune_plugin.linalg.solve import damp_moments
from struprune_plugin.paper.admm_attention import (
    AttentionSample,
    accumulate_attention_moments,
    initialize_attention_variables,
    make_maps,
    update_attention_variables,
)
from struprune_plugin.paper.admm_ffn import ADMMSettings, solve_ridge

F64 = torch.float64
HEADS = 2
METHODS = [2, 1]
problems = {
    "seed": st.integers(0, 10_000),
    "tokens": st.integers(5, 8),
    "d": st.integers(4, 6),
    "dh": st.integers(2, 3),
    "dv": st.integers(2, 3),
}
ratios = st.sampled_from([(1.0, 1.0), (0.3, 30.0), (5.0, 0.2)])
methods = st.sampled_from(METHODS)


def make_mask(tokens):
    return torch.full((tokens, tokens), -torch.inf, dtype=F64).triu(1)


def make_weights(seed=0, d=5, dh=3, dv=2, d_out=4):
    generator = torch.Generator().manual_seed(seed)
    shapes = (*[(HEADS * dh, d + 1)] * 2, *[(dv, d + 1)] * HEADS, (d_out, HEADS * dv + 1))
    return [torch.randn(*shape, generator=generator, dtype=F64) for shape in shapes]


def make_sample(seed=0, tokens=7, d=5, d_out=4):
    generator = torch.Generator().manual_seed(seed + 1)
    inputs, targets = (torch.randn(tokens, n, generator=generator, dtype=F64) for n in (d, d_out))
    return AttentionSample(inputs, targets, make_mask(tokens))


def make_settings(ratio=(1.0, 1.0), learning_rate=0.05):
    return ADMMSettings(alpha=ratio[0], beta=ratio[1], inner_steps=6, learning_rate=learning_rate)


def disturb(weights, seed, size=0.3):
    generator = torch.Generator().manual_seed(seed + 2)
    return [weight + size * torch.randn(weight.shape, generator=generator, dtype=F64) for weight in weights]


def make_problem(seed, tokens, d, dh, dv, method):
    """A sample, variables away from any optimum (those of other weights), and weights."""
    weights = make_weights(seed, d, dh, dv)
    sample = make_sample(seed, tokens, d)
    return sample, initialize_attention_variables(sample, disturb(weights, seed), method), weights


def heads_of(tokens):
    return tokens.unflatten(1, (HEADS, -1)).transpose(0, 1)


def project(inputs, weight):
    return inputs @ weight[:, :-1].T + weight[:, -1]


def values_of(sample, weights):
    return torch.stack([project(sample.inputs, weight) for weight in weights[2:-1]])


def _naive_maps(query, key):
    """Row by row: softmax over the keys up to the query, zero beyond. Queries and keys [H, T, dh]."""
    maps = torch.zeros(HEADS, len(query[0]), len(query[0]), dtype=F64)
    for h in range(HEADS):
        for t in range(len(query[0])):
            logits = torch.stack([query[h, t] @ key[h, s] / math.sqrt(query.shape[-1]) for s in range(t + 1)])
            maps[h, t, : t + 1] = logits.exp() / logits.exp().sum()
    return maps


def _naive_blend(maps, values):
    return torch.cat([a @ v for a, v in zip(maps, values, strict=True)], 1)


def query_key_of(sample, weights):
    return [heads_of(project(sample.inputs, weight)) for weight in weights[:2]]


def _naive_attention(sample, weights):
    maps = _naive_maps(*query_key_of(sample, weights))
    return project(_naive_blend(maps, values_of(sample, weights)), weights[-1])


def _naive_soft(logits):
    return torch.softmax(logits + make_mask(logits.shape[-1]), -1)


def soft_of(variables):
    _, *logits = variables
    return _naive_soft(logits[0]) if len(logits) == 1 else _naive_maps(*logits)


def _naive_product(sample, weights):
    query, key = query_key_of(sample, weights)
    return query @ key.mT / math.sqrt(query.shape[-1])


def _naive_terms(sample, variables, weights, alpha, beta, maps):
    """struprune.tex, "Method 1" and "Method 2" (R13), term by term."""
    mixed, *logits = variables
    blend = _naive_blend(maps, values_of(sample, weights))
    terms = {
        "output": alpha * (sample.targets - project(mixed, weights[-1])).square().sum().item(),
        "mixed": alpha * (mixed - blend).square().sum().item(),
        "maps": beta * (maps - soft_of(variables)).square().sum().item(),
    }
    if len(logits) == 1:
        residual = (logits[0] - _naive_product(sample, weights)).tril()
        return terms | {"logits": alpha * residual.square().sum().item()}
    for name, z, mean in zip(("query", "key"), logits, query_key_of(sample, weights), strict=True):
        terms[name] = alpha * (z - mean).square().sum().item()
    return terms


def _naive_total(*args):
    return sum(_naive_terms(*args).values())


def not_above(after, before):
    return after <= before * (1 + 1e-12) + 1e-20


def gather(samples, variables, maps, weights, settings=None, **kwargs):
    """Moments of several sequences, and the terms of the objective that they lack."""
    moments, rest = [make_moments(weight) for weight in weights], 0.0
    for sample, v, a in zip(samples, variables, maps, strict=True):
        rest += accumulate_attention_moments(moments, sample, v, a, weights, settings or make_settings(), **kwargs)
    return moments, rest


def assert_same_moments(left, right, **tolerance):
    for a, b in zip(left, right, strict=True):
        for name in ("gram", "cross", "target_energy", "absolute_sum"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), **tolerance)


@examples(20)
@given(**problems, method=methods)
def test_initialize_attention_variables_coupling_terms_are_zero_and_output_is_the_naive_error(
    seed, tokens, d, dh, dv, method
):
    weights, sample = make_weights(seed, d, dh, dv), make_sample(seed, tokens, d)
    variables = initialize_attention_variables(sample, weights, method)
    terms = _naive_terms(sample, variables, weights, 2.0, 3.0, make_maps(sample, variables))
    assert sum(terms.values()) - terms["output"] < 1e-20
    naive = (sample.targets - _naive_attention(sample, weights)).square().sum().item()
    assert terms["output"] == pytest.approx(2 * naive, rel=1e-10)


@examples(20)
@given(**problems, ratio=ratios, method=methods)
def test_moments_and_the_rest_make_up_the_objective(seed, tokens, d, dh, dv, ratio, method):
    sample, variables, weights = make_problem(seed, tokens, d, dh, dv, method)
    maps = torch.rand(HEADS, tokens, tokens, dtype=F64, generator=torch.Generator().manual_seed(seed)).tril()
    moments, rest = gather([sample], [variables], [maps], weights, make_settings(ratio))
    pairs = list(zip(moments, weights, strict=True))[0 if method == 2 else 2 :]
    measured = ratio[0] * sum(measure_error(total, weight).item() for total, weight in pairs) + rest
    assert measured == pytest.approx(_naive_total(sample, variables, weights, *ratio, maps), rel=1e-10)


@examples(40)
@given(**problems, ratio=ratios, method=methods, learning_rate=st.sampled_from([0.01, 0.1, 3.0]))
def test_update_attention_variables_no_sub_step_raises_its_objective(
    seed, tokens, d, dh, dv, ratio, method, learning_rate
):
    sample, before, weights = make_problem(seed, tokens, d, dh, dv, method)
    after, maps = update_attention_variables(sample, before, weights, make_settings(ratio, learning_rate=learning_rate))
    stages = [  # the variables after the a-step, the mixed-step and the z-step
        (before, soft_of(before)),
        (before, maps),
        ((after[0], *before[1:]), maps),
        (after, maps),
    ]
    totals = [_naive_total(sample, v, weights, *ratio, a) for v, a in stages]
    for previous, now in itertools.pairwise(totals):
        assert not_above(now, previous)


@examples(20)
@given(**problems, ratio=ratios)
def test_update_attention_variables_maps_equal_least_squares_per_row(seed, tokens, d, dh, dv, ratio):
    """min over the seen entries of alpha ||mixed_t - a_t V||^2 + beta ||a_t - s_t||^2, stacked as one lstsq."""
    sample, before, weights = make_problem(seed, tokens, d, dh, dv, 2)
    _, maps = update_attention_variables(sample, before, weights, make_settings(ratio))
    values, soft, mixed = values_of(sample, weights), soft_of(before), heads_of(before[0])
    a, b = (math.sqrt(r) for r in ratio)
    for h in range(HEADS):
        for t in range(tokens):
            seen = slice(0, t + 1)
            system = torch.cat([a * values[h, seen].T, b * torch.eye(t + 1, dtype=F64)])
            wanted = torch.cat([a * mixed[h, t], b * soft[h, t, seen]])
            naive = torch.linalg.lstsq(system, wanted[:, None]).solution[:, 0]
            torch.testing.assert_close(maps[h, t, seen], naive, rtol=1e-7, atol=1e-9)
            assert not maps[h, t, t + 1 :].any()


@examples(20)
@given(**problems, method=methods)
def test_update_attention_variables_mixed_solves_normal_equations(seed, tokens, d, dh, dv, method):
    sample, before, weights = make_problem(seed, tokens, d, dh, dv, method)
    after, maps = update_attention_variables(sample, before, weights, make_settings())
    blend = _naive_blend(maps, values_of(sample, weights))
    residual = sample.targets - project(after[0], weights[-1])
    torch.testing.assert_close(residual @ weights[-1][:, :-1], after[0] - blend, rtol=1e-9, atol=1e-9)


def pad(sample, variables, side, fill=3.0):
    """Three padding tokens on one side, hidden from the others by the mask; what they hold is arbitrary."""
    tokens = len(sample.inputs)
    rows = torch.arange(tokens) + (3 if side == "left" else 0)
    mask = torch.full((tokens + 3, tokens + 3), -torch.inf, dtype=F64)
    mask[rows[:, None], rows] = sample.mask

    def widen(tensor, dims):
        shape = [n + 3 if i in dims else n for i, n in enumerate(tensor.shape)]
        index = tuple(rows.view(-1, *[1] * (len(dims) - 1 - i)) for i in range(len(dims)))
        wide = torch.full(shape, fill, dtype=F64)
        wide[(slice(None),) * dims[0] + index] = tensor
        return wide

    mixed, *logits = variables
    sample = AttentionSample(widen(sample.inputs, [0]), widen(sample.targets, [0]), mask)
    return sample, (widen(mixed, [0]), *(widen(z, [1, 2] if len(logits) == 1 else [1]) for z in logits)), rows


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", METHODS)
def test_padding_has_no_influence(method, side):
    sample, before, weights = make_problem(2, 6, 5, 3, 2, method)
    padded, padded_before, rows = pad(sample, before, side)
    settings_ = make_settings()
    after, maps = update_attention_variables(sample, before, weights, settings_)
    padded_after, padded_maps = update_attention_variables(padded, padded_before, weights, settings_)
    torch.testing.assert_close(padded_maps[:, rows[:, None], rows], maps)
    torch.testing.assert_close(padded_after[0][rows], after[0])
    moments, rest = gather([sample], [after], [maps], weights)
    padded_moments, padded_rest = gather([padded], [padded_after], [padded_maps], weights)
    assert_same_moments(moments, padded_moments)
    assert rest == pytest.approx(padded_rest)
    assert initialize_attention_variables(padded, weights, method)[0].isfinite().all()


def test_queries_left_out_still_count_as_keys_where_the_mask_shows_them():
    sample, variables, weights = make_problem(2, 6, 5, 3, 2, 2)
    sample.mask[0] = -torch.inf
    moments, _ = gather([sample], [variables], [make_maps(sample, variables)], weights)
    assert [moments[i].num_tokens for i in (0, 1, -1)] == [5, 6, 5]
    for total, weight, z, wanted, first in zip(
        moments[:2], weights[:2], variables[1:], query_key_of(sample, weights), (1, 0), strict=True
    ):
        assert measure_error(total, weight).item() == pytest.approx((z - wanted)[:, first:].square().sum().item())


def test_accumulate_attention_moments_equals_naive_sums():
    sample, before, weights = make_problem(4, 7, 5, 3, 2, 2)
    variables, maps = update_attention_variables(sample, before, weights, make_settings())
    moments, _ = gather([sample], [variables], [maps], weights)
    ones = torch.ones(7, 1, dtype=F64)
    x = torch.cat([sample.inputs, ones], 1)
    mixed, *logits = variables
    m = torch.cat([mixed, ones], 1)
    pairs = [(x, z.transpose(0, 1).flatten(1)) for z in logits]
    pairs += [(maps[h] @ x, heads_of(mixed)[h]) for h in range(HEADS)]
    pairs.append((m, sample.targets))
    for total, (p, y) in zip(moments, pairs, strict=True):
        torch.testing.assert_close(total.gram, p.T @ p)
        torch.testing.assert_close(total.cross, y.T @ p)
        torch.testing.assert_close(total.target_energy, y.square().sum())


def make_pass(method, count=3, ratio=(1.0, 1.0), seed=0):
    weights = make_weights(seed)
    samples = [make_sample(seed + 10 * i, tokens=5 + i) for i in range(count)]
    starts = [initialize_attention_variables(s, disturb(weights, seed + i), method) for i, s in enumerate(samples)]
    settings_ = make_settings(ratio)
    updated = [update_attention_variables(s, v, weights, settings_) for s, v in zip(samples, starts, strict=True)]
    return samples, [v for v, _ in updated], [a for _, a in updated], weights


@examples(20)
@given(seed=st.integers(0, 10_000), method=methods, dampening=st.sampled_from([1e-4, 0.01, 0.5]))
def test_ridge_solves_satisfy_normal_equations_and_raise_no_term(seed, method, dampening):
    samples, variables, maps, weights = make_pass(method, seed=seed)
    moments, _ = gather(samples, variables, maps, weights)
    solved = solve_ridge(moments, weights, dampening, True, ["x"] * len(weights))
    for total, new, old in zip(moments, solved, weights, strict=True):
        damped = damp_moments(total, old, dampening)
        torch.testing.assert_close(new @ damped.gram, damped.cross, rtol=1e-8, atol=1e-8)
        assert measure_error(total, new) <= measure_error(total, old) * (1 + 1e-9) + 1e-9
    # the same, seen from the objective: W_V and W_O (method 2: also W_Q and W_K) lower their own terms and no other
    triples = list(zip(samples, variables, maps, strict=True))
    before, after = ([_naive_terms(s, v, w, 1.0, 1.0, a) for s, v, a in triples] for w in (weights, solved))

    def add(parts, name):
        return sum(part[name] for part in parts)

    for name in ("output", "mixed", *(("query", "key") if method == 2 else ())):
        assert not_above(add(after, name), add(before, name))
    assert add(after, "maps") == add(before, "maps")
