import torch
from helpers.problems import gather, make_case

from struprune_plugin.linalg.second_moments import append_bias
from struprune_plugin.linalg.solve import damp_moments
from struprune_plugin.paper.admm import score_closed_form
from struprune_plugin.paper.gates import _gate_quadratic, score_l0
from struprune_plugin.paper.paper_rules import measure_norms

UNITS = torch.tensor([[0, 1], [2, 3], [4, 5]])


def test_layer_importance_equals_algorithm_3():
    heads = [torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    attention = sum(w.abs().sum() + 0.1 * w.var(correction=0) + 0.01 * w.norm() for w in heads)
    mlp = sum(w.abs().sum() + 0.05 * w.var(correction=0) for w in heads)
    assert abs(measure_norms(heads, 0.1, 0.01) - attention) < 1e-12
    assert abs(measure_norms(heads, 0.05) - mlp) < 1e-12


def test_score_closed_form_equals_lemma_1():
    """R4: the first step, at which nothing has changed, cannot rank anything."""
    generator = torch.Generator().manual_seed(0)
    a = torch.cat([torch.randn(30, 4, generator=generator), torch.ones(30, 1)], 1).double()
    dense, current = (torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    b, c, d, z_pre = a @ current.T, a @ dense.T, a @ dense.T, a @ dense.T
    numerator, denominator = (c * b + d * z_pre).sum(0), (c * c + d * d).sum(0)
    naive = numerator.view(3, 2).sum(1) / denominator.view(3, 2).sum(1)
    dense, current = dense.view(3, 2, 5), current.view(3, 2, 5)
    torch.testing.assert_close(score_closed_form(dense, current, a.T @ a), naive)
    assert torch.equal(score_closed_form(dense, dense, a.T @ a), torch.ones(3, dtype=torch.float64))


def test_gate_quadratic_equals_the_error_of_gated_weights():
    inputs, targets, weight, bias = make_case(n=6)
    moments, dense = gather(inputs, targets, 50), append_bias(weight, bias)
    quadratic, linear = _gate_quadratic(moments, dense, UNITS)
    gates = torch.tensor([0.3, 1.0, 0.0, 1.0], dtype=torch.float64)
    gated = weight * gates[:3].repeat_interleave(2)
    naive = (targets - inputs @ gated.T - bias).square().sum()
    torch.testing.assert_close(gates @ quadratic @ gates - 2 * linear @ gates + moments.target_energy, naive)


def test_score_l0_ranks_units_that_matter_above_those_that_do_not():
    inputs, _, weight, bias = make_case(n=6)
    weight[:, 2:4] = 0.01 * weight[:, 2:4]
    dense = append_bias(weight, bias)
    damped = damp_moments(gather(inputs, inputs @ weight.T + bias, 50), dense, 0.01)
    scores = score_l0(damped, dense, UNITS, retention=2 / 3)
    assert scores.argmin() == 1
    torch.testing.assert_close(scores, score_l0(damped, dense, UNITS, retention=2 / 3))
    assert (torch.sigmoid(scores).mean() - 2 / 3).abs() < 0.25
