"""Time a model's own modules at a grid of widths, in an engine.

Models of a few decoder layers, of random weights and the model's own sizes, run side by side: one dense, one in which the modules
of one kind keep k units, are gone, or in which no layer is left. What differs, over the layers, is what the modules cost. All other
modules stay as they are, so that weights come from where they come from in the whole model.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.allocation.costs.cost_table import (
    CostTable,
    ModuleCosts,
    PhaseCosts,
    describe_module,
    describe_shapes,
)
from struprune_plugin.linalg.cost_curves import fit_penalties, fit_rising, fit_smooth, interpolate
from struprune_plugin.model.layers import find_decoder_layers, find_layouts, has_uniform_layers
from struprune_plugin.model.units.group import UnitGroup

_EIGHTHS = range(1, 9)  # of a width, that are measured
_LIKED = 128  # a width that is a multiple of this pleases every kernel
_PROBES = (1, 4, 8, 16, 32, 64)  # powers of two, that a width may be a multiple of instead
_COLD = 128 << 20  # bytes of weights that no processor's cache holds
_FEWEST = 2  # decoder layers
_AGAIN = 3  # times that the one with all units is measured
_ROOM = 32  # tokens that are read one by one behind a prompt


@dataclass(frozen=True)
class Run:
    """What is timed.

    :param batch: sequences at a time
    :param length: tokens of a prompt, or in the cache
    :param python: interpreter that has the engine, where it is another than this one
    """

    phases: Sequence[Literal["prompt", "token"]]
    batch: int
    length: int
    python: str = ""


@dataclass(frozen=True)
class Change:
    """How a model of few layers differs from the dense one.

    :param group: of the first layer, whose like in every layer has other units
    :param units: how many; 0 where the module is gone
    """

    group: UnitGroup
    units: int


class Engine(ABC):
    """What models are run in.

    :ivar name: in tables
    :ivar machine: for people
    :ivar num_layers: decoder layers of the models that are timed
    :ivar num_whole: of these, how many stay whole where others lose a module, or are gone: an engine may need one
    """

    name: str
    machine: str
    dtype: str
    num_layers: int
    num_whole: int = 0

    @abstractmethod
    def compare(self, change: Change | None) -> Mapping[str, tuple[float, float]]:
        """Return, by phase, the seconds of the dense model of few layers, and of a changed one, run in turn.

        :param change: None for a model without layers
        """

    def can_remove(self, group: UnitGroup) -> bool:
        """Tell whether a layer runs without a kind of modules; where not, the line is continued to no units."""
        return True

    def is_flat(self, group: UnitGroup) -> bool:
        """Tell whether it makes no difference how many units a kind of modules keeps."""
        return False


def choose_layers(model: nn.Module, item: int) -> int:
    """Return how many decoder layers of a model hold more than a cache does.

    :param item: bytes of a weight
    """
    layers = find_decoder_layers(model)
    held = sum(parameter.numel() * item for parameter in layers[0][1].parameters())
    return min(len(layers), max(_FEWEST, math.ceil(_COLD / held)))


def check_measurable(model: PreTrainedModel, run: Run) -> None:
    """Refuse a model of which a few layers do not stand for all, and a length that it has no positions for.

    :raises ValueError: the same
    """
    layouts, config = [layout for _, layout in find_layouts(model)], model.config
    alike = all(layout == layouts[0] for layout in layouts) and layouts[0].experts is None and has_uniform_layers(model)
    if not alike or config.get_text_config(decoder=True) is not config:
        raise ValueError(
            "budget.speedup: the model must have layers that are all alike, without experts, in a configuration of its own, "
            f"got {config.model_type!r} with others. Budget its parameters or bytes instead."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and run.length + _ROOM > positions:
        raise ValueError(
            f"length: must be at most {positions - _ROOM} for this model's {positions} positions, got {run.length}. Set the "
            "budget's length, or --length of struprune costs."
        )


def measure_costs(
    engine: Engine,
    model: nn.Module,
    groups: Sequence[UnitGroup],
    run: Run,
    tell: Callable[[str], None] = lambda _: None,
) -> CostTable:
    """Return the table of a model's modules.

    :param model: the dense one, which may be without values
    :param groups: those of its first layer, of every kind that is to be measured
    :param tell: takes a word after each measurement
    """
    num_layers = len(find_decoder_layers(model))
    dense: dict[str, float] = dict.fromkeys(run.phases, math.inf)
    ratios: dict[tuple[str, int], Mapping[str, float]] = {}

    def compare(change: Change | None) -> Mapping[str, float]:
        found = engine.compare(change)
        for phase in run.phases:
            dense[phase] = min(dense[phase], found[phase][0])
        tell("no layers" if change is None else f"{change.group.kind} {change.units} of {change.group.num_units}")
        gone = 0 if change is not None and change.units else engine.num_whole
        factor = engine.num_layers / (engine.num_layers - gone)  # as if all layers had lost it
        return {phase: 1 - factor * (1 - changed / whole) for phase, (whole, changed) in found.items()}

    empty, whole_ones = compare(None), [compare(Change(groups[0], groups[0].num_units)) for _ in range(_AGAIN)]
    full: dict[str, float] = {}  # at which all lines end
    for phase in run.phases:
        full[phase] = statistics.median(ratio[phase] for ratio in whole_ones)
    for group in groups:
        points = [] if engine.is_flat(group) else [*_list_grid(group), *_list_probes(group).values()]
        for units in [*([0] if engine.can_remove(group) else []), *points]:
            ratios[group.name, units] = full if units == group.num_units else compare(Change(group, units))
        if not engine.can_remove(group):
            low, high, *_ = points
            ratios[group.name, 0] = {
                phase: ratios[group.name, low][phase]
                - (ratios[group.name, high][phase] - ratios[group.name, low][phase]) * low / (high - low)
                for phase in run.phases
            }
    phases = []
    for phase in run.phases:
        layer = dense[phase] / engine.num_layers
        seconds = {key: layer * ratio[phase] for key, ratio in ratios.items()}
        modules = [_gather(model, group, seconds, layer * full[phase], engine.is_flat(group)) for group in groups]
        ends = [  # the model with all units by every line, steadier than its own measurement
            seconds[group.name, 0] + module.seconds[-1]
            for group, module in zip(groups, modules, strict=True)
            if not engine.is_flat(group)
        ]
        at_full = statistics.mean(ends) / layer if ends else full[phase]
        rest, more = dense[phase] * empty[phase], num_layers / engine.num_layers
        whole, pruned = (rest + more * (dense[phase] * ratio - rest) for ratio in (1.0, at_full))
        phases.append(PhaseCosts(phase, run.batch, run.length, whole, pruned, modules))
    return CostTable(
        engine=engine.name, machine=engine.machine, dtype=engine.dtype, model=describe_shapes(model), phases=phases
    )


def _gather(
    model: nn.Module, group: UnitGroup, seconds: Mapping[tuple[str, int], float], whole: float, is_flat: bool
) -> ModuleCosts:
    """Return the costs of one kind of modules from the seconds of whole models, over their layers.

    :param whole: of the one with all units
    """
    gone, name = seconds[group.name, 0], describe_module(model, group)
    full = max(whole - gone, 0.0)
    if is_flat:
        return ModuleCosts(name, sorted({1, group.num_units}), [full] * len({1, group.num_units}), {}, 0.0)
    grid = _list_grid(group)
    points = [full if units == group.num_units else max(seconds[group.name, units] - gone, 0.0) for units in grid]
    smooth, error = fit_smooth(grid, torch.tensor(points, dtype=torch.float64))
    values = fit_rising(smooth.clamp(min=0))
    line = interpolate(grid, values, group.num_units)
    probes = {power: (units, float(line[units])) for power, units in _list_probes(group).items()}
    factors = {power: (seconds[group.name, units] - gone) / max(told, 1e-12) for power, (units, told) in probes.items()}
    noise = error / max(min((told for _, told in probes.values()), default=1.0), 1e-12)
    penalties = {str(power): factor for power, factor in fit_penalties(factors, noise).items()}
    if penalties:
        penalties[str(_align(group))] = 1.0
    return ModuleCosts(name, grid, values.tolist(), penalties, error)


def _align(group: UnitGroup) -> int:
    """Return the power of two that half of a width is nearly a multiple of."""
    half = group.num_units // group.num_blocks // 2
    return int(min(_LIKED, 2 ** (half.bit_length() - 1))) if half else 1


def _list_grid(group: UnitGroup) -> list[int]:
    """Return the kept units that the line goes through: eighths of the width, as aligned as that is."""
    width = group.num_units // group.num_blocks
    align = max(1, min(_align(group), 2 ** max((width // 8).bit_length() - 1, 0)))
    widths = {min(max(align, round(width * part / 8 / align) * align), width) for part in _EIGHTHS} | {width}
    return sorted(one * group.num_blocks for one in widths)


def _list_probes(group: UnitGroup) -> dict[int, int]:
    """Return kept units just above half, by the power of two that their width is a multiple of; none of whole heads."""
    width, align = group.num_units // group.num_blocks, _align(group)
    if group.columns_per_unit > group.repeats:
        return {}
    half = width // 2 // align * align
    return {power: (half + power) * group.num_blocks for power in _PROBES if power < align and half + power < width}
