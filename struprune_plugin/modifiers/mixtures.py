"""Whole experts in a budget: how many may be kept per layer, and the share of channels, FFNs and values to remove beside them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.pruning import REAPPruningModifier
from transformers import PreTrainedModel

from struprune_plugin.allocation.whole_experts import Mixture
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.model.experts import list_experts
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.model.structure.routing import find_routing, list_counts
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.widths import Rounding, measure_groups
from struprune_plugin.pruning.config import KeptExperts, UnitAllocation
from struprune_plugin.runtime.distributed import check_one_process
from struprune_plugin.storage.records import ExpertsRecord


def find_mixture(
    recipe: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup], others: Sequence[Modifier] = ()
) -> Mixture | None:
    """Return the whole experts that a recipe may remove; None if it removes none.

    :param groups: groups that the recipe selects
    :param others: modifiers in the recipe
    :raises ValueError: no expert can be removed, or not the same number from every layer; another setting conflicts
    """
    if recipe.experts is None or not recipe.experts.drops:
        return None
    asked = f"experts: {recipe.experts.units}"
    lists: dict[str, list[UnitGroup]] = {}
    for group in groups:
        if group.experts:
            lists.setdefault(group.output_name, []).append(group)
    there = {
        f"{name}.{own}": members.num_experts
        for name, layer in find_decoder_layers(model)
        for own, members in list_experts(layer)
    }
    problem = ""
    if not lists:
        problem = "needs a mixture whose experts can be removed, and the model has none. Remove it"
    elif {name: len(members) for name, members in lists.items()} != there:
        problem = (
            "must cover the experts of all layers, and targets or ignore leave some out. Remove targets and ignore"
        )
    elif len({len(members) for members in lists.values()}) > 1:
        problem = "needs the same number of experts in every layer, and the model has different numbers. Set `experts: channels`"
    elif any(isinstance(other, REAPPruningModifier) for other in others):
        problem = "cannot be combined with REAPPruningModifier, which removes experts, too. Remove one of the two"
    elif recipe.only_plans:
        problem = "cannot be combined with a SparsityAllocatorModifier stage. Remove that stage"
    elif recipe.experts.units == "both" and not recipe.allocation.weighs_errors:
        problem = f"needs a rule that compares errors, got `allocation: {recipe.allocation.rule}`. Set `allocation: error_curve`"
        if getattr(recipe, "output", "") == "uniform":
            problem = (
                "needs layers of several sizes, got `output: uniform`. Set `experts: whole` or `experts: channels`"
            )
    if problem:
        raise ValueError(f"`{asked}` {problem}.")
    check_one_process(asked, "Set `experts: channels`, or run one process.")
    routing, firsts = find_routing(model), [members[0] for members in lists.values()]
    total = len(lists[firsts[0].output_name])
    counts, num_groups = list_counts(model.config.get_text_config(decoder=True), total)
    layers = {name: dict(layer.named_parameters()) for name, layer in find_decoder_layers(model)}
    cost = sum(
        parameter.numel()
        for first in firsts
        for name, parameter in layers[first.layer_name].items()
        if name.startswith(f"{first.experts}.{first.expert_index}.")
    )
    return Mixture(routing, lists, list(counts), num_groups, cost)


@dataclass(frozen=True)
class Split:
    """Split of a budget between whole experts and other units.

    :param left: kept experts per layer
    :param share: share of the other groups' parameters to remove
    """

    left: int
    share: float


def list_splits(mixture: Mixture, size: Callable[[int], Sequence[GroupSize]], asked: float) -> list[Split]:
    """Return the splits that meet a budget or, if none does, the nearest ones to within half an expert of every layer.

    :param size: returns the sizes of the other groups for a number of kept experts
    :param asked: parameters to remove
    :raises ValueError: that many parameters cannot be removed
    """
    found, misses = [], []
    for left in mixture.counts:
        sizes, wanted = size(left), asked - mixture.count_gone(left)
        taken = min(max(wanted, 0.0), sum(group.max_removable for group in sizes))
        total = sum(group.num_parameters for group in sizes)
        found.append(Split(left, taken / total if total else 0.0))
        misses.append((abs(wanted - taken), wanted))
    if misses[-1][1] > 0 and misses[-1][0] > mixture.num_groups * mixture.cost / 2:
        raise ValueError(
            f"sparsity: {asked:,.0f} parameters are to be removed, and experts and the other units have only "
            f"{asked - min(misses)[0]:,.0f} removable ({mixture.counts[-1]} of {mixture.counts[0]} experts of a layer must stay). "
            "Lower sparsity, or prune more kinds of units."
        )
    least = min(misses)[0]
    return [split for split, (miss, _) in zip(found, misses, strict=True) if miss <= least + 0.5]


def pick_even(mixture: Mixture, splits: Sequence[Split], share: float) -> Split:
    """Return the split whose share of removed experts is nearest to ``share``."""
    return min(splits, key=lambda split: abs(1 - split.left / mixture.counts[0] - share))


def measure_others(
    recipe: StructuredModifier,
    groups: Sequence[UnitGroup],
    roundings: Mapping[str, Rounding],
    kept: Mapping[str, Sequence[int]] | int,
) -> list[GroupSize]:
    """Return the group sizes for allocation beside whole experts; kept experts are included if their channels may be pruned.

    :param kept: kept experts by their list, or their number
    """
    assert recipe.experts is not None
    own = [group for group in groups if not group.experts]
    if recipe.experts.units == "both":
        own += [
            group
            for group in groups
            if group.experts
            and (group.expert_index < kept if isinstance(kept, int) else group.expert_index in kept[group.output_name])
        ]
    return measure_groups(own, roundings)


@dataclass(frozen=True)
class Dropped:
    """Model from which experts were removed as evenly as a budget allows.

    :param sizes: sizes of the remaining groups, for the rest of the budget
    :param share: share of their parameters to remove for it
    :param told: text that says how many experts are kept
    """

    model: PreTrainedModel
    groups: list[UnitGroup]
    sizes: list[GroupSize]
    share: float
    told: str


def drop_evenly(
    recipe: StructuredModifier,
    model: PreTrainedModel,
    groups: Sequence[UnitGroup],
    roundings: Mapping[str, Rounding],
    asked: float,
) -> Dropped | None:
    """Return a copy of a model without the last experts of every layer, to count from shapes; None if none may be removed.

    :param asked: parameters to remove
    :raises ValueError: the budget cannot be met
    """
    mixture = find_mixture(recipe, model, groups)
    if mixture is None:
        return None

    def measure(left: int) -> list[GroupSize]:
        return measure_others(recipe, groups, roundings, left)

    total, copied = mixture.counts[0], copy.deepcopy(model)
    everything = total * mixture.cost + sum(g.num_units * g.unit_cost for g in groups if not g.experts)
    split = pick_even(mixture, list_splits(mixture, measure, asked), asked / everything)
    for members in mixture.lists.values():
        layer = copied.get_submodule(members[0].layer_name)
        mixture.routing.drop(layer, members[0].experts, range(split.left))
    left = [group for group in groups if not group.experts or group.expert_index < split.left]
    told = (
        f"{split.left} of {total} stay in every layer"
        if recipe.experts and recipe.experts.units == "whole"
        else (f"whole ones of {total} in every layer, or channels of all, whichever costs least")
    )
    return Dropped(copied, left, measure(split.left), split.share, told)


def describe_experts(mixture: Mixture | None, kept: KeptExperts | None) -> list[ExpertsRecord]:
    """Return the manifest's records of the kept whole experts."""
    if mixture is None or kept is None:
        return []
    each = mixture.cost // len(mixture.lists)
    return [
        ExpertsRecord(name, members[0].layer_index, len(members), [*keep], (len(members) - len(keep)) * each)
        for (name, members), keep in zip(mixture.lists.items(), kept.keep.values(), strict=True)
    ]


def tell_lost_experts(model: PreTrainedModel, groups: Sequence[UnitGroup], plan: UnitAllocation | None) -> None:
    """Set the configuration's number of experts to those that a later modifier (REAP) has left: it sets the number itself only
    after the pruned class has been built.

    :param groups: groups of the pruning stage
    :param plan: its plan; one that removes experts itself sets their number, too
    """
    if plan is not None and plan.experts is not None:
        return
    before = Counter(group.output_name for group in groups if group.experts)
    left = {name: cast(Any, model.get_submodule(name)).num_experts for name in before}
    if any(left[name] < before[name] for name in before) and len(set(left.values())) == 1:
        setattr(model.config.get_text_config(decoder=True), find_routing(model).key, next(iter(left.values())))


def find_whole(recipe: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    """Return the shared experts that keep all channels and are re-solved after the routed experts beside them.

    :param groups: groups that the recipe selects
    """
    update, lists = recipe.weight_update, {(g.layer_name, g.join.block) for g in groups if g.experts}
    if not lists or not update.solves or update.refines:
        return []
    chosen = {group.name for group in groups}
    found = find_groups(model, recipe.attention_unit, True, recipe.targets, recipe.ignore, True)
    beside = [group for group in found if group.join.block and not group.experts]
    return [group for group in beside if group.name not in chosen and (group.layer_name, group.join.block) in lists]
