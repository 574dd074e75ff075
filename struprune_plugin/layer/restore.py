"""Restore the weights that remain: a least-squares solve of the consumer, and ADMM over the producers too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from struprune_plugin.device.room import Room
from struprune_plugin.layer.admm import run_admm
from struprune_plugin.layer.criteria import read_dense
from struprune_plugin.layer.gather import GroupMoments, LayerObserver
from struprune_plugin.layer.methods import Methods
from struprune_plugin.layer.records import ADMMRecord, SolveRecord
from struprune_plugin.maths.elimination import expand_units
from struprune_plugin.maths.rotation import rotate_columns, rotate_moments
from struprune_plugin.maths.solve import choose_damping, damp_moments, solve_kept_weights
from struprune_plugin.maths.statistics import Moments, measure_error, with_bias_index
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import set_consumer, slice_group
from struprune_plugin.model.units.group import UnitGroup


@dataclass(frozen=True)
class System:
    """What the weights of one consumer are solved from.

    :param gathered: its moments
    :param damped: those of all sequences, damped
    :param dense: its dense weights, bias last, shape [d, n + 1], float64
    :param has_bias: whether it has a bias
    """

    gathered: GroupMoments
    damped: Moments
    dense: Tensor
    has_bias: bool

    def rotate(self, basis: Tensor, copies: int) -> System:
        """Return the system of rotated inputs."""
        moments, held = self.gathered.all, self.gathered.held
        rotated = rotate_moments(moments, basis, copies)
        damped = rotate_moments(self.damped, basis, copies)
        held = None if held is None else rotate_moments(held, basis, copies)
        return System(GroupMoments(rotated, held), damped, rotate_columns(self.dense, basis, copies), self.has_bias)


def solve_group(
    system: System, group: UnitGroup, keep: Tensor, swaps: int, methods: Methods, restores: bool
) -> tuple[Tensor, SolveRecord]:
    """Return the consumer's weights on the kept units, re-solved where that is asked for, and how that went.

    :param keep: sorted kept units
    :param swaps: for the record
    """
    moments, held, dense = system.gathered.all, system.gathered.held, system.dense
    columns = expand_units(keep, group.columns_per_unit)
    deleted = dense[:, with_bias_index(columns, group.num_columns)]
    weight, condition, damping, damped = deleted, None, methods.damping, system.damped
    if methods.restoration.solves and restores:
        if held is not None:
            damping = choose_damping(moments, held, dense, columns, system.has_bias, group.name)
            damped = damp_moments(moments, dense, damping, system.has_bias)
        solved = solve_kept_weights(damped, columns, group.name)
        weight, condition = solved.weight, solved.condition_number
    energy = max(float(moments.target_energy), 1e-300)
    before, after = (measure_error(moments, w, columns) / energy for w in (deleted, weight))
    return weight, SolveRecord(energy, before, after, swaps, damping, None, condition)


def refine_group(
    layer: nn.Module,
    group: UnitGroup,
    keep: Tensor,
    weight: Tensor,
    observed: LayerObserver,
    methods: Methods,
    room: Room,
) -> ADMMRecord:
    """Run ADMM from the least-squares solution, slice, and re-solve the consumer on the true activations.

    The closing solve makes p = phi(z) hold exactly in the saved model. Source: method.md sections 6 and 7.

    :param keep: sorted kept units
    :param weight: the consumer's re-solved weights on them, bias last
    """
    visits = observed.visit_batches(layer, group, f"{group.name} inputs")
    result = run_admm(layer, group, keep, weight, visits, methods.admm, room)
    slice_group(layer, group, keep, result.consumer, result.producers)
    closing = solve_again(layer, group.resize(len(keep)), observed, methods, room)
    return ADMMRecord(result.objective, closing.error_after)


def solve_again(
    layer: nn.Module, group: UnitGroup, observed: LayerObserver, methods: Methods, room: Room
) -> SolveRecord:
    """Re-solve a sliced group's consumer, in place, on what it now reads, damped towards its present weights.

    :param group: as it now is
    """
    gathered = observed.collect_moments(layer, group, f"{group.name} closing")
    with room.solving():
        dense, has_bias = read_dense(layer, group, room), find_linear(layer, group.consumer).bias is not None
        system = System(gathered, damp_moments(gathered.all, dense, methods.damping, has_bias), dense, has_bias)
        everything = torch.arange(group.num_units, device=gathered.all.gram.device)
        weight, record = solve_group(system, group, everything, 0, methods, restores=True)
    set_consumer(layer, group, weight)
    return record


def can_refine(group: UnitGroup) -> bool:
    """Tell whether ADMM is defined for a group: an FFN, or attention whose queries and keys no positions rotate."""
    return group.unit.is_ffn or bool(group.wiring.query_key)
