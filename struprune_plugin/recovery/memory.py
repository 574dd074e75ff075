"""Estimate of the device memory of a recovery, from shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.offload import disable_onloading
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.runner import compute_dtype_of, list_rest
from struprune_plugin.model.footprint import read_sizes
from struprune_plugin.model.layers import find_decoder_layers, find_linear
from struprune_plugin.recovery.recovery_config import RecoveryConfig
from struprune_plugin.recovery.states import list_layer_parameters
from struprune_plugin.runtime.distributed import count_ranks
from struprune_plugin.runtime.offload_plan import MAX_LOGITS

BACKWARD_COPIES = 3  # activations that a layer keeps for its backward pass, in those of a forward pass
_USUAL_LAYERS = 3  # held where no budget says more: one, the next on its way, and a gradient
_MIN_ROWS = 64  # of the output embeddings at once
_LOGIT_COPIES = 12  # float32, those of the piece before among them
_STATE_COPIES = 8  # of a micro-batch's hidden states, float32, around the head


@dataclass(frozen=True)
class RecoveryPlacement:
    """Placement of the parts of a step.

    :param ahead: the next layer's weights are fetched while one computes
    :param held_sums: bytes of a layer's gradients, in float32, that are added up on the device; all others on the host, each as
        soon as it is there
    :param vocabulary: rows of the output embeddings on the device at once
    """

    ahead: bool
    held_sums: int
    vocabulary: int


@dataclass(frozen=True)
class RecoverySizes:
    """Bytes and widths, as input of the estimate.

    :param layer: bytes of the largest decoder layer's weights, as they are computed with
    :param sums: of the float32 gradients of what is trained in it
    :param largest: of the largest gradient on its way
    :param activations: of a micro-batch in one layer, kept for its backward pass
    :param micro_batches: a step, of one process
    :param tokens: of a micro-batch
    :param rest: bytes of what stands on the last layer: norms and projections
    :param width: of the head's inputs, and of hidden states
    :param item: bytes of a value that is computed with
    """

    layer: int
    sums: int
    largest: int
    activations: int
    micro_batches: int
    tokens: int
    rest: int
    width: int
    item: int


def place_recovery(budget: int | None, free: int | None, sizes: RecoverySizes) -> RecoveryPlacement:
    """Choose the fastest placement and piece sizes that fit.

    :param budget: bytes; where None three layers beside the activations of a micro-batch, or the least there is
    :param free: bytes that the device has, a bound where no budget is given; None where nobody knows
    :raises ValueError: the least that is needed, and what would lower it
    """
    fixed = sizes.layer + sizes.largest + sizes.activations
    least = max(fixed, _measure_head(sizes, _MIN_ROWS))
    if budget is None:
        budget = max(_USUAL_LAYERS * sizes.layer + sizes.activations, least)
        budget = budget if free is None else min(budget, free)
    if least > budget:
        raise ValueError(
            f"memory_budget: must be at least {least:,} bytes for recovery ({least / sizes.layer:.2f} decoder layers, "
            f"micro-batches of {sizes.tokens} tokens), got {budget:,}. Raise it, or choose a smaller micro_batch_size or shorter "
            "sequences."
        )
    # a sum on the device goes to the host once, in float32; one on the host takes every micro-batch's gradient, in 16 bits
    few = 2 * sizes.item * sizes.micro_batches <= 8
    held = 0 if few and fixed + sizes.sums + sizes.layer > budget else min(sizes.sums, max(0, budget - fixed))
    rows = max(_MIN_ROWS, MAX_LOGITS // sizes.tokens)
    fitting = (budget - _measure_head(sizes, 0)) // (_measure_head(sizes, 1) - _measure_head(sizes, 0))
    return RecoveryPlacement(fixed + held + sizes.layer <= budget, held, max(_MIN_ROWS, min(rows, fitting)))


def _measure_head(sizes: RecoverySizes, rows: int) -> int:
    """Return the bytes of the head's step with ``rows`` rows at once."""
    states = 4 * _STATE_COPIES * sizes.tokens * sizes.width
    return sizes.rest + states + rows * (2 * sizes.item * sizes.width + 4 * _LOGIT_COPIES * sizes.tokens)


def read_recovery_sizes(
    model: PreTrainedModel, config: RecoveryConfig, linears: Sequence[str], shape: torch.Size
) -> RecoverySizes:
    """Return the sizes that the budget is checked against, for a model and the shape of a micro-batch.

    :param linears: full names of those that get adapters
    :param shape: of a micro-batch, [sequences, tokens of the longest sample]
    """
    sizes = read_sizes(model, [], shape)
    item, head = compute_dtype_of(model, config.compute).itemsize, model.get_output_embeddings()
    with disable_onloading():
        rest = sum(tensor.numel() for tensor in list_rest(model).values())
        head_width = head.weight.shape[1]
    ratio = item / model.dtype.itemsize
    largest = sums = 0
    for name, layer in find_decoder_layers(model):
        counts = _count_trained(name, layer, config, linears)
        sums, largest = max(sums, sum(counts)), max(largest, *counts, 0)
    return RecoverySizes(
        layer=round(sizes.layer * ratio) + item * (sums if config.adapters else 0),
        sums=max(4, item) * sums,
        largest=item * largest,
        activations=round(BACKWARD_COPIES * sizes.activations * ratio),
        micro_batches=-(-config.batch_size // (shape[0] * count_ranks())),
        tokens=shape.numel(),
        rest=item * rest,
        width=max(model.config.get_text_config(decoder=True).hidden_size, head_width),
        item=item,
    )


def _count_trained(name: str, layer: nn.Module, config: RecoveryConfig, linears: Sequence[str]) -> list[int]:
    """Return the number of values of each trained tensor in a layer."""
    if config.adapters:
        here = [find_linear(layer, n[len(name) + 1 :]) for n in linears if n.startswith(f"{name}.")]
        return [config.adapters.rank * side for linear in here for side in linear.weight.shape]
    return [p.numel() for p in list_layer_parameters(layer, config.trained).values()]
