"""What fits the device under ``memory_budget``: estimated from shapes, before work starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.offload import disable_onloading
from transformers import PreTrainedModel

from struprune_plugin.topology import UnitGroup, find_decoder_layers, find_family, find_linear, list_linears

MAX_LOGITS = 1 << 26  # held at once, a quarter of a gigabyte; their gradient takes as much again, thrice
_MIN_ROWS = 64  # of a tile, and tokens of a chunk
_SOLVE_COPIES = 9  # float64 Gram matrices alive together in the worst solve: swaps, or the choice of a damping
_LOGIT_COPIES = 5  # float32


@dataclass(frozen=True)
class Placement:
    """Where a run's parts live, and in what pieces they are made; all on the device and whole unless a budget forbids.

    :param gather_on_host: moments are kept on the host and grow by tiles made on the device
    :param solve_on_host: ranking, swaps and solves run on the host
    :param release_weights: a linear's weights leave the device after every call, not with the layer
    :param rows: of a tile of moments
    :param tokens: widened to float32 at once
    :param logits: held at once
    """

    gather_on_host: bool = False
    solve_on_host: bool = False
    release_weights: bool = False
    rows: int = 1 << 20
    tokens: int = 1 << 20
    logits: int = MAX_LOGITS


WHOLE = Placement()


@dataclass(frozen=True)
class Sizes:
    """Bytes and widths that the estimate needs.

    :param layer: bytes of the largest decoder layer
    :param linear: of its largest linear
    :param embeddings: of the input embeddings, positions too, and of what is made from them
    :param head: of the output embeddings
    :param width: inputs of the widest consumer
    :param hidden: its outputs
    :param tokens: of a micro-batch
    :param activations: of a layer's forward pass on it, maps not materialised
    """

    layer: int
    linear: int
    embeddings: int
    head: int
    width: int
    hidden: int
    tokens: int
    activations: int


def read_sizes(model: PreTrainedModel, groups: Sequence[UnitGroup], batch: torch.Size) -> Sizes:
    """Read sizes off a model, its groups and the shape of a calibration batch."""
    family, layers = find_family(model), [layer for _, layer in find_decoder_layers(model)]

    def count(*modules: torch.nn.Module) -> int:
        parameters = {id(p): p for module in modules for p in module.parameters()}
        return sum(p.numel() * p.element_size() for p in parameters.values())

    with disable_onloading():
        linears = [find_linear(layers[0], name) for name in list_linears(family, layers[0])]
        embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
        item = linears[0].weight.element_size()
        producers = len(linears) - 4 if len(linears) > 4 else 2
        width = max(group.num_columns for group in groups)
        hidden = model.config.hidden_size
        tokens, length = batch.numel(), batch[-1]
        per_token = item * (max(2, producers) * width + 10 * hidden + 4 * length) + 4 * 3 * hidden
        return Sizes(
            layer=max(map(count, layers)),
            linear=max(map(count, linears)),
            embeddings=count(*embeddings) + item * tokens * (6 * hidden + 4 * length),
            head=count(model.get_output_embeddings()),
            width=width,
            hidden=hidden,
            tokens=tokens,
            activations=tokens * per_token,
        )


def find_least_budget(sizes: Sizes, sensitivity: bool) -> int:
    """Return the bytes that even the smallest pieces need."""
    least = max(sizes.linear + sizes.activations + _measure_pieces(sizes)[1], sizes.embeddings)
    if sensitivity:
        logits = 4 * _LOGIT_COPIES * sizes.head // sizes.hidden  # of one token
        least = max(least, sizes.layer + 3 * sizes.activations, sizes.head + sizes.activations + logits)
    return least


def _measure_pieces(sizes: Sizes) -> tuple[int, int]:
    """Return bytes of one row of moments, and of the smallest pieces: widened tokens, a tile and its product."""
    row = 4 * (sizes.width + 1)
    return row, 3 * _MIN_ROWS * row


def place_parts(budget: int, sizes: Sizes, num_moments: int, sensitivity: bool) -> Placement:
    """Choose what goes to the host and how large pieces may be, the fastest that fits.

    :param num_moments: moments of the widest consumer held together
    :param sensitivity: whether a backward pass and the logits must fit
    :raises ValueError: the least that is needed, and what would lower it
    """
    row, pieces = _measure_pieces(sizes)
    moments = num_moments * row * (sizes.width + 1 + sizes.hidden)
    whole = sizes.activations + 2 * sizes.tokens * row
    work = _SOLVE_COPIES * 2 * row * (sizes.width + 1) + 4 * 2 * row * sizes.hidden
    resident = max(sizes.layer + sizes.activations, sizes.layer + sizes.embeddings)
    gather_on_host = max(resident, sizes.layer + whole) + moments > budget
    release = gather_on_host and max(resident, sizes.layer + sizes.activations + pieces) > budget
    base = sizes.linear if release else sizes.layer
    logits = (budget - sizes.head - sizes.activations) // (4 * _LOGIT_COPIES)
    least = find_least_budget(sizes, sensitivity)
    if least > budget:
        remedy = " sensitivity: none," if sensitivity else ""
        raise ValueError(
            f"memory_budget: must be at least {least:,} bytes ({least / sizes.layer:.2f} decoder layers) for "
            f"{sizes.tokens} tokens a batch, got {budget:,} ({budget / sizes.layer:.2f}). Raise it, or choose{remedy} a "
            "smaller batch_size or shorter sequences."
        )
    rows = max(_MIN_ROWS, (budget - base - sizes.activations) // (3 * row)) if gather_on_host else 1 << 20
    return Placement(
        gather_on_host,
        sizes.layer + moments + work > budget,
        release,
        rows,
        min(rows, sizes.tokens) if gather_on_host else 1 << 20,
        max(1, min(MAX_LOGITS, logits)),
    )
