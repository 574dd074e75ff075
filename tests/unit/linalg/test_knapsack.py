"""Several budgets of any cost at once, against all combinations."""

import itertools

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from struprune_plugin.linalg.budget import allocate_error_curves
from struprune_plugin.linalg.knapsack import Limit, allocate_under_limits, find_least, fit_shares
from struprune_plugin.linalg.rounding import GroupSize

pytestmark = pytest.mark.portability

GROUPS = [
    GroupSize("a", "attention", 6, 50, 2),
    GroupSize("b", "ffn", 9, 13, 1),
    GroupSize("c", "ffn", 8, 13, 1),
    GroupSize("d", "ffn", 5, 11, 8),
    GroupSize("e", "ffn", 7, 17, 1),
]


def make_curves(seed, groups=GROUPS):
    torch.manual_seed(seed)
    drops = [torch.rand(g.num_units, dtype=torch.float64) * 10 ** torch.randn(()) for g in groups]
    return [torch.cat([d.flip(0).cumsum(0).flip(0), torch.zeros(1, dtype=torch.float64)]) for d in drops]


def make_limit(name, seed, share, shape, groups=GROUPS):
    """A budget of a share of the way from the fewest units to all, on lines, on stairs, or on any monotone curves."""
    generator = torch.Generator().manual_seed(1000 + seed)
    costs = []
    for group in groups:
        steps = torch.rand(group.num_units, dtype=torch.float64, generator=generator)
        if shape == "line":
            steps = steps[:1].expand(group.num_units)
        if shape == "stairs":
            steps = steps * (torch.arange(group.num_units) % 4 == 0)
        first = torch.rand(1, dtype=torch.float64, generator=generator)  # the step at which the module vanishes
        costs.append(torch.cat([torch.zeros(1, dtype=torch.float64), first + steps.cumsum(0)]))
    least = sum(float(cost[k]) for cost, k in zip(costs, find_least(groups), strict=True))
    most = sum(float(cost[-1]) for cost in costs)
    return Limit(name, costs, least + share * (most - least))


def list_choices(groups):
    return [range(min(g.step, g.num_units), g.num_units + 1, min(g.step, g.num_units)) for g in groups]


def search(curves, limits, groups=GROUPS):
    """Return the least error of all combinations that fit."""
    fitting = (ks for ks in itertools.product(*list_choices(groups)) if all(limit.fits(ks) for limit in limits))
    return min(sum(float(c[k]) for c, k in zip(curves, ks, strict=True)) for ks in fitting)


def measure(curves, kept):
    return sum(float(curve[count]) for curve, count in zip(curves, kept, strict=True))


@pytest.mark.parametrize("shape", ["line", "stairs", "any"])
@pytest.mark.parametrize("seed", range(8))
def test_one_budget_of_any_cost_is_within_a_few_per_cent_of_all_combinations(seed, shape):
    curves, limit = make_curves(seed), make_limit("clock", seed, 0.3 + 0.05 * seed, shape)
    kept = allocate_under_limits(GROUPS, curves, [limit])
    assert limit.fits(kept)
    assert all(count in choices for count, choices in zip(kept, list_choices(GROUPS), strict=True))
    best = search(curves, [limit])
    assert best <= measure(curves, kept) + 1e-12
    assert measure(curves, kept) <= 1.05 * best + 1e-12


@pytest.mark.parametrize("seed", range(10))
def test_several_budgets_are_all_met_and_near_all_combinations(seed):
    curves = make_curves(seed)
    limits = [
        make_limit("bytes", seed, 0.6, "line"),
        make_limit("token", seed + 50, 0.5, "any"),
        make_limit("prompt", seed + 90, 0.55, "stairs"),
    ]
    kept = allocate_under_limits(GROUPS, curves, limits)
    assert all(limit.fits(kept) for limit in limits)
    assert search(curves, limits) <= measure(curves, kept) + 1e-12
    assert measure(curves, kept) <= 1.1 * search(curves, limits) + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_a_budget_that_does_not_bind_changes_nothing(seed):
    curves, tight = make_curves(seed), make_limit("bytes", seed, 0.4, "line")
    loose = make_limit("token", seed, 1.0, "any")
    assert allocate_under_limits(GROUPS, curves, [tight, loose]) == allocate_under_limits(GROUPS, curves, [tight])


@examples(30)
@given(seed=st.integers(0, 200), share=st.floats(0.05, 0.95))
def test_parameters_as_a_budget_are_as_good_as_the_hulls(seed, share):
    """The rule for parameters alone takes hull steps and fills up."""
    groups = [GroupSize(str(i), "ffn", 40, 7 + 3 * i, 1) for i in range(6)]
    curves = make_curves(seed, groups)
    most = share * sum(group.num_parameters for group in groups) + sum(group.unit_cost * 2 for group in groups)
    costs = [torch.arange(group.num_units + 1, dtype=torch.float64) * group.unit_cost for group in groups]
    ours = allocate_under_limits(groups, curves, [Limit("parameters", costs, most)])
    hulls = allocate_error_curves(groups, curves, most)
    assert sum(k * g.unit_cost for k, g in zip(ours, groups, strict=True)) <= most + 1e-6
    assert measure(curves, ours) <= 1.02 * measure(curves, hulls) + 1e-12


def test_what_is_left_is_less_than_one_unit():
    curves, limit = make_curves(3), make_limit("bytes", 3, 0.5, "line")
    kept = allocate_under_limits(GROUPS, curves, [limit])
    for index, (group, count) in enumerate(zip(GROUPS, kept, strict=True)):
        step = min(group.step, group.num_units)
        if count + step <= group.num_units:
            assert not limit.fits([*kept[:index], count + step, *kept[index + 1 :]])


def test_units_that_cost_nothing_all_stay():
    """A cache budget asks nothing of FFNs; where an engine pads values, its clock asks nothing of them."""
    groups = [GroupSize("values", "attention", 8, 10, 1), GroupSize("ffn", "ffn", 16, 10, 4)]
    curves = [torch.linspace(1, 0, 9), torch.linspace(1, 0, 17)]
    flat, line = torch.full((17,), 3.0), torch.arange(9.0)
    assert allocate_under_limits(groups, curves, [Limit("cache", [line, flat], 7.0)]) == [4, 16]
    assert fit_shares(groups, [0.0, 0.0], [Limit("cache", [line, flat], 7.0)]) == [4, 16]


def test_flat_curves_are_filled_evenly():
    groups = [GroupSize(str(i), "ffn", 10, 1, 1) for i in range(3)]
    costs = [torch.arange(11.0)] * 3
    assert allocate_under_limits(groups, [torch.zeros(11)] * 3, [Limit("bytes", costs, 17.0)]) == [6, 6, 5]


def test_stairs_are_taken_whole():
    """A kernel that runs 8 channels at the cost of 1 keeps 8."""
    groups = [GroupSize(str(i), "ffn", 32, 1, 1) for i in range(2)]
    stairs = (torch.arange(33) + 7).div(8, rounding_mode="floor").double()
    curves = [torch.linspace(1, 0, 33), torch.linspace(2, 0, 33)]
    kept = allocate_under_limits(groups, curves, [Limit("clock", [stairs, stairs], 5.0)])
    assert kept == [8, 32]


@pytest.mark.parametrize("shares", [[0.0] * 5, [0.5, 0.1, 0.2, 0.0, 0.7]])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_fit_shares_meets_every_budget_and_leaves_nothing_over(shares, part):
    limits = [make_limit("bytes", 1, part, "line"), make_limit("token", 2, part, "any")]
    kept = fit_shares(GROUPS, shares, limits)
    assert all(limit.fits(kept) for limit in limits)
    for index, (group, count) in enumerate(zip(GROUPS, kept, strict=True)):
        step = min(group.step, group.num_units)
        if count + step <= group.num_units:
            more = [*kept[:index], count + step, *kept[index + 1 :]]
            assert not all(limit.fits(more) for limit in limits)


def test_a_budget_below_the_fewest_units_is_refused_by_name():
    limit = make_limit("cache", 0, -0.1, "line")
    with pytest.raises(
        ValueError, match=r"^budget: cache must leave the modules at least .*, got .*\. Relax the budget"
    ):
        allocate_under_limits(GROUPS, make_curves(0), [limit])
