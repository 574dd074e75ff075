"""Timing of a model's modules at a grid of widths, in an engine.

Models of a few decoder layers, with random weights and the model's own sizes, run in turn: a dense one, and one in which the
modules of one kind keep k units or are removed, or in which no layer is left. The difference, divided by the number of layers,
is the cost of the modules. All other modules stay unchanged, so that weights are read from the same memory as in the whole
model.
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

_EIGHTHS = range(1, 9)  # eighths of a width that are measured
_LIKED = 128  # every kernel is fast at multiples of this width
_PROBES = (1, 4, 8, 16, 32, 64)  # smaller powers of two that may divide a width
_COLD = 128 << 20  # bytes of weights that exceed every processor's cache
_FEWEST = 2  # least number of decoder layers
_AGAIN = 3  # measurements of the model with all units
_ROOM = 32  # tokens that are read one by one after a prompt


@dataclass(frozen=True)
class Run:
    """Workload that is timed.

    :param batch: sequences per batch
    :param length: tokens of the prompt, or in the cache
    :param python: interpreter that has the engine, if it is not this one
    """

    phases: Sequence[Literal["prompt", "token"]]
    batch: int
    length: int
    python: str = ""


@dataclass(frozen=True)
class Change:
    """Difference between a changed model of few layers and the dense one.

    :param group: group of the first layer; its counterpart in every layer gets the same units
    :param units: number of units; 0 if the module is removed
    """

    group: UnitGroup
    units: int


def removes(changes: Sequence[Change] | None) -> bool:
    """Return whether whole modules, or all layers (None), are removed."""
    return changes is None or not all(change.units for change in changes)


def describe_changes(changes: Sequence[Change] | None) -> str:
    """Return a short text for progress bars."""
    if changes is None:
        return "no layers"
    told = [f"{change.group.kind} {change.units} of {change.group.num_units}" for change in changes]
    return ", ".join(told) or "all units"


class Engine(ABC):
    """Inference engine in which models are timed.

    :ivar name: name in tables
    :ivar machine: description of the machine, for people
    :ivar num_layers: decoder layers of the timed models
    :ivar num_whole: number of these that stay whole where others lose a module or are removed: an engine may need one
    """

    name: str
    machine: str
    dtype: str
    num_layers: int
    num_whole: int = 0

    @abstractmethod
    def compare(self, changes: Sequence[Change] | None) -> Mapping[str, tuple[float, float]]:
        """Return the seconds, by phase, of the dense model of :attr:`num_layers` layers and of a changed one, run in turn.

        :param changes: of different kinds; none for a pruned model that still has all units; None for a model without layers
        """

    def can_remove(self, group: UnitGroup) -> bool:
        """Return whether a layer runs without a kind of modules; if not, its cost line is extended to zero units."""
        return True

    def is_flat(self, group: UnitGroup) -> bool:
        """Return whether the cost does not depend on how many units a kind of modules keeps."""
        return False


def choose_layers(model: nn.Module, item: int) -> int:
    """Return the number of decoder layers of a model whose weights exceed a cache.

    :param item: bytes per weight
    """
    layers = find_decoder_layers(model)
    held = sum(parameter.numel() * item for parameter in layers[0][1].parameters())
    return min(len(layers), max(_FEWEST, math.ceil(_COLD / held)))


def check_measurable(model: PreTrainedModel, run: Run) -> None:
    """Raise if a few layers of a model do not represent all, or if it has too few positions for the length.

    :raises ValueError: one of these
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
    """Return the cost table of a model's modules.

    :param model: the dense model; its weights may be without values
    :param groups: groups of its first layer, one of every kind to measure
    :param tell: function that is called with a short text after each measurement
    """
    num_layers = len(find_decoder_layers(model))
    dense: dict[str, float] = dict.fromkeys(run.phases, math.inf)
    ratios: dict[tuple[str, int], Mapping[str, float]] = {}

    def compare(changes: Sequence[Change] | None) -> Mapping[str, float]:
        found = engine.compare(changes)
        for phase in run.phases:
            dense[phase] = min(dense[phase], found[phase][0])
        tell(describe_changes(changes))
        gone = engine.num_whole if removes(changes) else 0
        factor = engine.num_layers / (engine.num_layers - gone)  # as if all layers were changed
        return {phase: 1 - factor * (1 - changed / whole) for phase, (whole, changed) in found.items()}

    empty, whole_ones = compare(None), [compare([]) for _ in range(_AGAIN)]
    full: dict[str, float] = {}  # ratio with all units, where all lines end
    for phase in run.phases:
        full[phase] = statistics.median(ratio[phase] for ratio in whole_ones)
    for group in groups:
        points = [] if engine.is_flat(group) else [*_list_grid(group), *_list_probes(group).values()]
        for units in [*([0] if engine.can_remove(group) else []), *points]:
            ratios[group.name, units] = full if units == group.num_units else compare([Change(group, units)])
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
        ends = [  # the model with all units from every line, less noisy than its own measurement
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
    """Return the costs of one kind of modules from the seconds of whole models, divided by their layers.

    :param whole: seconds of the model with all units
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
    """Return the largest power of two up to half of a width, at most 128."""
    half = group.num_units // group.num_blocks // 2
    return int(min(_LIKED, 2 ** (half.bit_length() - 1))) if half else 1


def _list_grid(group: UnitGroup) -> list[int]:
    """Return the kept units at the points of the line: eighths of the width, as aligned as it allows."""
    width = group.num_units // group.num_blocks
    align = max(1, min(_align(group), 2 ** max((width // 8).bit_length() - 1, 0)))
    widths = {min(max(align, round(width * part / 8 / align) * align), width) for part in _EIGHTHS} | {width}
    return sorted(one * group.num_blocks for one in widths)


def _list_probes(group: UnitGroup) -> dict[int, int]:
    """Return kept units just above half, by the power of two that divides their width; none for whole heads."""
    width, align = group.num_units // group.num_blocks, _align(group)
    if group.columns_per_unit > group.repeats:
        return {}
    half = width // 2 // align * align
    return {power: (half + power) * group.num_blocks for power in _PROBES if power < align and half + power < width}
