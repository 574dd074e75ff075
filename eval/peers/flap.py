"""FLAP (An et al. 2024): heads and FFN channels by the fluctuation of their inputs, one threshold for all, biases make up.

Source: "Fluctuation-based Adaptive Structured Pruning for Large Language Models" (AAAI), reimplemented from the paper, in
its setting WIFV and AL-AM: statistics of the dense model, one search over all layers and both kinds of modules.

Legend, of a consuming linear (``o_proj``, ``down_proj``):
    X [tokens, n]  its inputs in the dense model
    W [d, n]       its weights
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eval.groups import find_groups
from eval.peers import PeerResult
from eval.peers.calibration import record_calls, run_again
from struprune_plugin.allocation.rounding import GroupSize, find_group_sparsity
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.layerwise.capture import record
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.second_moments import with_bias_index
from struprune_plugin.model.layers import count_prunable_parameters, find_decoder_layers, find_linear
from struprune_plugin.model.surgery import read_consumer, slice_group
from struprune_plugin.model.unit_kind import UnitGroup


@torch.no_grad()
def prune_flap(folder: str, windows: Tensor, sparsity: float, batch_size: int = 8) -> PeerResult:
    """Prune heads and FFN channels of a checkpoint with FLAP.

    Weights that stay do not change; a consuming linear that loses inputs gets the bias ``sum_j W_:j mean(X_j)`` over them,
    which is added where it has none, and then counted against ``removed``. Differs from the source: at least one unit stays
    in every module. Differs from the authors' program, as the paper has it: the variance is over all tokens, and that of
    attention is not squared. Not in the source: under grouped-query attention a head is a KV head with its query heads.

    :param folder: model folder or hub name
    :param windows: calibration tokens, shape [windows, length], int64
    :param sparsity: of the parameters of all decoder linears, in [0, 1)
    :raises ValueError: the contract of ``sparsity``
    """
    model, _ = load_checkpoint(folder, "auto")
    start = time.perf_counter()
    groups, dense = find_groups(model, "head"), count_prunable_parameters(model)
    layers = dict(find_decoder_layers(model))
    statistics = measure_inputs(model, groups, windows, batch_size)
    scores = []
    for group in groups:
        weight = read_consumer(layers[group.layer_name], group)[:, :-1]
        scores.append(score_units(statistics[group.name], weight, group.columns_per_unit))
    consumers = [find_linear(layers[group.layer_name], group.consumer) for group in groups]
    added = [consumer.out_features if consumer.bias is None else 0 for consumer in consumers]
    keeps = search_structure(groups, scores, added, dense, sparsity)
    for group, keep in zip(groups, keeps, strict=True):
        if len(keep) < group.num_units:
            _slice_and_compensate(layers[group.layer_name], group, keep, statistics[group.name].mean)
    removed = 1 - count_prunable_parameters(model) / dense
    return PeerResult(model, removed, time.perf_counter() - start, f"{sum(added):,} biases added" if sum(added) else "")


@dataclass(frozen=True)
class InputStatistics:
    """Mean and sample variance of every input of a linear over all tokens, shape [n], float64."""

    mean: Tensor
    variance: Tensor


def measure_inputs(
    model: nn.Module, groups: Sequence[UnitGroup], windows: Tensor, batch_size: int
) -> dict[str, InputStatistics]:
    """Run the dense model layer by layer; return what enters the groups' consumers, by group."""
    calls = record_calls(model, windows, batch_size)  # type: ignore[arg-type]
    hidden = [call.hidden for call in calls]
    found = {}
    for name, layer in find_decoder_layers(model):
        members = [group for group in groups if group.layer_name == name]
        sums = {g.name: torch.zeros(2, g.num_columns, dtype=torch.float64, device=calls[0].device) for g in members}
        with record(layer, members) as seen:
            for index, call in enumerate(calls):
                hidden[index] = run_again(call, layer, hidden[index]).cpu()
                for group in members:
                    inputs = seen.inputs[group.consumer].double()
                    sums[group.name] += torch.stack([inputs.sum(0), inputs.square().sum(0)])
        num_tokens = windows.numel()
        for key, (total, squares) in sums.items():
            mean = total / num_tokens
            found[key] = InputStatistics(mean, (squares - num_tokens * mean.square()) / (num_tokens - 1))
    return found


def score_units(statistics: InputStatistics, weight: Tensor, width: int) -> Tensor:
    """Return ``var(X_j) ||W_:j||^2``, standardised over the module's channels, its mean over each unit's, shape [units].

    :param weight: W, shape [d, n], float64
    :param width: columns of one unit
    """
    fluctuation = statistics.variance * weight.square().sum(0)
    spread = fluctuation.std().clamp(min=torch.finfo(torch.float64).tiny)
    return ((fluctuation - fluctuation.mean()) / spread).view(-1, width).mean(1)


def search_structure(
    groups: Sequence[UnitGroup], scores: Sequence[Tensor], added: Sequence[int], num_prunable: int, sparsity: float
) -> list[Tensor]:
    """Remove units of all modules by rising score, until the parameters that are gone come closest to the budget.

    :param scores: one tensor of shape [units] a group
    :param added: parameters that a group gains once it loses a unit
    :param num_prunable: parameters of all linears of the decoder layers
    :return: sorted kept units of every group, int64
    :raises ValueError: so much cannot go
    """
    sizes = [GroupSize(g.name, g.unit.pool, g.num_units, g.unit_cost, 1) for g in groups]
    find_group_sparsity(sizes, num_prunable, sparsity)  # raises
    owner = torch.cat([torch.full((len(score),), index) for index, score in enumerate(scores)])
    unit = torch.cat([torch.arange(len(score)) for score in scores])
    order = torch.argsort(torch.cat([score.cpu() for score in scores]), stable=True)
    left, gone, wanted = [group.num_units for group in groups], 0, sparsity * num_prunable
    path, best, least = [], 0, wanted
    for at in order.tolist():
        g = int(owner[at])
        if left[g] == 1:
            continue
        gone += groups[g].unit_cost - (added[g] if left[g] == groups[g].num_units else 0)
        left[g] -= 1
        path.append(at)
        if abs(gone - wanted) < least:
            best, least = len(path), abs(gone - wanted)
        if gone > wanted + max(added, default=0):
            break
    if least > max(group.unit_cost for group in groups):
        raise ValueError(
            f"flap: sparsity must leave room for the biases that are added, got {sparsity} ({num_prunable:,} parameters, "
            f"{sum(added):,} biases). Lower it."
        )
    kept = torch.ones(len(owner), dtype=torch.bool)
    kept[path[:best]] = False
    return [unit[kept & (owner == index)] for index in range(len(groups))]


def _slice_and_compensate(layer: nn.Module, group: UnitGroup, keep: Tensor, mean: Tensor) -> None:
    """Slice a group; what its removed inputs gave on average becomes a bias of the consumer."""
    consumer = find_linear(layer, group.consumer)
    dense = read_consumer(layer, group)
    columns = unit_columns(keep.to(dense.device), group.columns_per_unit)
    lost = mean.index_fill(0, columns, 0)
    dense[:, -1] += dense[:, :-1] @ lost
    if consumer.bias is None:
        consumer.bias = nn.Parameter(consumer.weight.new_zeros(consumer.out_features))
    slice_group(layer, group, keep, dense[:, with_bias_index(columns, group.num_columns)])
