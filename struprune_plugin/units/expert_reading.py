"""Channels of the experts of a mixture, measured on split experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from struprune_plugin.model.experts import linearize_experts, list_experts
from struprune_plugin.model.structure.couplings import COPIES, Call, Measured, measure
from struprune_plugin.model.structure.joins import find_norm, match_streams, record_streams
from struprune_plugin.model.structure.layout import Join, LayerLayout, UnitLayout
from struprune_plugin.model.structure.locate import list_linears
from struprune_plugin.model.structure.tiny import TinyRun
from struprune_plugin.model.structure.trial_removal import find_flaw
from struprune_plugin.model.structure.units import read_units
from struprune_plugin.units.ffn import FFNLayout

_TOKENS = 8
_EXACT = 1e-4  # relative to a change of the layer's output


@dataclass(frozen=True, kw_only=True)
class ExpertsLayout(UnitLayout):
    """Channels of a mixture's experts after :func:`~struprune_plugin.model.experts.linearize_experts` has split them into linears.

    Its ``output`` is the list of experts, and its ``join`` that of their sum.

    :param expert: layout of one expert; names are relative to the expert
    """

    of_mixture: ClassVar[bool] = True
    expert: FFNLayout

    def place(self, index: int) -> FFNLayout:
        """Return the layout of one expert with names relative to the decoder layer."""
        prefix, expert = f"{self.output}.{index}.", self.expert
        producers = {f"{prefix}{name}": parts for name, parts in expert.producers.items()}
        return replace(expert, producers=producers, output=f"{prefix}{expert.output}", join=self.join)


def find_experts(
    model: nn.Module, measured: Sequence[Measured], layouts: Sequence[LayerLayout], run: TinyRun
) -> list[LayerLayout]:
    """Return the layouts of the types of layers with their experts, which are split in place."""
    wanted = run()
    try:
        linearize_experts(model)
        difference = run.describe_difference(run(), wanted)
    except Exception as error:  # any error of llm-compressor on a class that it supports wrongly
        problem = f"llm-compressor cannot split the experts into linears ({type(error).__name__})"
        return [replace(layout, unprunable={**layout.unprunable, "experts": problem}) for layout in layouts]
    extended = []
    for outer, layout in zip(measured, layouts, strict=True):
        for name, members in list(list_experts(outer.layer))[:1]:
            try:
                if difference:
                    raise ValueError(f"split into linears, the experts change the logits by {difference}")
                experts = _find_units(outer, name, members, run)
                units = list(layout.units)
                for place, unit in enumerate(units):  # a shared expert is added to the sum of the others
                    is_open = isinstance(unit, FFNLayout) and not unit.join.is_direct
                    if is_open and _find_join(outer, unit.output) == experts.join:
                        units[place] = replace(unit, join=experts.join)
                layout = replace(layout, units=[*units, experts])
            except ValueError as error:
                layout = replace(layout, unprunable={**layout.unprunable, name: str(error)})
        extended.append(layout)
    return extended


def _find_units(outer: Measured, name: str, members: Any, run: TinyRun) -> ExpertsLayout:
    """Return the layout of the experts of one type of layer; ValueError where they have no removable channels."""
    width: Any = next(iter(list_linears(members[0]).values())).in_features
    tokens = torch.randn(_TOKENS, width, generator=torch.Generator().manual_seed(0))
    measured = measure([members[0]], Call((tokens.repeat(COPIES, 1),), {}), _TOKENS)
    ffns = read_units(measured).list_units(FFNLayout)
    if len(ffns) != 1:
        raise ValueError("an expert has no channels that can be removed alone")
    join = _find_join(outer, name)
    layout = ExpertsLayout(kind="experts", producers={}, output=name, join=join, expert=ffns[0])
    gone = torch.arange(measured.inputs[ffns[0].output].shape[-1]) % 3 == 0
    for index in range(members.num_experts):
        prefix = f"{name}.{index}."
        couplings = {(prefix + first, prefix + last): each for (first, last), each in measured.couplings.items()}
        placed = replace(measured, layers=outer.layers, couplings=couplings)
        if flaw := find_flaw(layout.place(index), placed, gone, run):
            raise ValueError(flaw)
    return layout


def _find_join(outer: Measured, name: str) -> Join:
    """Return the join of a module's output, else the norm that rescales it, or the sum to which it belongs."""
    return _find_direct_join(outer, name) or Join(norm=find_norm(outer, name))


def _find_direct_join(outer: Measured, name: str) -> Join | None:
    """Return the join of a module's output where noise added to it reaches the layer's output up to a factor, else None."""
    noise: list[Tensor] = []

    def add(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
        noise.append(torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).mul_(output.std()))
        return output + noise[0]

    before = outer.call.run(outer.layer)
    with outer.layer.get_submodule(name).register_forward_hook(add):
        change = outer.call.run(outer.layer) - before
    if noise[0].numel() != change.numel():
        return None
    added = noise[0].reshape(change.shape)
    scale = float((added * change).sum() / added.square().sum())
    if not scale or float((change - scale * added).norm()) >= _EXACT * float(change.norm()):
        return None
    streams, returned = record_streams(outer)
    block = name
    while block:  # the smallest block of which a stream plus its output times a factor is the layer's output
        if block in returned and (match := match_streams(streams, [returned[""]], returned[block])):
            is_same = abs(match[1] - scale) < _EXACT * abs(scale)
            return Join(match[0], scale=match[1], is_direct=True, block=block) if is_same else None
        block = block.rpartition(".")[0]
    return None
