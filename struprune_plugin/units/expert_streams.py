"""Streams of a mixture's experts: each expert sees the tokens routed to it, weighted by the router."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.layerwise.capture import ConsumerBatch, ModuleTensors
from struprune_plugin.model.unit_kind import UnitGroup


def visit_experts(
    layer: nn.Module,
    groups: Sequence[UnitGroup],
    tensors: ModuleTensors,
    call: LayerCall,
    missing: tuple[Tensor, Tensor] | None,
) -> Iterator[tuple[UnitGroup, ConsumerBatch]]:
    """Yield every group with its inputs and target in a forward pass: its tokens sorted, without padding and those of weight 0.

    An error r is split among the experts of a token such that they change least: the one with weight g changes by
    ``g r / sum g^2``.

    :param groups: groups of one list of experts
    :param missing: what the experts have to add, shape [tokens, d], and factors on the tokens' errors; None for nothing
    """
    experts: Any = layer.get_submodule(groups[0].mixture)
    scales = tensors.read_factors(groups[0])  # of the norm behind the sum
    args = tensors.arguments[groups[0].mixture]  # without a router's choice for Llama 4
    routed = None
    if len(args) > 2:
        routed = _read_routing(experts.num_experts, args[1], args[2], call, missing and missing[1])
    for group in groups:
        inputs, output = tensors.inputs[group.consumer], tensors.outputs[group.consumer]
        if routed is None:  # the expert saw every token multiplied by its weight, so those of weight 0 are zero
            source = tensors.find_source(group)
            rows = (source.ne(0).any(1) & call.tokens.flatten().to(source.device)).nonzero().flatten()
            batch, length = call.tokens.shape
            counts = torch.bincount(rows // length, minlength=batch).tolist()
            target, factors = output[rows].float(), torch.ones_like(rows).float()
        else:
            rows, tokens, factors, counts, shares = routed[group.entry]
            target = output[rows].float()
            if missing is not None:
                target = target + shares[:, None] * missing[0][tokens]
        if scales is not None:
            factors = factors * scales[rows if routed is None else tokens]
        yield group, ConsumerBatch(tensors.find_source(group)[:0], inputs[rows], target, call, counts, factors)


def _read_routing(
    num_experts: int, chosen: Tensor, weights: Tensor, call: LayerCall, on_errors: Tensor | None
) -> list[tuple[Tensor, Tensor, Tensor, list[int], Tensor]]:
    """Return the routing of a batch, for all experts in a few operations, because the host waits for their number of rows.

    :param chosen: experts of every token, shape [tokens, k], int64
    :param weights: factors on their outputs, shape [tokens, k]
    :param on_errors: factors on the tokens' errors, shape [tokens], where these are to be repaired
    :return: by expert, the rows of its inputs that count, in the order of their tokens; these tokens; factors on errors of its
        outputs, float32; the number of rows in every sequence; the shares of these tokens' errors that it has to repair, float32
    """
    (batch, length), num_tokens = call.tokens.shape, len(chosen)
    expert, order = chosen.T.flatten().sort(stable=True)  # the order of rows in llm-compressor's experts
    token, weight = order % num_tokens, weights.float().T.flatten()[order]
    counted = call.tokens.flatten().to(chosen.device)[token] & (weight != 0) & (expert < num_experts)
    kept = counted.nonzero().flatten()
    kept = kept[(expert[kept] * num_tokens + token[kept]).argsort(stable=True)]
    starts = torch.searchsorted(expert, torch.arange(num_experts, device=expert.device))
    places = expert[kept] * batch + token[kept] // length
    counts = torch.bincount(places, minlength=num_experts * batch).view(num_experts, batch).tolist()
    rows, token, weight = kept - starts[expert[kept]], token[kept], weight[kept]
    factor = shares = weight
    if on_errors is not None:
        energy = weights.float().square().sum(1)[token]
        factor, shares = weight * on_errors[token], weight / energy.clamp(min=1e-12)
    sizes = [sum(per_sequence) for per_sequence in counts]
    parts = (rows.split(sizes), token.split(sizes), factor.split(sizes), counts, shares.split(sizes))
    return list(zip(*parts, strict=True))
