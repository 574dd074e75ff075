"""What of a recovery under one layer fits the device: estimated from shapes, before work starts."""

from __future__ import annotations

from dataclasses import dataclass

from struprune_plugin.device.placement import MAX_LOGITS

BACKWARD_COPIES = 3  # activations that a layer keeps for its backward pass, in those of a forward pass
_MIN_ROWS = 64  # of the output embeddings at once
_LOGIT_COPIES = 12  # float32, those of the piece before among them
_STATE_COPIES = 8  # of a micro-batch's hidden states, float32, around the head


@dataclass(frozen=True)
class RecoveryPlacement:
    """Where the parts of a step live.

    :param ahead: the next layer's weights are fetched while one computes
    :param sums_on_host: gradients of a layer are added up on the host, each as soon as it is there
    :param vocabulary: rows of the output embeddings on the device at once
    """

    ahead: bool
    sums_on_host: bool
    vocabulary: int


@dataclass(frozen=True)
class RecoverySizes:
    """Bytes and widths that the estimate needs.

    :param layer: bytes of the largest decoder layer's weights, as they are computed with
    :param sums: of the float32 gradients of what is trained in it
    :param largest: of the largest gradient on its way
    :param activations: of a micro-batch in one layer, kept for its backward pass
    :param tokens: of a micro-batch
    :param rest: bytes of what stands on the last layer: norms and projections
    :param width: of the head's inputs, and of hidden states
    :param item: bytes of a value that is computed with
    """

    layer: int
    sums: int
    largest: int
    activations: int
    tokens: int
    rest: int
    width: int
    item: int


def place_recovery(budget: int | None, sizes: RecoverySizes) -> RecoveryPlacement:
    """Choose what goes to the host and how large pieces may be, the fastest that fits.

    :raises ValueError: the least that is needed, and what would lower it
    """
    fixed = sizes.layer + sizes.largest + sizes.activations
    if budget is None:  # what the layers take anyway
        budget = max(fixed + sizes.sums + sizes.layer, _measure_head(sizes, _MIN_ROWS))
    least = max(fixed, _measure_head(sizes, _MIN_ROWS))
    if least > budget:
        raise ValueError(
            f"memory_budget: must be at least {least:,} bytes for recovery ({least / sizes.layer:.2f} decoder layers, "
            f"micro-batches of {sizes.tokens} tokens), got {budget:,}. Raise it, or choose a smaller micro_batch_size or shorter "
            "sequences."
        )
    sums_on_host = fixed + sizes.sums > budget
    used = fixed + (0 if sums_on_host else sizes.sums)
    rows = max(_MIN_ROWS, MAX_LOGITS // sizes.tokens)
    fitting = (budget - _measure_head(sizes, 0)) // (_measure_head(sizes, 1) - _measure_head(sizes, 0))
    return RecoveryPlacement(used + sizes.layer <= budget, sums_on_host, max(_MIN_ROWS, min(rows, fitting)))


def _measure_head(sizes: RecoverySizes, rows: int) -> int:
    """Return the bytes of the head's step with so many rows at once."""
    states = 4 * _STATE_COPIES * sizes.tokens * sizes.width
    return sizes.rest + states + rows * (2 * sizes.item * sizes.width + 4 * _LOGIT_COPIES * sizes.tokens)
