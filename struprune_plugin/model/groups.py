"""Groups of coupled units of every decoder layer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from compressed_tensors.utils import match_name
from torch import nn

from struprune_plugin.model.layers import find_decoder_layers, find_layouts, find_linear
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup, UnitKind, sort_groups

AttentionUnit = Literal["head", "value_channels", "none"]


def list_asked(attention_unit: AttentionUnit, prune_ffn: bool, prune_experts: bool) -> list[UnitKind]:
    """Return the kinds of units that a recipe's short forms name."""
    wanted = {attention_unit: attention_unit != "none", "ffn": prune_ffn, "experts": prune_experts}
    return [UNIT_KINDS.parse(name) for name, is_wanted in wanted.items() if is_wanted]


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
    kinds = list_asked(attention_unit, prune_ffn, prune_experts)
    layers = zip(find_layouts(model), find_decoder_layers(model), strict=True)
    for index, ((layer, layout), (name, _)) in enumerate(layers):
        costs: dict[str, int] = {}  # per unit: entries of a mixture are alike
        for group in sort_groups([group for kind in kinds for group in kind.list_groups(layout, layer)]):
            key = group.mixture or group.consumer
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


def count_unit_parameters(layer: nn.Module, group: UnitGroup) -> int:
    """Return the number of parameters per unit: its rows with their biases, and its columns."""
    count = group.columns_per_unit * find_linear(layer, group.consumer).out_features
    for name in group.producers:
        producer = find_linear(layer, name)
        count += group.count_rows(name) * (producer.in_features + (producer.bias is not None))
    return count
