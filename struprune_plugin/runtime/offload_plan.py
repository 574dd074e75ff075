"""Estimate, from shapes, of which parts of a run fit on the device under ``memory_budget``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from struprune_plugin.linalg.second_moments import count_sums

MAX_LOGITS = 1 << 24  # held at the same time; with their gradients a third of a gigabyte
_MIN_ROWS = 64  # rows per tile, and tokens per chunk
_MAX_TOKENS = 4096  # per chunk, under a budget
_LOGIT_COPIES = 5  # float32 copies


@dataclass(frozen=True)
class OffloadPlan:
    """Placement of a run's parts and the size of their pieces; without a budget all parts are whole and on the device.

    :param gather_on_host: second moments are stored on the host and accumulated in tiles computed on the device
    :param hold_on_host: second moments of held-out sequences are
    :param solve_on_host: ranking and solves run on the host
    :param release_weights: a linear's weights leave the device after every call, not with the layer; tensors saved for a backward
        pass are on the host
    :param embed_on_host: input and output embeddings are applied on the host
    :param fetch_ahead: the next layer's weights are fetched to the device while a layer is processed
    :param rows: rows per tile of second moments
    :param tokens: tokens cast to float32 at the same time
    :param logits: logits held at the same time
    """

    gather_on_host: bool = False
    hold_on_host: bool = False
    solve_on_host: bool = False
    release_weights: bool = False
    embed_on_host: bool = False
    fetch_ahead: bool = False
    rows: int = 1 << 20
    tokens: int = 1 << 20
    logits: int = MAX_LOGITS


WHOLE = OffloadPlan(fetch_ahead=True)


@dataclass(frozen=True)
class Consumer:
    """Sizes of one consuming linear.

    :param inputs: n
    :param outputs: d
    :param copies: number of float64 Gram matrices that its solves hold
    :param of_expert: whether its moments are gathered together with those of all experts of the list, and kept until its solve
    """

    inputs: int
    outputs: int
    copies: int
    of_expert: bool = False


@dataclass(frozen=True)
class Sizes:
    """Bytes and widths that the estimate needs.

    :param layer: bytes of the largest decoder layer
    :param largest: bytes of the largest module with its own weights: a linear, or all experts
    :param embeddings: bytes of the input embeddings, including positions
    :param head: bytes of the output embeddings
    :param layers: consuming linears of every decoder layer that loses units; layers of equal sizes are listed once
    :param tokens: tokens per micro-batch
    :param activations: bytes of the forward pass of the layer that needs most
    :param vocabulary: logits per token
    """

    layer: int
    largest: int
    embeddings: int
    head: int
    layers: tuple[tuple[Consumer, ...], ...]
    tokens: int
    activations: int
    vocabulary: int = 0

    @property
    def consumers(self) -> list[Consumer]:
        """All consuming linears."""
        return [consumer for layer in self.layers for consumer in layer]


@dataclass(frozen=True)
class Demands:
    """Requirements of a run.

    :param together: whether moments of all modules of a layer are gathered in one pass
    :param hold_out: whether moments of held-out sequences are gathered, too
    :param sensitivity: whether a backward pass and the logits are computed
    """

    together: bool
    hold_out: bool
    sensitivity: bool


def place_parts(budget: int, sizes: Sizes, demands: Demands, strict: bool = True) -> OffloadPlan:
    """Return the fastest placement and piece sizes that fit a budget.

    A second layer's weights are fetched to the device only where no other part has to leave it for them.

    :param strict: raise where even the smallest pieces exceed the budget; otherwise use them
    :raises ValueError: the budget is too small; the message names the least budget, and how to lower it
    """
    least = find_least_budget(sizes, demands)
    if strict and least > budget:
        remedy = " sensitivity: none," if demands.sensitivity else ""
        raise ValueError(
            f"memory_budget: must be at least {least:,} bytes ({least / sizes.layer:.2f} decoder layers) for "
            f"batches of {sizes.tokens} tokens, got {budget:,} ({budget / sizes.layer:.2f}). Raise it, or choose{remedy} a "
            "smaller batch_size or shorter sequences."
        )
    roomy = _place_under(budget - sizes.layer, sizes, demands)  # beside another layer's weights
    whole = replace(WHOLE, rows=roomy.rows, tokens=roomy.tokens, logits=roomy.logits)
    return whole if replace(roomy, fetch_ahead=True) == whole else _place_under(budget, sizes, demands)


def _place_under(budget: int, sizes: Sizes, demands: Demands) -> OffloadPlan:
    """Return the fastest placement that fits, without fetching another layer's weights."""
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
    return OffloadPlan(
        gather_on_host=gather_on_host,
        hold_on_host=hold_on_host,
        solve_on_host=sizes.layer + _measure_solve(sizes) + _measure_waiting(sizes, resident, hold_on_host) > budget,
        release_weights=release,
        embed_on_host=embed_on_host,
        rows=pieces,
        tokens=min(pieces, _MAX_TOKENS),
        logits=max(1, min(MAX_LOGITS, logits)),
    )


def estimate_device(plan: OffloadPlan, sizes: Sizes, demands: Demands) -> int:
    """Return an estimate of the device's peak bytes under a plan: while statistics are gathered, in a solve, in a backward pass, or
    at the model's embeddings."""
    weights = sizes.largest if plan.release_weights else sizes.layer * (1 + plan.fetch_ahead)
    sums = 0 if plan.gather_on_host else _measure_sums(sizes, demands.together)
    held = sums if demands.hold_out and not plan.hold_on_host else 0
    pieces = 3 * min(plan.tokens, sizes.tokens) * _measure_row(sizes)
    solve = 0 if plan.solve_on_host else _measure_solve(sizes) + _measure_waiting(sizes, sums, plan.hold_on_host)
    kept = 1 if plan.release_weights else 3  # saved tensors are on the host with release_weights
    backward = kept * sizes.activations + _measure_fisher(sizes) if demands.sensitivity else 0
    head = sizes.head * (not plan.embed_on_host)
    logits = 4 * _LOGIT_COPIES * min(plan.logits, sizes.tokens * sizes.vocabulary) if demands.sensitivity else 0
    return max(
        weights + max(sizes.activations + sums + held + pieces, solve, backward), head + sizes.activations + logits
    )


def find_least_budget(sizes: Sizes, demands: Demands) -> int:
    """Return the bytes that even the smallest pieces need."""
    least = sizes.largest + sizes.activations + _measure_pieces(_measure_row(sizes))
    if demands.sensitivity:
        least = max(least, sizes.largest + sizes.activations + _measure_fisher(sizes))
    return least


def _measure_row(sizes: Sizes) -> int:
    """Return the bytes per row of the widest Gram matrix, float32."""
    return 4 * (max(consumer.inputs for consumer in sizes.consumers) + 1)


def _measure_pieces(row: int) -> int:
    """Return the bytes of the smallest pieces: float32 tokens, a tile and its product."""
    return 3 * _MIN_ROWS * row


def _measure_sums(sizes: Sizes, together: bool) -> int:
    """Return the bytes of float32 moments gathered at the same time: of a whole layer, or else of one consumer or all experts."""
    return max(sum(map(_measure_moments, part)) for layer in sizes.layers for part in _list_gathered(layer, together))


def _list_gathered(layer: tuple[Consumer, ...], together: bool) -> list[tuple[Consumer, ...]]:
    """Return the consumers of a layer whose moments are gathered at the same time."""
    if together:
        return [layer]
    experts = tuple(consumer for consumer in layer if consumer.of_expert)
    return [*((consumer,) for consumer in layer if not consumer.of_expert), experts]


def _measure_moments(consumer: Consumer) -> int:
    return 4 * count_sums(consumer.inputs, consumer.outputs)


def _measure_waiting(sizes: Sizes, resident: int, hold_on_host: bool) -> int:
    """Return the bytes of other experts' moments on the device during one expert's solve.

    :param resident: bytes of all moments that are gathered at the same time
    """
    waits = any(consumer.of_expert for consumer in sizes.consumers)
    return resident * (1 if hold_on_host else 2) * waits


def _measure_solve(sizes: Sizes) -> int:
    return max(8 * (c.inputs + 1) * (c.copies * (c.inputs + 1) + 4 * c.outputs) for c in sizes.consumers)


def _measure_fisher(sizes: Sizes) -> int:
    """Return the bytes of the gradients of one module's output and of their products."""
    return max(4 * c.outputs * (sizes.tokens + c.outputs) for c in sizes.consumers)


def _measure_backward(sizes: Sizes) -> int:
    sums = max(sum(8 * c.outputs**2 for c in layer) for layer in sizes.layers)
    return sizes.layer + 3 * sizes.activations + _measure_fisher(sizes) + sums
