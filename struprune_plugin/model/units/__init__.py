"""Groups of coupled units of every decoder layer.

Moments and weights outside ``struprune_plugin.model`` have the consumer's columns in *unit order*: those of one unit are adjacent.
Activations have them in the module's order (:meth:`UnitGroup.to_unit_order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from compressed_tensors.utils import match_name
from torch import Tensor, nn

from struprune_plugin.model.layers import find_decoder_layers, find_layouts, find_linear
from struprune_plugin.model.structure.layout import LayerLayout
from struprune_plugin.model.units.group import UnitGroup, UnitKind, count_unit_parameters
from struprune_plugin.model.units.kinds import EXPERT, FFN, HEAD, VALUE, describe_groups, describe_heads

AttentionUnit = Literal["head", "value_channels", "none"]
ATTENTION_UNITS: dict[str, tuple[UnitKind, ...]] = {"head": (HEAD,), "value_channels": (VALUE,), "none": ()}


def find_groups(
    model: nn.Module,
    attention_unit: AttentionUnit,
    prune_ffn: bool = True,
    targets: Sequence[str] = ("re:.*",),
    ignore: Sequence[str] = (),
    prune_experts: bool = False,
) -> list[UnitGroup]:
    """Return the groups of coupled units to prune, in the order in which the model computes them, those beside experts last.

    :param targets: names of consuming linears, exact or ``re:<pattern>``, as in llm-compressor's recipes
    :param ignore: the same, for linears that are not pruned
    :param prune_experts: whether channels of experts are pruned; the experts have been split
    :raises ValueError: unsupported architecture; a target or the whole choice matches nothing
    """
    groups = list[UnitGroup]()
    kinds = [*ATTENTION_UNITS[attention_unit], *([FFN] if prune_ffn else []), *([EXPERT] if prune_experts else [])]
    layers = zip(find_layouts(model), find_decoder_layers(model), strict=True)
    for index, ((layer, layout), (name, _)) in enumerate(layers):
        costs: dict[str, int] = {}  # per unit: experts of a layer are alike
        for group in sort_groups([group for kind in kinds for group in describe_groups(kind, layout, layer)]):
            key = group.experts or group.consumer
            cost = costs[key] = costs.get(key) or count_unit_parameters(layer, group)
            groups.append(replace(group, layer_index=index, layer_name=name, unit_cost=cost))
    for field, target in (*(("targets", name) for name in targets), *(("ignore", name) for name in ignore)):
        if groups and not any(match_name(group.name, target) for group in groups):
            raise ValueError(
                f"{field}: {target!r} must match the consuming linear of a module to prune, got no match "
                f"({len(groups)} candidates, the first is {groups[0].name!r}). Correct the name or the pattern."
            )
    chosen = [group for group in groups if any(match_name(group.name, target) for target in targets)]
    chosen = [group for group in chosen if not any(match_name(group.name, target) for target in ignore)]
    if not chosen:
        raise ValueError(
            "targets: at least one module must be left to prune, got none "
            f"(attention_unit={attention_unit}, prune_ffn={prune_ffn}). Choose a unit or widen targets."
        )
    return chosen


def sort_groups(groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    """Return groups in pruning order: layer by layer; in a layer attention, FFNs, experts, shared experts beside these."""

    def rank(group: UnitGroup) -> tuple[int, bool, bool, bool]:
        is_beside = bool(group.join.block) and not group.experts
        return group.layer_index, is_beside, bool(group.experts), group.unit.is_ffn

    return sorted(groups, key=rank)


def list_head_weights(layer: nn.Module, layout: LayerLayout) -> list[Tensor]:
    """Return the weights of every head (rows of Q, K and V, columns of O), flattened, one tensor per (KV) head."""
    group = describe_heads(layout, layer)
    parts = []
    for name in group.producers:
        weight, owners = find_linear(layer, name).weight.detach(), group.find_row_owners(name)
        parts.append(weight[owners.argsort(stable=True).to(weight.device)].unflatten(0, (group.num_units, -1)))
    parts.append(find_linear(layer, group.consumer).weight.detach().T.unflatten(0, (group.num_units, -1)))
    return [torch.cat([part[head].flatten() for part in parts]) for head in range(group.num_units)]
