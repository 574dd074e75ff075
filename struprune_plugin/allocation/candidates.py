"""Trials of allocation plans: how far each moves the model's own output, on calibration text that no solve has seen.

Error curves and sensitivities are second-order approximations at the dense model, and a plan may lead far from it. Each plan is
applied with weights solved on the dense model's moments, without correction of inherited errors, all plans in one pass; they
are compared by the KL divergence of the model's next tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from compressed_tensors.offload import disable_offloading
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.allocation.rules import GroupStatistics
from struprune_plugin.layerwise.calls import States
from struprune_plugin.layerwise.capture import replace_weights
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.ends import compute_logits
from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.layerwise.statistics import GroupMoments, LayerStatistics, ModuleView
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.error_curves import solve_nested_weights
from struprune_plugin.linalg.rotation import rotate_columns, rotate_moments
from struprune_plugin.linalg.second_moments import SecondMoments, move_moments
from struprune_plugin.linalg.solve import damp_moments
from struprune_plugin.linalg.ties import argmin_with_ties
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.units.group import UnitGroup, select_groups
from struprune_plugin.pruning.config import PruningConfig, UnitAllocation
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0, sum_over_ranks
from struprune_plugin.storage.manifest import AllocationRecord

Kept = Mapping[str, int]  # number of units by group
Weights = dict[int, tuple[Tensor, Tensor]]  # a consumer's weights and bias by number of kept units


@dataclass(frozen=True)
class Fit:
    """Results of an allocation pass that trials use.

    :param measured: statistics of every group: the removal order of its units, and the basis to which they are rotated
    :param num_batches: number of batches on which the weights are solved; the batches after them are for trials
    :param moments: moments of those batches, if the pass has stored them; the batches are then left out
    """

    measured: Mapping[str, GroupStatistics]
    num_batches: int
    moments: Mapping[str, GroupMoments] | None = None


@dataclass
class _Path:
    """State of one plan that is passed from layer to layer.

    :param kept: kept units; a group without an entry keeps all
    :param states: hidden states that enter the current layer, by batch; empty while they are the dense ones
    """

    kept: Kept
    states: list[States] = field(default_factory=list)


class Trial:
    """Trial of plans on the dense model, which is not changed; it measures one divergence per plan.

    One decoder layer is on the device at a time; moments are those of the dense path. With several processes, each runs its own
    batches, with weights that rank 0 has solved.

    :param groups: groups of all layers
    :param plans: kept units of every group, by the names of the dense model, one per plan
    :param config: methods of the pruning pass
    :param fit: data on which the weights are solved
    """

    def __init__(
        self,
        model: PreTrainedModel,
        groups: Sequence[UnitGroup],
        plans: Sequence[UnitAllocation],
        config: PruningConfig,
        fit: Fit,
        context: DeviceContext,
    ):
        self._model, self._groups, self._context = model, groups, context
        self._config, self._fit, self._num_fit = config, fit, 0 if fit.moments else fit.num_batches
        self._paths = [_Path(plan.kept) for plan in plans]
        self._statistics = LayerStatistics(TARGETS["local"], context)
        self._dense: list[Tensor] = []  # outputs of the last layer, by trial batch

    @torch.no_grad()
    def run(self, batches: Sequence[dict[str, Tensor]]) -> None:
        """Run every plan through all layers.

        :param batches: batches to solve on, unless their moments are known, then batches to try
        """
        for step in stream_layers(self._model, batches, self._context, "trials"):
            own, num_fit = select_groups(self._groups, step.name), self._num_fit
            cut = [group for group in own if self._list_counts(group)]
            step.observe(self._statistics, cut, slice(num_fit))
            weights = {group.name: self._solve(step.layer, group) for group in cut}
            step.observe(self._statistics, [], slice(num_fit, None))
            self._dense = [flow.states.hidden for flow in step.flows[num_fit:]]
            for path in self._paths:
                self._advance(path, step.layer, own, weights)
            self._statistics.finish_layer()

    @torch.no_grad()
    def measure(self, batches: Sequence[dict[str, Tensor]]) -> list[float]:
        """Return KL(dense ‖ pruned) per plan in nats, mean over the trial tokens of all processes, after :meth:`run`.

        :param batches: the trial batches
        """
        paths = [[states.hidden for states in path.states] or self._dense for path in self._paths]
        totals, count = torch.zeros(len(paths), dtype=torch.float64), 0
        with disable_offloading():
            for index, batch in enumerate(tqdm(batches, desc="KL divergences")):
                mask = batch.get("attention_mask")
                valid = (torch.ones_like(batch["input_ids"]) if mask is None else mask).bool()
                count += int(valid.sum())
                finals = [hidden[index] for hidden in (self._dense, *paths)]
                for row, kept in enumerate(valid):
                    totals += self._compare(batch, row, kept, finals)
        *sums, tokens = sum_over_ranks(torch.cat([totals, totals.new_tensor([count])])).tolist()
        return [total / max(tokens, 1) for total in sums]

    def _solve(self, layer: nn.Module, group: UnitGroup) -> Weights:
        """Return a consumer's weights, in module order, and bias, where systems are solved, for every number of kept units."""
        known = (self._fit.moments or {}).get(group.name)
        gathered = known or self._statistics.collect_moments(layer, group, "trials")
        with self._context.solving():
            solve = partial(self._solve_moments, layer, group, gathered)
            return compute_on_rank0(solve, self._context.solve_device)

    def _solve_moments(self, layer: nn.Module, group: UnitGroup, gathered: GroupMoments) -> Weights:
        """Return the result of :meth:`_solve`, from moments on any device."""
        linear, counts = find_linear(layer, group.consumer), self._list_counts(group)
        dense = ModuleView(layer, group, self._statistics).read_weights()
        moments = move_moments(gathered.all, self._context.to_solver)
        damped = damp_moments(moments, dense, self._config.dampening_frac, linear.bias is not None)
        solves = self._config.weight_update.solves and gathered.determines
        solved = self._find_weights(group, damped if solves else None, dense, counts)
        cast = {count: weight.to(linear.weight.dtype) for count, weight in solved.items()}
        return {n: (group.to_module_order(weight[:, :-1]).contiguous(), weight[:, -1]) for n, weight in cast.items()}

    def _find_weights(
        self, group: UnitGroup, damped: SecondMoments | None, dense: Tensor, counts: Sequence[int]
    ) -> dict[int, Tensor]:
        """Return the weights on the kept units, zero elsewhere, by number of kept units, shape [d, n + 1].

        :param damped: damped moments; None to keep the dense weights
        """
        found, copies = self._fit.measured[group.name], group.columns_per_unit
        order = found.order.to(dense.device)
        if damped is None:
            gone = {count: unit_columns(order[: group.num_units - count], copies) for count in counts}
            return {count: dense.index_fill(1, columns, 0.0) for count, columns in gone.items()}
        if found.basis is None:
            return solve_nested_weights(damped, order, copies, counts, group.name)
        basis = self._context.to_solver(found.basis)
        solved = solve_nested_weights(rotate_moments(damped, basis, copies), order, copies, counts, group.name)
        return {count: rotate_columns(weight, basis.mT, copies) for count, weight in solved.items()}

    def _list_counts(self, group: UnitGroup) -> list[int]:
        """Return the numbers of kept units in the plans, without the number of all units."""
        return sorted({path.kept.get(group.name, group.num_units) for path in self._paths} - {group.num_units})

    def _advance(
        self,
        path: _Path,
        layer: nn.Module,
        groups: Sequence[UnitGroup],
        weights: Mapping[str, Weights],
    ) -> None:
        """Propagate a plan's hidden states through the layer, pruned as in the plan."""
        new = {
            group.consumer: solved[kept]
            for group in groups
            if (kept := path.kept.get(group.name, group.num_units)) in (solved := weights.get(group.name, {}))
        }
        if not new and not path.states:
            return
        calls = self._statistics.calls[self._num_fit :]
        inputs = path.states or [call.states for call in calls]
        with replace_weights(layer, new):
            outputs = [
                call.run(layer, self._context, states).map(self._context.park)
                for call, states in zip(calls, inputs, strict=True)
            ]
        for states in path.states:
            self._context.release(states.hidden)
        path.states = outputs

    def _compare(self, batch: dict[str, Tensor], row: int, kept: Tensor, finals: Sequence[Tensor]) -> Tensor:
        """Return the sum over a sequence's tokens of KL(first ‖ other) for every other, in nats, shape [others], float64.

        :param row: index of the sequence in its batch
        :param kept: mask of the tokens that count, shape [tokens], bool
        :param finals: hidden states of the last layer for the whole batch, parked
        """

        def compute(final: Tensor) -> Tensor:
            logits = compute_logits(self._model, batch, row, final, self._context)
            logits = logits if kept.all() else logits[kept.to(logits.device)]
            return logits.to(torch.promote_types(logits.dtype, torch.float32))

        wanted = compute(finals[0])
        whole, probs = wanted.logsumexp(-1), torch.softmax(wanted, dim=-1)
        totals = []
        for final in finals[1:]:
            found = compute(final)
            moved = found.logsumexp(-1) - whole - torch.linalg.vecdot(probs, found.sub_(wanted))
            totals.append(float(moved.double().sum()))
            del found
        return torch.tensor(totals, dtype=torch.float64)


def take_best(proposed: Mapping[str, UnitAllocation], divergences: Sequence[float]) -> UnitAllocation:
    """Return the allocation that changes the model's output least on held-out batches; the first one among ties.

    :param proposed: allocations by name; the first is returned if no divergence is finite
    :param divergences: KL divergences in the same order; empty if nothing was tried
    """
    known = zip(proposed, divergences, strict=True) if divergences else ()
    tried = {name: value for name, value in known if math.isfinite(value)}
    if not tried:
        return next(iter(proposed.values()))
    taken = list(tried)[argmin_with_ties(list(tried.values()))]
    plan = proposed[taken]
    return replace(plan, record=replace(plan.record, tried=tried, taken=taken))


def describe_trials(record: AllocationRecord) -> str:
    """Return a line on the divergences of the allocations that were tried."""
    told = ", ".join(f"{name} {value:.4g}" for name, value in (record.tried or {}).items())
    return f"KL divergence in nats of each candidate allocation: {told}; selected: {record.taken}"
