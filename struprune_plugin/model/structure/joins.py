"""Joins of module outputs with the residual stream, found among the tensors of one run of a tiny layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.model.structure.couplings import Call, is_whole, split_copies
from struprune_plugin.model.structure.layout import Join

_EXACT = 1e-4  # relative to the difference of two streams


@torch.no_grad()
def find_joins(
    layer: nn.Module, call: Call, outputs: Mapping[str, Tensor], consumers: Sequence[str]
) -> dict[str, Join]:
    """Return the join of every consumer.

    The output is added where a stream Y (the input of a submodule, or the layer's output) equals another stream R plus the output
    times a factor, or plus the outputs of two consumers times one factor.

    :param outputs: outputs of the layer's linears in this call
    :param consumers: names in the order of computation
    """
    streams, last = record_streams(layer, call, len(next(iter(outputs.values()))))
    later = [*streams.values(), last]
    found: dict[str, Join] = {}
    for place, consumer in enumerate(consumers):
        found[consumer] = Join()
        for other in ("", *consumers[:place], *consumers[place + 1 :]):
            if other and outputs[other].shape != outputs[consumer].shape:
                continue
            added = outputs[consumer] + (outputs[other] if other else 0)
            match = match_streams(streams, later, added)
            if match:
                parallel = other if other in consumers[:place] else ""
                found[consumer] = Join(match[0], parallel, match[1], is_direct=True)
                break
    return found


def match_streams(streams: Mapping[str, Tensor], later: Sequence[Tensor], added: Tensor) -> tuple[str, float] | None:
    """Return the name of the stream to which ``added`` is added, and the factor; None where there is none."""
    energy = max(float(added.square().sum()), 1e-30)
    for name, residual in streams.items():
        for stream in later:
            if not stream.shape == residual.shape == added.shape:
                continue
            difference = stream - residual
            scale = float((added * difference).sum()) / energy
            if scale and float((difference - scale * added).norm()) < _EXACT * float(difference.norm()):
                return name, 1.0 if abs(scale - 1) < 1e-4 else scale
    return None


def record_streams(layer: nn.Module, call: Call, length: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of a layer's submodules by name, the layer's own input last, and the layer's output."""
    inputs: dict[str, Tensor] = {}
    results: list[Any] = []

    def see(name: str) -> Any:
        def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            if isinstance(given, Tensor) and given.is_floating_point():
                inputs.setdefault(name, _take_first(given, length))

        return hook

    with ExitStack() as stack:
        for name, module in layer.named_modules():
            stack.callback(module.register_forward_pre_hook(see(name), with_kwargs=True).remove)
        stack.callback(layer.register_forward_hook(lambda _m, _a, output: results.append(output)).remove)
        call.run(layer)
    own = inputs.pop("", None)
    if own is not None:  # last, so that a submodule that reads the same tensor is found first
        inputs[""] = own
    output = results[0][0] if isinstance(results[0], (tuple, list)) else results[0]
    return inputs, _take_first(output, length)


def _take_first(given: Tensor, length: int) -> Tensor:
    """Return the part of the first copy, shape [tokens, d]; an empty tensor where ``given`` does not hold all copies."""
    return split_copies(given.detach(), length)[0] if is_whole(given, length) else given.new_zeros(0)
