import torch
from test_statistics import gather, make_case

from struprune_plugin.importance import (
    measure_attention_importance,
    measure_mlp_importance,
    score_magnitude,
    score_wanda,
    score_wanda_l2,
)

UNITS = torch.tensor([[0, 1], [2, 3], [4, 5]])


def make_scored(seed=0):
    inputs, targets, weight, _ = make_case(n=6, seed=seed)
    return inputs, weight, gather(inputs, targets, 50)


def test_score_wanda_equals_naive_loops():
    """Algorithms 2 and 3, step 3: mean over tokens of sum_o |W_oi x_it|."""
    inputs, weight, moments = make_scored()
    naive = [sum((inputs[:, i, None] * weight[:, i]).abs().sum(1).mean() for i in unit) for unit in UNITS.tolist()]
    torch.testing.assert_close(score_wanda(moments, weight, UNITS), torch.stack(naive))


def test_score_wanda_l2_equals_naive_norms():
    """Eq. (wanda): ||W||_2 times ||X||_2."""
    inputs, weight, moments = make_scored()
    naive = [sum(weight[:, i].norm() * inputs[:, i].norm() for i in unit) for unit in UNITS.tolist()]
    torch.testing.assert_close(score_wanda_l2(moments, weight, UNITS), torch.stack(naive))


def test_score_magnitude_adds_rows_and_columns():
    _, weight, _ = make_scored()
    rows = torch.tensor([1.0, 2.0, 3.0])
    naive = torch.stack([weight[:, unit].abs().sum() for unit in UNITS]) + rows + 2 * rows
    torch.testing.assert_close(score_magnitude(weight, UNITS, [rows, 2 * rows]), naive)


def test_layer_importance_equals_algorithm_3():
    heads = [torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    attention = sum(w.abs().sum() + 0.1 * w.var(correction=0) + 0.01 * w.norm() for w in heads)
    mlp = sum(w.abs().sum() + 0.05 * w.var(correction=0) for w in heads)
    assert abs(measure_attention_importance(heads) - attention) < 1e-12
    assert abs(measure_mlp_importance(heads) - mlp) < 1e-12
