"""Choices that rounding does not sway."""

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from struprune_plugin.linalg.elimination import eliminate_units
from struprune_plugin.linalg.rotation import find_directions
from struprune_plugin.linalg.second_moments import SecondMoments
from struprune_plugin.linalg.solve import damp_moments
from struprune_plugin.linalg.ties import argmin_with_ties, order_scores, round_off


def make_symmetric(num_copies: int = 2, n: int = 6, d: int = 4, seed: int = 0) -> tuple[SecondMoments, torch.Tensor]:
    """SecondMoments of units of which every one comes in exact copies, and the dense weights on them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(80, n, generator=generator, dtype=torch.float64).repeat(1, num_copies)
    weight = torch.randn(d, n, generator=generator, dtype=torch.float64).repeat(1, num_copies)
    p = torch.cat([inputs, torch.ones(80, 1, dtype=torch.float64)], 1)
    weight = torch.cat([weight, torch.zeros(d, 1, dtype=torch.float64)], 1)
    targets = p @ weight.T
    return SecondMoments(p.T @ p, targets.T @ p, targets.square().sum(), inputs.abs().sum(0)), weight


def disturb(moments: SecondMoments, seed: int) -> SecondMoments:
    """Change every sum by some of its last digits, as another order of its terms would."""
    generator = torch.Generator().manual_seed(seed)

    def shake(part):
        return part * (1 + 1e-14 * torch.randn(part.shape, generator=generator, dtype=torch.float64))

    gram = shake(moments.gram)
    return SecondMoments((gram + gram.T) / 2, shake(moments.cross), moments.target_energy, moments.absolute_sum)


def test_ties_go_to_the_first():
    assert argmin_with_ties([3.0, 2.0 + 1e-12, 2.0]) == 1
    assert argmin_with_ties([3.0, 2.5, 2.0], margin=0.6) == 1
    assert argmin_with_ties([float("inf")] * 2) == 0
    assert argmin_with_ties([float("nan"), 1.0]) in (0, 1)
    assert order_scores(torch.tensor([2.0, 1.0 + 1e-12, 1.0, -1.0], dtype=torch.float64)).tolist() == [3, 1, 2, 0]
    assert order_scores(torch.tensor([2.0, 2.0, torch.inf, 1.0, torch.inf])).tolist() == [3, 0, 1, 2, 4]
    assert round_off(1.23456789012345) == round_off(1.234567890123) == 1.23456789
    assert round_off(0.0) == 0


@examples(50)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30), st.integers(0, 2**31))
def test_order_scores_sorts_and_is_not_swayed(scores, seed):
    values = torch.tensor(scores, dtype=torch.float64)
    noise = 1e-12 * torch.randn(len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    order = order_scores(values)
    assert sorted(order.tolist()) == list(range(len(values)))
    assert torch.equal(values[order], values.sort().values)  # float32 numbers differ by more than the margin
    assert torch.equal(order, order_scores(values * (1 + noise)))


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_copies_are_removed_in_the_same_order_whatever_the_last_digits(num_blocks):
    moments, weight = make_symmetric()
    orders = []
    for seed in range(8):
        damped = damp_moments(disturb(moments, seed), weight, 0.01)
        orders.append(eliminate_units(damped, 1, "here", num_blocks).order.tolist())
    assert all(order == orders[0] for order in orders)


def test_rotation_of_what_has_no_direction_of_its_own_does_not_depend_on_the_last_digits():
    size = 6  # one head; every direction costs the same
    gram = torch.diag(torch.tensor([4.0] * size + [9.0], dtype=torch.float64))
    weight = torch.cat([torch.eye(size, dtype=torch.float64), torch.zeros(size, 1, dtype=torch.float64)], 1)
    moments = SecondMoments(gram, weight @ gram, (weight @ gram * weight).sum(), torch.ones(size, dtype=torch.float64))
    found = [find_directions(disturb(moments, seed), 1, 1, "here").basis for seed in range(5)]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=1e-5)
