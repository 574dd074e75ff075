"""What the units of one group are ranked by, and what its weights are solved from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter

from torch import Tensor

from struprune_plugin.layerwise.moments import Moments
from struprune_plugin.layerwise.statistics import Stack
from struprune_plugin.linalg.rotation import rotate_columns, rotate_moments
from struprune_plugin.linalg.second_moments import SecondMoments, move_moments
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
    """Least-squares problem of the consumers of a stack: inputs in unit order, the bias last.

    The first dimension of every tensor is the linears; in the problem of one linear (:meth:`select`) there is none.

    :param module: the groups in their layer, which is not changed
    :param gathered: moments of the consumers' inputs and targets
    :param weight: the consumers' present weights, shape [linears, d, n + 1], float64
    :param damped: moments of all sequences, damped towards these weights
    :param sparsity: sparsity asked of the whole model
    :param dampening_frac: dampening of every solve but the closing one
    """

    module: Stack
    gathered: Moments
    weight: Tensor
    damped: SecondMoments
    sensitivity: Sensitivity
    sparsity: float
    dampening_frac: float

    @classmethod
    def pose(
        cls,
        module: Stack,
        gathered: Moments,
        dampening_frac: float,
        sensitivity: Sensitivity | None = None,
        sparsity: float = 0.0,
    ) -> GroupProblem:
        """Return the problem of a stack in its present state."""
        weight = module.read_weights()
        damped = damp_moments(gathered.all, weight, dampening_frac, module.has_bias)
        return cls(module, gathered, weight, damped, sensitivity or Sensitivity(), sparsity, dampening_frac)

    def select(self, linear: int) -> GroupProblem:
        """Return the problem of one linear, as views without the first dimension."""
        module, gathered = self.module.take([linear]), self.gathered.select(linear)
        damped = move_moments(self.damped, itemgetter(linear))
        return replace(self, module=module, gathered=gathered, weight=self.weight[linear], damped=damped)

    @property
    def group(self) -> UnitGroup:
        """The first group, for all that is the same in the others."""
        return self.module.group

    @property
    def moments(self) -> SecondMoments:
        """Moments of all sequences, not damped."""
        return self.gathered.all

    @property
    def weighed(self) -> SecondMoments:
        """Damped moments with errors weighted by the sensitivity of the module's output, where it was measured; then without the
        target's energy."""
        root = self.sensitivity.fisher_sqrt.get(self.group.output_name)
        return self.damped if root is None else weigh_outputs(self.damped, self.module.context.to_solver(root))

    def rotate(self, basis: Tensor) -> GroupProblem:
        """Return the problem of rotated inputs.

        :param basis: shape [linears, blocks, width, width]
        """
        copies, held = self.group.columns_per_unit, self.gathered.held
        rotated = None if held is None else rotate_moments(held, basis, copies)
        gathered = replace(self.gathered, all=rotate_moments(self.moments, basis, copies), held=rotated)
        damped, weight = rotate_moments(self.damped, basis, copies), rotate_columns(self.weight, basis, copies)
        return replace(self, gathered=gathered, damped=damped, weight=weight)
