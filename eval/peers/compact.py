"""COMPACT (Kwek and Yin 2025): rows of rare tokens, and FFN channels by the squared activations that common tokens give."""

import time
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.groups import find_groups, keep_evenly
from eval.peers import PeerResult
from eval.peers.calibration import record_calls, run_again
from eval.vocabulary import list_weights, rank_by, take_rows
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.layerwise.capture import record
from struprune_plugin.linalg.elimination import keep_last
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters, find_decoder_layers
from struprune_plugin.model.surgery import slice_group
from struprune_plugin.vocabulary.trim_plan import TrimPlan, check_source, plan_trim


def prune_compact(folder: str, windows: Tensor, sparsity: float) -> PeerResult:
    """Prune a checkpoint with COMPACT: as many parameters as this share of all decoder linears holds, in rows and FFN channels.

    The paper leaves both sizes to its user. Here the vocabulary loses the same share of its rows as every FFN of its channels,
    and tokens are ranked by how often the calibration windows hold them, as `struprune trim` ranks without a word list: nine tenths
    of the text count, low ids have 5 % of the counts, and the parts of a token that stays stay.

    :param folder: model folder or hub name
    :param windows: calibration tokens, shape [windows, length], int64
    :param sparsity: in (0, 1)
    :raises ValueError: the vocabulary cannot be trimmed, or not so far
    """
    model = load_checkpoint(folder, "auto")[0]
    parameters = sparsity * count_prunable_parameters(model)
    return prune_by_plan(model, windows, parameters, plan_rows(folder, model, windows, parameters))


def plan_rows(folder: str, model: PreTrainedModel, windows: Tensor, parameters: float) -> TrimPlan:
    """Return the rows that :func:`prune_compact` removes; parameters as in :func:`prune_by_plan`."""
    source = check_source(folder)
    in_rows = sum(weight.numel() for weight in {*list_weights(model)})  # once where they are tied
    in_ffns = sum(group.num_units * group.unit_cost for group in find_groups(model, "none"))
    with rank_by(source.loaded.decode(window) for window in windows.tolist()) as ranking:
        return plan_trim(source, replace(ranking, vocabulary=1 - parameters / (in_rows + in_ffns)))


@torch.no_grad()
def prune_by_plan(model: PreTrainedModel, windows: Tensor, parameters: float, plan: TrimPlan) -> PeerResult:
    """Prune a loaded model with COMPACT: the rows that a plan takes, then FFN channels until so many parameters are gone.

    A channel's score is the sum of its squared activations over the tokens that stay in the vocabulary, in the dense model.
    Every layer loses the same share; weights that stay do not change. Source: arXiv 2509.06836, Algorithm 1, "common act²".

    :param windows: tokens of the whole vocabulary, shape [windows, length], int64
    """
    start = time.perf_counter()
    groups, whole = find_groups(model, "none"), count_parameters(model)
    num_prunable = count_prunable_parameters(model)
    calls = record_calls(model, windows)
    hidden = [call.hidden for call in calls]
    tokenizer = take_rows(model, plan, list_weights(model))
    in_rows = whole - count_parameters(model)
    kept = keep_evenly(groups, num_prunable, (parameters - in_rows) / num_prunable)
    counts = torch.isin(windows, torch.tensor(plan.kept))
    masks = [batch.reshape(-1).double() for batch in counts.split(len(hidden[0]))]
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
    seconds, note = time.perf_counter() - start, f"{plan.size:,} of {plan.source.num_rows:,} rows stay"
    return PeerResult(model, removed / num_prunable, seconds, note, tokenizer, in_rows / whole)
