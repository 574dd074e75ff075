"""What fits the device under ``memory_budget``: estimated from shapes, before work starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.offload import disable_onloading
from transformers import PreTrainedModel

from struprune_plugin.modifiers.memory import can_fuse_attention
from struprune_plugin.statistics import count_sums
from struprune_plugin.topology import UnitGroup, find_decoder_layers, find_family, find_linear, list_linears

MAX_LOGITS = 1 << 24  # held at once; with their gradients a third of a gigabyte
_MIN_ROWS = 64  # of a tile, and tokens of a chunk
_MAX_TOKENS = 1024  # of a chunk, under a budget
# float64 Gram matrices alive together in the worst solve, float32 ones counted half: choice of a damping, or rotation
_SOLVE_COPIES = {"ffn": 7, "head": 7, "vo": 12}
_LOGIT_COPIES = 5  # float32


@dataclass(frozen=True)
class Placement:
    """Where a run's parts live, and in what pieces they are made; all on the device and whole unless a budget forbids.

    :param gather_on_host: moments are kept on the host and grow by tiles made on the device
    :param hold_on_host: those of sequences held out are
    :param solve_on_host: ranking, swaps and solves run on the host
    :param release_weights: a linear's weights leave the device after every call, not with the layer; what a backward
        pass needs waits on the host
    :param embed_on_host: input and output embeddings are applied on the host
    :param rows: of a tile of moments
    :param tokens: widened to float32 at once
    :param logits: held at once
    """

    gather_on_host: bool = False
    hold_on_host: bool = False
    solve_on_host: bool = False
    release_weights: bool = False
    embed_on_host: bool = False
    rows: int = 1 << 20
    tokens: int = 1 << 20
    logits: int = MAX_LOGITS


WHOLE = Placement()


@dataclass(frozen=True)
class Sizes:
    """Bytes and widths that the estimate needs.

    :param layer: bytes of the largest decoder layer
    :param largest: of the largest module that holds its own weights: a linear, or all experts
    :param embeddings: of the input embeddings, positions too
    :param head: of the output embeddings
    :param consumers: inputs and outputs of the consuming linears of a layer, the widest first, and how many float64 Gram
        matrices their solves hold
    :param tokens: of a micro-batch
    :param activations: bytes of a layer's forward pass on it
    """

    layer: int
    largest: int
    embeddings: int
    head: int
    consumers: tuple[tuple[int, int, int], ...]
    tokens: int
    activations: int


@dataclass(frozen=True)
class Demands:
    """What a run asks for.

    :param together: moments of all modules of a layer are gathered in one pass
    :param hold_out: those of sequences held out, too
    :param sensitivity: a backward pass and the logits
    """

    together: bool
    hold_out: bool
    sensitivity: bool


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
        first = [group for group in groups if group.layer_index == groups[0].layer_index]
        hidden = model.config.hidden_size
        consumers = sorted(((g.num_columns, hidden, _SOLVE_COPIES[g.kind]) for g in first), reverse=True)
        tokens, length = batch.numel(), batch[-1]
        outputs = _sum_outputs(family.attention_producers, layers[0]), _sum_outputs(family.ffn_producers, layers[0])
        widest = max((3 if family.rotary else 2) * outputs[0], outputs[1] + consumers[0][0])
        single = (5 if family.rotary else 3) * hidden  # float32: targets, and norms that widen
        per_token = item * (widest + 7 * hidden + 2 * length) + 4 * single
        maps = 0 if can_fuse_attention(model) else 12 * model.config.num_attention_heads * length
        return Sizes(
            layer=max(map(count, layers)),
            largest=max(_count_own(module) for layer in layers for module in layer.modules()),
            embeddings=count(*embeddings),
            head=count(model.get_output_embeddings()),
            consumers=tuple(consumers),
            tokens=tokens,
            activations=tokens * (per_token + maps),
        )


def _sum_outputs(names: Iterable[str], layer: torch.nn.Module) -> int:
    """Return the outputs of all linears of some names that a layer has."""
    found = [module for name, module in layer.named_modules() if name in names and isinstance(module, torch.nn.Linear)]
    return sum(linear.out_features for linear in found)


def _count_own(module: torch.nn.Module) -> int:
    """Return the bytes of the weights that a module holds itself."""
    return sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))


def place_parts(budget: int, sizes: Sizes, demands: Demands, strict: bool = True) -> Placement:
    """Choose what goes to the host and how large pieces may be, the fastest that fits.

    :param strict: refuse a budget that even the smallest pieces exceed; take these otherwise
    :raises ValueError: the least that is needed, and what would lower it
    """
    least = find_least_budget(sizes, demands)
    if strict and least > budget:
        remedy = " sensitivity: none," if demands.sensitivity else ""
        raise ValueError(
            f"memory_budget: must be at least {least:,} bytes ({least / sizes.layer:.2f} decoder layers) for "
            f"{sizes.tokens} tokens a batch, got {budget:,} ({budget / sizes.layer:.2f}). Raise it, or choose{remedy} a "
            "smaller batch_size or shorter sequences."
        )
    row, sums = _measure_row(sizes), _measure_sums(sizes, demands.together)
    free = budget - sizes.layer - sizes.activations
    gather_on_host = sums + _MIN_ROWS * row > free
    resident = 0 if gather_on_host else sums
    hold_on_host = gather_on_host or 2 * sums + _MIN_ROWS * row > free
    release = _measure_pieces(row) > free or (demands.sensitivity and _measure_backward(sizes) > budget)
    embed_on_host = (
        max(sizes.embeddings, sizes.head * demands.sensitivity) + sizes.activations + sizes.layer * (not release)
        > budget
    )
    left = budget - (sizes.largest if release else sizes.layer) - sizes.activations - resident
    pieces = max(_MIN_ROWS, left // (3 * row))  # tokens, a tile and its product
    logits = (budget - sizes.head * (not embed_on_host) - sizes.activations) // (4 * _LOGIT_COPIES)
    return Placement(
        gather_on_host=gather_on_host,
        hold_on_host=hold_on_host,
        solve_on_host=sizes.layer + _measure_solve(sizes) > budget,
        release_weights=release,
        embed_on_host=embed_on_host,
        rows=pieces,
        tokens=min(pieces, _MAX_TOKENS),
        logits=max(1, min(MAX_LOGITS, logits)),
    )


def find_least_budget(sizes: Sizes, demands: Demands) -> int:
    """Return the bytes that even the smallest pieces need."""
    least = sizes.largest + sizes.activations + _measure_pieces(_measure_row(sizes))
    if demands.sensitivity:
        least = max(least, sizes.largest + sizes.activations + _measure_fisher(sizes))
    return least


def _measure_row(sizes: Sizes) -> int:
    """Return the bytes of a row of the widest Gram matrix, float32."""
    return 4 * (sizes.consumers[0][0] + 1)


def _measure_pieces(row: int) -> int:
    """Return the bytes of the smallest pieces: widened tokens, a tile and its product."""
    return 3 * _MIN_ROWS * row


def _measure_sums(sizes: Sizes, together: bool) -> int:
    """Return the bytes of float32 moments while they grow."""
    consumers = sizes.consumers if together else sizes.consumers[:1]
    return sum(4 * count_sums(n, d) for n, d, _ in consumers)


def _measure_solve(sizes: Sizes) -> int:
    return max(8 * (n + 1) * (copies * (n + 1) + 4 * d) for n, d, copies in sizes.consumers)


def _measure_fisher(sizes: Sizes) -> int:
    """Return the bytes of the gradients of one module's output, and of their products."""
    d = sizes.consumers[0][1]
    return 4 * d * (sizes.tokens + d)


def _measure_backward(sizes: Sizes) -> int:
    return sizes.layer + 3 * sizes.activations + _measure_fisher(sizes)
