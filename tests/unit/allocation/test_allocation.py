import itertools

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from struprune_plugin.allocation.budget import allocate_error_curves, spread_sparsity
from struprune_plugin.allocation.rounding import (
    GroupSize,
    check_budget,
    find_group_sparsity,
    measure_uniform_slack,
    round_kept_counts,
    round_uniform_counts,
)
from struprune_plugin.paper.paper_rules import (
    allocate_global_threshold,
    allocate_softmax,
    allocate_softmax_as_printed,
    allocate_softmax_inverse_as_printed,
    search_temperature,
)


def make_groups(layers=4, heads=8, channels=64, head_cost=2000, channel_cost=129, multiple=1):
    pair = [("attention", heads, head_cost, 1), ("ffn", channels, channel_cost, multiple)]
    return [GroupSize(f"{i}.{kind}", kind, n, cost, step) for i in range(layers) for kind, n, cost, step in pair]


def count_removed(groups, kept):
    return sum((g.num_units - k) * g.unit_cost for g, k in zip(groups, kept, strict=True))


@examples(80)
@given(
    shares=st.lists(st.floats(0.01, 0.8), min_size=8, max_size=8),
    multiple=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([4, 8]),
)
def test_round_kept_counts_total_misses_less_than_one_step(shares, multiple, heads):
    groups = make_groups(heads=heads, multiple=multiple)
    kept = round_kept_counts(groups, shares)
    ideal = sum(share * g.num_parameters for share, g in zip(shares, groups, strict=True))
    at_a_bound = any(k in (g.step, g.num_units) for g, k in zip(groups, kept, strict=True) if g.pool == "ffn")
    assert abs(count_removed(groups, kept) - ideal) <= (
        129 * multiple / 2 if not at_a_bound else 2000 + 4 * 129 * multiple
    )
    for group, count in zip(groups, kept, strict=True):
        assert group.step <= count <= group.num_units
        assert count % group.step == 0


def test_round_kept_counts_zero_sparsity_keeps_all_whatever_the_multiple():
    groups = [GroupSize("a", "ffn", 100, 10, 64), GroupSize("b", "ffn", 130, 10, 64)]
    assert round_kept_counts(groups, [0.0, 0.0]) == [100, 130]
    assert round_kept_counts(groups, [0.0, 0.4]) == [100, 64]


def test_round_kept_counts_ties_keep_earlier_layers_larger():
    groups = [GroupSize(str(i), "attention", 4, 10, 1) for i in range(4)]
    assert round_kept_counts(groups, [0.375] * 4) == [3, 3, 2, 2]


@pytest.mark.parametrize("multiple", [1, 256, 512])
@pytest.mark.parametrize("sparsity", [0.1, 0.2, 0.3, 0.5])
def test_round_uniform_counts_meet_the_budget_with_few_head_counts(multiple, sparsity):
    """LLaMA-7B: head counts that divide hidden_size, and FFN steps larger than a head."""
    sizes = {"attention": (32, 4 * 4096 * 128, 1), "ffn": (11008, 3 * 4096, multiple)}
    groups = [GroupSize(f"{i}.{kind}", kind, *size) for i in range(32) for kind, size in sizes.items()]
    kept = round_uniform_counts(groups, sparsity, lambda kind, n: kind == "ffn" or 4096 % n == 0)
    check_budget(groups, kept, sparsity, measure_uniform_slack(groups))
    assert 4096 % kept[0] == 0
    assert kept[1] % multiple == 0


def test_check_budget_refuses_what_misses_the_slack():
    groups = make_groups()
    kept = [g.num_units for g in groups]
    with pytest.raises(ValueError, match="width_multiple"):
        check_budget(groups, kept, 0.1, slack=10)


def test_find_group_sparsity_makes_up_for_what_is_not_pruned():
    groups = make_groups()
    total = sum(g.num_parameters for g in groups) * 2
    assert find_group_sparsity(groups, total, 0.3) == pytest.approx(0.6)
    with pytest.raises(ValueError, match=r"sparsity=0\.6: .*Lower sparsity to at most 0\.4"):
        find_group_sparsity(groups, total, 0.6)


def test_all_that_can_go_is_no_more_than_can_go():
    (group,) = groups = [GroupSize("ffn", "ffn", 64, 1, 1)]
    assert 63 / 1001 * 1001 > 63 == group.max_removable, "as floats are rounded"
    assert find_group_sparsity(groups, 1001, 63 / 1001) == pytest.approx(63 / 64)


def _naive_algorithm_2(importance, sparsity, temperature):
    """Algorithm 2, step 2, as printed (T already absolute)."""
    w = [torch.exp(-i / temperature) for i in importance]
    r = [min(max(sparsity * len(w) * (x / sum(w)).item(), 0), 0.95) for x in w]
    if all(x < 0.95 for x in r):
        mean = sum(r) / len(r)
        r = [min(max(x * sparsity / mean, 0), 0.95) for x in r]
    return r


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_allocate_softmax_as_printed_equals_algorithm_2(temperature):
    importance = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64)
    scale = temperature * importance.std(correction=0)
    naive = _naive_algorithm_2(importance, 0.5, scale)
    ours = allocate_softmax_as_printed(importance, 0.5, temperature)
    torch.testing.assert_close(ours, torch.tensor(naive, dtype=torch.float64))


def test_allocate_softmax_keeps_the_budget_where_the_printed_one_misses_it():
    """R6."""
    importance = torch.tensor([1.0, 2.0, 3.0, 5.0])
    printed = allocate_softmax_as_printed(importance, 0.5, 0.3)
    ours = allocate_softmax(importance, torch.ones(4), 0.5, 0.3)
    assert printed.mean() < 0.45
    assert ours.mean().item() == pytest.approx(0.5)
    assert ours.max() <= 0.95
    assert (ours.diff() <= 0).all(), "more important layers lose less"


def test_allocate_softmax_constant_importance_is_uniform():
    """R8."""
    found = allocate_softmax(torch.full((5,), 3.0), torch.ones(5), 0.3, 1.0)
    torch.testing.assert_close(found, torch.full((5,), 0.3, dtype=torch.float64))


def test_allocate_softmax_inverse_follows_the_text_and_as_printed_the_formula():
    """R7."""
    importance = torch.tensor([4.0, 3.0, 2.0, 1.0])  # decays with depth
    text = allocate_softmax(importance, torch.ones(4), 0.3, 2.0)
    printed = allocate_softmax_inverse_as_printed(importance, 0.3, 2.0)
    w = torch.softmax(-importance.double() / (2.0 * importance.double().std(correction=0)), 0)
    torch.testing.assert_close(printed, 0.3 * 4 * (1 - w) / (1 - w).sum())
    assert (text.diff() > 0).all(), "deeper layers lose more"
    assert (printed.diff() < 0).all()
    assert text.mean().item() == pytest.approx(0.3)


def test_allocate_global_threshold_keeps_the_best_scores_whatever_their_group():
    groups = [GroupSize("a", "ffn", 4, 10, 1), GroupSize("b", "ffn", 4, 10, 1)]
    scores = [torch.tensor([0.9, 0.8, 0.1, 0.7]), torch.tensor([0.2, 0.3, 0.95, 0.05])]
    assert allocate_global_threshold(groups, scores, 0.5) == [0.25, 0.75]
    assert allocate_global_threshold(groups, [torch.ones(4), torch.ones(4)], 0.5) == [0.0, 1.0]


@examples(80)
@given(
    weights=st.lists(st.floats(0.001, 10), min_size=2, max_size=8),
    sparsity=st.floats(0, 0.94),
    sizes=st.lists(st.integers(1, 100), min_size=8, max_size=8),
)
def test_spread_sparsity_meets_the_mean_within_the_cap(weights, sparsity, sizes):
    size = torch.tensor(sizes[: len(weights)], dtype=torch.float64)
    shares = spread_sparsity(torch.tensor(weights), size, sparsity)
    assert shares.max() <= 0.95 + 1e-12
    assert ((shares * size).sum() / size.sum()).item() == pytest.approx(sparsity, abs=1e-9)


def test_search_temperature_measures_every_temperature():
    groups = [GroupSize(str(i), "ffn", 10, 5, 1) for i in range(3)]
    importance = [1.0, 2.0, 9.0]
    curves = [torch.linspace(s, 0, 11) for s in (1.0, 2.0, 50.0)]  # the third layer is dear: spare it
    found = search_temperature(
        groups, importance, curves, [0.2, 1.0, 20.0], lambda t, i, sizes: allocate_softmax(i, sizes, 0.3, t)
    )
    best, _ = min(found, key=lambda one: one[1])
    assert len(found) == 3
    assert best[2] > best[0]
    for kept, loss in found:
        assert sum(kept) == 21
        assert loss == pytest.approx(sum(float(c[k]) for c, k in zip(curves, kept, strict=True)))


def _brute_force(groups, curves, budget):
    steps = [min(g.step, g.num_units) for g in groups]
    choices = [range(step, g.num_units + 1, step) for step, g in zip(steps, groups, strict=True)]
    fitting = (
        ks
        for ks in itertools.product(*choices)
        if sum(g.unit_cost * k for k, g in zip(ks, groups, strict=True)) <= budget
    )
    return min(sum(float(c[k]) for c, k in zip(curves, ks, strict=True)) for ks in fitting)


def _make_curves(groups, seed, convex):
    torch.manual_seed(seed)
    drops = [torch.rand(g.num_units, dtype=torch.float64) * 10 ** torch.randn(()) for g in groups]
    drops = [d.sort(descending=True).values if convex else d for d in drops]
    return [torch.cat([d.flip(0).cumsum(0).flip(0), torch.zeros(1, dtype=torch.float64)]) for d in drops]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("step", [1, 2])
def test_allocate_error_curves_convex_curves_of_one_cost_equal_brute_force(seed, step):
    groups = [GroupSize(str(i), "ffn", n, 7, step) for i, n in enumerate((6, 8, 4))]
    curves = _make_curves(groups, seed, convex=True)
    budget = 7 * (10 + seed % 5) + 3
    kept = allocate_error_curves(groups, curves, budget)
    error = sum(float(c[k]) for c, k in zip(curves, kept, strict=True))
    assert error == pytest.approx(_brute_force(groups, curves, budget), rel=1e-12)
    assert sum(k * 7 for k in kept) <= budget


@pytest.mark.parametrize("seed", range(6))
def test_allocate_error_curves_of_any_shape_is_optimal_to_within_one_step_of_the_hull(seed):
    groups = [
        GroupSize("a", "attention", 6, 50, 2),
        GroupSize("b", "ffn", 9, 13, 1),
        GroupSize("c", "ffn", 7, 13, 3),
        GroupSize("d", "ffn", 5, 11, 8),
    ]
    curves = _make_curves(groups, seed, convex=False)
    budget = 0.85 * sum(g.num_parameters for g in groups)
    kept = allocate_error_curves(groups, curves, budget)
    used = sum(k * g.unit_cost for k, g in zip(kept, groups, strict=True))
    assert used <= budget
    for group, k in zip(groups, kept, strict=True):
        assert k > 0
        assert k % min(group.step, group.num_units) == 0
    error = sum(float(c[k]) for c, k in zip(curves, kept, strict=True))
    # a step of the hull that does not fit is worth at most 200 parameters, all of group a but its first step
    assert _brute_force(groups, curves, budget) <= error <= _brute_force(groups, curves, budget - 200) + 1e-12
    for i in range(4):  # nothing that fits is left to take
        for more in range(kept[i] + 1, groups[i].num_units + 1):
            fits = used + (more - kept[i]) * groups[i].unit_cost <= budget
            if more % min(groups[i].step, groups[i].num_units) == 0 and fits:
                assert curves[i][more] >= curves[i][kept[i]]


@pytest.mark.parametrize(("asked", "experts", "removed"), [(250, 3, 250), (380, 2, 400), (450, 2, 450), (10, 4, 10)])
def test_allocate_error_curves_takes_the_nearer_step_where_one_group_has_coarse_ones(asked, experts, removed):
    """Experts of one width hold four fifths of the parameters, in steps of a fifth; attention is dearer."""
    groups = [GroupSize("experts", "experts", 4, 200, 1), GroupSize("attention", "attention", 40, 5, 1)]
    curves = [torch.linspace(1, 0, 5), torch.linspace(50, 0, 41)]
    kept = allocate_error_curves(groups, curves, 1000 - asked)
    assert (kept[0], count_removed(groups, kept)) == (experts, removed)


@pytest.mark.parametrize("sparsity", [0.0, 0.001, 0.01, 0.05, 0.2])
def test_allocate_error_curves_meets_small_budgets_where_curves_end_flat(sparsity):
    """Units that the others replace to within rounding save nothing; they are not to go for that."""
    groups = make_groups()
    total = sum(group.num_parameters for group in groups)
    flat = [torch.linspace(1, 0, g.num_units + 1).sub(0.6).clamp(min=0) for g in groups]
    kept = allocate_error_curves(groups, flat, (1 - sparsity) * total)
    assert 0 <= count_removed(groups, kept) - sparsity * total < 2000 or sparsity == 0
    check_budget(groups, kept, sparsity)
    assert sparsity or kept == [g.num_units for g in groups]


@examples(40)
@given(bound=st.floats(0.3, 0.85), seed=st.integers(0, 99))
def test_allocate_error_curves_keeps_max_sparsity_to_within_a_step(bound, seed):
    groups, generator = make_groups(multiple=4), torch.Generator().manual_seed(seed)
    total = sum(group.num_parameters for group in groups)
    curves = [torch.rand(g.num_units + 1, generator=generator).sort(descending=True).values for g in groups]
    kept = allocate_error_curves(groups, curves, (1 - 0.99 * bound) * total, bound)
    check_budget(groups, kept, 0.99 * bound)
    for group, count in zip(groups, kept, strict=True):
        assert count >= max((1 - bound) * group.num_units - group.step, group.step)
