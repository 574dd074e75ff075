"""Updates of the remaining weights: a least-squares solve of the consumer, and a weight update's own refinement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from struprune_plugin.layerwise.statistics import ModuleView
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.second_moments import measure_error, stack, stack_moments, take_columns, with_bias_index
from struprune_plugin.linalg.solve import choose_damping, damp_moments, scale_weights, solve_kept_weights
from struprune_plugin.model.surgery import set_consumer, slice_group
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.storage.manifest import GroupRecord, SolveRecord


def solve_groups(
    problems: Sequence[GroupProblem], keep: Tensor, config: PruningConfig, updates: bool = True
) -> list[tuple[Tensor, SolveRecord]]:
    """Return the consumers' weights on the kept units, re-solved where configured, and the records of the solves.

    :param problems: of one group, or of experts of one shape; all have, or all lack, held-out tokens and as many as a solve needs
    :param keep: sorted kept units, shape [groups, kept]
    :param updates: whether the remaining weights are re-solved at all
    """
    group, gathered, has_bias = problems[0].group, problems[0].gathered, problems[0].module.has_bias
    moments, present = stack_moments([problem.moments for problem in problems]), stack([p.weight for p in problems])
    columns = unit_columns(keep, group.columns_per_unit)
    deleted = take_columns(present, with_bias_index(columns, group.num_columns))
    weight, dampings = deleted, [config.dampening_frac] * len(problems)
    condition = scale = [None] * len(problems)
    if config.weight_update.solves and updates and not gathered.determines:
        weight, factors = scale_weights(moments, deleted, columns)
        scale = factors.tolist()
    elif config.weight_update.solves and updates:
        if gathered.held is None:
            damped = stack_moments([problem.damped for problem in problems])
        else:
            held = stack_moments([problem.gathered.held for problem in problems if problem.gathered.held])
            dampings = choose_damping(moments, held, present, columns, has_bias)
            damped = damp_moments(moments, present, present.new_tensor(dampings), has_bias)
        weight, high = solve_kept_weights(damped, columns, [problem.group.name for problem in problems])
        condition = high.tolist()
    energy = moments.target_energy.clamp(min=1e-300)
    before, after = (measure_error(moments, some, columns) / energy for some in (deleted, weight))
    errors = torch.stack([energy, before, after]).tolist()
    records = map(SolveRecord, *errors, dampings, [None] * len(problems), condition, scale)
    return list(zip(weight, records, strict=True))


def refine_group(
    module: ModuleView, keep: Tensor, weight: Tensor, config: PruningConfig
) -> tuple[list[float], SolveRecord]:
    """Refine the least-squares solution, slice, and re-solve the consumer on the true activations.

    The closing solve makes p = phi(z) hold exactly in the saved model. Source: method.md sections 6 and 7.

    :param keep: sorted kept units
    :param weight: the consumer's re-solved weights on them, bias last
    :return: the objective at the start, then after every step; the record of the closing solve
    """
    refined = config.weight_update.refine(module, keep, weight, config.dampening_frac)
    slice_group(module.layer, module.group, keep, refined.consumer, refined.producers)
    sliced = replace(module, group=module.group.resize(len(keep)))
    gathered = module.statistics.collect_moments(module.layer, [sliced.group], f"{module.group.name} closing")
    with module.context.solving():
        problems = GroupProblem.pose([sliced], gathered, config.dampening_frac)  # damped towards the refined weights
        everything = torch.arange(len(keep), device=problems[0].weight.device)
        ((closing, record),) = solve_groups(problems, everything[None], config)
    set_consumer(sliced.layer, sliced.group, closing)
    return refined.objective, record


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
