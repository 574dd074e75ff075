"""Least-squares problems of random activations, and the naive error that solves are held against."""

import torch

from struprune_plugin.linalg.second_moments import accumulate_moments, append_bias, make_moments
from struprune_plugin.linalg.solve import damp_moments


def make_case(tokens=50, n=7, d=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((tokens, n), (tokens, d), (d, n), (d,))
    )


def gather(inputs, targets, splits):
    moments = make_moments(torch.empty(targets.shape[1], inputs.shape[1] + 1, dtype=torch.float64))
    for x, y in zip(inputs.split(splits), targets.split(splits), strict=True):
        accumulate_moments(moments, x, y)
    return moments


def make_problem(n=6, d=3, seed=0, dampening=0.01, tokens=50):
    inputs, targets, weight, bias = make_case(tokens=tokens, n=n, d=d, seed=seed)
    inputs = inputs @ torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)  # correlate
    dense = append_bias(weight, bias)
    moments = gather(inputs, targets, tokens)
    return moments, dense, damp_moments(moments, dense, dampening)


def naive_restored_error(damped, columns):
    """min_W of the damped error with only these inputs and the bias, by the pseudo-inverse."""
    rows = [*columns, damped.gram.shape[0] - 1]
    gram, cross = damped.gram[rows][:, rows], damped.cross[:, rows]
    return (damped.target_energy - (cross @ torch.linalg.pinv(gram) * cross).sum()).item()
