"""Search for the stock configuration of a model whose layers all have the same sizes, by trying its keys."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from loguru import logger
from transformers import PreTrainedConfig, PreTrainedModel

from struprune_plugin.export.any_class import (
    Shapes,
    build_dense,
    copy_settings,
    list_differences,
    list_shapes,
    list_stock_shapes,
    replace_conv1d,
)
from struprune_plugin.model.experts import list_packed_shapes
from struprune_plugin.model.groups import list_groups
from struprune_plugin.model.layers import LayerSizes, find_layouts, measure_layer
from struprune_plugin.model.structure.locate import find_stock, make_dense_config
from struprune_plugin.model.unit_kind import UnitGroup, UnitKind, list_kinds

_PLAIN = {"block_auto_adjust_ff_dim": False}  # LFM 2 derives the width from another number by default


def list_sizes(model: PreTrainedModel) -> list[LayerSizes]:
    """Return the sizes of all decoder layers."""
    return [measure_layer(layout, layer) for layer, layout in find_layouts(model)]


def are_layers_alike(model: PreTrainedModel) -> bool:
    """Return whether a pruned model's layers all have the same sizes, values as wide as keys."""
    sizes = list_sizes(model)
    widths = {size.width for size in sizes if size.width}
    heads = {replace(size, width=0) for size in sizes if size.num_heads}
    is_whole = all(size.value_head_dim == size.head_dim for size in heads)
    return len(widths) <= 1 and len(heads) <= 1 and is_whole and _are_experts_alike(model)


def _are_experts_alike(model: PreTrainedModel) -> bool:
    """Return whether packed tensors that have one shape in the stock class have one shape in a model, split or not."""
    now, shapes = list_stock_shapes(model), dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]]()
    for name, shape in list_shapes(build_stock(model, {})[0]).items():
        if len(shape) > 2 and name in now:
            shapes.setdefault((".".join(name.split(".")[-2:]), shape), set()).add(now[name])
    return all(len(present) == 1 for present in shapes.values())


def select_configurable(model: PreTrainedModel, groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    """Return the groups without those FFNs whose width no key of the stock configuration sets, which are not pruned.

    One key sets the width of FFNs with the same name and width, and one that of all experts. Where one sets the width of experts
    and of another FFN beside them (DeepSeek V3), the two are tied.

    :raises ValueError: no group is left
    """
    sharing: dict[tuple[str, int], list[UnitGroup]] = {}  # groups whose width one key may set
    for group in groups:
        if not group.unit.is_mixer:
            sharing.setdefault((group.mixture or group.consumer, group.num_units), []).append(group)
    fixed = {group.name: problem for m in sharing.values() if (problem := _find_obstacle(model, m)) for group in m}
    beside = [group for group in groups if group.name in fixed]
    tie = next((group.tie for group in beside if group.mixture), "")
    if tie and not _find_obstacle(model, beside):
        groups = [replace(group, tie=tie) if group.name in fixed else group for group in groups]
        fixed = {}
    left = [group for group in groups if group.name not in fixed]
    if not left:
        raise ValueError(
            "`output: uniform` needs FFNs whose width a key of the stock configuration sets, got none: "
            f"{next(iter(fixed.values()))}. Set `output: per_layer`."
        )
    if fixed:
        logger.info(
            f"`output: uniform` leaves {len(fixed)} FFNs whole, the first is {next(iter(fixed))}: no key of the configuration sets "
            "their width"
        )
    return left


def _find_obstacle(model: PreTrainedModel, groups: Sequence[UnitGroup]) -> str:
    """Return why no key of the stock configuration sets the common width of FFNs; empty where one does."""
    try:
        find_stock_config(model, shapes=_list_narrower(model, groups))
    except ValueError as error:
        return str(error)
    return ""


def change_heads(model: PreTrainedModel, num_key_value_heads: int) -> dict[str, int]:
    """Return the configuration's changes for a number of value heads; empty where no head is removed."""
    dense = make_dense_config(model.config).get_text_config(decoder=True)
    sizes = next((size for size in list_sizes(model) if size.num_heads), None)
    if sizes is None:
        return {}
    num_heads = num_key_value_heads * sizes.num_heads // sizes.num_key_value_heads
    if not num_heads or num_heads == getattr(dense, "num_attention_heads", sizes.num_heads):
        return {}
    counts = {"num_attention_heads": num_heads, "num_key_value_heads": num_key_value_heads}
    return counts | {"head_dim": sizes.head_dim}


def can_hold_heads(model: PreTrainedModel, num_key_value_heads: int) -> bool:
    """Return whether a model's stock class can be configured with ``num_key_value_heads`` in every layer, and differs in the
    linears of the heads alone."""
    changes = change_heads(model, num_key_value_heads)
    if not changes:
        return True
    try:
        built, dense = (build_stock(model, keys)[0] for keys in (changes, {}))
        replace_conv1d(built)
        replace_conv1d(dense)
        sizes = [size for size in list_sizes(built) if size.num_heads]
    except ValueError:
        return False
    groups = list_groups(model, list_head_kinds())
    linears = {f"{group.layer_name}.{name}" for group in groups for name in (*group.producers, group.consumer)}
    shapes, wanted = list_shapes(built), tuple(changes.values())
    changed = {name.rpartition(".")[0] for name, shape in list_shapes(dense).items() if shapes[name] != shape}
    return changed <= linears and all((s.num_heads, s.num_key_value_heads, s.head_dim) == wanted for s in sizes)


def list_head_kinds() -> list[UnitKind]:
    """Return the kinds of mixers' units that go as a whole and whose number a configuration may state."""
    return [kind for kind in list_kinds() if kind.is_mixer and not kind.splits_blocks and kind.short_form]


def build_stock(model: PreTrainedModel, changes: Mapping[str, int]) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """Return a model of the stock class on the meta device, and its configuration with changed keys; ValueError where refused."""
    dense = make_dense_config(model.config)
    text = dense.get_text_config(decoder=True)
    try:
        for name, value in changes.items():
            setattr(text, name, value)
        values = {name: value for name, value in dense.to_dict().items() if name != "model_type"}
        config = type(dense)(**values)  # as it will be read from the file
        copy_settings(dense, config)
        return build_dense(find_stock(type(model)), config), config
    except Exception as error:  # any error of a class on sizes that it was not written for
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{type(dense).__name__}: must take {dict(changes)}, got {problem}") from None


def find_stock_config(
    model: PreTrainedModel, changes: Mapping[str, int] | None = None, shapes: Shapes | None = None
) -> PreTrainedConfig:
    """Return the stock configuration of a model with the same sizes in all layers, found by trying keys.

    :param changes: known values of the text configuration's keys
    :param shapes: shapes of the tensors; those of the model, padded linears grown, where None
    :raises ValueError: no tried values of the keys yield the shapes
    """
    shapes = list_stock_shapes(model) if shapes is None else shapes
    built, config = build_stock(model, changes or {})
    changes, before = dict(changes or {}), list_shapes(built)
    text = config.get_text_config(decoder=True).to_dict()
    plain = {name: value for name, value in _PLAIN.items() if name in text}
    problems = list_differences(shapes, before)
    pairs = (pair for name, shape in before.items() for pair in zip(shape, shapes.get(name, shape), strict=True))
    for old, new in sorted({(old, new) for old, new in pairs if old != new}):
        named = [name for name, value in text.items() if value == old and type(value) is int]
        unnamed = [name for name, value in text.items() if value is None or (plain and type(value) is int)]
        unnamed = [name for name in unnamed if name not in named]
        count = len(problems)
        for name in (*named, *unnamed):  # unnamed: a default width, or one derived from another number
            if name in unnamed and len(problems) < count:
                break
            tried = {**changes, **(plain if name in unnamed else {}), name: new}
            try:
                built, candidate = build_stock(model, tried)
            except ValueError:
                continue
            if len(rest := list_differences(shapes, list_shapes(built))) < len(problems):
                changes, problems, config = tried, rest, candidate
    if problems:
        raise ValueError(
            f"{type(config).__name__}: {changes} must give the model's shapes, got: {problems[0]}. Keep `output: per_layer`."
        )
    return config


def _list_narrower(model: PreTrainedModel, groups: Sequence[UnitGroup]) -> Shapes:
    """Return a model's stock shapes with half the channels in the FFNs of ``groups``."""
    experts = {f"{group.layer_name}.{group.mixture}" for group in groups if group.mixture}
    shapes = list_stock_shapes(model) | list_packed_shapes(model, experts)
    for group in (group for group in groups if not group.mixture):
        for name in (*group.producers, group.consumer):
            full, reads = f"{group.layer_name}.{name}", name == group.consumer
            shape = [*shapes[f"{full}.weight"]]
            axis = reads != hasattr(model.get_submodule(full), "nf")  # the stock class' Conv1D modules are transposed
            shape[axis] //= 2
            shapes[f"{full}.weight"] = tuple(shape)
            if not reads and f"{full}.bias" in shapes:
                shapes[f"{full}.bias"] = (shape[axis],)
    return shapes
