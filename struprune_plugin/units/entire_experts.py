"""Entire experts of a mixture, which go with their entries in the router: those of largest REAP score stay."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from llmcompressor.modifiers.pruning import REAPPruningModifier
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.capture import record
from struprune_plugin.layerwise.passes import calibrating, stream_layers
from struprune_plugin.layerwise.wide_layers import widen_weights
from struprune_plugin.model.experts import list_experts
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.model.unit_kind import ListEntries, UnitGroup, select_groups
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import compute_on_rank0, sum_over_ranks
from struprune_plugin.units.expert_routing import Routing, find_routing, list_counts


@dataclass(frozen=True, kw_only=True)
class EntireExperts(ListEntries):
    """Entire experts of a model, of which equally many stay in every layer.

    :param routing: parts that are removed with an expert besides its linears
    :param num_groups: number of equal runs of experts that keep the same number each
    """

    label: ClassVar[str] = "experts"
    remedy: ClassVar[str] = "set `experts: channels`"
    routing: Routing
    num_groups: int

    def choose(
        self, model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], num_keep: int, context: DeviceContext
    ) -> Mapping[str, Sequence[int]]:
        with calibrating(model):
            scores = self.score(model, batches, context)
        return compute_on_rank0(lambda: self.keep_best(scores, num_keep), dict[str, list[int]])

    def drop(self, layer: nn.Module, name: str, keep: Sequence[int]) -> None:
        self.routing.drop(layer, name, keep)

    def keep_best(self, scores: Mapping[str, Sequence[float]], num_keep: int) -> dict[str, list[int]]:
        """Return the experts of largest score of every list, sorted; of experts with one score, the later ones stay.

        :param scores: score of every expert, by list
        :param num_keep: number of experts that stay in a layer
        """
        keep = {}
        for name, values in scores.items():
            size, each = len(values) // self.num_groups, num_keep // self.num_groups
            runs = [range(first, first + size) for first in range(0, len(values), size)]
            best = [sorted(run, key=lambda expert: (values[expert], expert))[size - each :] for run in runs]
            keep[name] = sorted(expert for run in best for expert in run)
        return keep

    @torch.no_grad()
    def score(
        self, model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], context: DeviceContext
    ) -> dict[str, list[float]]:
        """Return the score of every expert of the dense model, by the full name of its list, with one layer on the device at a
        time: the mean of router weight times output norm over the expert's tokens. Source: REAP (Lasby et al. 2025), Eq. 9.
        """
        firsts, scores = [groups[0] for groups in self.lists.values()], dict[str, list[float]]()
        for step in stream_layers(model, batches, context, self.label):
            groups = select_groups(firsts, step.name)
            lists: list[Any] = [step.layer.get_submodule(group.mixture) for group in groups]
            # of norms, of tokens
            sums = [torch.zeros(2, experts.num_experts, dtype=torch.float64) for experts in lists]
            with ExitStack() as stack:
                for experts in lists:  # they run again, on what they saw
                    stack.enter_context(widen_weights(experts, context.widened))
                seen = stack.enter_context(record(step.layer, groups))
                for flow in step.flows:
                    call = flow.advance(step.index, step.layer, context)
                    for group, experts, total in zip(groups, lists, sums, strict=True):
                        _add_norms(total, experts, seen.arguments[group.mixture], call.tokens.flatten())
            for group, total in zip(groups, sums, strict=True):
                norms, tokens = sum_over_ranks(total)
                scores[group.output_name] = (norms / tokens.clamp(min=1)).tolist()
        return scores


def _add_norms(total: Tensor, experts: Any, args: Sequence[Tensor], counted: Tensor) -> None:
    """Add every expert's sum of router weight times output norm over the counted tokens, and their number, shape [2, experts].

    :param args: hidden states of all tokens, experts chosen for each and their weights
    :param counted: mask of the tokens that count, shape [tokens], bool
    """
    hidden, chosen, weights = (part[counted.to(part.device)] for part in args)
    for expert in chosen.unique().tolist():
        tokens, place = torch.where(chosen == expert)
        norms = experts[expert](hidden[tokens]).float().norm(dim=1)
        total[0, expert] += float((weights[tokens, place].float() * norms).sum(dtype=torch.float64))
        total[1, expert] += len(tokens)


def find_entire_experts(
    model: PreTrainedModel, groups: Sequence[UnitGroup], others: Sequence[Any]
) -> EntireExperts | None:
    """Return the entire experts that may go from a model, whose mixtures have been split; None where it has none.

    :param groups: of the channels of experts
    :param others: the recipe's other modifiers
    :raises ValueError: the message says why experts cannot go
    """
    lists: dict[str, list[UnitGroup]] = {}
    for group in groups:
        lists.setdefault(group.output_name, []).append(group)
    if not lists:
        return None
    layers = [layer for _, layer in find_decoder_layers(model)]
    sizes = sorted(experts.num_experts for layer in layers for _, experts in list_experts(layer))
    if sizes[0] != sizes[-1]:
        raise ValueError(f"layers have {sizes[0]} to {sizes[-1]} experts")
    if sorted(map(len, lists.values())) != sizes:
        raise ValueError("targets or ignore leave some experts out")
    if any(isinstance(other, REAPPruningModifier) for other in others):
        raise ValueError("REAPPruningModifier removes some in the same recipe")
    counts, num_groups = list_counts(model.config.get_text_config(decoder=True), sizes[0])
    if len(counts) < 2:
        raise ValueError(f"all {sizes[0]} experts of a layer must stay for its routing")
    experts = [model.get_submodule(f"{name}.{members[0].entry}") for name, members in lists.items()]
    costs = [sum(parameter.numel() for parameter in expert.parameters()) for expert in experts]
    routing = find_routing(model)
    tensors = [tensor for layer in layers for name, tensor in layer.named_parameters() if name in routing.tensors]
    entries = sum(tensor.numel() // sizes[0] for tensor in tensors)
    return EntireExperts(lists, [*counts], costs, entries, routing=routing, num_groups=num_groups)


def count_experts(model: nn.Module, groups: Sequence[UnitGroup]) -> None:
    """Set the configuration's number of experts to those that are left: the pruned class is built with it. A later modifier (REAP)
    sets the number itself only afterwards.

    :param groups: of the channels of experts, before any expert went
    """
    before = Counter(group.output_name for group in groups)
    left = {name: cast(Any, model.get_submodule(name)).num_experts for name in before}
    if left != before and len({*left.values()}) == 1:
        config: Any = model.config
        setattr(config.get_text_config(decoder=True), find_routing(model).key, next(iter(left.values())))
