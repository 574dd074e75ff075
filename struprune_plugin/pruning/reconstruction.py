"""Updates of the remaining weights: a least-squares solve of the consumer, a weight update's refinement, and the cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from struprune_plugin.layerwise.statistics import Stack
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.second_moments import measure_error, take_columns, with_bias_index
from struprune_plugin.linalg.solve import (
    choose_dampening,
    damp_moments,
    measure_solved_error,
    scale_weights,
    solve_kept_weights,
)
from struprune_plugin.model.surgery import LayerCopy, rotate_group, rotate_producer, set_consumer, slice_group
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.runtime.distributed import compute_on_rank0
from struprune_plugin.storage.manifest import GroupRecord, SolveRecord

_OF_LAST_SOLVE = "error_after", "damping", "condition_number"  # of a record


@dataclass(frozen=True)
class Solution:
    """Kept units and new weights of a stack, in unit order, the bias last; the first dimension is the linears.

    :param keep: sorted kept units, shape [linears, kept], int64, on the host
    :param weight: the consumers' weights on them, shape [linears, d, kept columns + 1], float64
    :param basis: rotation of the units before selection, shape [linears, blocks, width, width]; None without one
    :param producers: by name, the kept rows of a linear that the rotation changes, bias last; processes may share the weights
    """

    keep: Tensor
    weight: Tensor
    basis: Tensor | None
    producers: dict[str, Tensor]
    records: list[SolveRecord]

    def take(self, linear: int) -> Solution:
        """Return the solution of one linear, as views."""
        only = slice(linear, linear + 1)
        basis = None if self.basis is None else self.basis[only]
        return Solution(self.keep[only], self.weight[only], basis, self.producers, self.records[only])


@dataclass(frozen=True)
class FinishedLayer:
    """Records of one decoder layer, whether anything was removed up to it, and for a store a copy of it if so."""

    groups: list[GroupRecord]
    changed: bool
    copy: LayerCopy | None = None


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
    weight, dampenings = deleted, [config.dampening_frac] * len(keep)
    condition = scale = [None] * len(keep)
    before = after = measure_error(gathered.all, deleted, columns)
    if config.weight_update.solves and updates and not gathered.determines:
        weight, factors = scale_weights(gathered.all, deleted, columns)
        after, scale = measure_error(gathered.all, weight, columns), factors.tolist()
    elif config.weight_update.solves and updates:
        damped, chosen = problem.damped, problem.weight.new_tensor(dampenings)
        if gathered.held is not None:
            dampenings = choose_dampening(gathered.all, gathered.held, problem.weight, columns, module.has_bias)
            chosen = problem.weight.new_tensor(dampenings)
            damped = damp_moments(gathered.all, problem.weight, chosen, module.has_bias)
        weight, high = solve_kept_weights(damped, columns, module.names)
        after, condition = measure_solved_error(gathered.all, weight, deleted, columns, chosen), high.tolist()
    energy = gathered.all.target_energy.clamp(min=1e-300)
    errors = torch.stack([energy, before / energy, after / energy]).tolist()
    return weight, list(map(SolveRecord, *errors, dampenings, [None] * len(keep), condition, scale))


def rotate_producers(stack: Stack, keep: Tensor, basis: Tensor) -> dict[str, Tensor]:
    """Return, by name, the kept rows of the linear that produces the rotated values of a single group, bias last.

    :param keep: sorted kept units, shape [1, kept], on the host
    :param basis: shape [1, blocks, width, width]
    """
    (group,), (kept_units,), (rotation,) = stack.groups, keep, basis
    (name,) = group.producers
    rotated = rotate_producer(stack.layer, group, rotation, stack.context.to_solver)
    return {name: rotated[group.find_kept_rows(name, kept_units).to(rotated.device)]}


def cut_group(stack: Stack, solution: Solution, config: PruningConfig, updates: bool = True) -> GroupRecord:
    """Remove units of a single group from the layer, with the weight update's refinement if it has one; return its record.

    A refined consumer is solved once more on its true inputs, so that p = phi(z) holds exactly in the saved model; so is one whose
    inputs a norm over all units changes. Source: method.md sections 6 and 7.

    :param updates: whether the layer changes at all
    """
    (group,), (keep,), (weight,), (record,) = stack.groups, solution.keep, solution.weight, solution.records
    if not updates:
        return describe_group(group, keep, record)
    update, producers, objective = config.weight_update, solution.producers, None
    closes = group.is_coupled and update.solves and len(keep) < group.num_units
    if update.can_refine(group):
        for basis in () if solution.basis is None else solution.basis:
            rotate_group(stack.layer, group, basis)
        refined = update.refine(stack, keep, weight, config.dampening_frac)
        weight, producers, objective, closes = refined.consumer, refined.producers, refined.objective, True
    slice_group(stack.layer, group, keep, weight, producers)
    if closes:
        last = solve_sliced(stack, len(keep), config)
        record = replace(record, **{name: getattr(last, name) for name in _OF_LAST_SOLVE}, admm=objective)
    return describe_group(group, keep, record)


def solve_sliced(module: Stack, num_keep: int, config: PruningConfig) -> SolveRecord:
    """Re-solve the consumer of a single group that has lost units already on what it reads now; damped towards its weights.

    :param module: the group before it lost units
    """
    sliced = replace(module, groups=[module.group.resize(num_keep)])
    gathered = sliced.collect_moments(f"{module.group.name} closing")

    def solve() -> tuple[Tensor, list[SolveRecord]]:
        problem = GroupProblem.pose(sliced, gathered, config.dampening_frac)
        everything = torch.arange(num_keep, device=problem.weight.device)
        return solve_weights(problem, everything[None], config)

    result_type = tuple[Tensor, list[SolveRecord]]
    (closing,), (record,) = compute_on_rank0(solve, result_type, module.context.solve_device)
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
