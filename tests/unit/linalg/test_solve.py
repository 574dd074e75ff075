import dataclasses
import itertools
from dataclasses import replace

import pytest
import torch
from helpers.examples import examples
from helpers.problems import gather, make_case, make_problem, naive_restored_error
from hypothesis import given
from hypothesis import strategies as st

from struprune_plugin.linalg import elimination, second_moments, solve
from struprune_plugin.linalg.elimination import eliminate_units, keep_last, order_units, unit_columns
from struprune_plugin.linalg.error_curves import measure_deletion_curve, measure_restored_curve, solve_nested_weights
from struprune_plugin.linalg.second_moments import (
    append_bias,
    measure_error,
    take_columns,
    with_bias_index,
)
from struprune_plugin.linalg.solve import (
    choose_dampening,
    damp_moments,
    measure_solved_error,
    scale_weights,
    solve_kept_weights,
    weigh_outputs,
)


def increases(ranked):
    """The increase of the error at each removal, in their order."""
    return ranked.scores.gather(-1, ranked.order)


def stack_moments(parts):
    return second_moments.SecondMoments(*map(torch.stack, zip(*(vars(part).values() for part in parts), strict=True)))


@examples(25)
@given(seed=st.integers(0, 1000), size=st.integers(1, 6), dampening=st.sampled_from([1e-4, 0.01, 0.3]))
def test_solve_kept_weights_satisfies_normal_equations_and_beats_deletion(seed, size, dampening):
    moments, dense, damped = make_problem(seed=seed, dampening=dampening)
    columns = torch.randperm(6, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    rows = torch.cat([columns, torch.tensor([6])])
    solved = solve_kept_weights(damped, columns, "fc2")[0]
    torch.testing.assert_close(solved @ damped.gram[rows][:, rows], damped.cross[:, rows], rtol=1e-8, atol=1e-8)
    error = measure_error(moments, solved, columns)
    assert error <= measure_error(moments, dense[:, rows], columns) * (1 + 1e-12)
    torch.testing.assert_close(measure_solved_error(moments, solved, dense[:, rows], columns, dampening), error)


def test_solve_kept_weights_all_kept_local_target_is_identity():
    """Dampening towards the dense weights leaves an unpruned layer as it is, whatever the dampening."""
    inputs, _, weight, bias = make_case()
    dense = append_bias(weight, bias)
    moments = gather(inputs, inputs @ weight.T + bias, 50)
    solved, _ = solve_kept_weights(damp_moments(moments, dense, 0.5), torch.arange(7), "fc2")
    torch.testing.assert_close(solved, dense)


def test_solve_kept_weights_without_bias_is_the_ridge_solution_without_one():
    moments, dense, _ = make_problem()
    dense[:, -1] = 0
    solved, _ = solve_kept_weights(damp_moments(moments, dense, 0.05, has_bias=False), torch.tensor([0, 2, 3]), "fc2")
    strength = 0.05 * moments.gram.diagonal()[:-1].mean()
    rows = torch.tensor([0, 2, 3])
    system = moments.gram[rows][:, rows] + strength * torch.eye(3, dtype=torch.float64)
    naive = (moments.cross[:, rows] + strength * dense[:, rows]) @ torch.linalg.inv(system)
    torch.testing.assert_close(solved[:, :-1], naive)
    assert not solved[:, -1].any()
    error = measure_solved_error(moments, solved, dense[:, [0, 2, 3, 6]], rows, 0.05)
    torch.testing.assert_close(error, measure_error(moments, solved, rows))


def test_solve_kept_weights_singular_names_layer_condition_and_remedy():
    inputs, targets, weight, bias = make_case()
    inputs[:, 1] = inputs[:, 0]
    damped = damp_moments(gather(inputs, targets, 50), append_bias(weight, bias), 0.0)
    with pytest.raises(ValueError, match=r"layers\.3\.fc2: .*condition number .* got .*Raise dampening_frac"):
        solve_kept_weights(damped, torch.arange(7), "layers.3.fc2")


def test_solve_kept_weights_condition_number_is_near_the_true_one():
    _, _, damped = make_problem(dampening=0.001)
    columns = torch.arange(6)
    true = torch.linalg.cond(damped.gram).item()
    assert solve_kept_weights(damped, columns, "fc2")[1].item() == pytest.approx(true, rel=0.2)


@pytest.mark.parametrize("gone", [0, 0.4])
@pytest.mark.parametrize("width", [1, 3])
def test_eliminate_units_equals_naive_greedy(width, gone, monkeypatch):
    """method.md section 3, obs: at every step remove the unit whose removal raises the re-solved error least."""
    monkeypatch.setattr(elimination, "_GONE", gone)
    n = 12
    _, _, damped = make_problem(n=n)
    result = eliminate_units(damped, width, "fc2")
    units = list(range(n // width))

    def error(kept):
        return naive_restored_error(damped, [u * width + i for u in kept for i in range(width)])

    for order, increase in zip(result.order.tolist(), increases(result).tolist(), strict=True):
        costs = {u: error([v for v in units if v != u]) - error(units) for u in units}
        best = min(costs, key=costs.__getitem__)
        assert order == best
        assert increase == pytest.approx(costs[best], rel=1e-6, abs=1e-9)
        units.remove(best)


@pytest.mark.parametrize("panels", [4, 8, 96])
@pytest.mark.parametrize(("width", "num_blocks"), [(1, 1), (1, 2), (3, 1), (2, 3), (1, 24)])
def test_eliminate_units_in_panels_is_hardly_worse_than_one_at_a_time(width, num_blocks, panels, monkeypatch):
    _, _, damped = make_problem(n=96, d=12, tokens=400)
    monkeypatch.setattr(elimination, "_PANELS", panels)
    part = eliminate_units(damped, width, "fc2", num_blocks)
    monkeypatch.setattr(elimination, "_PANELS", 96)
    one = eliminate_units(damped, width, "fc2", num_blocks)
    assert sorted(part.order.tolist()) == list(range(96 // width))
    for start in range(0, 96 // width, num_blocks):  # every round takes one unit of every block
        blocks = part.order[start : start + num_blocks] // (96 // width // num_blocks)
        assert sorted(blocks.tolist()) == list(range(num_blocks))
    errors = [measure_restored_curve(damped, found.order, width, "fc2") for found in (part, one)]
    assert (errors[0] <= 1.03 * errors[1] + 1e-9 * errors[1][0]).all()
    steps = errors[0].flip(0).diff()
    torch.testing.assert_close(increases(part), steps, rtol=1e-6, atol=1e-9 * float(errors[0][0]))


@pytest.mark.parametrize(("n", "width"), [(96, 1), (96, 3), (1056, 1)])
def test_units_of_a_linear_whose_weights_are_all_zero_are_removed_once_and_for_nothing(n, width):
    _, _, damped = make_problem(n=n, tokens=2 * n)
    found = eliminate_units(replace(damped, cross=torch.zeros_like(damped.cross)), width, "x")
    assert sorted(found.order.tolist()) == list(range(n // width))
    assert increases(found).count_nonzero() == 0


@pytest.mark.parametrize("num_remove", [None, 8])
@pytest.mark.parametrize(("width", "num_blocks"), [(1, 1), (2, 2)])
def test_linears_of_one_shape_are_worked_on_together(width, num_blocks, num_remove):
    problems = [make_problem(n=24, d=6, seed=seed)[2] for seed in range(3)]
    together = eliminate_units(stack_moments(problems), width, "x", num_blocks, num_remove)
    for index, problem in enumerate(problems):
        alone = eliminate_units(problem, width, "x", num_blocks, num_remove)
        assert torch.equal(together.order[index], alone.order)
        torch.testing.assert_close(increases(together)[index], increases(alone))


@pytest.mark.parametrize("width", [1, 2])
def test_curves_equal_one_solve_per_count(width):
    _, dense, damped = make_problem(n=8, dampening=0.02)
    order = eliminate_units(damped, width, "fc2").order
    restored = measure_restored_curve(damped, order, width, "fc2")
    deleted = measure_deletion_curve(damped, dense, order, width)
    for kept in range(8 // width + 1):
        columns = unit_columns(keep_last(order, len(order), kept), width)
        assert restored[kept].item() == pytest.approx(naive_restored_error(damped, columns.tolist()), rel=1e-8)
        rows = torch.cat([columns, torch.tensor([8])])
        assert deleted[kept].item() == pytest.approx(measure_error(damped, dense[:, rows], columns).item(), rel=1e-8)
    assert (restored.diff() <= 1e-9).all()
    assert (restored <= deleted + 1e-9).all()


def test_order_units_every_round_takes_one_of_each_block():
    scores = torch.tensor([3.0, 1.0, 2.0, 9.0, 7.0, 8.0])
    order = order_units(scores, num_blocks=2)
    assert order.tolist() == [1, 4, 2, 5, 0, 3]
    assert order_units(scores, 1).tolist() == [1, 2, 0, 4, 5, 3]
    for rounds, kept in itertools.product((1, 2), (2, 4)):
        assert len({int(u) // 3 for u in keep_last(order, len(order), kept)}) == 2, rounds


def test_eliminate_units_stops_where_asked_and_keeps_the_same_prefix():
    _, _, damped = make_problem(n=12)
    whole, part = eliminate_units(damped, 1, "fc2"), eliminate_units(damped, 1, "fc2", num_remove=5)
    assert torch.equal(whole.order[:5], part.order)
    assert keep_last(part.order, 12, 7).tolist() == sorted(whole.order[5:].tolist())
    assert eliminate_units(damped, 1, "fc2", num_remove=0).order.numel() == 0


def test_a_dead_input_without_dampening_is_refused_by_name_everywhere():
    inputs, targets, weight, bias = make_case()
    inputs[:, 3] = 0
    damped = damp_moments(gather(inputs, targets, 50), append_bias(weight, bias), 0.0)
    for run in (
        lambda: eliminate_units(damped, 1, "layers.3.fc2"),
        lambda: measure_restored_curve(damped, torch.arange(7), 1, "layers.3.fc2"),
        lambda: solve_kept_weights(damped, torch.arange(7), "layers.3.fc2"),
    ):
        with pytest.raises(ValueError, match=r"layers\.3\.fc2: .*condition number .* got inf"):
            run()


def test_weigh_outputs_counts_errors_by_the_root():
    moments, dense, _ = make_problem(n=6, d=3)
    moments = dataclasses.replace(moments, cross=dense @ moments.gram)  # its own output: local
    damped = damp_moments(moments, dense, 0.01)
    root = torch.randn(3, 3, dtype=torch.float64)
    weighed = weigh_outputs(damped, root)
    weighed = dataclasses.replace(weighed, target_energy=(weighed.cross * (root @ dense)).sum())
    columns = torch.tensor([0, 2, 5])
    solved = solve_kept_weights(damped, columns, "x")[0]
    torch.testing.assert_close(solve_kept_weights(weighed, columns, "x")[0], root @ solved)
    full = torch.zeros_like(dense)
    full[:, [0, 2, 5, 6]] = solved
    error = root @ (full - dense)
    assert measure_error(weighed, root @ solved, columns).item() == pytest.approx(
        (error @ damped.gram * error).sum().item()
    )


def choose_one(moments, held, dense, columns):
    return choose_dampening(stack_moments([moments]), stack_moments([held]), dense[None], columns[None], True)[0]


def test_choose_dampening_is_that_of_least_error_on_tokens_held_out():
    """Few noisy tokens: the choice, read off moments, is that of naive solves scored on the held-out tokens themselves."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    dense = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    targets = inputs @ dense[:, :-1].T + dense[:, -1] + 2 * torch.randn(24, 2, generator=generator, dtype=torch.float64)
    columns = torch.tensor([0, 2, 3, 5])
    errors = {}
    for dampening in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0):
        damped = damp_moments(gather(inputs[:16], targets[:16], 16), dense, dampening)
        weight = solve_kept_weights(damped, columns, "x")[0]
        errors[dampening] = (
            (inputs[16:, columns] @ weight[:, :-1].T + weight[:, -1] - targets[16:]).square().sum().item()
        )
    moments, held = gather(inputs, targets, 24), gather(inputs[16:], targets[16:], 8)
    assert choose_one(moments, held, dense, columns) == min(errors, key=errors.get)
    assert len(set(errors.values())) == 7


def test_choose_dampening_leaves_out_those_that_float32_sums_do_not_resolve():
    """Inputs with one strong mean: float32 sums leave H with negative eigenvalues beyond the weakest dampenings."""
    torch.manual_seed(0)
    inputs = 1 + 1e-4 * torch.randn(200, 64, dtype=torch.float64)
    moments, held = (gather(rows, rows[:, :3], len(rows)) for rows in (inputs, inputs[:50]))
    moments.gram.diagonal()[:-1].sub_(0.01 * len(inputs))
    dense = torch.zeros(3, 65, dtype=torch.float64)
    chosen = choose_one(moments, held, dense, torch.arange(64))
    assert chosen > 1e-2
    assert solve_kept_weights(damp_moments(moments, dense, chosen), torch.arange(64), "x")[0].isfinite().all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_linears_solved_together_get_what_each_gets_alone(has_bias, together, monkeypatch):
    """Dampenings in one batch as on a card, here on a CPU; noise makes them differ from linear to linear."""
    measure, sizes = solve._measure_damped, []

    def see(rest, *args):
        sizes.append(len(rest.gram))
        return measure(rest, *args)

    monkeypatch.setattr(solve, "_measure_damped", see)
    monkeypatch.setattr(solve, "_solves_together", lambda _systems: together)
    parts = []
    for seed, noise in enumerate((0.1, 3.0, 30.0, 0.5)):
        inputs, targets, weight, bias = make_case(tokens=90, n=24, d=5, seed=seed)
        targets = targets + noise * torch.randn(90, 5, generator=torch.Generator().manual_seed(seed))
        columns = torch.randperm(24, generator=torch.Generator().manual_seed(seed))[:17].sort().values
        moments, held = gather(inputs, targets, 90), gather(inputs[60:], targets[60:], 30)
        parts.append((moments, held, append_bias(weight, bias if has_bias else None), columns))

    def run(alike):
        moments, held = (stack_moments([part[place] for part in alike]) for place in (0, 1))
        dense, columns = (torch.stack([part[place] for part in alike]) for place in (2, 3))
        dampenings = choose_dampening(moments, held, dense, columns, has_bias)
        damped = damp_moments(moments, dense, torch.tensor(dampenings, dtype=torch.float64), has_bias)
        solved, condition = solve_kept_weights(damped, columns, ["x"] * len(alike))
        rows = with_bias_index(columns, 24)
        scaled = scale_weights(moments, take_columns(dense, rows), columns)
        return dampenings, solved, condition, measure_error(moments, solved, columns), *scaled

    dampenings, *found = run(parts)
    assert max(sizes) == (2 * len(parts) if together else 1)
    for index, part in enumerate(parts):
        dampening, *alone = run([part])
        assert dampening == [dampenings[index]]
        for values, own in zip(found, alone, strict=True):
            torch.testing.assert_close(values[index], own[0])
    assert len(set(dampenings)) > 2


def test_a_singular_system_among_several_is_told():
    systems = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    systems[1, 0, 0] = -1
    with pytest.raises(ValueError, match="there: the least-squares system must have a condition number"):
        solve.factorize_in_place(systems, ["here", "there"])


def make_large_problem(dampening):
    """More inputs than float64 is taken for, some of them large and many of them alike, as in a real FFN."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, 2, 1100, dtype=torch.float64).flip(0)
    mix = torch.randn(60, 1100, generator=generator, dtype=torch.float64)
    inputs = torch.randn(600, 60, generator=generator, dtype=torch.float64) @ mix
    inputs = (inputs + torch.randn(inputs.shape, generator=generator, dtype=torch.float64)) * scales
    weight = torch.randn(8, 1100, generator=generator, dtype=torch.float64) / scales
    moments = gather(inputs, inputs @ weight.T, 600)
    return damp_moments(moments, append_bias(weight, torch.zeros(8, dtype=torch.float64)), dampening)


def test_many_units_are_eliminated_in_float32_as_well_as_in_float64(monkeypatch):
    damped = make_large_problem(dampening=0.01)
    fast = eliminate_units(damped, 1, "fc2", num_remove=700)
    solved = dict(solve_nested_weights(damped, fast.order, 1, [400], "fc2"))[400]
    assert solve.factorize_fast(damped.gram, "fc2").dtype == torch.float32
    monkeypatch.setattr(solve, "_EXACT", 2000)
    exact = eliminate_units(damped, 1, "fc2", num_remove=700)
    columns = [keep_last(found.order, 1100, 400) for found in (fast, exact)]
    errors = [measure_error(damped, solve_kept_weights(damped, part, "fc2")[0], part) for part in columns]
    assert errors[0] <= 1.03 * errors[1]  # close choices part the ways, for the better or the worse
    assert float(increases(fast).sum()) == pytest.approx(float(increases(exact).sum()), rel=0.03)
    assert fast.scores.dtype == torch.float64
    again = dict(solve_nested_weights(damped, fast.order, 1, [400], "fc2"))[400]
    torch.testing.assert_close(solved, again, rtol=1e-3, atol=1e-3 * float(again.abs().max()))


def test_a_system_that_float32_cannot_factorise_is_left_to_float64():
    damped = make_large_problem(dampening=1e-9)
    before = damped.gram.clone()
    factor = solve.factorize_fast(damped.gram, "fc2")
    assert factor.dtype == torch.float64
    torch.testing.assert_close(factor @ factor.T, before)
    assert torch.equal(damped.gram, before)


@pytest.mark.parametrize("noise", [0.1, 3.0, 30.0])
def test_a_few_directions_of_many_outputs_choose_the_same_dampening(noise, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    inputs, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((60, 40), (300, 40)))
    targets = inputs @ weight.T + noise * torch.randn(60, 300, generator=generator, dtype=torch.float64)
    moments, held = gather(inputs, targets, 60), gather(inputs[:15], targets[:15], 15)
    dense, columns = append_bias(weight, torch.zeros(300, dtype=torch.float64)), torch.arange(30)
    few = choose_one(moments, held, dense, columns)
    monkeypatch.setattr(solve, "_DIRECTIONS", 300)
    assert few == choose_one(moments, held, dense, columns)


def test_wide_units_are_eliminated_by_two_threads():
    """MKL's float32 LU of such blocks fails with several threads."""
    generator = torch.Generator().manual_seed(1)
    inputs, weight = (torch.randn(rows, 576, generator=generator, dtype=torch.float64) for rows in (900, 576))
    damped = damp_moments(gather(inputs, inputs @ weight.T, 300), append_bias(weight, None), 0.01)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ranked = eliminate_units(damped, 192, "o_proj")
    finally:
        torch.set_num_threads(before)
    assert ranked.scores.isfinite().all()
    assert sorted(ranked.order.tolist()) == [0, 1, 2]
