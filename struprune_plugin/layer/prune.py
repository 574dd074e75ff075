"""Prune one decoder layer. The page to read first: everything else in this package serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from struprune_plugin.device.room import Room
from struprune_plugin.layer.decide import Decision, decide_group
from struprune_plugin.layer.gather import LayerObserver
from struprune_plugin.layer.methods import Methods, Plan
from struprune_plugin.layer.records import GroupRecord
from struprune_plugin.layer.restore import can_refine, refine_group, solve_again
from struprune_plugin.layer.signals import Signals
from struprune_plugin.layer.tuning import TuningRecord, prepare_tuning
from struprune_plugin.model.surgery import rotate_group, slice_group
from struprune_plugin.model.units.group import UnitGroup


@dataclass(frozen=True)
class LayerOutcome:
    """What became of one decoder layer.

    :param groups: a record a group, in order
    :param tuning: None where the layer was not tuned
    :param changed: whether anything has gone from this layer or from one before it
    """

    groups: list[GroupRecord]
    tuning: TuningRecord | None
    changed: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON has it."""
        tuning = None if self.tuning is None else asdict(self.tuning)
        return {"groups": [record.to_dict() for record in self.groups], "tuning": tuning, "changed": self.changed}

    @classmethod
    def from_dict(cls, held: dict[str, Any]) -> LayerOutcome:
        """Read what :meth:`to_dict` gave."""
        tuning = None if held["tuning"] is None else TuningRecord(**held["tuning"])
        return cls([GroupRecord.from_dict(flat) for flat in held["groups"]], tuning, held["changed"])


def prune_layer(
    layer: nn.Module,
    groups: Sequence[UnitGroup],
    observed: LayerObserver,
    plan: Plan,
    methods: Methods,
    signals: Signals,
    room: Room,
    changed: bool = False,
    progress: str = "",
) -> LayerOutcome:
    """Remove units from every group of a decoder layer, in place, and restore what remains.

    Each group in turn: statistics of its consumer's inputs, as the groups before it left them; which units stay and what the
    weights on them are; surgery; where asked for, an FFN is tuned, and its consumer solved once more. A layer is left alone as
    long as nothing has gone: its inputs are the dense ones.

    :param groups: of this layer, in the order in which the model computes them
    :param observed: what the layer has shown on the calibration data, and can show again
    :param plan: how many units each group keeps
    :param changed: whether anything has gone from a layer before
    :param progress: where the run is, for progress bars
    """
    records, tuning = [], None
    for group in groups:
        with room.stage("statistics"):
            gathered = observed.collect_moments(layer, group, f"{progress}{group.consumer.split('.')[-1]} statistics")
        changed = changed or plan.kept[group.name] < group.num_units
        with room.stage("select and solve"):
            decision = decide_group(layer, group, gathered, observed, plan, methods, signals, room, restores=changed)
        del gathered
        record = decision.record
        tune = None
        if methods.tuning and group.unit.is_ffn and record.kept < group.num_units:
            with room.stage("tuning"):
                tune = prepare_tuning(layer, group, observed, signals.roots.get(group.name), methods.tuning, room)
        if changed and methods.restoration.refines and can_refine(group):
            record = _refine(layer, group, decision, observed, methods, room)
        elif changed:
            with room.stage("surgery"):
                _slice(layer, group, decision, room)
        if tune is not None:
            with room.stage("tuning"):
                tuning, record = _tune(layer, group, tune, record, observed, methods, room)
        records.append(record)
    return LayerOutcome(records, tuning, changed)


def _slice(layer: nn.Module, group: UnitGroup, decision: Decision, room: Room) -> None:
    producers = {} if decision.rows is None else {next(iter(group.producers)): decision.rows}
    slice_group(layer, group, decision.keep, decision.weight, producers)
    room.release(layer)


def _refine(
    layer: nn.Module, group: UnitGroup, decision: Decision, observed: LayerObserver, methods: Methods, room: Room
) -> GroupRecord:
    """Slice by way of ADMM; return the record with what it did."""
    if decision.basis is not None:
        rotate_group(layer, group, decision.basis)
    with room.stage("admm"):
        admm = refine_group(layer, group, decision.keep, decision.weight, observed, methods, room)
    solve = replace(decision.record.solve, admm=admm, error_after=admm.error_after)
    return replace(decision.record, solve=solve)


def _tune(
    layer: nn.Module,
    group: UnitGroup,
    tune: Callable[[UnitGroup], TuningRecord],
    record: GroupRecord,
    observed: LayerObserver,
    methods: Methods,
    room: Room,
) -> tuple[TuningRecord, GroupRecord]:
    """Tune a sliced FFN, and solve its consumer once more on what it now reads."""
    now = group.resize(record.kept)
    tuning = tune(now)
    if tuning.best_epoch and methods.restoration.solves:
        solve, was = solve_again(layer, now, observed, methods, room), record.solve
        record = replace(record, solve=replace(solve, error_before=was.error_before, swaps=was.swaps, admm=was.admm))
    room.release(layer)
    return tuning, record
