import pytest
import torch
from helpers.models import make_opt
from helpers.problems import make_problem, naive_restored_error

from eval.groups import find_groups
from struprune_plugin.linalg.elimination import keep_last
from struprune_plugin.linalg.rotation import find_directions, rotate_columns, rotate_moments
from struprune_plugin.model.surgery import rotate_group

LAYOUTS = [(1, 1), (2, 1), (3, 1), (2, 2)]  # blocks, copies


@pytest.mark.parametrize(("blocks", "copies"), LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_find_directions_increase_is_that_of_a_naive_solve(blocks, copies, seed):
    width = 4
    _, _, damped = make_problem(n=blocks * copies * width, seed=seed, tokens=80)
    rotation = find_directions(damped, blocks, copies, "x")
    identity = torch.eye(width, dtype=torch.float64).expand(blocks, width, width)
    torch.testing.assert_close(rotation.basis @ rotation.basis.mT, identity, rtol=0, atol=1e-8)
    rotated = rotate_moments(damped, rotation.basis, copies)
    start = naive_restored_error(rotated, range(blocks * copies * width))
    for gone in range(1, width + 1):
        columns = [i for i in range(blocks * copies * width) if i // copies % width >= gone]
        naive = naive_restored_error(rotated, columns) - start
        assert rotation.scores.view(blocks, width)[:, :gone].sum().item() == pytest.approx(naive, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("gone", range(1, 5))
@pytest.mark.parametrize("seed", range(3))
def test_of_one_head_no_other_directions_cost_less(seed, gone):
    _, _, damped = make_problem(n=5, seed=seed)
    least = find_directions(damped, 1, 1, "x").scores[:gone].sum().item()
    start = naive_restored_error(damped, range(5))
    generator = torch.Generator().manual_seed(seed)
    bases = [torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q for _ in range(50)]
    bases += [torch.eye(5, dtype=torch.float64).roll(i, 0) for i in range(5)]
    others = [naive_restored_error(rotate_moments(damped, basis[None], 1), range(gone, 5)) - start for basis in bases]
    assert least <= min(others) * (1 + 1e-5)  # ties prefer the first channels by a millionth
    assert least < 0.99 * max(others)


@pytest.mark.parametrize(("blocks", "copies"), LAYOUTS)
def test_rotate_moments_are_those_of_rotated_inputs(blocks, copies):
    moments, dense, _ = make_problem(n=blocks * copies * 3, tokens=60)
    basis = torch.linalg.qr(torch.randn(blocks, 3, 3, dtype=torch.float64)).Q.contiguous()
    eye = torch.eye(copies, dtype=torch.float64)
    full = torch.block_diag(*[torch.kron(part, eye) for part in basis], torch.ones(1, 1, dtype=torch.float64))
    rotated = rotate_moments(moments, basis, copies)
    torch.testing.assert_close(rotated.gram, full @ moments.gram.double() @ full.T)
    torch.testing.assert_close(rotated.cross, moments.cross.double() @ full.T)
    torch.testing.assert_close(rotate_columns(dense, basis, copies), dense @ full.T)


def test_a_round_removes_one_direction_of_each_block():
    order = find_directions(make_problem(n=6)[2], 2, 1, "x").order
    assert order.tolist() == [0, 3, 1, 4, 2, 5]
    assert keep_last(order, 6, 4).tolist() == [1, 2, 4, 5]


@pytest.mark.parametrize("shape", [{}, {"enable_bias": False}])
def test_rotate_group_keeps_the_function(shape):
    model = make_opt(**shape)
    ids = torch.randint(4, 2048, (2, 12))
    before = model(ids).logits
    for group in find_groups(model, "value_channels", prune_ffn=False):
        basis = torch.linalg.qr(torch.randn(4, 6, 6, dtype=torch.float64)).Q
        rotate_group(model.get_submodule(group.layer_name), group, basis)
    torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)
