"""What the numerics promise, over random shapes and dtypes."""

import pytest
import torch
from helpers.examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from struprune_plugin.linalg.budget import allocate_error_curves
from struprune_plugin.linalg.rotation import find_directions, rotate_columns, rotate_moments
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.linalg.second_moments import MomentSums, SecondMoments, measure_error
from struprune_plugin.linalg.solve import damp_moments

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
    return sums.assemble()


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


# -- rotation -----------------------------------------------------------------------------------------------------


@many
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 2), st.integers(1, 4), DTYPES, SEEDS)
def test_rotation_is_orthogonal_and_changes_no_function(blocks, width, copies, d, dtype, seed):
    n = blocks * width * copies
    moments, weight, inputs, _ = make_moments(n, d, seed, dtype)
    damped = damp_moments(moments, weight, 0.01)
    rotation = find_directions(damped, blocks, copies, "here")
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
