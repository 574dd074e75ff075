"""Stock configurations of modules that shrink by tensors and numbers of their own, found by comparing instances of a class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import combinations

import torch
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.export.stock_config import build_stock
from struprune_plugin.model.groups import list_groups
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.locate import is_pruned, read_numbers
from struprune_plugin.model.surgery import pick_first, slice_group
from struprune_plugin.model.unit_kind import UnitKind, list_kinds

Sizes = dict[str, tuple[float, ...]]  # shapes of tensors and numbers of modules, by name


def list_resized_kinds(model: PreTrainedModel) -> list[UnitKind]:
    """Return the kinds of a model's units whose modules shrink by tensors and numbers of their own."""
    present = {unit.kind for layout in find_structure(model).kinds for unit in layout.units if unit.by_name}
    return [kind for kind in list_kinds() if kind.kind in present]


def find_obstacle(model: PreTrainedModel, kind: UnitKind) -> str:
    """Return why a model's stock class cannot have fewer units of a kind in every layer; empty where it can."""
    try:
        groups = list_groups(build_stock(model, {})[0], [kind])
        if len({group.num_units for group in groups}) > 1:
            return "layers have different numbers of them"
        find_unit_changes(model, {kind.kind: groups[0].num_units - groups[0].num_blocks})
    except ValueError as error:
        return str(error)
    return ""


def can_hold_units(model: PreTrainedModel, pool: str, num_keep: int) -> bool:
    """Return whether a model's stock class can have ``num_keep`` of the resized units of a pool in every layer."""
    kinds = [kind.kind for kind in list_resized_kinds(model) if kind.pool == pool]
    try:
        find_unit_changes(model, dict.fromkeys(kinds, num_keep))
    except ValueError:
        return False
    return True


def read_unit_changes(model: PreTrainedModel) -> dict[str, int]:
    """Return the configuration's changes for the resized units that a model has now.

    :raises ValueError: layers have different numbers of them, or the class cannot have these
    """
    kinds = list_resized_kinds(model)
    counts = {kind.kind: {group.num_units for group in list_groups(model, [kind])} for kind in kinds}
    for name, numbers in counts.items():
        if len(numbers) > 1:
            raise ValueError(f"layers have different numbers of {name}: {', '.join(map(str, sorted(numbers)))}")
    return find_unit_changes(model, {name: next(iter(numbers)) for name, numbers in counts.items()})


def are_units_alike(model: PreTrainedModel) -> bool:
    """Return whether a model's resized units are all those of its stock class and configuration."""
    try:
        return not is_pruned(type(model)) or not read_unit_changes(model)
    except ValueError:
        return False


@torch.no_grad()
def find_unit_changes(model: PreTrainedModel, num_keep: Mapping[str, int]) -> dict[str, int]:
    """Return the configuration's changes with which the stock class has fewer units in every layer; empty where none goes.

    A dense instance is sliced on the meta device. The changes are the fewest keys of the text configuration for which the class
    makes every tensor and every number of a module as they are there, so that it computes the same from the same weights.

    :param num_keep: numbers of units by kind
    :raises ValueError: there are no such keys; the message says what differs
    """
    kinds = [kind for kind in list_resized_kinds(model) if kind.kind in num_keep]
    if not kinds:
        return {}
    dense = build_stock(model, {})[0]
    groups = [group for group in list_groups(dense, kinds) if num_keep[group.kind] != group.num_units]
    if not groups:
        return {}
    sliced = deepcopy(dense)
    for group in groups:
        slice_group(sliced.get_submodule(group.layer_name), group, pick_first(group, num_keep[group.kind]))
    before, wanted = _list_sizes(dense), _list_sizes(sliced)
    moved = {name for name in wanted if wanted[name] != before[name]}
    pairs = {pair for name in moved for pair in zip(before[name], wanted[name], strict=True) if pair[0] != pair[1]}
    text = dense.config.get_text_config(decoder=True).to_dict()
    keys = [(key, int(new)) for key, value in text.items() if type(value) is int for old, new in pairs if value == old]
    best, problem = len(moved), "no key of the configuration sets their number alone"
    for changes in _list_changes(model, sorted(keys), before, moved):
        try:
            built = _list_sizes(build_stock(model, changes)[0])
        except ValueError:
            continue
        differing = [name for name in wanted if built.get(name) != wanted[name]]
        if not differing:
            return changes
        if len(differing) < best:
            name = differing[0]
            best, problem = (
                len(differing),
                f"{name} would have to be {wanted[name]}, got {built.get(name)} of {changes}",
            )
    raise ValueError(problem)


def _list_changes(
    model: PreTrainedModel, keys: list[tuple[str, int]], before: Sizes, moved: set[str]
) -> Iterator[dict[str, int]]:
    """Yield changes to try, the fewest keys first, of those keys that change nothing but ``moved`` where one alone can change."""
    left = list[tuple[str, int]]()
    for key, value in keys:
        try:
            built = _list_sizes(build_stock(model, {key: value})[0])
        except ValueError:  # it may need another key beside it
            left.append((key, value))
            continue
        changed = {name for name, size in before.items() if built.get(name) != size}
        left += [(key, value)] if changed and changed <= moved else []
    for count in range(1, len(left) + 1):
        for several in combinations(left, count):
            if len(dict(several)) == count:
                yield dict(several)


def _list_sizes(model: nn.Module) -> Sizes:
    """Return the shapes of a model's parameters and buffers, and the numbers that its modules store, by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    numbers = ((f"{path}.{n}", v) for path, module in model.named_modules() for n, v in read_numbers(module).items())
    return {name: (*tensor.shape,) for name, tensor in tensors} | {name: (value,) for name, value in numbers}
