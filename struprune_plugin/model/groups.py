"""Groups of coupled units of every decoder layer of a model."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from compressed_tensors.utils import match_name
from torch import nn

from struprune_plugin.model.layers import find_decoder_layers, find_layouts, find_linear
from struprune_plugin.model.unit_kind import UnitGroup, UnitKind, sort_groups


def list_groups(
    model: nn.Module, kinds: Sequence[UnitKind], targets: Sequence[str] = ("re:.*",), ignore: Sequence[str] = ()
) -> list[UnitGroup]:
    """Return the groups of coupled units to prune, in the order in which the model computes them, those beside a mixture last.

    :param kinds: kinds of units to prune; mixtures have been split for those that need it
    :param targets: names of consuming linears, exact or ``re:<pattern>``, as in llm-compressor's recipes
    :param ignore: the same, for linears that are not pruned
    :raises ValueError: unsupported architecture; a target or the whole choice matches nothing; two kinds share a module
    """
    groups = list[UnitGroup]()
    layers = zip(find_layouts(model), find_decoder_layers(model), strict=True)
    for index, ((layer, layout), (name, _)) in enumerate(layers):
        costs: dict[str, int] = {}  # per unit: entries of a mixture are alike
        for group in sort_groups([group for kind in kinds for group in kind.list_groups(layout, layer)]):
            key = group.mixture or group.consumer
            cost = costs[key] = costs.get(key) or count_unit_parameters(layer, group)
            groups.append(replace(group, layer_index=index, layer_name=name, unit_cost=cost))
    for group, other in pairwise(sorted(groups, key=lambda group: group.name)):
        if group.name == other.name:
            raise ValueError(
                f"units: a linear must be read by one kind of units, got {group.kind} and {other.kind} for {group.name}. "
                "Remove one of the two."
            )
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
            f"of the units {', '.join(kind.kind for kind in kinds) or 'none'}. Choose a unit or widen targets."
        )
    for kind in kinds:
        tied = iter(kind.tie([group for group in chosen if group.unit == kind]))
        chosen = [next(tied) if group.unit == kind else group for group in chosen]
    return chosen


def count_unit_parameters(layer: nn.Module, group: UnitGroup) -> int:
    """Return the number of parameters per unit: its rows with their biases, and its columns."""
    count = group.columns_per_unit * find_linear(layer, group.consumer).out_features
    for name in group.producers:
        producer = find_linear(layer, name)
        count += group.count_rows(name) * (producer.in_features + (producer.bias is not None))
    return count
