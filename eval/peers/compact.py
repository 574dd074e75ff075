"""COMPACT (Kwek and Yin 2025): FFN channels by the squared activations that common tokens give, beside rows of rare tokens."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch
from torch import Tensor

from eval.groups import find_groups, keep_evenly
from eval.peers import PeerResult
from eval.peers.calibration import record_calls, run_again
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.layerwise.capture import record
from struprune_plugin.linalg.elimination import keep_last
from struprune_plugin.model.layers import count_prunable_parameters, find_decoder_layers
from struprune_plugin.model.surgery import slice_group


@torch.no_grad()
def prune_compact(
    folder: str, windows: Tensor, sparsity: float, common: Collection[int] | None = None, batch_size: int = 8
) -> PeerResult:
    """Prune FFN channels of a checkpoint with COMPACT; the rows of the vocabulary are left to the caller.

    A channel's score is the sum of its squared activations over the tokens that stay in the vocabulary, in the dense model.
    Every layer loses the same share; weights that stay do not change. Source: arXiv 2509.06836, Algorithm 1, "common act²".

    :param folder: model folder or hub name
    :param windows: calibration tokens, shape [windows, length], int64
    :param sparsity: of the parameters of all decoder linears, in [0, 1), all of it from the FFNs
    :param common: ids of the tokens that count; all where None
    """
    model, _ = load_checkpoint(folder, "auto")
    start = time.perf_counter()
    groups = find_groups(model, "none")
    num_prunable = count_prunable_parameters(model)
    kept = keep_evenly(groups, num_prunable, sparsity)
    counts = torch.ones_like(windows) if common is None else torch.isin(windows, torch.tensor(sorted(common)))
    masks = [batch.reshape(-1).double() for batch in counts.split(batch_size)]
    calls = record_calls(model, windows, batch_size)
    hidden = [call.hidden for call in calls]
    for name, layer in find_decoder_layers(model):
        members = [group for group in groups if group.layer_name == name]
        scores = {group.name: torch.zeros(group.num_units, dtype=torch.float64) for group in members}
        with record(layer, members) as seen:
            for index, (call, mask) in enumerate(zip(calls, masks, strict=True)):
                hidden[index] = run_again(call, layer, hidden[index]).cpu()
                for group in members:
                    inputs = seen.inputs[group.consumer].double().cpu().reshape(len(mask), -1)
                    scores[group.name] += (inputs.square() * mask[:, None]).sum(0)
        for group in members:
            keep = keep_last(scores[group.name].argsort(stable=True), group.num_units, kept[group.name])
            slice_group(layer, group, keep)
    removed = sum((g.num_units - kept[g.name]) * g.unit_cost for g in groups)
    return PeerResult(model, removed / num_prunable, time.perf_counter() - start, "rows of rare tokens apart")
