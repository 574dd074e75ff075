"""What the numerics promise, over random shapes and dtypes."""

import pytest
import torch
from helpers.examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from struprune_plugin.linalg.budget import allocate_error_curves, spread_sparsity
from struprune_plugin.linalg.elimination import eliminate_units, keep_last, order_units, unit_columns
from struprune_plugin.linalg.error_curves import measure_deletion_curve, measure_restored_curve
from struprune_plugin.linalg.rotation import eliminate_directions, rotate_columns, rotate_moments
from struprune_plugin.linalg.rounding import GroupSize, find_group_sparsity, round_kept_counts
from struprune_plugin.linalg.second_moments import (
    MomentSums,
    SecondMoments,
    measure_error,
    subtract_moments,
    with_bias_index,
)
from struprune_plugin.linalg.solve import choose_damping, damp_moments, solve_kept_weights
from struprune_plugin.paper.softmax_rules import allocate_softmax
from struprune_plugin.paper.threshold_rule import allocate_global_threshold
from struprune_plugin.pruning.importance.wanda import score_wanda

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 2**31)
many = examples(25)


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sum_sequences(inputs: torch.Tensor, targets: torch.Tensor, **options) -> SecondMoments:
    """SecondMoments of tokens [sequences, tokens, ...], one sequence after the other."""
    sums = MomentSums((inputs.shape[-1], targets.shape[-1]), "cpu", torch.float32, **options)
    for sequence, wanted in zip(inputs, targets, strict=True):
        sums.add(sequence, wanted)
    return sums.gather()


def make_moments(
    n: int, d: int, seed: int, dtype: torch.dtype
) -> tuple[SecondMoments, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return moments of activations in a dtype, the dense weights, the inputs and the targets."""
    inputs, weight = draw((2, 2 * n + 8, n), seed, dtype), draw((d, n + 1), seed + 1)
    inputs = inputs + 0.5 * inputs.mean(-1, keepdim=True)  # correlated
    targets = inputs.double() @ weight[:, :-1].T + weight[:, -1] + 0.1 * draw((*inputs.shape[:2], d), seed + 2)
    return sum_sequences(inputs, targets.to(dtype)), weight, inputs, targets.to(dtype)


# -- statistics ---------------------------------------------------------------------------------------------------


@many
@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 300), st.integers(1, 9), DTYPES, SEEDS)
def test_sums_are_those_of_the_definition(sequences, length, n, d, dtype, seed):
    inputs, targets = draw((sequences, length, n), seed, dtype), draw((sequences, length, d), seed + 1, dtype)
    moments = sum_sequences(inputs, targets)
    x, y = inputs.flatten(0, 1).double(), targets.flatten(0, 1).double()
    p = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(moments.gram.double(), p.T @ p, **close)
    torch.testing.assert_close(moments.cross.double(), y.T @ p, **close)
    torch.testing.assert_close(moments.target_energy, y.square().sum(), **close)
    torch.testing.assert_close(moments.absolute_sum.double(), x.abs().sum(0), **close)
    assert torch.equal(moments.gram, moments.gram.T)
    assert moments.num_tokens == sequences * length
    part = sum_sequences(inputs[:1], targets[:1])
    rest = subtract_moments(moments, part)
    assert rest.num_tokens == (sequences - 1) * length


@many
@given(st.integers(1, 1100), st.integers(1, 300), DTYPES, SEEDS)
@example(length=5, n=16, dtype=torch.float32, seed=0).via("an AMD processor with AVX-512: the last bit of `cross`")
def test_the_number_of_threads_changes_sums_by_rounding_alone(length, n, dtype, seed):
    """No BLAS promises the order of a sum's terms; any two orders differ by at most ``2 n eps sum |x||y|``."""
    inputs, targets = draw((1, length, n), seed, dtype), draw((1, length, 5), seed + 1, dtype)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found.append(sum_sequences(inputs, targets))
        finally:
            torch.set_num_threads(before)
    x, y = inputs[0].double().abs(), targets[0].double().abs()
    p = torch.cat([x, torch.ones(length, 1, dtype=torch.float64)], 1)
    terms = {"gram": p.T @ p, "cross": y.T @ p, "target_energy": y.square().sum(), "absolute_sum": x.sum(0)}
    rounding = 2 * (length + 8) * torch.finfo(torch.float32).eps
    for name, total in terms.items():
        one, two = (getattr(sums, name).double() for sums in found)
        assert ((one - two).abs() <= rounding * total).all(), name


@many
@given(st.integers(2, 30), st.integers(1, 5), DTYPES, SEEDS)
def test_error_of_any_weight_is_that_of_a_second_pass(n, d, dtype, seed):
    moments, weight, inputs, targets = make_moments(n, d, seed, dtype)
    other = weight + draw(tuple(weight.shape), seed + 5)
    p = torch.nn.functional.pad(inputs.flatten(0, 1).double(), (0, 1), value=1)
    y, scale = targets.flatten(0, 1).double(), float(moments.target_energy)
    for candidate in (weight, other):
        naive = float((y - p @ candidate.T).square().sum())
        assert measure_error(moments, candidate) == pytest.approx(naive, rel=1e-4, abs=1e-4 * scale)


# -- selection ----------------------------------------------------------------------------------------------------


@many
@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 8), DTYPES, SEEDS)
def test_order_keeps_blocks_equal_and_the_best(num_blocks, width, rounds, dtype, seed):
    scores = draw((num_blocks * width,), seed, dtype)
    order = order_units(scores, num_blocks)
    assert sorted(order.tolist()) == list(range(num_blocks * width))
    keep = keep_last(order, len(scores), num_blocks * max(width - rounds, 0))
    assert torch.equal(keep, keep.sort().values)
    for block in range(num_blocks):
        inside = keep[(keep // width) == block]
        assert len(inside) == max(width - rounds, 0)
        gone = [u for u in range(block * width, (block + 1) * width) if u not in inside]
        assert all(scores[u] <= scores[v] for u in gone for v in inside.tolist())


@many
@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 3), DTYPES, SEEDS)
def test_scores_follow_their_units(n, d, width, dtype, seed):
    moments, weight, _, _ = make_moments(n * width, d, seed, dtype)
    columns = unit_columns(torch.arange(n), width).view(n, -1)
    turn = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    scores = score_wanda(moments, weight[:, :-1], columns)
    assert (scores >= 0).all()
    assert scores.isfinite().all()
    torch.testing.assert_close(score_wanda(moments, weight[:, :-1], columns[turn]), scores[turn])


@many
@given(st.integers(2, 12), st.integers(1, 3), st.integers(1, 4), DTYPES, SEEDS)
def test_elimination_prices_what_the_solves_lose(units, width, d, dtype, seed):
    moments, weight, _, _ = make_moments(units * width, d, seed, dtype)
    damped = damp_moments(moments, weight, 0.01)
    elimination = eliminate_units(damped, width, "here")
    assert sorted(elimination.order.tolist()) == list(range(units))
    assert (elimination.increase >= -1e-9 * damped.target_energy).all()
    curve = measure_restored_curve(damped, elimination.order, width, "here")
    scale = float(damped.target_energy)
    lost = curve[0] - curve[-1]
    assert float(elimination.increase.sum()) == pytest.approx(float(lost), rel=1e-4, abs=1e-6 * scale)
    assert (curve.diff() <= 1e-9 * scale).all()
    deletion = measure_deletion_curve(damped, weight, elimination.order, width)
    assert (deletion >= curve - 1e-6 * scale).all()


# -- solve --------------------------------------------------------------------------------------------------------


@many
@given(st.integers(1, 24), st.integers(1, 5), st.sampled_from([0.001, 0.01, 1.0]), st.booleans(), DTYPES, SEEDS)
def test_solve_is_a_minimum_and_never_worse_than_deletion(n, d, damping, has_bias, dtype, seed):
    moments, weight, _, _ = make_moments(n, d, seed, dtype)
    if not has_bias:
        weight[:, -1] = 0
    damped = damp_moments(moments, weight, damping, has_bias)
    keep = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: max(n // 2, 1)].sort().values
    solved = solve_kept_weights(damped, keep, "here")
    assert solved.weight.dtype == torch.float64
    assert solved.weight.isfinite().all()
    assert solved.condition_number >= 1 - 1e-9
    error, scale = measure_error(damped, solved.weight, keep), float(damped.target_energy)
    deleted = weight[:, with_bias_index(keep, n)]
    assert error <= measure_error(damped, deleted, keep) + 1e-9 * scale
    for step in range(3):
        nudge = 1e-3 * draw(tuple(solved.weight.shape), seed + step)
        if not has_bias:
            nudge[:, -1] = 0
        assert error <= measure_error(damped, solved.weight + nudge, keep) + 1e-9 * scale
    if not has_bias:
        assert (solved.weight[:, -1] == 0).all()


@many
@given(st.integers(1, 12), st.integers(1, 4), DTYPES, SEEDS)
def test_chosen_damping_is_as_good_as_any_on_held_out_tokens(n, d, dtype, seed):
    moments, weight, inputs, _ = make_moments(n, d, seed, dtype)
    targets = (inputs[1:].double() @ weight[:, :-1].T + weight[:, -1]).to(dtype)
    held = sum_sequences(inputs[1:], targets)
    whole = sum_sequences(inputs, (inputs.double() @ weight[:, :-1].T + weight[:, -1]).to(dtype))
    rest, keep = subtract_moments(whole, held), torch.arange(max(n - 1, 1))
    chosen = choose_damping(whole, held, weight, keep, True, "here")

    def measure(damping):
        return measure_error(held, solve_kept_weights(damp_moments(rest, weight, damping), keep, "here").weight, keep)

    best = min(measure(damping) for damping in (1e-3, 1e-2, 1e-1, 1.0))
    assert measure(chosen) <= best + 2e-6 * float(held.target_energy) + 1e-9
    assert moments.num_tokens == whole.num_tokens


# -- rotation -----------------------------------------------------------------------------------------------------


@many
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 2), st.integers(1, 4), DTYPES, SEEDS)
def test_rotation_is_orthogonal_and_changes_no_function(blocks, width, copies, d, dtype, seed):
    n = blocks * width * copies
    moments, weight, inputs, _ = make_moments(n, d, seed, dtype)
    damped = damp_moments(moments, weight, 0.01)
    rotation = eliminate_directions(damped, blocks, copies, "here")
    identity = torch.eye(width, dtype=torch.float64).expand(blocks, width, width)
    torch.testing.assert_close(rotation.basis @ rotation.basis.mT, identity, rtol=0, atol=1e-8)
    assert (rotation.increase >= -1e-9 * damped.target_energy).all()
    turned = rotate_moments(damped, rotation.basis, copies)
    moved = rotate_columns(weight, rotation.basis, copies)
    close = {"rel": 1e-8, "abs": 1e-9 * float(damped.target_energy)}
    assert measure_error(turned, moved) == pytest.approx(measure_error(damped, weight), **close)
    p = torch.nn.functional.pad(inputs.flatten(0, 1).double(), (0, 1), value=1)
    torch.testing.assert_close(rotate_columns(p, rotation.basis, copies) @ moved.T, p @ weight.T)


# -- allocation ---------------------------------------------------------------------------------------------------


@st.composite
def budgets(draw_from):
    """Groups of two kinds, as in a decoder, and a sparsity that they can reach."""
    layers = draw_from(st.integers(1, 5))
    steps = [draw_from(st.sampled_from([1, 2, 4])), draw_from(st.sampled_from([1, 2, 8]))]
    counts, costs = [draw_from(st.integers(2, 8)), draw_from(st.integers(4, 40))], [draw_from(st.integers(8, 40)), 3]
    groups = [
        GroupSize(f"{layer}.{kind}", kind, steps[k] * counts[k], costs[k], steps[k])
        for layer in range(layers)
        for k, kind in enumerate(("attention", "ffn"))
    ]
    most = sum(group.max_removable for group in groups) / sum(group.num_parameters for group in groups)
    return groups, draw_from(st.floats(0, most))


def count_removed(groups, kept):
    return sum((group.num_units - count) * group.unit_cost for group, count in zip(groups, kept, strict=True))


@examples(60)
@given(budgets(), SEEDS)
def test_error_curves_keep_the_budget_and_the_bounds(case, seed):
    groups, sparsity = case
    total = sum(group.num_parameters for group in groups)
    generator = torch.Generator().manual_seed(seed)
    curves = [
        torch.rand(g.num_units + 1, generator=generator, dtype=torch.float64).sort(descending=True).values
        for g in groups
    ]
    kept = allocate_error_curves(groups, curves, (1 - sparsity) * total)
    for group, count in zip(groups, kept, strict=True):
        assert group.step <= count <= group.num_units
        assert count % group.step == 0 or count == group.num_units
    removed = count_removed(groups, kept)
    assert removed >= sparsity * total - 1e-6
    assert removed - sparsity * total <= max(group.step * group.unit_cost for group in groups)

    turn = torch.randperm(len(groups), generator=generator).tolist()
    turned = allocate_error_curves([groups[i] for i in turn], [curves[i] for i in turn], (1 - sparsity) * total)
    assert sum(float(curves[i][k]) for i, k in zip(turn, turned, strict=True)) == pytest.approx(
        sum(float(c[k]) for c, k in zip(curves, kept, strict=True)), rel=1e-9
    )
    assert turned == [kept[i] for i in turn]  # no two random errors tie


@examples(60)
@given(budgets(), st.floats(0.05, 20), SEEDS)
def test_softmax_meets_the_mean_falls_with_importance_and_follows_its_layers(case, temperature, seed):
    groups, sparsity = case
    sparsity = min(sparsity, 0.9)
    sizes = torch.tensor([group.num_parameters for group in groups])
    importance = draw((len(groups),), seed).exp()
    shares = allocate_softmax(importance, sizes, sparsity, temperature)
    assert shares.dtype == torch.float64
    assert ((shares >= 0) & (shares <= 0.95 + 1e-12)).all()
    assert float((shares * sizes).sum() / sizes.sum()) == pytest.approx(sparsity, abs=1e-9)
    by_importance = shares[importance.argsort()]
    assert (by_importance.diff() <= 1e-9).all()
    turn = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(allocate_softmax(importance[turn], sizes[turn], sparsity, temperature), shares[turn])
    more = spread_sparsity(torch.ones(len(groups)), sizes, min(sparsity + 0.05, 0.95))
    assert (more >= spread_sparsity(torch.ones(len(groups)), sizes, sparsity) - 1e-12).all()


@examples(60)
@given(budgets(), SEEDS)
@example(case=([GroupSize("a", "attention", 8, 9, 1), GroupSize("f", "ffn", 4, 9, 1)], 1e-08), seed=0)
def test_rounding_and_thresholds_keep_the_budget(case, seed):
    groups, sparsity = case
    total = sum(group.num_parameters for group in groups)
    assert find_group_sparsity(groups, 2 * total, sparsity / 2) == pytest.approx(sparsity)
    shares = [sparsity] * len(groups)
    kept = round_kept_counts(groups, shares)
    for group, count in zip(groups, kept, strict=True):
        assert min(group.step, group.num_units) <= count <= group.num_units
        assert count % group.step == 0
    if sparsity == 0:
        assert count_removed(groups, kept) == 0
    scores = [draw((group.num_units,), seed + i) for i, group in enumerate(groups)]
    chosen = allocate_global_threshold(groups, scores, sparsity)
    counts = [round((1 - share) * group.num_units) for share, group in zip(chosen, groups, strict=True)]
    assert -1e-6 <= count_removed(groups, counts) - sparsity * total < max(group.unit_cost for group in groups) + 1e-6
    less = allocate_global_threshold(groups, scores, sparsity / 2)
    assert all(a <= b + 1e-12 for a, b in zip(less, chosen, strict=True))
