"""Weights of the plans in a trial, solved on moments of the dense model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from struprune_plugin.allocation.rules import GroupStatistics
from struprune_plugin.layerwise.statistics import GroupMoments, LayerStatistics, ModuleView
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.error_curves import solve_nested_weights
from struprune_plugin.linalg.rotation import rotate_columns, rotate_moments
from struprune_plugin.linalg.second_moments import SecondMoments, move_moments
from struprune_plugin.linalg.solve import damp_moments
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.config import PruningConfig
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0

Weights = dict[int, tuple[Tensor, Tensor]]  # a consumer's weights and bias by number of kept units


@dataclass(frozen=True)
class Fit:
    """Results of an allocation pass that trials use.

    :param measured: statistics of every group: the removal order of its units, and the basis to which they are rotated
    :param num_batches: number of batches on which the weights are solved; the batches after them are for trials
    :param moments: moments of those batches, on the host, if the pass has stored them; the batches are then left out
    """

    measured: Mapping[str, GroupStatistics]
    num_batches: int
    moments: Mapping[str, GroupMoments] | None = None


@dataclass(frozen=True)
class TrialSolver:
    """Solver of consumers for several numbers of kept units at once; the model is not changed.

    :param config: methods of the pruning pass
    :param fit: data on which the weights are solved
    :param statistics: statistics of the present layer
    """

    config: PruningConfig
    fit: Fit
    statistics: LayerStatistics
    context: DeviceContext

    def solve(self, layer: nn.Module, group: UnitGroup, counts: Sequence[int]) -> Weights:
        """Return a consumer's weights, in module order, and bias, on the host, for every number of kept units."""
        known = (self.fit.moments or {}).get(group.name)
        gathered = known or self.statistics.collect_moments(layer, group, "trials")
        with self.context.stage("trials"), self.context.solving():
            solve = partial(self._solve_moments, layer, group, gathered, counts)
            return compute_on_rank0(solve, torch.device("cpu"))

    def _solve_moments(
        self, layer: nn.Module, group: UnitGroup, gathered: GroupMoments, counts: Sequence[int]
    ) -> Weights:
        """Return the result of :meth:`solve`, from moments on any device."""
        linear, host = find_linear(layer, group.consumer), self.context.to_host
        dense = ModuleView(layer, group, self.statistics).read_dense()
        moments = move_moments(gathered.all, lambda part: self.context.place(part, dense))
        damped = damp_moments(moments, dense, self.config.dampening_frac, linear.bias is not None)
        solves = self.config.weight_update.solves and gathered.determines
        solved = self._find_weights(group, damped if solves else None, dense, counts)
        parts = {count: (group.to_module_order(weight[:, :-1]), weight[:, -1]) for count, weight in solved.items()}
        dtype = linear.weight.dtype
        return {count: (host(weight.to(dtype)), host(bias.to(dtype))) for count, (weight, bias) in parts.items()}

    def _find_weights(
        self, group: UnitGroup, damped: SecondMoments | None, dense: Tensor, counts: Sequence[int]
    ) -> dict[int, Tensor]:
        """Return the weights on the kept units, zero elsewhere, by number of kept units, shape [d, n + 1].

        :param damped: damped moments; None to keep the dense weights
        """
        found, copies, place = self.fit.measured[group.name], group.columns_per_unit, self.context.place
        order = found.order.to(dense.device)
        if damped is None:
            gone = {count: unit_columns(order[: group.num_units - count], copies) for count in counts}
            return {count: dense.index_fill(1, columns, 0.0) for count, columns in gone.items()}
        if found.basis is None:
            return solve_nested_weights(damped, order, copies, counts, group.name)
        basis = place(found.basis, damped.gram)
        solved = solve_nested_weights(rotate_moments(damped, basis, copies), order, copies, counts, group.name)
        return {count: rotate_columns(weight, basis.mT, copies) for count, weight in solved.items()}
