"""Streams of a mixture's experts: each expert sees the tokens routed to it, weighted by the router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.layerwise.capture import Seen, Visit
from struprune_plugin.layerwise.dense_reference import Repair
from struprune_plugin.model.unit_kind import UnitGroup


def visit_experts(
    layer: nn.Module, groups: Sequence[UnitGroup], seen: Seen, call: LayerCall, repair: Repair | None
) -> Iterator[tuple[UnitGroup, Visit]]:
    """Yield every group with its visit in the recorded forward pass: its tokens sorted, without padding and those of weight 0.

    An error r is split among the experts of a token such that they change least: the one with weight g changes by
    ``g r / sum g^2``.

    :param groups: groups of one list of experts
    :param repair: error that the experts have to repair, or None
    """
    experts: Any = layer.get_submodule(groups[0].mixture)
    scales = seen.read_factors(groups[0])  # of the norm behind the sum
    args = seen.arguments[groups[0].mixture]  # without a router's choice for Llama 4
    routed = _read_routing(experts.num_experts, args[1], args[2], call, repair) if len(args) > 2 else None
    for group in groups:
        stream = seen.read(group)
        if routed is None:  # the expert saw every token multiplied by its weight, so those of weight 0 are zero
            rows = (stream.source.ne(0).any(1) & call.mark_tokens().to(stream.source.device)).nonzero().flatten()
            batch, length = call.batch_shape
            counts = torch.bincount(rows // length, minlength=batch).tolist()
            target, factors = stream.output[rows].float(), torch.ones_like(rows).float()
        else:
            rows, tokens, factors, counts, shares = routed[group.entry]
            target = stream.output[rows].float()
            if repair is not None:
                target = target + shares[:, None] * repair.error[tokens]
        if scales is not None:
            factors = factors * scales[rows if routed is None else tokens]
        yield group, Visit(stream.source[:0], stream.inputs[rows], target, call, counts, factors)


def _read_routing(
    num_experts: int, chosen: Tensor, weights: Tensor, call: LayerCall, repair: Repair | None
) -> list[tuple[Tensor, Tensor, Tensor, list[int], Tensor]]:
    """Return the routing of a batch, for all experts in a few operations, because the host waits for their number of rows.

    :param chosen: experts of every token, shape [tokens, k], int64
    :param weights: factors on their outputs, shape [tokens, k]
    :return: by expert, the rows of its inputs that count, in the order of their tokens; these tokens; factors on errors of its
        outputs, float32; the number of rows in every sequence; the shares of these tokens' errors that it has to repair, float32
    """
    (batch, length), num_tokens = call.batch_shape, len(chosen)
    expert, order = chosen.T.flatten().sort(stable=True)  # the order of rows in llm-compressor's experts
    token, weight = order % num_tokens, weights.float().T.flatten()[order]
    counted = call.mark_tokens().to(chosen.device)[token] & (weight != 0) & (expert < num_experts)
    kept = counted.nonzero().flatten()
    kept = kept[(expert[kept] * num_tokens + token[kept]).argsort(stable=True)]
    starts = torch.searchsorted(expert, torch.arange(num_experts, device=expert.device))
    places = expert[kept] * batch + token[kept] // length
    counts = torch.bincount(places, minlength=num_experts * batch).view(num_experts, batch).tolist()
    rows, token, weight = kept - starts[expert[kept]], token[kept], weight[kept]
    factor = shares = weight
    if repair is not None:
        energy = weights.float().square().sum(1)[token]
        factor, shares = weight * repair.factors[token], weight / energy.clamp(min=1e-12)
    sizes = [sum(per_sequence) for per_sequence in counts]
    parts = (rows.split(sizes), token.split(sizes), factor.split(sizes), counts, shares.split(sizes))
    return list(zip(*parts, strict=True))
