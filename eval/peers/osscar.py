"""OSSCAR: greedy removal of heads and FFN channels, then swaps, each judged by the re-solved error.

Source: Meng et al. 2024, "OSSCAR: One-Shot Structured Pruning in Vision and Language Models with Combinatorial
Optimization" (ICML), reimplemented from the paper, with the settings of the authors' program. Per consuming linear, from
the first layer to the last, with P the inputs on the pruned path and Y the dense model's outputs, it looks for the set S
of kept units with the least ``min_W ||Y - W P_S||^2``.

Legend as in ``struprune_plugin.linalg.solve``: H gram [n + 1, n + 1], C cross [d, n + 1], the bias last; and
    A  [n + 1, n + 1]  (H_SS)^-1, zero where an input is not in S (or the bias)
    W  [d, n + 1]      C_S (H_SS)^-1, zero likewise
    U  [w]             the columns of one unit
"""

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from eval.groups import find_groups, keep_evenly
from eval.peers import PeerResult
from eval.peers.calibration import ROOM, record_calls, run_again
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.statistics import LayerStatistics
from struprune_plugin.linalg.elimination import eliminate_units, keep_last, unit_columns
from struprune_plugin.linalg.second_moments import SecondMoments, append_bias, with_bias_index
from struprune_plugin.linalg.solve import damp_moments, solve_kept_weights
from struprune_plugin.model.layers import count_prunable_parameters, find_decoder_layers, find_linear
from struprune_plugin.model.surgery import read_weight, slice_group
from struprune_plugin.model.unit_kind import UnitGroup

DAMPENING = 0.01  # lambda_2 of the authors' program, relative to the mean diagonal of H
TOLERANCE = 1e-9  # a swap must lower the error by more than this share of it: what is less may be rounding


@torch.no_grad()
def prune_osscar(folder: str, windows: Tensor, sparsity: float) -> PeerResult:
    """Prune heads and FFN channels of a checkpoint with OSSCAR, the same numbers from every layer.

    Differs from the source: before the swaps, units go one at a time, not several; the heads are rounded to the nearest
    number and the FFN makes up the rest, so that the budget is met. As in the source, biases stay as they are, and both
    modules of a layer are measured before either is cut. Not in the source: under grouped-query attention a head is a KV
    head with its query heads, whose columns of ``o_proj`` go and are re-solved together.

    :param windows: calibration tokens, shape [windows, window], int64
    :param sparsity: fraction of the parameters of the decoder layers' linears to remove, in [0, 1)
    :raises ValueError: the contract of ``sparsity``, or an architecture that is not supported
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"osscar: sparsity must be in [0, 1), got {sparsity}. Change it.")
    model, _ = load_checkpoint(folder, "auto")
    groups = find_groups(model, "head")
    dense = count_prunable_parameters(model)
    kept = plan_counts(groups, dense, sparsity)
    start = time.perf_counter()
    calls = record_calls(model, windows)
    hidden = [call.hidden for call in calls]
    observer = LayerStatistics(TARGETS["block"], ROOM)
    changed, num_swaps = False, 0
    for name, layer in find_decoder_layers(model):
        members = [group for group in groups if group.layer_name == name]
        for call, stream in zip(calls, hidden, strict=True):
            observer.run_layer(layer, members, replace(call, hidden=stream))
        for group in members:
            moments = observer.collect_moments(layer, [group], group.name).select(0).all
            changed = changed or kept[group.name] < group.num_units
            if changed:  # before the first cut there is nothing to repair
                num_swaps += _prune_group(layer, group, moments, kept[group.name])
        observer.finish_layer()
        hidden = [run_again(call, layer, stream).cpu() for call, stream in zip(calls, hidden, strict=True)]
    seconds = time.perf_counter() - start
    return PeerResult(model, 1 - count_prunable_parameters(model) / dense, seconds, f"{num_swaps} swaps")


def plan_counts(groups: list[UnitGroup], num_prunable: int, sparsity: float) -> dict[str, int]:
    """Return the units that every group keeps.

    :param num_prunable: parameters of all linears of the decoder layers
    :raises ValueError: so much cannot go
    """
    attention, ffn = ([group for group in groups if group.unit.pool == pool] for pool in ("attention", "ffn"))
    kept = {group.name: max(round(group.num_units * (1 - sparsity)), 1) for group in attention}
    removed = sum((group.num_units - kept[group.name]) * group.unit_cost for group in attention)
    return kept | keep_evenly(ffn, num_prunable, max(sparsity - removed / num_prunable, 0.0))


def _prune_group(layer: nn.Module, group: UnitGroup, moments: SecondMoments, num_keep: int) -> int:
    """Select, re-solve and slice one group; return the number of swaps."""
    consumer = find_linear(layer, group.consumer)
    dense = append_bias(*read_weight(consumer))
    damped = damp_moments(subtract_bias(moments, dense[:, -1]), dense, DAMPENING, has_bias=False)
    order = eliminate_units(damped, group.columns_per_unit, group.name, num_remove=group.num_units - num_keep).order
    greedy = keep_last(order, group.num_units, num_keep)
    keep, num_swaps = search_swaps(damped, greedy, group.columns_per_unit)
    weight = solve_kept_weights(damped, unit_columns(keep, group.columns_per_unit), group.name)[0]
    weight[:, -1] = dense[:, -1]
    slice_group(layer, group, keep, weight)
    return num_swaps


def subtract_bias(moments: SecondMoments, bias: Tensor) -> SecondMoments:
    """Return the float64 moments of the targets ``Y - b 1^T``, which a linear meets by its weights alone.

    :param bias: b, shape [d], float64
    """
    gram, cross = moments.gram.double(), moments.cross.double()
    sums, outputs = gram[:, -1], cross[:, -1]  # P 1 and Y 1
    energy = moments.target_energy - 2 * (bias @ outputs) + sums[-1] * bias.square().sum()
    return SecondMoments(gram, cross - bias[:, None] * sums, energy, moments.absolute_sum)


def search_swaps(damped: SecondMoments, keep: Tensor, width: int) -> tuple[Tensor, int]:
    """Swap removed units for kept ones until no single swap lowers the re-solved error.

    A step takes the removed unit whose addition lowers the error most and drops the other unit that is then worth least;
    where that gains nothing, it goes on to the next best. The end is an exact local optimum over all pairs.

    :param damped: from :func:`struprune_plugin.linalg.solve.damp_moments`
    :param keep: kept units, sorted, shape [kept], int64
    :param width: columns of one unit
    :return: (kept units, sorted, as many as before; number of swaps)
    """
    num_units = (damped.gram.shape[0] - 1) // width
    kept = torch.zeros(num_units, dtype=torch.bool, device=damped.gram.device)
    kept[keep] = True
    if kept.all():
        return keep, 0
    state = _solve_support(damped, kept, width)
    num_swaps = 0
    while swap := _find_swap(damped, state, kept, width):
        added, dropped = swap
        _add_unit(damped, state, unit_columns(kept.new_tensor([added], dtype=torch.int64), width))
        _remove_unit(state, unit_columns(kept.new_tensor([dropped], dtype=torch.int64), width))
        kept[added], kept[dropped] = True, False
        num_swaps += 1
    return kept.nonzero().flatten(), num_swaps


@dataclass(frozen=True)
class _Support:
    """The solution on the kept inputs; both tensors change in place.

    :param inverse: A
    :param weight: W
    """

    inverse: Tensor
    weight: Tensor


def _solve_support(damped: SecondMoments, kept: Tensor, width: int) -> _Support:
    rows = _support_rows(kept, width)
    inverse, weight = torch.zeros_like(damped.gram), torch.zeros_like(damped.cross)
    block = torch.cholesky_inverse(torch.linalg.cholesky(damped.gram[rows][:, rows]))
    inverse[rows[:, None], rows] = block
    weight[:, rows] = damped.cross[:, rows] @ block
    return _Support(inverse, weight)


def _support_rows(kept: Tensor, width: int) -> Tensor:
    return with_bias_index(unit_columns(kept.nonzero().flatten(), width), len(kept) * width)


def _add_unit(damped: SecondMoments, state: _Support, columns: Tensor) -> None:
    """Border A with a unit: with ``V = A H_SU`` and ``M = (H_UU - H_US V)^-1``, A grows by ``V M V^T`` (rank w).

    The weights of the unit are ``W_U = (C_U - W H_SU) M``, those of the others fall by ``W_U V^T``.
    """
    coupling = damped.gram[:, columns]
    step = state.inverse @ coupling
    inner = torch.linalg.inv(coupling[columns] - coupling.T @ step)
    new = (damped.cross[:, columns] - state.weight @ coupling) @ inner
    state.weight.sub_(new @ step.T)
    state.weight[:, columns] = new
    state.inverse.add_(step @ inner @ step.T)
    state.inverse[:, columns] = -step @ inner
    state.inverse[columns] = -inner @ step.T
    state.inverse[columns[:, None], columns] = inner


def _remove_unit(state: _Support, columns: Tensor) -> None:
    """Take a unit out of A and W: ``A - A_SU (A_UU)^-1 A_US`` and ``W - W_U (A_UU)^-1 A_US`` (rank w)."""
    gain = torch.linalg.solve(state.inverse[columns][:, columns], state.inverse[columns])
    state.weight.sub_(state.weight[:, columns] @ gain)
    state.inverse.sub_(state.inverse[:, columns] @ gain)
    state.weight[:, columns] = 0
    state.inverse[columns] = 0
    state.inverse[:, columns] = 0


@dataclass(frozen=True)
class _Additions:
    """What adding each removed unit, alone, would change.

    :param units: the removed units, shape [removed], int64
    :param gains: fall of the error ``tr(W_U M^-1 W_U^T)``, shape [removed]
    :param steps: V without the bias' row, shape [kept, w, removed, w]
    :param inner: M, shape [removed, w, w]
    :param weights: W_U, shape [removed, d, w]
    """

    units: Tensor
    gains: Tensor
    steps: Tensor
    inner: Tensor
    weights: Tensor


def _propose_additions(damped: SecondMoments, state: _Support, kept: Tensor, width: int) -> _Additions:
    """Compute the quantities of :func:`_add_unit` for all removed units at once."""
    outside = (~kept).nonzero().flatten()
    support, columns = _support_rows(kept, width), unit_columns(outside, width)
    coupling = damped.gram[support][:, columns]
    steps = state.inverse[support][:, support] @ coupling
    own = columns.view(-1, width)
    couplings, by_unit = (t.view(-1, len(outside), width) for t in (coupling, steps))
    schur = damped.gram[own[:, :, None], own[:, None, :]] - torch.einsum("kru,krv->ruv", couplings, by_unit)
    residual = damped.cross[:, columns] - state.weight[:, support] @ coupling
    blocks = residual.view(len(residual), len(outside), width).transpose(0, 1)
    inner = torch.linalg.inv(schur)
    weights = blocks @ inner
    gains = (weights * blocks).sum((1, 2))
    return _Additions(outside, gains, steps[:-1].view(-1, width, len(outside), width), inner, weights)


def _find_swap(damped: SecondMoments, state: _Support, kept: Tensor, width: int) -> tuple[int, int] | None:
    """Return (unit to add, unit to drop) of the first swap that lowers the error, by falling gain of the addition."""
    additions = _propose_additions(damped, state, kept, width)
    inside = kept.nonzero().flatten()
    rows = unit_columns(inside, width)
    own = rows.view(-1, width)
    inverse = state.inverse[own[:, :, None], own[:, None, :]]
    weights = state.weight[:, rows].view(-1, len(inside), width)
    error = damped.target_energy - (state.weight * damped.cross).sum()  # tr(Y Y^T) - tr(W C^T)
    least = TOLERANCE * max(float(error), 1e-6 * float(damped.target_energy))
    for i in additions.gains.argsort(descending=True).tolist():
        if additions.gains[i] <= least:
            return None
        step = additions.steps[:, :, i]
        costs = _removal_costs(
            inverse + step @ additions.inner[i] @ step.transpose(1, 2),
            weights - torch.einsum("du,jvu->djv", additions.weights[i], step),
        )
        j = int(costs.argmin())
        if additions.gains[i] - costs[j] > least:
            return int(additions.units[i]), int(inside[j])
    return None


def _removal_costs(blocks: Tensor, weights: Tensor) -> Tensor:
    """Return ``tr(W_U (A_UU)^-1 W_U^T)`` of every kept unit.

    :param blocks: A_UU, shape [kept, w, w]
    :param weights: shape [d, kept, w]
    """
    columns = weights.permute(1, 2, 0)
    return (columns * torch.linalg.solve(blocks, columns)).sum((1, 2))
