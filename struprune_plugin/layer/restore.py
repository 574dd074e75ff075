"""Restore the weights that remain: a least-squares solve of the consumer, and ADMM over the producers too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from struprune_plugin.device.room import Room
from struprune_plugin.layer.admm import run_admm
from struprune_plugin.layer.gather import GroupMoments, LayerObserver, accumulate_tokens, check_finite, make_group_sums
from struprune_plugin.layer.methods import Methods
from struprune_plugin.layer.records import ADMMRecord, SolveRecord
from struprune_plugin.maths.elimination import expand_units
from struprune_plugin.maths.rotation import rotate_columns, rotate_moments
from struprune_plugin.maths.solve import choose_damping, damp_moments, solve_kept_weights
from struprune_plugin.maths.statistics import Moments, measure_error, with_bias_index
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import set_weight, slice_group
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
    consumer = find_linear(layer, group.consumer)
    sums = make_group_sums(layer, group, keep.device, room)
    for visit in observed.visit_batches(layer, group, f"{group.name} closing"):
        accumulate_tokens(sums, visit.inputs, visit.target, visit.call.tokens, visit.call.length, room)
    check_finite(sums, group)
    moments = sums.gather()
    damped = damp_moments(moments, result.consumer.double(), methods.damping, consumer.bias is not None)
    columns = torch.arange(len(keep) * group.columns_per_unit, device=moments.gram.device)
    solved = solve_kept_weights(damped, columns, group.name)
    set_weight(consumer, solved.weight)
    error = measure_error(moments, solved.weight) / max(float(moments.target_energy), 1e-300)
    return ADMMRecord(result.objective, error)


def can_refine(group: UnitGroup) -> bool:
    """Tell whether ADMM is defined for a group: an FFN, or attention whose queries and keys no positions rotate."""
    return group.unit.is_ffn or bool(group.wiring.query_key)
