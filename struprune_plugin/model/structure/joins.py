"""Joins of module outputs with the residual stream, found among the tensors of one run of a tiny layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.model.structure.couplings import Measured, is_whole, split_copies, watch
from struprune_plugin.model.structure.layout import Join

_EXACT = 1e-4  # relative to the difference of two streams
_UNCHANGED = 0.05  # of a layer's output, relative to a run without the module: a norm's eps has a small effect


@torch.no_grad()
def find_joins(measured: Measured, consumers: Sequence[str]) -> dict[str, Join]:
    """Return the join of every consumer.

    The output is added where a stream Y (the input of a submodule, or the layer's output) equals another stream R plus the output
    times a factor, or plus the outputs of two consumers (named in the order of computation) times one factor.
    """
    outputs, joins = measured.outputs, dict[str, Join]()
    streams, returned = record_streams(measured)
    for place, consumer in enumerate(consumers):
        for other in ("", *consumers[:place], *consumers[place + 1 :]):
            if other and outputs[other].shape != outputs[consumer].shape:
                continue
            added = outputs[consumer] + (outputs[other] if other else 0)
            if match := match_streams(streams, [*streams.values(), returned[""]], added):
                parallel = other if other in consumers[:place] else ""
                joins[consumer] = Join(match[0], parallel, match[1], is_direct=True)
                break
        else:
            joins[consumer] = _find_normed(measured, consumer, streams, returned)
    return joins


def _find_normed(
    measured: Measured, consumer: str, streams: Mapping[str, Tensor], returned: Mapping[str, Tensor]
) -> Join:
    """Return the join of an output behind which a norm may stand: that of the norm's own output, if an RMSNorm reads it alone."""
    norm, output = find_norm(measured, consumer), measured.outputs[consumer]
    relative = output / output.square().mean(-1, keepdim=True).sqrt()
    readers = [name for name in streams if name in returned and torch.equal(streams[name], output)]
    for name in readers if norm == consumer else ():
        gain = measured.layer.get_submodule(name)(torch.ones_like(output[None]))[0]
        is_rms = float((gain * relative - returned[name]).norm()) < _UNCHANGED * float(returned[name].norm())
        if is_rms and (match := match_streams(streams, [*streams.values(), returned[""]], returned[name])):
            return Join(match[0], scale=match[1], norm=norm, normalizer=name)
    return Join(norm=norm)


def find_norm(measured: Measured, consumer: str) -> str:
    """Return the consumer, or the smallest module around it, whose output a norm rescales: twice that output leaves the layer's
    output as it is. Empty where there is none.
    """
    name, dense = consumer, measured.call.run(measured.layer)
    while name:
        with_none, with_twice = (_run_scaled(measured, name, factor) for factor in (0.0, 2.0))
        if float((with_twice - dense).norm()) < _UNCHANGED * float((with_none - dense).norm()):
            return name
        name = name.rpartition(".")[0]
    return ""


def _run_scaled(measured: Measured, name: str, factor: float) -> Tensor:
    """Return a layer's output with a module's output multiplied by a factor."""

    def scale(_module: nn.Module, _args: tuple, output: Any) -> Any:
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    with measured.layer.get_submodule(name).register_forward_hook(scale):
        return measured.call.run(measured.layer)


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


def record_streams(measured: Measured) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inputs and the outputs of a layer's submodules, each of the first call, by name, shape [tokens, d].

    The layer's own, of name "", come last, so that a submodule that reads the same tensor is found first. A tensor is empty where
    it does not hold all copies.
    """

    def take_first(seen: Tensor) -> Tensor:
        return split_copies(seen, measured.length)[0] if is_whole(seen, measured.length) else seen.new_zeros(0)

    with watch(measured.layer, [name for name, _ in measured.layer.named_modules()]) as calls:
        measured.call.run(measured.layer)
    inputs, outputs = dict[str, Tensor](), dict[str, Tensor]()
    for each in (*calls[1:], calls[0]):
        output = each.output[0] if isinstance(each.output, (tuple, list)) else each.output
        if isinstance(each.hidden, Tensor) and each.hidden.is_floating_point():
            inputs.setdefault(each.name, take_first(each.hidden))
        if isinstance(output, Tensor):
            outputs.setdefault(each.name, take_first(output))
    return inputs, outputs
