"""Whole experts in a budget: how many stay in every layer, and the share of FFNs and values to remove beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from struprune_plugin.pruning.config import KeptExperts
from struprune_plugin.runtime.distributed import check_one_process
from struprune_plugin.storage.manifest import ExpertsRecord


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
    if problem:
        raise ValueError(f"`experts: whole` {problem}.")
    check_one_process("experts: whole", "Set `experts: channels`, or run one process.")
    firsts = [members[0] for members in lists.values()]
    counts, num_groups = list_counts(model.config.get_text_config(decoder=True), len(lists[firsts[0].output_name]))
    experts = [model.get_submodule(f"{first.output_name}.{first.expert_index}") for first in firsts]
    cost = sum(parameter.numel() for expert in experts for parameter in expert.parameters())
    return Mixture(find_routing(model), lists, list(counts), num_groups, cost)


def split_budget(mixture: Mixture, sizes: Sequence[GroupSize], asked: float) -> tuple[int, float]:
    """Return the number of experts that stay in a layer, and the share of the other groups' parameters to remove beside them.

    Of the numbers that meet the budget, it is the one at which experts lose a share nearest to that of all parameters. If none
    does, it is the nearest number, to within half an expert of every layer.

    :param sizes: sizes of the other groups
    :param asked: parameters to remove
    :raises ValueError: that many parameters cannot be removed
    """
    total, most = sum(size.num_parameters for size in sizes), sum(size.max_removable for size in sizes)
    even = asked / (mixture.counts[0] * mixture.cost + total)
    wanted = {left: asked - mixture.count_gone(left) for left in mixture.counts}
    taken = {left: min(max(rest, 0.0), most) for left, rest in wanted.items()}
    misses = {left: abs(wanted[left] - taken[left]) for left in mixture.counts}
    least = min(misses.values())
    if wanted[mixture.counts[-1]] > most + mixture.num_groups * mixture.cost / 2:
        raise ValueError(
            f"sparsity: {asked:,.0f} parameters are to be removed, and experts and the other units have only "
            f"{asked - least:,.0f} removable ({mixture.counts[-1]} of {mixture.counts[0]} experts of a layer must stay). "
            "Lower sparsity, or prune more kinds of units."
        )
    near = [left for left in mixture.counts if misses[left] <= least + 0.5]
    left = min(near, key=lambda count: abs(1 - count / mixture.counts[0] - even))
    return left, taken[left] / total if total else 0.0


def describe_experts(mixture: Mixture | None, kept: KeptExperts | None) -> list[ExpertsRecord]:
    """Return the manifest's records of the kept whole experts."""
    if mixture is None or kept is None:
        return []
    each = mixture.cost // len(mixture.lists)
    return [
        ExpertsRecord(name, members[0].layer_index, len(members), [*keep], (len(members) - len(keep)) * each)
        for (name, members), keep in zip(mixture.lists.items(), kept.keep.values(), strict=True)
    ]


def tell_lost_experts(model: PreTrainedModel, groups: Sequence[UnitGroup]) -> None:
    """Set the configuration's number of experts to those that are left: the pruned class is built with it. A later modifier (REAP)
    sets the number itself only afterwards.

    :param groups: groups of the pruning stage
    """
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
