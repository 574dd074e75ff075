"""LLM-Pruner (Ma et al. 2023): heads and FFN channels by the first-order Taylor importance of all coupled weights.

Source: "LLM-Pruner: On the Structural Pruning of Large Language Models" (NeurIPS), reimplemented from the paper, in its
setting Element^1 with block-wise pruning: the importance of a weight is ``|w dL/dw|``, that of a group of coupled
structures the sum over its weights. The recovery by LoRA is left out.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eval.groups import find_groups, keep_evenly
from eval.peers import PeerResult
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.linalg.elimination import keep_last
from struprune_plugin.model.layers import count_prunable_parameters, find_decoder_layers, find_linear
from struprune_plugin.model.surgery import slice_group, sum_rows
from struprune_plugin.model.unit_kind import UnitGroup

NUM_SAMPLES, LENGTH = 10, 128  # calibration sequences and their tokens, the paper's
_FIRST, _LAST, _OF = 4, 2, 32  # decoder layers that its recipe for LLaMA-7B leaves alone: 0 to 3, 30 and 31


def prune_llm_pruner(
    folder: str, windows: Tensor, sparsity: float, num_samples: int = NUM_SAMPLES, length: int = LENGTH
) -> PeerResult:
    """Prune heads and FFN channels of a checkpoint with LLM-Pruner, the same share of every layer but the ends.

    The first eighth and the last sixteenth of the layers, at least one each, stay whole, as in the paper's recipe; the others
    lose the more, so that the budget is met. Weights that stay do not change. Not in the source: counts are rounded by
    largest remainder over layers; under grouped-query attention a head is a KV head with its query heads.

    :param folder: model folder or hub name
    :param windows: calibration tokens, shape [windows, window], int64
    :param sparsity: of the parameters of all decoder linears, in [0, 1)
    :param num_samples: windows that gradients are taken of, the first ones
    :param length: tokens of each, at most
    :raises ValueError: the contract of ``sparsity``, or a model of less than three decoder layers
    """
    model, _ = load_checkpoint(folder, "float32")  # gradients are summed in it
    start = time.perf_counter()
    first, last = find_spared_layers(len(find_decoder_layers(model)))
    layers = dict(find_decoder_layers(model))
    groups = [group for group in find_groups(model, "head") if first <= group.layer_index < len(layers) - last]
    dense = count_prunable_parameters(model)
    kept = keep_evenly(groups, dense, sparsity)
    _accumulate_gradients(model, groups, windows[:num_samples, :length])
    for group in groups:
        layer = layers[group.layer_name]
        keep = keep_last(score_units(layer, group).argsort(stable=True), group.num_units, kept[group.name])
        slice_group(layer, group, keep)
    model.zero_grad()
    removed = 1 - count_prunable_parameters(model) / dense
    note = f"the first {first} and the last {last} decoder layers are whole"
    return PeerResult(model.requires_grad_(False), removed, time.perf_counter() - start, note)


def find_spared_layers(num_layers: int) -> tuple[int, int]:
    """Return how many of the first and of the last decoder layers stay whole.

    :raises ValueError: that would be all of them
    """
    first, last = (max(round(part * num_layers / _OF), 1) for part in (_FIRST, _LAST))
    if first + last >= num_layers:
        raise ValueError(
            f"llm_pruner: model must have at least 3 decoder layers, of which the first and the last stay whole, got "
            f"{num_layers}. Choose another model."
        )
    return first, last


@torch.enable_grad()
def _accumulate_gradients(model: PreTrainedModel, groups: Sequence[UnitGroup], windows: Tensor) -> None:
    """Leave the gradient of the mean next-token loss in the linears of groups, one sequence after the other."""
    layers = dict(find_decoder_layers(model))
    model.requires_grad_(False)
    for group in groups:
        for name in (*group.producers, group.consumer):
            find_linear(layers[group.layer_name], name).requires_grad_(True)
    for window in windows.to(model.device).split(1):
        loss = model(input_ids=window, labels=window, use_cache=False).loss
        (loss / len(windows)).backward()


@torch.no_grad()
def score_units(layer: nn.Module, group: UnitGroup) -> Tensor:
    """Return ``sum |w dL/dw|`` over all rows and columns, biases of rows too, that go with every unit, shape [units]."""
    consumer = _weigh(find_linear(layer, group.consumer).weight)
    scores = consumer.sum(0).view(group.num_units, -1).sum(1)
    for name in group.producers:
        producer = find_linear(layer, name)
        rows = _weigh(producer.weight).sum(1)
        if producer.bias is not None:
            rows = rows + _weigh(producer.bias)
        scores = scores + sum_rows(group, name, rows)
    return scores


def _weigh(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return (parameter.double() * parameter.grad.double()).abs()
