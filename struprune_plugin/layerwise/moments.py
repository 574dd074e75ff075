"""Second moments of the consumers of a stack: sums over batches, then moments, those of held-out sequences separately."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor, nn

from struprune_plugin.layerwise.capture import ConsumerBatch, join_rows
from struprune_plugin.linalg.second_moments import (
    MomentSums,
    SecondMoments,
    move_moments,
    reproduce_weight,
    select_inputs,
    stack,
    sum_energies,
)
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_consumer
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import gather, sum_over_ranks

_FAINT = 1e-12
_HOLD_EVERY = 4  # sequences


@dataclass(frozen=True)
class Moments:
    """Second moments of the consumers of a stack, inputs in unit order; the first dimension of every tensor is the linears.

    :param all: of all sequences
    :param held: of the held-out ones among them; None where there are none
    :param num_rows: number of tokens that each expert saw; None elsewhere
    :param holds: for each linear, whether it has held-out tokens
    """

    all: SecondMoments
    held: SecondMoments | None = None
    num_rows: Sequence[int] | None = None
    holds: Sequence[bool] = ()

    @property
    def determines(self) -> bool:
        """True if every linear has at least as many tokens as inputs, so that a solve is determined."""
        return self.num_rows is None or min(self.num_rows) >= self.all.gram.shape[-1] - 1

    def select(self, linear: int) -> Moments:
        """Return the moments of one linear, without the first dimension, as views."""
        return self._pick([linear], itemgetter(linear))

    def take(self, linears: Sequence[int]) -> Moments:
        """Return the moments of some linears; of neighbours as views."""
        first, count = linears[0], len(linears)
        if [*linears] == [*range(first, first + count)]:
            return self._pick(linears, itemgetter(slice(first, first + count)))
        return self._pick(linears, lambda tensor: tensor[torch.tensor(linears, device=tensor.device)])

    def _pick(self, linears: Sequence[int], pick: Callable[[Tensor], Tensor]) -> Moments:
        held = None if self.held is None else move_moments(self.held, pick)
        rows = None if self.num_rows is None else [self.num_rows[index] for index in linears]
        return Moments(move_moments(self.all, pick), held, rows, [self.holds[index] for index in linears])

    def split(self, alone: bool) -> Iterator[tuple[list[int], Moments]]:
        """Yield linears in parts that are solved together, and their moments: those that all have, or all lack, held-out tokens and
        as many tokens as a solve needs.

        :param alone: each linear alone
        """
        parts = dict[object, list[int]]()
        for index, holds in enumerate(self.holds):
            parts.setdefault((self.select(index).determines, holds, alone and index), []).append(index)
        for linears in parts.values():
            part = self.take(linears)
            yield linears, part if all(part.holds) else replace(part, held=None)


def make_sums(
    layer: nn.Module,
    group: UnitGroup,
    device: torch.device,
    context: DeviceContext,
    hold_out: bool = False,
    is_own: bool = False,
) -> list[MomentSums]:
    """Return empty sums of a group's consumer: of all sequences, or of those that are not held out and of those that are.

    :param device: device of the consumer's inputs; with ``offload`` the sums are on the host
    :param is_own: whether the target is the consumer's own output, so that its sums follow from those of the inputs
    """
    consumer, fetch = find_linear(layer, group.consumer), context.to_solver if context.solves_on_host else None
    sizes = consumer.in_features, 0 if is_own else consumer.out_features
    device = context.solve_device if fetch else device
    return [MomentSums(sizes, device, torch.float32, fetch) for _ in range(1 + hold_out)]


def add_batch(sums: Sequence[MomentSums], batch: ConsumerBatch, context: DeviceContext, num_before: int = 0) -> None:
    """Add every sequence of a micro-batch once: to the first sums, or every fourth to the last.

    :param num_before: number of sequences before this batch, of all processes
    """
    device, parts = batch.inputs.device, [list[slice]() for _ in sums]
    target = context.to_device(batch.target, device)[:, : sums[0].num_outputs]
    values = [batch.inputs, target, *([] if batch.factors is None else [batch.factors])]
    for number, part in enumerate(batch.split(), num_before + 1):
        parts[0 if number % _HOLD_EVERY else -1].append(part)
    for total, rows in zip(sums, (join_rows(part, device) for part in parts), strict=True):
        pieces = [[value[part] for value in values] for part in rows]
        if batch.counts and len(rows) > 1 and device.type != "cpu":  # few rows of an expert in one product
            pieces = [[torch.cat(column) for column in zip(*pieces, strict=True)]]
        for inputs, *others in pieces:
            if len(inputs):
                total.add(inputs, *others)


def assemble_moments(
    layer: nn.Module, groups: Sequence[UnitGroup], sums: Sequence[Sequence[MomentSums]], context: DeviceContext
) -> Moments:
    """Return the moments of a stack over the batches of all processes, once, in unit order; its sums are released.

    An expert that saw no token has those of uncorrelated inputs, negligible beside other modules' errors.

    :param sums: of every group, as :func:`make_sums` returns them
    :raises ValueError: NaN or Inf among the activations; the message names the linear
    """
    for part in (part for each in sums for total in each for part in total.list_parts()):
        sum_over_ranks(part)
    ranks = gather([sum(total.num_rows for total in each) for each in sums])
    rows, group = [sum(counts) for counts in zip(*ranks, strict=True)], groups[0]
    every, *held = (MomentSums.assemble(columns, context.to_solver) for columns in zip(*sums, strict=True))
    for other in held:  # the first sums lack the held-out sequences
        for total, part in zip(vars(every).values(), vars(other).values(), strict=True):
            total.add_(part)
    if group.repeats > 1:
        columns = group.to_unit_order(torch.arange(group.num_columns, device=every.gram.device))
        every, *held = (select_inputs(part, columns.expand(len(groups), -1)) for part in (every, *held))
    if not sums[0][0].num_outputs:
        weight = stack([read_consumer(layer, each, context.to_solver) for each in groups])
        every, *held = (reproduce_weight(part, weight) for part in (every, *held))
    # not checked earlier, because the check waits for the device
    counts = (held or [every])[-1].gram[:, -1, -1]
    energies, counts = torch.stack([sum_energies(every), counts]).tolist()
    for each, energy in zip(groups, energies, strict=True):
        if not math.isfinite(energy):
            raise ValueError(
                f"{each.name}: activations must be finite, got NaN or Inf in its inputs or targets. "
                "Load the model in a wider dtype (bfloat16 or float32), or repair the checkpoint."
            )
    for index, each in enumerate(groups):
        if group.mixture and not rows[index]:
            dense = read_consumer(layer, each)
            every.gram[index].diagonal().fill_(_FAINT)
            every.cross[index].copy_(_FAINT * dense)
            every.target_energy[index].copy_(_FAINT * dense.square().sum())
    holds = [bool(held and count) for count in counts]
    return Moments(every, held[0] if held else None, rows if group.mixture else None, holds)
