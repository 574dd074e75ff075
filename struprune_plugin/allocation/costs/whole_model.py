"""Correction of a cost table by the model of all layers.

What modules save in a model of a few layers can differ from what they save in the whole model, by a tenth and more. Here the whole
model is timed: dense, and with half the units of every module (of the first kind named, if there are several). All lines are
scaled by one factor to that saving.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psutil
import torch
from torch import nn

from struprune_plugin.allocation.costs.cost_table import CostTable, PhaseCosts, describe_module
from struprune_plugin.allocation.costs.measure_costs import Change, Engine, describe_changes
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
    chosen: dict[str, UnitGroup] = {}  # by consumer: heads and value channels are cut one or the other
    for group in groups:
        if not engine.is_flat(group):
            chosen.setdefault(group.consumer, group)
    halves = {name: _find_half(table, name) for name in (describe_module(model, group) for group in chosen.values())}
    full = _measure(engine, [], tell)
    cut = _measure(engine, [Change(*pair) for pair in zip(chosen.values(), halves.values(), strict=True)], tell)
    phases = []
    for phase in table.phases:
        (dense, ratio), (_, half_ratio) = full[phase.phase], cut[phase.phase]
        phases.append(_scale(phase, dense, dense * ratio, halves, dense * (ratio - half_ratio) / layers))
    return table.model_copy(update={"phases": phases})


def _measure(
    engine: Engine, changes: Sequence[Change], tell: Callable[[str], None]
) -> Mapping[str, tuple[float, float]]:
    """Return, by phase, the least seconds of the dense model, and the median ratio of the changed one's to them."""
    found = []
    for _ in range(_AGAIN):
        found.append(engine.compare(changes))
        tell(f"whole model, {describe_changes(changes)}")
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


def _scale(phase: PhaseCosts, dense: float, whole: float, halves: Mapping[str, int], saved: float) -> PhaseCosts:
    """Return the costs of a phase with new totals, its lines scaled so that keeping these halves saves what was measured;
    lines stay as they are if that is nothing.

    :param saved: seconds that each layer of the whole model saves
    """
    known = {module.module: module for module in phase.modules}
    line = sum(
        known[name].seconds[-1] - known[name].seconds[known[name].units.index(half)] for name, half in halves.items()
    )
    factor = saved / line if line > 0 and saved > 0 else 1.0
    modules = [
        replace(module, seconds=[factor * value for value in module.seconds], error=factor * module.error)
        for module in phase.modules
    ]
    return replace(phase, dense=dense, whole=whole, modules=modules)
