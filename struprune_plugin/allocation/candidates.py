"""Trials of candidate allocations: how far each moves the model's own output, on calibration text that no solve has seen.

Error curves and sensitivities are second-order approximations at the dense model, and a candidate may lead far from it. Each is
applied with weights solved on the dense model's moments, without correction of inherited errors, all candidates in one pass; they
are compared by the KL divergence of the model's next tokens. Curves also treat an error as independent of its token; where that is
far from the truth, whole blocks of modules are affected: those of one pool in one part of the depth. A few candidates, each with
the units of one block removed, measure by how much.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from compressed_tensors.offload import disable_offloading
from llmcompressor.utils.helpers import DisableQuantization
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.allocation.curves import Batches, DenseMeasurements
from struprune_plugin.allocation.rounding import expand_counts
from struprune_plugin.allocation.rules import GroupStatistics, Sizes
from struprune_plugin.layerwise.calls import States, mark_tokens
from struprune_plugin.layerwise.capture import replace_weights
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.ends import compute_logits
from struprune_plugin.layerwise.moments import Moments
from struprune_plugin.layerwise.passes import LayerStep, calibrating, stream_layers
from struprune_plugin.layerwise.statistics import LayerStatistics, Stack
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.error_curves import solve_nested_weights
from struprune_plugin.linalg.rotation import rotate_columns, rotate_moments
from struprune_plugin.linalg.second_moments import move_moments
from struprune_plugin.linalg.second_moments import stack as stack_tensors
from struprune_plugin.linalg.solve import damp_moments
from struprune_plugin.linalg.ties import MARGIN, argmin_with_ties
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.unit_kind import UnitGroup, select_groups
from struprune_plugin.pruning.config import PruningConfig, UnitAllocation
from struprune_plugin.pruning.selection import list_stacks
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0, sum_over_ranks

_PARTS = 3  # parts of the depth
_NOISE = 0.1  # share of the mean divergence of a block, added to both sides, so that a small one has little effect
_MOST = 10.0  # largest factor that a curve is multiplied or divided by
Block = tuple[int, ...]  # indices of the sizes
Weights = dict[int, tuple[Tensor, Tensor]]  # a consumer's weights and bias by number of kept units


@dataclass(frozen=True)
class Trial:
    """Trial of candidate allocations on the dense model, which is not changed, with one decoder layer on the device at a time.

    :param groups: groups of all layers
    :param candidates: of each, the kept units by group, by the names of the dense model; all where a group has no entry
    :param config: methods of the pruning pass
    :param measured: statistics on which the weights are solved
    """

    model: PreTrainedModel
    groups: Sequence[UnitGroup]
    candidates: Sequence[Mapping[str, int]]
    config: PruningConfig
    measured: DenseMeasurements
    context: DeviceContext

    @torch.no_grad()
    def measure(self, batches: Batches, held: Batches) -> list[float]:
        """Return KL(dense ‖ pruned) per candidate in nats, mean over the trial tokens of all processes.

        :param batches: to solve on, unless their moments are stored
        :param held: batches to try
        """
        batches = [] if self.measured.moments else batches
        statistics = LayerStatistics(TARGETS["local"], self.context)
        paths: list[list[States]] = [[] for _ in self.candidates]  # by batch; empty while they are the dense ones
        with calibrating(self.model):
            for step in stream_layers(self.model, [*batches, *held], self.context, "trials"):
                self._run_layer(step, statistics, len(batches), paths)
        dense = [flow.states for flow in step.flows[len(batches) :]]
        finals = zip(*([states.hidden for states in path or dense] for path in (dense, *paths)), strict=True)
        totals, count = torch.zeros(len(paths), dtype=torch.float64), 0
        with disable_offloading(), DisableQuantization(self.model):  # also of the head
            for batch, hidden in zip(tqdm(held, desc="KL divergences"), finals, strict=True):
                for row, length in enumerate(mark_tokens(batch).sum(1).tolist()):
                    count += length
                    totals += self._compare(batch, row, length, hidden)
        *sums, tokens = sum_over_ranks(torch.cat([totals, totals.new_tensor([count])])).tolist()
        return [total / max(tokens, 1) for total in sums]

    def _list_counts(self, group: UnitGroup) -> list[int]:
        """Return the numbers of kept units in the candidates, without the number of all units."""
        return sorted({num_keep.get(group.name, group.num_units) for num_keep in self.candidates} - {group.num_units})

    def _run_layer(
        self, step: LayerStep, statistics: LayerStatistics, num_solve: int, paths: list[list[States]]
    ) -> None:
        """Solve a layer's weights on the first batches, and take the dense path and every candidate's through it on the others."""
        weights = self._solve_layer(step, statistics, slice(num_solve))
        calls = [flow.advance(step.index, step.layer, self.context) for flow in step.flows[num_solve:]]
        for place, num_keep in enumerate(self.candidates):
            counts = [(group, num_keep.get(group.name), solved) for group, solved in weights]
            new = {group.consumer: solved[count] for group, count, solved in counts if count in solved}
            if not new and not paths[place]:
                continue
            before, path = paths[place], list[States]()
            with replace_weights(step.layer, new):
                for call, states in zip(calls, before or [call.states for call in calls], strict=True):
                    path.append(call.run(step.layer, self.context, states).map(self.context.offload))
            for states in before:
                self.context.discard(states.hidden)
            paths[place] = path

    def _solve_layer(
        self, step: LayerStep, statistics: LayerStatistics, batches: slice
    ) -> list[tuple[UnitGroup, Weights]]:
        """Return the consumers' weights, in module order, and biases, solved on rank 0, for every number of kept units."""
        solved, known = list[tuple[UnitGroup, Weights]](), self.measured.moments
        cut = [group for group in select_groups(self.groups, step.name) if self._list_counts(group)]
        step.observe(statistics, cut, batches)
        for stack in list_stacks(step.layer, cut, statistics, {group.name: self._list_counts(group) for group in cut}):
            for part, moments in _read_moments(stack, known):
                solve = partial(self._solve, part, moments)
                weights = compute_on_rank0(solve, list[Weights], self.context.solve_device)
                solved += zip(part.groups, weights, strict=True)
                del moments, solve  # before the next are assembled
        statistics.finish_layer()
        return solved

    def _solve(self, stack: Stack, gathered: Moments) -> list[Weights]:
        """Return the weights on the kept units, zero elsewhere; the dense ones without a solve, or all with too few tokens."""
        group, config, to_solver = stack.group, self.config, self.context.to_solver
        statistics = self.measured.statistics
        counts, copies, dense = self._list_counts(group), group.columns_per_unit, stack.read_weights()
        order = to_solver(stack_tensors([statistics[name].order for name in stack.names]))
        bases = [basis for name in stack.names if (basis := statistics[name].basis) is not None]
        if config.weight_update.solves and gathered.determines:
            moments = move_moments(gathered.all, to_solver)
            damped = damp_moments(moments, dense, config.dampening_frac, stack.has_bias)
            basis = to_solver(stack_tensors(bases)) if bases else None
            if basis is not None:
                damped = rotate_moments(damped, basis, copies)
            solved = solve_nested_weights(damped, order, copies, counts, stack.names)
            if basis is not None:
                solved = ((n, rotate_columns(weight, basis.mT, copies)) for n, weight in solved)
        else:
            gone = unit_columns(order, copies)[:, None].expand(-1, dense.shape[1], -1)
            solved = ((n, dense.scatter(2, gone[..., : (group.num_units - n) * copies], 0.0)) for n in counts)
        weights, dtype = [Weights() for _ in stack.groups], find_linear(stack.layer, group.consumer).weight.dtype
        for count, weight in solved:
            cast = weight.to(dtype)
            columns = group.to_module_order(cast[..., :-1]).contiguous()
            for solved_by_count, part, bias in zip(weights, columns, cast[..., -1].contiguous(), strict=True):
                solved_by_count[count] = part, bias
        return weights

    def _compare(self, batch: dict[str, Tensor], row: int, length: int, finals: Sequence[Tensor]) -> Tensor:
        """Return the sum over a sequence's tokens of KL(first ‖ other) for every other, in nats, shape [others], float64.

        :param length: tokens of the sequence, without the padding behind them
        :param finals: hidden states of the last layer for the whole batch, offloaded
        """

        def compute(final: Tensor) -> Tensor:
            logits = compute_logits(self.model, batch, row, final, self.context)[:length]
            return logits.to(torch.promote_types(logits.dtype, torch.float32))

        wanted = compute(finals[0])
        normaliser, probs = wanted.logsumexp(-1), torch.softmax(wanted, dim=-1)
        totals = []
        for final in finals[1:]:
            logits = compute(final)
            moved = logits.logsumexp(-1) - normaliser - torch.linalg.vecdot(probs, logits.sub_(wanted))
            totals.append(float(moved.double().sum()))
            del logits
        return torch.tensor(totals, dtype=torch.float64)


def _read_moments(stack: Stack, known: Mapping[str, tuple[Moments, int]] | None) -> Iterator[tuple[Stack, Moments]]:
    """Yield the parts of a stack that are solved together, with their moments: stored ones, or gathered now."""
    if known is None:
        yield from stack.split(stack.collect_moments("trials"))
        return
    for _, run in itertools.groupby(range(len(stack.groups)), lambda index: id(known[stack.names[index]][0])):
        linears = list(run)  # stored together
        moments, _ = known[stack.names[linears[0]]]
        places = [known[stack.names[index]][1] for index in linears]
        yield from stack.take(linears).split(moments.take(places))


def take_best(proposed: Mapping[str, UnitAllocation], divergences: Sequence[float]) -> UnitAllocation:
    """Return the allocation of least divergence, the first one among ties.

    :param divergences: KL divergences, in the order of the allocations
    :raises ValueError: none is finite
    """
    tried = {name: value for name, value in zip(proposed, divergences, strict=True) if math.isfinite(value)}
    if not tried:
        raise ValueError(
            "model: logits must be finite, got NaN or Inf in every allocation's. Load it in a wider dtype (bfloat16 or float32)."
        )
    taken = list(tried)[argmin_with_ties(list(tried.values()))]
    best = proposed[taken]
    return replace(best, record=replace(best.record, tried=tried, taken=taken))


def describe_doubt(tried: Mapping[str, float], rule: str, even: Collection[str]) -> str | None:
    """Return a sentence where an allocation nearer to uniform has less divergence than the rule's own; None elsewhere.

    :param tried: KL divergence in nats by the name of an allocation
    :param rule: name of the rule's own
    :param even: names of those nearer to uniform
    """
    best = min((name for name in even if name in tried), key=lambda name: tried[name], default=rule)
    if rule not in tried or not tried[best] < (1 - MARGIN) * tried[rule]:
        return None
    return (
        f"on held-out text {best!r} diverges by {tried[best]:.4g} nats and {rule!r} by {tried[rule]:.4g}: "
        "the measured error curves do not describe this model well. Try more calibration text."
    )


# -- blocks of modules -----------------------------------------------------------------------------------------------


def list_blocks(sizes: Sizes, layers: Mapping[str, int]) -> list[Block]:
    """Return blocks of modules of one pool in one part of the depth; none if there were only one.

    :param layers: index of the decoder layer, by the name of a group
    """
    blocks, num_layers = dict[tuple[str, int], list[int]](), max(layers.values()) + 1
    for place, size in enumerate(sizes):
        blocks.setdefault((size.pool, layers[size.name] * _PARTS // num_layers), []).append(place)
    return [tuple(block) for block in blocks.values()] if len(blocks) > 1 else []


def propose_blocks(sizes: Sizes, num_keep: Mapping[str, int], blocks: Sequence[Block]) -> list[Mapping[str, int]]:
    """Return one candidate per block: its modules keep the units of an allocation, all others every unit."""
    candidates: list[Mapping[str, int]] = []
    for block in blocks:
        alone = [num_keep[size.name] if place in block else size.num_units for place, size in enumerate(sizes)]
        candidates.append(expand_counts(sizes, alone))
    return candidates


def scale_curves(
    statistics: Mapping[str, GroupStatistics],
    sizes: Sizes,
    num_keep: Mapping[str, int],
    divergences: Mapping[Block, float],
) -> dict[str, GroupStatistics]:
    """Return the statistics with the curves of every block scaled so that they agree with the measured divergences.

    :param num_keep: kept units of the allocation with which the blocks were tried, by group name
    :param divergences: divergence of the model's output with a block's units removed, in nats
    """
    names = {block: [sizes[place].name for place in block] for block in divergences}
    errors = {size.name: float(statistics[size.name].curve[num_keep[size.name]]) for size in sizes}
    predicted = {block: sum(errors[name] for name in members) for block, members in names.items()}
    total, measured = sum(predicted.values()), sum(divergences.values())
    scaled = dict(statistics)
    if not (total > 0 and measured > 0):
        return scaled
    floor = _NOISE / len(predicted)
    for block, divergence in divergences.items():
        factor = (divergence / measured + floor) / (predicted[block] / total + floor)
        factor = min(max(factor, 1 / _MOST), _MOST)
        for name in names[block]:
            scaled[name] = replace(statistics[name], curve=statistics[name].curve * factor)
    return scaled
