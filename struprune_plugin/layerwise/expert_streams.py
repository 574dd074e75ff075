"""Streams of a mixture's experts: each expert sees the tokens routed to it, weighted by the router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.layerwise.capture import Seen, Stream, Visit
from struprune_plugin.model.units.group import UnitGroup


@dataclass(frozen=True)
class _Routing:
    """Decisions of a router for one batch, of the tokens that are not padding and whose weight is not 0.

    :param rows: by expert, the rows of its inputs that count, in the order of their tokens
    :param tokens: by expert, these tokens
    :param factors: by expert, factors on errors of its outputs in the same order, float32
    :param counts: by expert, the number of these rows in every sequence
    :param shares: by expert, shares of these tokens' errors that it has to repair, float32; None where it repairs none
    """

    rows: Sequence[Tensor]
    tokens: Sequence[Tensor]
    factors: Sequence[Tensor]
    counts: Sequence[Sequence[int]]
    shares: Sequence[Tensor] | None


def _read_routing(
    num_experts: int, chosen: Tensor, weights: Tensor, call: LayerCall, repair: Repair | None
) -> _Routing:
    """Return the routing of a batch, for all experts in a few operations, because the host waits for their number of rows.

    :param chosen: experts of every token, shape [tokens, k], int64
    :param weights: factors on their outputs, shape [tokens, k]
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
    sizes = [sum(own) for own in counts]
    rows, token, weight = kept - starts[expert[kept]], token[kept], weight[kept]
    factor, shares = weight, None
    if repair is not None:
        energy = weights.float().square().sum(1)[token]
        factor, shares = weight * repair.factors[token], (weight / energy.clamp(min=1e-12)).split(sizes)
    return _Routing(rows.split(sizes), token.split(sizes), factor.split(sizes), counts, shares)


@dataclass(frozen=True)
class Repair:
    """Error that the experts of a layer have to repair.

    :param error: error to be added to their sum, shape [tokens, d], float32
    :param factors: factors on the tokens' errors, shape [tokens], float32
    """

    error: Tensor
    factors: Tensor

    @classmethod
    def of(cls, wanted: Tensor, now: Tensor) -> Repair:
        """Return the difference between two streams; a token's factor is the inverse RMS of its stream, which norms divide by.

        The first token of a text may hold nine tenths of the energy.

        :param wanted: stream of the dense model, shape [tokens, d], float32
        :param now: present stream, shape [tokens, d], float32
        """
        return cls(wanted - now, now.square().mean(1).clamp(min=1e-12).rsqrt())


def visit_experts(
    layer: nn.Module, groups: Sequence[UnitGroup], seen: Seen, call: LayerCall, repair: Repair | None
) -> Iterator[tuple[UnitGroup, Visit]]:
    """Yield every group with its visit in the recorded forward pass.

    An error r is split among the experts of a token such that they change least: the one with weight g changes by
    ``g r / sum g^2``.

    :param groups: groups of one list of experts
    :param repair: error that the experts have to repair, or None
    """
    experts: Any = layer.get_submodule(groups[0].experts)
    args = seen.arguments[groups[0].experts]  # without a router's choice for Llama 4
    chosen = _read_routing(experts.num_experts, args[1], args[2], call, repair) if len(args) > 2 else None
    for group in groups:
        stream = seen.read(group)
        yield group, _make_expert_visit(stream, chosen, group.expert_index, repair, call)


def _make_expert_visit(
    stream: Stream, routing: _Routing | None, index: int, repair: Repair | None, call: LayerCall
) -> Visit:
    """Return one expert's visit, with its tokens sorted, without padding and those of weight 0."""
    source, inputs, output = stream.source, stream.inputs, stream.output
    if routing is None:  # the expert saw every token multiplied by its weight, so those of weight 0 are zero
        rows = (source.ne(0).any(1) & call.mark_tokens().to(source.device)).nonzero().flatten()
        batch, length = call.batch_shape
        counts = torch.bincount(rows // length, minlength=batch).tolist()
        return Visit(source[rows], inputs[rows], output[rows].float(), call, counts, torch.ones_like(rows).float())
    rows, target = routing.rows[index], output[routing.rows[index]].float()
    if repair is not None and routing.shares is not None:
        target = target + routing.shares[index][:, None] * repair.error[routing.tokens[index]]
    return Visit(source[:0], inputs[rows], target, call, routing.counts[index], routing.factors[index])
