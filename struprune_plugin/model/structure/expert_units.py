"""Channels of the experts of a mixture, measured on split experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.model.experts import list_experts, take_apart
from struprune_plugin.model.structure.couplings import COPIES, Call, list_linears, measure_couplings, record_linears
from struprune_plugin.model.structure.joins import match_streams, record_streams
from struprune_plugin.model.structure.layout import ExpertsLayout, FFNLayout, Join, LayerLayout
from struprune_plugin.model.structure.trial_removal import find_flaw, make_trial
from struprune_plugin.model.structure.units import Measured, read_units

_TOKENS = 8
_EXACT = 1e-4  # relative to a change of the layer's output


def find_experts(
    model: nn.Module,
    kinds: Sequence[tuple[Sequence[nn.Module], Call]],
    layouts: Sequence[LayerLayout],
    length: int,
    run: Callable[[], Tensor],
) -> list[LayerLayout]:
    """Return the layouts of the kinds of layers with their experts; the experts of the tiny model are split in place.

    :param kinds: per kind, all its layers and a call of the first
    :param length: number of tokens of the call's sequence
    :param run: returns the model's logits
    """
    wanted = run()
    try:
        take_apart(model)
        error = float((run() - wanted).abs().max() / wanted.abs().max())
    except Exception as problem:  # any error of llm-compressor on a class that it supports wrongly
        return [replace(layout, left={**layout.left, "experts": _explain(problem)}) for layout in layouts]
    found = []
    for (layers, call), layout in zip(kinds, layouts, strict=True):
        try:
            lists = list(list_experts(layers[0]))
            if lists and not error <= 1e-5:
                raise ValueError(f"split into linears, the experts change the logits by {error:.0e} of the largest")
            experts = _find_units(layers, call, length, lists[0], run) if lists else None
            found.append(
                layout if experts is None else _join_shared(replace(layout, experts=experts), layers[0], call, length)
            )
        except ValueError as problem:
            found.append(replace(layout, left={**layout.left, lists[0][0]: str(problem)}))
    return found


def _join_shared(layout: LayerLayout, layer: nn.Module, call: Call, length: int) -> LayerLayout:
    """Return a layout in which shared experts that are added unchanged to the routed experts' sum have the join of that sum."""
    assert layout.experts is not None
    join, ffns = layout.experts.join, list[FFNLayout]()
    for ffn in layout.ffns:
        is_added = join.is_direct and not ffn.join.is_direct and _find_join(layer, call, ffn.output, length) == join
        ffns.append(replace(ffn, join=join) if is_added else ffn)
    return replace(layout, ffns=tuple(ffns))


def _explain(problem: Exception) -> str:
    return f"llm-compressor cannot split the experts into linears ({type(problem).__name__})"


def _find_units(
    layers: Sequence[nn.Module], call: Call, length: int, experts: tuple[str, Any], run: Callable[[], Tensor]
) -> ExpertsLayout:
    """Return the layout of the experts of one kind of layer.

    :raises ValueError: the experts have no removable channels
    """
    name, members = experts
    measured = _measure_expert(members[0])
    ffns = read_units(measured).ffns
    if len(ffns) != 1:
        raise ValueError("an expert has no channels that can be removed alone")
    layout = ExpertsLayout(name, ffns[0], _find_join(layers[0], call, name, length))
    for index in range(members.num_experts):
        if flaw := find_flaw(layers, _make_trial(layout.place(index), measured, ffns[0]), run):
            raise ValueError(flaw)
    return layout


def _make_trial(placed: FFNLayout, measured: Measured, ffn: FFNLayout) -> Any:
    columns = torch.arange(0, measured.inputs[ffn.output].shape[-1], 3)
    names = zip(placed.producers, ffn.producers, strict=True)
    reached = {full: measured.couplings[name, ffn.output].reached for full, name in names}
    return make_trial(placed.output, reached, columns, slices=True)


def _measure_expert(expert: nn.Module) -> Measured:
    width: Any = next(iter(list_linears(expert).values())).in_features
    tokens = torch.randn(_TOKENS, width, generator=torch.Generator().manual_seed(0))
    call = Call((tokens.repeat(COPIES, 1),), {})
    inputs, outputs = record_linears(expert, call, _TOKENS)
    return Measured(expert, inputs, outputs, measure_couplings(expert, call, inputs, outputs))


def _find_join(layer: nn.Module, call: Call, name: str, length: int) -> Join:
    """Return the join of a module's output with the residual stream.

    The join is direct where noise added to the output reaches the layer's output times the factor of the experts' sum.
    """
    noise: list[Tensor] = []

    def add(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
        noise.append(torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).mul_(output.std()))
        return output + noise[0]

    before = _first(call.run(layer))
    with torch.no_grad():
        handle = layer.get_submodule(name).register_forward_hook(add)
        try:
            change = _first(call.run(layer)) - before
        finally:
            handle.remove()
    if noise[0].numel() != change.numel():
        return Join()
    added = noise[0].reshape(change.shape)
    scale = float((added * change).sum() / added.square().sum())
    if not scale or float((change - scale * added).norm()) >= _EXACT * float(change.norm()):
        return Join()
    join = _find_block(layer, call, name, length)
    return join if abs(join.scale - scale) < _EXACT * abs(scale) else Join()


def _find_block(layer: nn.Module, call: Call, name: str, length: int) -> Join:
    """Return the join of the module around the experts: a stream plus the module's output times a factor is the layer's output."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        block = ".".join(parts[:end])
        outputs: list[Tensor] = []
        handle = layer.get_submodule(block).register_forward_hook(lambda _m, _a, out: outputs.append(_first(out)))  # noqa: B023
        try:
            streams, last = record_streams(layer, call, length)
        finally:
            handle.remove()
        if outputs[0].numel() == COPIES * last.numel():
            match = match_streams(streams, [last], outputs[0].reshape(COPIES, *last.shape)[0])
            if match:
                return Join(match[0], scale=match[1], is_direct=True, block=block)
    return Join()


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output
