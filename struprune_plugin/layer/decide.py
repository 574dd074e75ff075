"""Decide, from moments and weights, which units of a group stay and what the remaining weights are. The layer stays as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from struprune_plugin.device.ranks import Parcel, decide_once
from struprune_plugin.device.room import Room
from struprune_plugin.layer.criteria import Ranking, read_dense
from struprune_plugin.layer.gather import GroupMoments, LayerObserver
from struprune_plugin.layer.methods import Methods, Plan
from struprune_plugin.layer.records import GroupRecord
from struprune_plugin.layer.restore import System, solve_group
from struprune_plugin.layer.signals import Signals
from struprune_plugin.maths.elimination import keep_last
from struprune_plugin.maths.rotation import Rotation, eliminate_directions, order_directions
from struprune_plugin.maths.solve import damp_moments, weigh_outputs
from struprune_plugin.maths.statistics import Moments
from struprune_plugin.maths.swaps import swap_units
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import rotate_producer
from struprune_plugin.model.units.group import UnitGroup


@dataclass(frozen=True)
class Decision:
    """What becomes of one group.

    :param keep: sorted kept units, shape [kept], int64
    :param weight: the consumer's weights on them, in unit order, bias last, shape [d, kept columns + 1], float64
    :param basis: what the heads' units are rotated by first, shape [blocks, width, width]; None where they are not
    :param rows: the producer's kept rows after the rotation, bias last; None where there is none
    :param record: for the manifest
    """

    keep: Tensor
    weight: Tensor
    basis: Tensor | None
    rows: Tensor | None
    record: GroupRecord

    def pack(self) -> Parcel:
        """Return the decision as what goes over the wire."""
        tensors = [self.keep, self.weight, *(part for part in (self.basis, self.rows) if part is not None)]
        return self.record.to_dict(), tensors

    @classmethod
    def unpack(cls, parcel: Parcel) -> Decision:
        """Read what :meth:`pack` gave."""
        flat, (keep, weight, *rotated) = parcel
        basis, rows = rotated or (None, None)
        return cls(keep, weight, basis, rows, GroupRecord.from_dict(flat))


def decide_group(
    layer: nn.Module,
    group: UnitGroup,
    gathered: GroupMoments,
    observed: LayerObserver,
    plan: Plan,
    methods: Methods,
    signals: Signals,
    room: Room,
    restores: bool = True,
) -> Decision:
    """Rank, select and re-solve one group; the first of several processes decides for all.

    :param gathered: the moments of the group's consumer
    :param observed: gives what the module sees, for a criterion that asks
    :param restores: whether the weights that remain are re-solved
    """

    def decide() -> Decision:
        dense = read_dense(layer, group, room)
        has_bias = find_linear(layer, group.consumer).bias is not None
        damped = damp_moments(gathered.all, dense, methods.damping, has_bias)
        weighed = weigh_moments(group, damped, dense, signals, room) if methods.criterion.eliminates else damped
        ranking = Ranking(layer, group, gathered.all, weighed, observed, methods, signals, room)
        keep, scores, rotation, swaps = _select_units(ranking, plan)
        system = System(gathered, damped, dense, has_bias)
        if rotation is not None:
            system = system.rotate(rotation.basis, group.columns_per_unit)
        weight, solve = solve_group(system, group, keep, swaps, methods, restores)
        basis = rows = None
        if rotation is not None:
            basis, rows = rotation.basis, _rotate_kept_rows(layer, group, keep, rotation.basis, room)
        return Decision(keep, weight, basis, rows, GroupRecord.describe(group, keep, scores, solve))

    with room.solving():
        return decide_once(decide, Decision.pack, Decision.unpack, gathered.all.gram.device)


def weigh_moments(group: UnitGroup, damped: Moments, dense: Tensor, signals: Signals, room: Room) -> Moments:
    """Return the moments that count errors by the sensitivity, or the same ones where none was measured."""
    root = signals.roots.get(group.name)
    return damped if root is None else weigh_outputs(damped, room.place(root, damped.gram), dense)


def _select_units(ranking: Ranking, plan: Plan) -> tuple[Tensor, Tensor | None, Rotation | None, int]:
    """Return (kept units, scores, the rotation that they are units of, swaps made).

    There are no scores where nothing had to be ranked, and no rotation where nothing goes.
    """
    group, methods, weighed = ranking.group, ranking.methods, ranking.damped
    num_keep, device = plan.kept[group.name], weighed.gram.device
    rotation = None
    if methods.rotates(group) and num_keep < group.num_units:
        gone = (group.num_units - num_keep) // group.num_blocks
        rotation = eliminate_directions(weighed, group.num_blocks, group.columns_per_unit, group.name, gone)
    if plan.units is not None:
        return torch.tensor(plan.units[group.name], device=device), None, rotation, 0
    if num_keep == group.num_units:
        return torch.arange(num_keep, device=device), None, rotation, 0
    order, scores = (
        order_directions(rotation) if rotation else methods.criterion.rank(ranking, group.num_units - num_keep)
    )
    keep, swaps = keep_last(order, group.num_units, num_keep), 0
    if methods.criterion.eliminates and not methods.rotates(group) and group.columns_per_unit == 1:
        keep, swaps = swap_units(weighed, keep, group.name, group.num_blocks, methods.max_swaps)
    return keep, scores, rotation, swaps


def _rotate_kept_rows(layer: nn.Module, group: UnitGroup, keep: Tensor, basis: Tensor, room: Room) -> Tensor:
    """Return the kept rows of the linear that makes the values, these rotated, bias last."""
    rows = group.find_kept_rows(next(iter(group.producers)), keep.cpu())
    producer = rotate_producer(layer, group, basis, room.fetch)
    return producer[rows.to(producer.device)]
