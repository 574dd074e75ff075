"""What the units of one group are ranked by, and what its weights are solved from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from struprune_plugin.layerwise.statistics import GroupMoments, ModuleView
from struprune_plugin.linalg.rotation import rotate_columns, rotate_moments
from struprune_plugin.linalg.second_moments import SecondMoments, stack, stack_moments, unstack_moments
from struprune_plugin.linalg.solve import damp_moments, weigh_outputs
from struprune_plugin.model.unit_kind import UnitGroup


@dataclass(frozen=True)
class Sensitivity:
    """Measurements of the dense model, on the host; empty where not requested.

    :param fisher_sqrt: R with ``R^T R`` the Fisher information of a module's output, by :attr:`UnitGroup.output_name`, shape
        [d, d], float64
    :param saliency: score of every unit from gradients, by group name, for importances that need one, shape [units], float64
    """

    fisher_sqrt: Mapping[str, Tensor] = field(default_factory=dict)
    saliency: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupProblem:
    """Least-squares problem of one group's consumer: inputs in unit order, the bias last.

    :param module: the group in its layer, which is not changed
    :param gathered: moments of the consumer's inputs and targets
    :param weight: the consumer's present weights, shape [d, n + 1], float64
    :param damped: moments of all sequences, damped towards these weights
    :param sparsity: sparsity asked of the whole model
    :param dampening_frac: dampening of every solve but the closing one
    """

    module: ModuleView
    gathered: GroupMoments
    weight: Tensor
    damped: SecondMoments
    sensitivity: Sensitivity
    sparsity: float
    dampening_frac: float

    @classmethod
    def pose(
        cls,
        modules: Sequence[ModuleView],
        gathered: Sequence[GroupMoments],
        dampening_frac: float,
        sensitivity: Sensitivity | None = None,
        sparsity: float = 0.0,
    ) -> list[GroupProblem]:
        """Return the problems of a module, or of experts of one shape, in their present state."""
        weights = stack([module.read_weights() for module in modules])
        damped = damp_moments(
            stack_moments([own.all for own in gathered]), weights, dampening_frac, modules[0].has_bias
        )
        common = sensitivity or Sensitivity(), sparsity, dampening_frac
        parts = zip(modules, gathered, weights, unstack_moments(damped), strict=True)
        return [cls(*part, *common) for part in parts]

    @property
    def group(self) -> UnitGroup:
        return self.module.group

    @property
    def moments(self) -> SecondMoments:
        """Moments of all sequences, not damped."""
        return self.gathered.all

    @property
    def weighed(self) -> SecondMoments:
        """Damped moments with errors weighted by the sensitivity of the module's output, where it was measured."""
        return unstack_moments(weigh_problems([self]))[0]

    def rotate(self, basis: Tensor) -> GroupProblem:
        """Return the problem of rotated inputs."""
        copies, held = self.group.columns_per_unit, self.gathered.held
        rotated = None if held is None else rotate_moments(held, basis, copies)
        gathered = replace(self.gathered, all=rotate_moments(self.moments, basis, copies), held=rotated)
        damped, weight = rotate_moments(self.damped, basis, copies), rotate_columns(self.weight, basis, copies)
        return replace(self, gathered=gathered, damped=damped, weight=weight)


def weigh_problems(problems: Sequence[GroupProblem]) -> SecondMoments:
    """Return :attr:`GroupProblem.weighed` of one group, or of experts of one list and shape, with a first dimension more."""
    damped, first = stack_moments([problem.damped for problem in problems]), problems[0]
    root = first.sensitivity.fisher_sqrt.get(first.group.output_name)
    if root is None:
        return damped
    return weigh_outputs(damped, first.module.context.to_solver(root), stack([problem.weight for problem in problems]))
