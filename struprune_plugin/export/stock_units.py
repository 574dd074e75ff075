"""Stock configurations of modules that shrink by tensors and numbers of their own, found by comparing instances of a class."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import combinations

import torch
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.export.any_class import build_dense
from struprune_plugin.export.stock_config import build_stock
from struprune_plugin.model.groups import list_groups
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.locate import find_stock, make_dense_config, read_numbers
from struprune_plugin.model.structure.shrinking import shrink_config
from struprune_plugin.model.structure.tiny import prove_once
from struprune_plugin.model.surgery import pick_first, slice_group
from struprune_plugin.model.unit_kind import UnitKind, list_kinds

Sizes = dict[str, tuple[float, ...]]  # shapes of tensors and numbers of modules, by name


def list_resized_kinds(model: PreTrainedModel) -> list[UnitKind]:
    """Return the kinds of a model's units whose modules shrink by tensors and numbers of their own."""
    present = {unit.kind for unit in find_structure(model).list_units() if unit.by_name}
    return [kind for kind in list_kinds() if kind.kind in present]


def find_obstacle(model: PreTrainedModel, kind: UnitKind) -> str:
    """Return why a model's stock class cannot have fewer units of a kind in every layer; empty where it can."""
    try:
        find_keys(model, kind)
    except ValueError as error:
        return str(error)
    return ""


def can_hold_units(model: PreTrainedModel, pool: str, num_keep: int) -> bool:
    """Return whether a model's stock class can have ``num_keep`` of the resized units of a pool in every layer."""
    try:
        for kind in list_resized_kinds(model):
            if kind.pool == pool:
                change_units(model, kind, num_keep)
    except ValueError:
        return False
    return True


def read_unit_changes(model: PreTrainedModel) -> dict[str, int]:
    """Return the configuration's changes for the resized units that a model has now.

    :raises ValueError: layers have different numbers of them, or the class cannot have these
    """
    changes = dict[str, int]()
    for kind in list_resized_kinds(model):
        numbers = {group.num_units for group in list_groups(model, [kind])}
        if len(numbers) > 1:
            raise ValueError(f"layers have different numbers of {kind.kind}: {', '.join(map(str, sorted(numbers)))}")
        changes |= change_units(model, kind, numbers.pop())
    return changes


def change_units(model: PreTrainedModel, kind: UnitKind, num_keep: int) -> dict[str, int]:
    """Return the configuration's changes with which the stock class has so many units of a kind in every layer; empty for all.

    :raises ValueError: no keys set their number, or the class cannot have this one
    """
    dense, config = build_stock(model, {})
    whole, text = list_groups(dense, [kind])[0].num_units, config.get_text_config(decoder=True)
    if num_keep == whole:
        return {}
    products = {key: getattr(text, key) * num_keep for key in find_keys(model, kind)}
    if any(product % whole for product in products.values()):
        raise ValueError(f"{', '.join(products)} cannot be {num_keep} of {whole} parts of what they are")
    changes = {key: product // whole for key, product in products.items()}
    build_stock(model, changes)
    return changes


def find_keys(model: PreTrainedModel, kind: UnitKind) -> list[str]:
    """Return the keys of the text configuration that set the number of units of a kind in every layer, and are proportional to it;
    found on a tiny instance, once per class and configuration.

    :raises ValueError: there are no such keys; the message says what differs
    """
    model_class, config = find_stock(type(model)), make_dense_config(model.config)
    tiny = shrink_config(config)
    return prove_once(
        f"keys of {kind.kind}", model_class, config, lambda: _search_keys(build_dense(model_class, tiny), kind)
    )


@torch.no_grad()
def _search_keys(model: PreTrainedModel, kind: UnitKind) -> list[str]:
    """Return the fewest keys for which the class makes every tensor and every number of a module as they are in an instance that
    is sliced on the meta device, so that it computes the same from the same weights."""
    groups = list_groups(model, [kind])
    whole, num_keep = groups[0].num_units, groups[0].num_units - groups[0].num_blocks
    if any(group.num_units != whole for group in groups):
        raise ValueError("layers have different numbers of them")
    sliced = deepcopy(model)
    for group in groups:
        slice_group(sliced.get_submodule(group.layer_name), group, pick_first(group, num_keep))
    before, wanted = _list_sizes(model), _list_sizes(sliced)
    moved = {name for name in wanted if wanted[name] != before[name]}
    old = {size for name in moved for size, new in zip(before[name], wanted[name], strict=True) if size != new}
    text = model.config.get_text_config(decoder=True).to_dict()
    values = {key: value * num_keep // whole for key, value in text.items() if type(value) is int and value in old}
    best, problem = len(moved), "no key of the configuration sets their number alone"
    for changes in _list_changes(model, dict(sorted(values.items())), before, moved):
        try:
            built = _list_sizes(build_stock(model, changes)[0])
        except ValueError:
            continue
        differing = [name for name in wanted if built.get(name) != wanted[name]]
        if not differing:
            return [*changes]
        if len(differing) < best:
            best, name = len(differing), differing[0]
            problem = f"{name} would have to be {wanted[name]}, got {built.get(name)} of {changes}"
    raise ValueError(problem)


def _list_changes(
    model: PreTrainedModel, values: Mapping[str, int], before: Sizes, moved: set[str]
) -> Iterator[dict[str, int]]:
    """Yield changes to try, the fewest keys first, of those keys that change nothing but ``moved`` where one alone can change."""
    left = dict[str, int]()
    for key, value in values.items():
        try:
            built = _list_sizes(build_stock(model, {key: value})[0])
        except ValueError:  # it may need another key beside it
            left[key] = value
            continue
        changed = {name for name, size in before.items() if built.get(name) != size}
        left |= {key: value} if changed and changed <= moved else {}
    for count in range(1, len(left) + 1):
        yield from map(dict, combinations(left.items(), count))


def _list_sizes(model: nn.Module) -> Sizes:
    """Return the shapes of a model's parameters and buffers, and the numbers that its modules store, by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    numbers = ((f"{path}.{n}", v) for path, module in model.named_modules() for n, v in read_numbers(module).items())
    return {name: (*tensor.shape,) for name, tensor in tensors} | {name: (value,) for name, value in numbers}
