"""Updates of the remaining weights: a least-squares solve of the consumer, and a weight update's own refinement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from struprune_plugin.layerwise.statistics import GroupMoments, ModuleView
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.rotation import rotate_columns, rotate_moments
from struprune_plugin.linalg.second_moments import SecondMoments, measure_error, with_bias_index
from struprune_plugin.linalg.solve import choose_damping, damp_moments, scale_weights, solve_kept_weights
from struprune_plugin.model.surgery import set_consumer, slice_group
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.storage.records import ADMMRecord, SolveRecord


@dataclass(frozen=True)
class LeastSquaresProblem:
    """Least-squares problem for the weights of one consumer.

    :param group: group in its current state
    :param gathered: moments of the group's consumer
    :param damped: damped moments of all sequences
    :param dense: the consumer's dense weights, bias last, shape [d, n + 1], float64
    :param has_bias: whether the consumer has a bias
    """

    group: UnitGroup
    gathered: GroupMoments
    damped: SecondMoments
    dense: Tensor
    has_bias: bool

    @classmethod
    def pose(cls, module: ModuleView, gathered: GroupMoments, dampening_frac: float) -> LeastSquaresProblem:
        """Return the problem of a module in its current state, damped towards its current weights."""
        dense, has_bias = module.read_dense(), module.has_bias
        damped = damp_moments(gathered.all, dense, dampening_frac, has_bias)
        return cls(module.group, gathered, damped, dense, has_bias)

    def rotate(self, basis: Tensor) -> LeastSquaresProblem:
        """Return the problem of rotated inputs."""
        copies, held = self.group.columns_per_unit, self.gathered.held
        rotated = replace(
            self.gathered,
            all=rotate_moments(self.gathered.all, basis, copies),
            held=None if held is None else rotate_moments(held, basis, copies),
        )
        damped, dense = rotate_moments(self.damped, basis, copies), rotate_columns(self.dense, basis, copies)
        return LeastSquaresProblem(self.group, rotated, damped, dense, self.has_bias)


def solve_group(
    problem: LeastSquaresProblem, keep: Tensor, config: PruningConfig, updates: bool = True
) -> tuple[Tensor, SolveRecord]:
    """Return the consumer's weights on the kept units, re-solved where configured, and the record of the solve.

    :param keep: sorted kept units
    :param updates: whether the remaining weights are re-solved at all
    """
    moments, held, dense = problem.gathered.all, problem.gathered.held, problem.dense
    group = problem.group
    columns = unit_columns(keep, group.columns_per_unit)
    deleted = dense[:, with_bias_index(columns, group.num_columns)]
    weight, condition, damping, damped, scale = deleted, None, config.dampening_frac, problem.damped, None
    if config.weight_update.solves and updates and not problem.gathered.determines:
        weight, scale = scale_weights(moments, deleted, columns)
    elif config.weight_update.solves and updates:
        if held is not None:
            damping = choose_damping(moments, held, dense, columns, problem.has_bias, group.name)
            damped = damp_moments(moments, dense, damping, problem.has_bias)
        solved = solve_kept_weights(damped, columns, group.name)
        weight, condition = solved.weight, solved.condition_number
    energy = max(float(moments.target_energy), 1e-300)
    before, after = (measure_error(moments, w, columns) / energy for w in (deleted, weight))
    return weight, SolveRecord(energy, before, after, damping, None, condition, scale)


def refine_group(module: ModuleView, keep: Tensor, weight: Tensor, config: PruningConfig) -> ADMMRecord:
    """Refine the least-squares solution, slice, and re-solve the consumer on the true activations.

    The closing solve makes p = phi(z) hold exactly in the saved model. Source: method.md sections 6 and 7.

    :param keep: sorted kept units
    :param weight: the consumer's re-solved weights on them, bias last
    """
    refined = config.weight_update.refine(module, keep, weight, config.dampening_frac)
    slice_group(module.layer, module.group, keep, refined.consumer, refined.producers)
    return ADMMRecord(refined.objective, solve_again(module.resize(len(keep)), config).error_after)


def solve_again(module: ModuleView, config: PruningConfig) -> SolveRecord:
    """Re-solve a sliced group's consumer, in place, on its new inputs, damped towards its current weights.

    :param module: the sliced module
    """
    gathered = module.collect_moments(f"{module.group.name} closing")
    with module.context.solving():
        problem = LeastSquaresProblem.pose(module, gathered, config.dampening_frac)
        everything = torch.arange(module.group.num_units, device=gathered.all.gram.device)
        weight, record = solve_group(problem, everything, config)
    set_consumer(module.layer, module.group, weight)
    return record
