"""Local search after an elimination: exchange kept units for removed ones while the re-solved error falls.

Legend as in ``solve.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments, with_bias_index
from struprune_plugin.linalg.solve import invert_in_place
from struprune_plugin.linalg.ties import argmin_tensor_with_ties, order_scores

_MAX_CANDIDATES = 512  # a swap looks at so many columns on either side


def swap_units(
    damped: SecondMoments, keep: Tensor, where: str, num_blocks: int = 1, max_swaps: int = 0
) -> tuple[Tensor, int]:
    """Exchange a kept column for a removed one, each time the pair that lowers the re-solved error most, until none does.

    Pairs are made of the 512 columns cheapest to drop and the 512 that gain most when added: all, in small modules.

    With S kept, the sweep operator holds ``-H_SS^-1``, ``B = H_SS^-1 H_SR`` and the Schur complement s of the removed in one
    matrix, and the weights W_S with the residual correlations r_R, transposed, in another. Adding u and then dropping v changes the
    error by ``-|r_u|^2 / s_uu + |W_v - r_u b_uv / s_uu|^2 / ((H_SS^-1)_vv + b_uv^2 / s_uu)``, exactly, for all pairs at
    once; a swap is one update of rank two. Source: the local search of OSSCAR (Meng et al., 2024), over single columns.

    :param keep: sorted kept columns, shape [k], int64, one unit each
    :param num_blocks: a swap stays within one of so many equal runs of columns
    :param max_swaps: stop after so many
    :return: (kept columns, sorted; swaps made)
    """
    size = damped.gram.shape[0] - 1
    if not max_swaps or len(keep) == size:
        return keep, 0
    kept = torch.zeros(size + 1, dtype=torch.bool, device=keep.device)
    kept[with_bias_index(keep, size)] = True
    table, values = _sweep_all(damped.gram, damped.cross, kept, where)
    block = torch.arange(size, device=keep.device) // (size // num_blocks)
    least = -1e-9 * (values[kept].T * damped.cross[:, kept]).sum()  # of what is explained: below it is rounding
    swaps = 0
    while swaps < max_swaps:
        inside, outside = _find_candidates(table, values, kept[:-1], len(keep))
        if not len(inside):
            break
        change = _find_changes(table, values, inside, outside)
        change = change.masked_fill(block[outside][:, None] != block[inside], torch.inf)
        best = argmin_tensor_with_ties(change)
        if not change.flatten()[best] < least:
            break
        u, v = int(outside[best // len(inside)]), int(inside[best % len(inside)])
        _sweep_pair(table, values, u, v)
        kept[u], kept[v] = True, False
        swaps += 1
    return kept[:-1].nonzero().flatten(), swaps


def _sweep_all(gram: Tensor, cross: Tensor, kept: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """Return (table, values) of :func:`swap_units`, shapes [n + 1, n + 1] and [n + 1, d], with ``kept`` swept in."""
    rows, rest = kept.nonzero().flatten(), (~kept).nonzero().flatten()
    between = gram[rows[:, None], rest]
    inverse = invert_in_place(gram[rows[:, None], rows], where)
    values = cross.new_empty(cross.T.shape)
    values[rows] = inverse @ cross[:, rows].T
    values[rest] = torch.addmm(cross[:, rest].T, between.T, values[rows], alpha=-1)
    reach = inverse @ between
    table = torch.empty_like(gram)
    table[rows[:, None], rows] = inverse.neg_()
    del inverse
    table[rows[:, None], rest], table[rest[:, None], rows] = reach, reach.T
    table[rest[:, None], rest] = gram[rest[:, None], rest].addmm_(between.T, reach, alpha=-1)
    return table, values


def _find_candidates(table: Tensor, values: Tensor, kept: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    """Return the kept columns that are cheapest to drop, and the removed ones that gain most, at most 512 of each, sorted.

    :param num_kept: how many are kept, which no swap changes
    """
    worth = torch.linalg.vector_norm(values[:-1], dim=1).square() / table.diagonal()[:-1].abs()
    inside = order_scores(worth.masked_fill(~kept, torch.inf))[: min(num_kept, _MAX_CANDIDATES)]
    outside = order_scores(worth.masked_fill(kept, -1), descending=True)
    outside = outside[: min(len(kept) - num_kept, _MAX_CANDIDATES)]
    return inside.sort().values, outside.sort().values


def _find_changes(table: Tensor, values: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Return what every swap does to the error, shape [removed, kept]."""
    schur, inverse = table.diagonal()[outside, None], -table.diagonal()[inside]
    ratio = table[outside[:, None], inside] / schur
    residual, weight = values[outside], values[inside]
    gain = residual.square().sum(1, keepdim=True)
    left = weight.square().sum(1) - 2 * ratio * (residual @ weight.T) + ratio.square() * gain
    return left.clamp(min=0) / (inverse + ratio.square() * schur) - gain / schur


def _sweep_pair(table: Tensor, values: Tensor, u: int, v: int) -> None:
    """Take column u into the kept set and v out of it, in place: the sweep operator on both at once.

    With ``K = {u, v}``, ``P = T_KK`` and ``R = T_K:``, the table loses ``R^T P^-1 R``, and its rows K become ``+-P^-1 R``.
    """
    pair = torch.tensor([u, v], device=table.device)
    signs = table.new_tensor([1, -1])
    rows, old = table[pair], values[pair]
    pivot = torch.linalg.inv(rows[:, pair])
    gain = pivot @ rows
    values.addmm_(gain.T, old, alpha=-1)
    table.addmm_(gain.T, rows, alpha=-1)
    gain *= signs[:, None]
    values[pair], table[pair], table[:, pair] = signs[:, None] * (pivot @ old), gain, gain.T
    table[pair[:, None], pair] = -signs[:, None] * pivot * signs
