import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from struprune_plugin.linalg.second_moments import make_moments, measure_error
from struprune_plugin.paper.admm_ffn import (
    ADMMSettings,
    Sample,
    accumulate_ffn_moments,
    activate,
    apply_linear,
    initialize_ffn_variables,
    solve_ridge,
    update_activations,
    update_ffn_variables,
    update_preactivations_gated,
    update_preactivations_relu,
)

PENALTIES = st.floats(0.05, 20)


def make_ffn(seed, num_first, tokens=30, d=4, k=5, out=3):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return draw(tokens, d), draw(tokens, out), tuple(draw(k, d + 1) for _ in range(num_first)), draw(out, k + 1)


def _naive_objective(variables, x, y, first, second, alpha, beta):
    """Algorithm 4's Lagrangian, term by term."""
    p, *preactivations = variables
    fit = (y - apply_linear(p, second)).square().sum()
    coupling = (p - activate(preactivations)).square().sum()
    linear = sum((z - apply_linear(x, w)).square().sum() for z, w in zip(preactivations, first, strict=True))
    return (alpha * fit + beta * coupling + alpha * linear).item()


@examples(30)
@given(seed=st.integers(0, 500), num_first=st.sampled_from([1, 2]), alpha=PENALTIES, beta=PENALTIES)
def test_every_sub_step_does_not_increase_the_objective(seed, num_first, alpha, beta):
    x, y, first, second = make_ffn(seed, num_first)
    variables = initialize_ffn_variables(x, [*first, second])
    value, settings = (
        _naive_objective(variables, x, y, first, second, alpha, beta),
        ADMMSettings(alpha=alpha, beta=beta),
    )
    for _ in range(3):
        p = update_activations(activate(variables[1:]), y, second, alpha, beta)
        after_p = _naive_objective((p, *variables[1:]), x, y, first, second, alpha, beta)
        assert after_p <= value * (1 + 1e-10)
        variables = update_ffn_variables(variables, Sample(x, y), [*first, second], settings)
        after_z = _naive_objective(variables, x, y, first, second, alpha, beta)
        assert after_z <= after_p * (1 + 1e-10)
        moments = [make_moments(weight) for weight in (*first, second)]
        coupling = accumulate_ffn_moments(moments, variables, Sample(x, y))
        fits = sum(measure_error(part, w).item() for part, w in zip(moments, [*first, second], strict=True))
        measured = alpha * fits + beta * coupling
        assert measured == pytest.approx(after_z, rel=1e-8, abs=1e-8)
        *first, second = solve_ridge(moments, [*first, second], 0.01, True, ["fc"] * (num_first + 1))
        value = _naive_objective(variables, x, y, first, second, alpha, beta)
        assert value <= after_z * (1 + 1e-10)


@examples(60)
@given(p=st.floats(-4, 4), m=st.floats(-4, 4), alpha=PENALTIES, beta=PENALTIES)
def test_z_step_relu_equals_brute_force(p, m, alpha, beta):
    """R11: the exact minimiser, whatever the sign of z was."""
    grid = torch.cat([torch.linspace(-6, 6, 24001, dtype=torch.float64), torch.tensor([0.0, m], dtype=torch.float64)])
    costs = beta * (p - grid.relu()).square() + alpha * (grid - m).square()
    z = update_preactivations_relu(torch.tensor([p]).double(), torch.tensor([m]).double(), alpha, beta)
    cost = beta * (p - z.relu()).square() + alpha * (z - m).square()
    assert cost.item() <= costs.min().item() + 1e-9


def test_p_step_satisfies_its_normal_equations():
    x, y, first, second = make_ffn(0, 1)
    phi = activate([apply_linear(x, first[0])])
    p = update_activations(phi, y, second, 0.7, 1.9)
    w = second[:, :-1]
    gradient = 0.7 * (p @ w.T - (y - second[:, -1])) @ w + 1.9 * (p - phi)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-10, rtol=0)


def test_gated_z_step_reaches_a_stationary_point():
    generator = torch.Generator().manual_seed(0)
    p, g, u, mg, mu = (torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(5))
    for _ in range(200):
        g, u = update_preactivations_gated(p, (g, u), (mg, mu), 1.0, 2.0)
    g.requires_grad_(True)
    u.requires_grad_(True)
    cost = (2.0 * (p - torch.nn.functional.silu(g) * u) ** 2 + (g - mg) ** 2 + (u - mu) ** 2).sum()
    cost.backward()
    assert g.grad.abs().max() < 1e-5
    assert u.grad.abs().max() < 1e-5
