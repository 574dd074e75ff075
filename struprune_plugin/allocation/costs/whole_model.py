"""Correction of a cost table by the model of all layers.

What a module saves in a model of a few layers can differ from what it saves in the whole model, by a tenth in llama.cpp and vLLM.
Here the whole model is timed: dense, and with one kind of modules cut by half. Each kind's line is scaled to that saving.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psutil
import torch
from torch import nn

from struprune_plugin.allocation.costs.cost_table import CostTable, ModuleCosts, describe_module
from struprune_plugin.allocation.costs.measure_costs import Change, Engine
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.device_context import find_free_bytes

_COPIES = 4  # of the weights that must fit in memory: up to three are held
_AGAIN = 3  # measurements of each model


def can_hold(model: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether the whole model can be timed in this machine's memory."""
    free = find_free_bytes() or psutil.virtual_memory().available
    return _COPIES * dtype.itemsize * sum(parameter.numel() for parameter in model.parameters()) <= free


def scale_to_whole(
    table: CostTable,
    engine: Engine,
    model: nn.Module,
    groups: Sequence[UnitGroup],
    tell: Callable[[str], None] = lambda _: None,
) -> CostTable:
    """Return a table whose totals are those of the whole model, and whose lines save there what was measured.

    :param table: of models of a few layers
    :param engine: times models of all layers
    :param groups: as in :func:`~struprune_plugin.allocation.costs.measure_costs.measure_costs`
    :param tell: function that is called with a short text after each model
    """
    layers = len(find_decoder_layers(model))
    full = _measure(engine, Change(groups[0], groups[0].num_units), tell)
    cut: dict[str, Mapping[str, tuple[float, float]]] = {}
    halves: dict[str, int] = {}
    for group in groups:
        if not engine.is_flat(group):
            name = describe_module(model, group)
            halves[name] = _find_half(table, name)
            cut[name] = _measure(engine, Change(group, halves[name]), tell)
    phases = []
    for phase in table.phases:
        dense, ratio = full[phase.phase]
        saved = {name: dense * (ratio - part[phase.phase][1]) for name, part in cut.items()}
        modules = [
            _scale(module, halves[module.module], saved[module.module] / layers) if module.module in halves else module
            for module in phase.modules
        ]
        phases.append(replace(phase, dense=dense, whole=dense * ratio, modules=modules))
    return table.model_copy(update={"phases": phases})


def _measure(engine: Engine, change: Change, tell: Callable[[str], None]) -> Mapping[str, tuple[float, float]]:
    """Return, by phase, the least seconds of the dense model, and the median ratio of the changed one's to them."""
    found = []
    for _ in range(_AGAIN):
        found.append(engine.compare(change))
        tell(f"whole model, {change.group.kind} {change.units} of {change.group.num_units}")
    return {
        phase: (
            min(one[phase][0] for one in found),
            statistics.median(one[phase][1] / one[phase][0] for one in found),
        )
        for phase in found[0]
    }


def _find_half(table: CostTable, name: str) -> int:
    """Return the measured number of units that is nearest to half of a kind's."""
    units = next(module.units for module in table.phases[0].modules if module.module == name)
    return min(units[:-1], key=lambda count: abs(count - units[-1] / 2))


def _scale(module: ModuleCosts, half: int, saved: float) -> ModuleCosts:
    """Return the costs of a module, scaled so that keeping half saves what was measured; as they are if that is nothing.

    :param saved: seconds that each layer of the whole model saves
    """
    line = module.seconds[-1] - module.seconds[module.units.index(half)]
    if line <= 0 or saved <= 0:
        return module
    factor = saved / line
    return replace(module, seconds=[factor * value for value in module.seconds], error=factor * module.error)
