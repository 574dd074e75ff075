"""Updates of the remaining weights: a least-squares solve of the consumer, and a weight update's own refinement."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from struprune_plugin.layerwise.statistics import Stack
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.second_moments import measure_error, take_columns, with_bias_index
from struprune_plugin.linalg.solve import choose_damping, damp_moments, scale_weights, solve_kept_weights
from struprune_plugin.model.surgery import set_consumer, slice_group
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.storage.manifest import GroupRecord, SolveRecord


def solve_weights(
    problem: GroupProblem, keep: Tensor, config: PruningConfig, updates: bool = True
) -> tuple[Tensor, list[SolveRecord]]:
    """Return the consumers' weights on the kept units, shape [linears, d, kept columns + 1], float64, re-solved where configured,
    and the record of every solve.

    :param problem: of linears that all have, or all lack, held-out tokens and as many as a solve needs
    :param keep: sorted kept units, shape [linears, kept]
    :param updates: whether the remaining weights are re-solved at all
    """
    group, gathered, module = problem.group, problem.gathered, problem.module
    columns = unit_columns(keep, group.columns_per_unit)
    deleted = take_columns(problem.weight, with_bias_index(columns, group.num_columns))
    weight, dampings = deleted, [config.dampening_frac] * len(keep)
    condition = scale = [None] * len(keep)
    if config.weight_update.solves and updates and not gathered.determines:
        weight, factors = scale_weights(gathered.all, deleted, columns)
        scale = factors.tolist()
    elif config.weight_update.solves and updates:
        damped = problem.damped
        if gathered.held is not None:
            dampings = choose_damping(gathered.all, gathered.held, problem.weight, columns, module.has_bias)
            chosen = problem.weight.new_tensor(dampings)
            damped = damp_moments(gathered.all, problem.weight, chosen, module.has_bias)
        weight, high = solve_kept_weights(damped, columns, module.names)
        condition = high.tolist()
    energy = gathered.all.target_energy.clamp(min=1e-300)
    before, after = (measure_error(gathered.all, some, columns) / energy for some in (deleted, weight))
    errors = torch.stack([energy, before, after]).tolist()
    return weight, list(map(SolveRecord, *errors, dampings, [None] * len(keep), condition, scale))


def refine_group(module: Stack, keep: Tensor, weight: Tensor, config: PruningConfig) -> tuple[list[float], SolveRecord]:
    """Refine the least-squares solution of a single group, slice, and re-solve the consumer on the true activations.

    The closing solve makes p = phi(z) hold exactly in the saved model. Source: method.md sections 6 and 7.

    :param keep: sorted kept units
    :param weight: the consumer's re-solved weights on them, bias last
    :return: the objective at the start, then after every step; the record of the closing solve
    """
    refined = config.weight_update.refine(module, keep, weight, config.dampening_frac)
    slice_group(module.layer, module.group, keep, refined.consumer, refined.producers)
    return refined.objective, solve_sliced(module, len(keep), config)


def solve_sliced(module: Stack, num_keep: int, config: PruningConfig) -> SolveRecord:
    """Re-solve the consumer of a single group that has lost units already on what it reads now; damped towards its weights.

    :param module: the group before it lost units
    """
    sliced = replace(module, groups=[module.group.resize(num_keep)])
    gathered = sliced.collect_moments(f"{module.group.name} closing")
    with module.context.solving():
        problem = GroupProblem.pose(sliced, gathered, config.dampening_frac)
        everything = torch.arange(num_keep, device=problem.weight.device)
        (closing,), (record,) = solve_weights(problem, everything[None], config)
    set_consumer(sliced.layer, sliced.group, closing)
    return record


def describe_group(group: UnitGroup, keep: Tensor, solve: SolveRecord) -> GroupRecord:
    """Return the manifest's record of a group."""
    return GroupRecord(
        name=group.name,
        layer=group.layer_index,
        kind=group.kind,
        num_units=group.num_units,
        num_blocks=group.num_blocks,
        unit_cost=group.unit_cost,
        kept=len(keep),
        sparsity=1 - len(keep) / group.num_units,
        keep=keep.tolist(),
        units=group.unit.describe(group),
        **vars(solve),
    )
