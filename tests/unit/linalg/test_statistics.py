from operator import itemgetter

import pytest
import torch
from helpers.examples import examples
from helpers.problems import gather, make_case
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from struprune_plugin.linalg import second_moments as statistics
from struprune_plugin.linalg.second_moments import (
    MomentSums,
    append_bias,
    count_sums,
    measure_error,
    move_moments,
    sum_energies,
)


def assemble(sums):
    return move_moments(MomentSums.assemble([sums]), itemgetter(0))


def test_accumulate_moments_equals_naive_sums():
    """method.md section 2: H = P P^T, C = Y P^T, tr(Y Y^T), P with a row of ones."""
    inputs, targets, _, _ = make_case()
    p = torch.cat([inputs, torch.ones(50, 1, dtype=torch.float64)], 1).T
    moments = gather(inputs, targets, 50)
    torch.testing.assert_close(moments.gram, p @ p.T)
    torch.testing.assert_close(moments.cross, targets.T @ p.T)
    torch.testing.assert_close(moments.target_energy, targets.square().sum())
    torch.testing.assert_close(moments.absolute_sum, inputs.abs().sum(0))
    assert moments.num_tokens == 50


def test_measure_error_equals_second_pass():
    inputs, targets, weight, bias = make_case()
    moments = gather(inputs, targets, 50)
    naive = (targets - inputs @ weight.T - bias).square().sum()
    assert measure_error(moments, append_bias(weight, bias)).item() == pytest.approx(naive.item(), rel=1e-10)
    columns = torch.tensor([1, 4, 6])
    naive = (targets - inputs[:, columns] @ weight[:, columns].T - bias).square().sum()
    assert measure_error(moments, append_bias(weight[:, columns], bias), columns).item() == pytest.approx(
        naive.item(), rel=1e-10
    )


PARTS = ("gram", "cross", "target_energy", "absolute_sum")


@pytest.mark.parametrize("fetch", [None, torch.clone])
def test_moment_sums_gather_to_the_moments_of_all_tokens(fetch, monkeypatch):
    """Wide enough for several blocks of the upper triangle."""
    monkeypatch.setattr(statistics, "_FETCHED", 7)
    inputs, targets, _, _ = make_case(tokens=40, n=600)
    sums = MomentSums((600, 3), "cpu", torch.float64, fetch)
    for x, y in zip(inputs.split(15), targets.split(15), strict=True):
        sums.add(x, y)
    held = count_sums(600, 3)
    assert held == sum(part.numel() for part in sums.list_parts())
    found, wanted = assemble(sums), gather(inputs, targets, 40)
    for name in PARTS:
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-12, atol=1e-12)
    assert held < 0.75 * sum(getattr(wanted, name).numel() for name in PARTS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_moment_sums_see_one_bad_token(bad):
    inputs, targets, _, _ = make_case()
    for part in (inputs, targets):
        good = float(part[3, 2])
        for value in (good, bad, good):
            part[3, 2] = value
            sums = MomentSums((inputs.shape[1], targets.shape[1]), "cpu", torch.float64)
            sums.add(inputs, targets)
            assert bool(sum_energies(assemble(sums)).isfinite()) is (value == good)


def test_sums_of_bfloat16_inputs_on_a_card_are_float32_sums(monkeypatch):
    """What a card does: exact products of what is bfloat16 already, targets within 2^-16."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 70, generator=generator).bfloat16()
    targets = torch.randn(300, 1500, generator=generator)  # more rows than one product has
    expected, found = (MomentSums((70, 1500), "cpu", torch.float32) for _ in range(2))
    expected.add(inputs, targets)
    monkeypatch.setattr(statistics, "_multiplies_narrow", lambda *_: True)
    monkeypatch.setattr(torch, "mm", lambda left, right, out_dtype: left.to(out_dtype) @ right.to(out_dtype))
    found.add(inputs, targets)
    expected, found = assemble(expected), assemble(found)
    for name in PARTS:
        wanted = getattr(expected, name)
        torch.testing.assert_close(getattr(found, name), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_product_rounds_its_inputs(dtype, monkeypatch):
    """A processor with bfloat16 instructions multiplies with them only where the inputs are bfloat16 already."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    matmul, generator = torch.backends.mkldnn.matmul, torch.Generator().manual_seed(0)
    before = matmul.fp32_precision
    inputs = torch.randn(600, 700, generator=generator).to(dtype)
    targets = torch.randn(600, 30, generator=generator)
    sums, wanted = MomentSums((700, 30), "cpu", torch.float32), MomentSums((700, 30), "cpu", torch.float64)
    sums.add(inputs, targets)
    wanted.add(inputs.double(), targets.double())
    assert matmul.fp32_precision == before
    found, expected = assemble(sums), assemble(wanted)
    for name in PARTS:
        want = getattr(expected, name)
        limit = 1e-5 * float(want.abs().max())
        torch.testing.assert_close(getattr(found, name).double(), want, rtol=0, atol=limit)


def test_a_card_multiplies_bfloat16_into_float32():
    """A tensor without numbers that says that it is on a card: operations check dtypes and shapes all the same."""
    with FakeTensorMode():
        inputs = torch.empty(16, 300, device="cuda", dtype=torch.bfloat16)
        assert statistics._multiplies_narrow(inputs, torch.float32)
        product = torch.mm(inputs.T, inputs, out_dtype=torch.float32)
        assert (product.device.type, product.dtype, product.shape) == ("cuda", torch.float32, (300, 300))
        assert not statistics._multiplies_narrow(inputs, torch.float64)
        assert not statistics._multiplies_narrow(inputs.half(), torch.float32)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@examples(25)
@given(st.integers(1, 1100), st.integers(1, 300), DTYPES, st.integers(0, 2**31))
@example(length=5, n=16, dtype=torch.float32, seed=0).via("an AMD processor with AVX-512: the last bit of `cross`")
def test_the_number_of_threads_changes_sums_by_rounding_alone(length, n, dtype, seed):
    """No BLAS promises the order of a sum's terms; any two orders differ by at most ``2 n eps sum |x||y|``."""
    inputs, targets, _, _ = make_case(length, n, 5, seed)
    inputs, targets = inputs.to(dtype), targets.to(dtype)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            sums = MomentSums((n, 5), "cpu", torch.float32)
            sums.add(inputs, targets)
            found.append(assemble(sums))
        finally:
            torch.set_num_threads(before)
    terms = gather(inputs.double().abs(), targets.double().abs(), length)
    rounding = 2 * (length + 8) * torch.finfo(torch.float32).eps
    for name in PARTS:
        one, two = (getattr(sums, name).double() for sums in found)
        assert ((one - two).abs() <= rounding * getattr(terms, name)).all(), name
