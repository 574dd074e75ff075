"""FASP (Hu et al. 2025): coupled rows and columns by the Wanda score of the column, uniform over layers, one restoration."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eval.groups import find_groups, keep_evenly
from eval.peers import PeerResult
from eval.peers.calibration import ROOM, record_calls, run_again
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.layerwise.capture import ConsumerBatch, record
from struprune_plugin.layerwise.moments import add_batch, assemble_moments, make_sums
from struprune_plugin.linalg.elimination import keep_last, unit_columns
from struprune_plugin.linalg.second_moments import SecondMoments
from struprune_plugin.linalg.solve import damp_moments, solve_kept_weights
from struprune_plugin.model.layers import count_prunable_parameters, find_decoder_layers, find_linear
from struprune_plugin.model.surgery import mask_group, read_consumer, slice_group
from struprune_plugin.model.unit_kind import UnitGroup

_NOTE = "value channels ragged over heads, kept as zeros: a deployment needs a mask"


@torch.no_grad()
def prune_fasp(
    folder: str, windows: Tensor, sparsity: float, dampening: float = 0.01, batch_size: int = 8
) -> PeerResult:
    """Prune a model with FASP, layer after layer on the pruned path's inputs.

    Units are FFN channels (columns of ``fc2``, rows of ``fc1``; of ``down_proj``, rows of ``gate_proj`` and ``up_proj``) and
    single value channels (columns of ``out_proj``, rows of ``v_proj``), those of all heads ranked together; Q and K stay
    whole, so that FFN and V/O give more than ``sparsity``. The target of a restoration is the dense linear's own output on
    the inputs that it now gets. Source: FASP, sections 3.1 to 3.3. Differs from the source: the bias, where the linear has
    one, is solved along, and the ridge pulls towards the dense weights, as here everywhere. Not in the source: under
    grouped-query attention a row of ``v_proj`` goes with its column in every query head that reads it, and their scores add up.

    :param folder: model folder or hub name
    :param windows: calibration tokens, shape [windows, length], int64
    :param sparsity: of the parameters of all decoder linears, in [0, 1)
    :param dampening: ridge, relative to the mean diagonal of the Gram matrix
    """
    model, _ = load_checkpoint(folder, "auto")
    start = time.perf_counter()
    groups = find_groups(model, "value_channels")
    num_prunable = count_prunable_parameters(model)
    kept = keep_evenly(groups, num_prunable, sparsity)
    calls = record_calls(model, windows, batch_size)
    hidden = [call.hidden for call in calls]
    for name, layer in find_decoder_layers(model):
        for group in groups:
            if group.layer_name == name:
                moments = _gather_moments(layer, group, calls, hidden)
                _prune_group(layer, group, moments, kept[group.name], dampening)
        hidden = [run_again(call, layer, states).cpu() for call, states in zip(calls, hidden, strict=True)]
    removed = sum((g.num_units - kept[g.name]) * g.unit_cost for g in groups)
    return PeerResult(model, removed / num_prunable, time.perf_counter() - start, _NOTE)


def _gather_moments(
    layer: nn.Module, group: UnitGroup, calls: Sequence[LayerCall], hidden: Sequence[Tensor]
) -> SecondMoments:
    """Run the layer as it now is; return the moments of the group's consumer against its own outputs, in unit order."""
    sums = make_sums(layer, group, calls[0].device, ROOM)
    with record(layer, [group]) as seen:
        for call, states in zip(calls, hidden, strict=True):
            run_again(call, layer, states)
            inputs, output = seen.inputs[group.consumer], seen.outputs[group.consumer]
            add_batch(sums, ConsumerBatch(seen.find_source(group), inputs, output, call), ROOM)
    return assemble_moments(layer, [group], [sums], ROOM).select(0).all


def _prune_group(layer: nn.Module, group: UnitGroup, moments: SecondMoments, num_keep: int, dampening: float) -> None:
    """Rank a module's units by ``sum_o |W_oj| * ||X_j||_2`` over their columns, drop the lowest, restore the rest."""
    dense = read_consumer(layer, group)
    scores = dense[:, :-1].abs().sum(0) * moments.gram.diagonal()[:-1].double().sqrt()
    scores = scores.view(-1, group.columns_per_unit).sum(1)
    keep = keep_last(scores.argsort(stable=True), group.num_units, num_keep)
    damped = damp_moments(moments, dense, dampening, find_linear(layer, group.consumer).bias is not None)
    weight = solve_kept_weights(damped, unit_columns(keep, group.columns_per_unit), group.name)[0]
    if group.kind == "ffn":
        slice_group(layer, group, keep, weight)
        return
    mask_group(layer, group, keep, weight)
    for name in group.producers:
        stays = group.find_kept_rows(name, keep)
        for parameter in find_linear(layer, name).parameters():
            gone = torch.ones(len(parameter), dtype=torch.bool).index_fill(0, stays, False)
            parameter[gone.to(parameter.device)] = 0
