"""Choice of the whole experts that stay: those of largest REAP score, equally many in every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.rounding import GroupSize
from struprune_plugin.layerwise.capture import record
from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.layerwise.wide_layers import widen_weights
from struprune_plugin.model.structure.routing import Routing
from struprune_plugin.model.unit_kind import UnitGroup, select_groups
from struprune_plugin.pruning.config import KeptExperts
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import sum_over_ranks
from struprune_plugin.storage.manifest import ExpertsRecord


@dataclass(frozen=True)
class Mixture:
    """Whole experts of a model, of which equally many stay in every layer.

    :param routing: parts that are removed with an expert besides its linears
    :param lists: the groups of every list of experts, in order, by the list's full name
    :param counts: numbers of experts that a layer may keep, descending
    :param num_groups: number of equal runs of experts that keep the same number each
    :param costs: parameters of the linears that are removed with one expert of each list
    :param entries: other parameters that go with one expert of every layer: the routers' rows, outside the budget
    """

    routing: Routing
    lists: Mapping[str, Sequence[UnitGroup]]
    counts: Sequence[int]
    num_groups: int
    costs: Sequence[int]
    entries: int = 0

    @property
    def cost(self) -> int:
        """Parameters that are removed with one expert of every layer."""
        return sum(self.costs)

    @property
    def max_removable(self) -> int:
        """Parameters that go if as few experts stay as may."""
        return (self.counts[0] - self.counts[-1]) * self.cost

    def split_budget(self, sizes: Sequence[GroupSize], sparsity: float, num_prunable: int) -> tuple[int, float]:
        """Return the number of experts that stay in a layer, and the share of the other groups' parameters to remove beside them.

        Of the numbers nearest to the budget, it is the one at which experts lose a share nearest to that of all parameters.

        :param sparsity: share of the prunable parameters to remove
        :raises ValueError: that many parameters cannot be removed, to within half a step of the experts of every layer
        """
        total, most = sum(size.num_parameters for size in sizes), sum(size.max_removable for size in sizes)
        asked, first, last = sparsity * num_prunable, self.counts[0], self.counts[-1]
        even = asked / (first * self.cost + total)
        wanted = {left: asked - (first - left) * self.cost for left in self.counts}
        taken = {left: min(max(rest, 0.0), most) for left, rest in wanted.items()}
        misses = {left: abs(wanted[left] - taken[left]) for left in self.counts}
        least = min(misses.values())
        if wanted[last] > most + (self.counts[-2] - last) * self.cost / 2:
            largest = math.floor(1e4 * (most + self.max_removable) / num_prunable) / 1e4
            raise ValueError(
                f"sparsity: must be at most {largest:.4f}, at which {last} of {first} experts of a layer stay, the fewest that its "
                f"routing allows, got {sparsity:.4f}. Lower it, prune more kinds of units, or set `experts: channels`."
            )
        near = [left for left in self.counts if misses[left] <= least + 0.5]
        left = min(near, key=lambda count: abs(1 - count / first - even))
        return left, taken[left] / total if total else 0.0

    def keep_best(self, scores: Mapping[str, Sequence[float]], left: int) -> KeptExperts:
        """Return the experts of largest score of every list; of experts with one score, the later ones.

        :param scores: score of every expert, by list
        :param left: number of experts that stay in a layer
        """
        keep = {}
        for name, own in scores.items():
            size, each = len(own) // self.num_groups, left // self.num_groups
            runs = [range(first, first + size) for first in range(0, len(own), size)]
            best = [sorted(run, key=lambda expert: (own[expert], expert))[size - each :] for run in runs]
            keep[name] = sorted(expert for run in best for expert in run)
        return KeptExperts(self.routing, keep)

    def describe(self, kept: KeptExperts) -> list[ExpertsRecord]:
        """Return the manifest's records of the kept experts."""
        lists = zip(self.lists.items(), kept.keep.values(), self.costs, strict=True)
        return [
            ExpertsRecord(name, members[0].layer_index, len(members), [*keep], (len(members) - len(keep)) * cost)
            for (name, members), keep, cost in lists
        ]


@torch.no_grad()
def score_experts(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], mixture: Mixture, context: DeviceContext
) -> dict[str, list[float]]:
    """Return the score of every expert of the dense model, by the full name of its list, with one layer on the device at a time.

    The score is the mean of router weight times output norm over an expert's tokens. Source: REAP (Lasby et al. 2025), Eq. 9.
    """
    firsts, scores = [groups[0] for groups in mixture.lists.values()], dict[str, list[float]]()
    for step in stream_layers(model, batches, context, "experts"):
        own = select_groups(firsts, step.name)
        lists: list[Any] = [step.layer.get_submodule(group.mixture) for group in own]
        sums = [torch.zeros(2, members.num_experts, dtype=torch.float64) for members in lists]  # of norms, of tokens
        with ExitStack() as stack:
            for members in lists:  # they run again, on what they saw
                stack.enter_context(widen_weights(members, context.widened))
            seen = stack.enter_context(record(step.layer, own))
            for flow in step.flows:
                call = flow.advance(step.index, step.layer, context)
                for group, members, total in zip(own, lists, sums, strict=True):
                    _add_norms(total, members, seen.arguments[group.mixture], call.tokens)
        sums = [sum_over_ranks(total) for total in sums]
        scores |= {group.output_name: (s[0] / s[1].clamp(min=1)).tolist() for group, s in zip(own, sums, strict=True)}
    return scores


def _add_norms(total: Tensor, members: Any, args: Sequence[Tensor], counted: Tensor | None) -> None:
    """Add every expert's sum of router weight times output norm over the counted tokens, and their number, shape [2, experts].

    :param args: hidden states of all tokens, experts chosen for each and their weights
    """
    hidden, chosen, weights = args if counted is None else (part[counted.to(part.device)] for part in args)
    for expert in chosen.unique().tolist():
        tokens, place = torch.where(chosen == expert)
        norms = members[expert](hidden[tokens]).float().norm(dim=1)
        total[0, expert] += float((weights[tokens, place].float() * norms).sum(dtype=torch.float64))
        total[1, expert] += len(tokens)
