"""Updates of the remaining weights: a least-squares solve of the consumer, and a weight update's own refinement."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from struprune_plugin.layerwise.statistics import ModuleView
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.second_moments import measure_error, with_bias_index
from struprune_plugin.linalg.solve import choose_damping, damp_moments, scale_weights, solve_kept_weights
from struprune_plugin.model.surgery import set_consumer, slice_group
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.storage.manifest import ADMMRecord, SolveRecord


def solve_group(
    problem: GroupProblem, keep: Tensor, config: PruningConfig, updates: bool = True
) -> tuple[Tensor, SolveRecord]:
    """Return the consumer's weights on the kept units, re-solved where configured, and the record of the solve.

    :param keep: sorted kept units
    :param updates: whether the remaining weights are re-solved at all
    """
    moments, held, dense, group = problem.moments, problem.gathered.held, problem.dense, problem.group
    columns = unit_columns(keep, group.columns_per_unit)
    deleted = dense[:, with_bias_index(columns, group.num_columns)]
    weight, condition, damping, damped, scale = deleted, None, config.dampening_frac, problem.damped, None
    if config.weight_update.solves and updates and not problem.gathered.determines:
        weight, scale = scale_weights(moments, deleted, columns)
    elif config.weight_update.solves and updates:
        if held is not None:
            damping = choose_damping(moments, held, dense, columns, problem.module.has_bias, group.name)
            damped = damp_moments(moments, dense, damping, problem.module.has_bias)
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
    sliced = replace(module, group=module.group.resize(len(keep)))
    gathered = sliced.collect_moments(f"{module.group.name} closing")
    with module.context.solving():
        problem = GroupProblem.pose(sliced, gathered, config.dampening_frac)  # damped towards the refined weights
        everything = torch.arange(len(keep), device=gathered.all.gram.device)
        closing, record = solve_group(problem, everything, config)
    set_consumer(sliced.layer, sliced.group, closing)
    return ADMMRecord(refined.objective, record.error_after)
