"""Conversion of a pruned checkpoint to other forms, for stock classes, readers of ``block_configs`` and llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from struprune_plugin.export import modeling_struprune as modeling
from struprune_plugin.export.any_class import (
    describe_form,
    list_padded,
    make_dense_config,
    replace_conv1d,
)
from struprune_plugin.export.convert import adopt_stock, copy_processor
from struprune_plugin.export.llama_cpp_gguf import FILE_NAME, check_gguf, write_gguf
from struprune_plugin.export.modeling_block_configs import DeciLMConfig, DeciLMForCausalLM
from struprune_plugin.export.stock_config import (
    build_stock,
    can_hold_heads,
    change_heads,
    find_stock_config,
    list_sizes,
)
from struprune_plugin.model.experts import take_apart
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.locate import is_pruned
from struprune_plugin.model.surgery import grow_group
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.storage.checkpoint import load_whole
from struprune_plugin.storage.manifest import MANIFEST_NAME, Manifest, read_manifest

Form = Literal["uniform-padded", "masked", "block_configs", "static", "gguf"]


def load_pruned(folder: Path) -> PreTrainedModel:
    """Return the model of a pruned folder, in its own dtype, on the host.

    :raises ValueError: the folder is not a pruned one in the per-layer form, or is quantised
    """
    model = load_whole(AutoModelForCausalLM, str(folder), dtype="auto")
    if not is_pruned(type(model)):
        raise ValueError(
            f"{folder}: must be a pruned folder in the per-layer form, got a stock {type(model).__name__}. It "
            "loads as it is, without a conversion."
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"{folder}: must not be quantised, got a quantised model. Convert the unquantised output, and quantise afterwards."
        )
    find_structure(model)  # refuses the static form
    return model


def convert_folder(source: Path, form: Form, output: Path) -> None:
    """Write a pruned folder in another form, with the same function and other shapes.

    - ``uniform-padded``: all layers padded with zeros to the largest; stock classes load it
    - ``masked``: the dense model's shapes, zeros in place of removed units; stock classes load it
    - ``block_configs``: per-layer FFN widths, attention padded to the dense model's, as in Nemotron NAS models
    - ``static``: per-layer sizes, linears that read the same input joined; the fewest steps in transformers
    - ``gguf``: one file for llama.cpp with per-layer FFN widths and heads, values padded to the width of keys

    :param output: an empty folder
    :raises ValueError: the class or the folder cannot be converted to that form
    """
    model = load_pruned(source)
    if describe_form(model.config) == "linears" and form != "uniform-padded":
        raise ValueError(
            f"{form}: attention must take values of any width, got padded linears of {model.config.model_type!r}. "
            "Use uniform-padded."
        )
    if form == "gguf":
        config = modeling.make_dense_config(model.config)
        check_gguf(config, source / "tokenizer.json")
        _pad_values(model)
        write_gguf(model, config, source, output / FILE_NAME)
        return
    if form == "masked":
        _restore_units(model, read_manifest(source / MANIFEST_NAME))
    elif form == "uniform-padded":
        _pad_layers(model)
    elif form == "static":
        _fuse_layers(model)
    else:
        model = _adopt_blocks(model)
    model.save_pretrained(output)
    copy_processor(str(source), output)
    if (source / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(source).save_pretrained(output)


def _grow(model: PreTrainedModel, group: UnitGroup, num_units: int, keep: torch.Tensor) -> None:
    """Grow a group in place to ``num_units``; the present units become those of ``keep``, the others are zeros."""
    grow_group(model.get_submodule(group.layer_name), group.resize(num_units), keep)


def _pad(model: PreTrainedModel, groups: Sequence[UnitGroup], wanted: Sequence[int]) -> None:
    """Grow groups in place to at least ``wanted`` units each; the present units come first in every block."""
    for group, num_units in zip(groups, wanted, strict=True):
        if group.num_units < num_units:
            per_block, present = num_units // group.num_blocks, group.num_units // group.num_blocks
            keep = torch.arange(num_units).view(group.num_blocks, per_block)[:, :present].flatten()
            _grow(model, group, num_units, keep)


def _restore_units(model: PreTrainedModel, manifest: Manifest) -> None:
    kinds = [record.kind for record in manifest.groups]
    unit: Any = next((kind for kind in kinds if kind not in ("ffn", "experts")), "none")
    if manifest.experts:
        raise ValueError(
            "masked must start from a model that has all its experts, got one that has lost some. Use uniform-padded."
        )
    if "experts" in kinds:
        take_apart(model)
    groups = {g.name: g for g in find_groups(model, unit, "ffn" in kinds, prune_experts="experts" in kinds)}
    config = make_dense_config(model.config)
    twin = build_stock(model, {})[0]
    dense = list_sizes(twin)
    largest = max(max(size.width, size.num_key_value_heads * size.head_dim) for size in dense)
    largest = max([largest, *(group.num_units for group in _list_ffns(twin))])
    for record in manifest.groups:
        group = groups.get(record.name)
        if group is None or record.kept != group.num_units or not record.num_units <= largest:
            raise ValueError(
                f"{record.name}: the manifest must describe the model's units, {group and group.num_units} of at most {largest}, "
                f"got {record.kept} of {record.num_units}. Use the manifest that was written with the model."
            )
        _grow(model, group, record.num_units, torch.tensor(record.keep))
    for (name, _), now, wanted in zip(find_decoder_layers(model), list_sizes(model), dense, strict=True):
        if now != wanted:
            raise ValueError(
                f"{name}: masked must start from a model that was pruned in one run, got sizes of an earlier "
                "run. Use uniform-padded."
            )
    adopt_stock(model, config)


def _pad_values(model: PreTrainedModel) -> None:
    sizes = list_sizes(model)
    if all(size.value_head_dim == size.head_dim for size in sizes) or list_padded(model):
        return  # padded linears grow on conversion to the stock class
    groups = find_groups(model, "value_channels", prune_ffn=False)
    _pad(model, groups, [group.num_blocks * sizes[group.layer_index].head_dim for group in groups])


def _pad_heads(model: PreTrainedModel, num_units: int) -> None:
    groups = find_groups(model, "head", prune_ffn=False)
    _pad(model, groups, [num_units] * len(groups))


def _pad_layers(model: PreTrainedModel) -> None:
    """Pad values to the width of keys, heads to the largest number of any layer, FFNs of equal dense width to a common width."""
    dense, changes = build_stock(model, {})[0], dict[str, int]()
    replace_conv1d(dense)
    now, before = list_sizes(model), list_sizes(dense)
    _pad_values(model)
    if any(size.num_heads < dense_size.num_heads for size, dense_size in zip(now, before, strict=True)):
        most, every = (max(size.num_key_value_heads for size in sizes) for sizes in (now, before))
        heads = next(count for count in range(most, every + 1) if can_hold_heads(model, count))
        changes = change_heads(model, heads)
        _pad_heads(model, heads)
    whole = [group.num_units for group in _list_ffns(dense)]
    if whole:
        groups, widths = _list_ffns(model), dict[int, int]()
        for group, wide in zip(groups, whole, strict=True):
            widths[wide] = max(widths.get(wide, 0), group.num_units)
        _pad(model, groups, [widths[wide] for wide in whole])
    try:
        config = find_stock_config(model, changes)
    except ValueError:  # no key of the configuration holds the width
        if not whole:
            raise
        _pad(model, _list_ffns(model), whole)
        config = find_stock_config(model, changes)
    adopt_stock(model, config)


def _list_ffns(model: PreTrainedModel) -> list[UnitGroup]:
    """Return the groups of a model's FFNs and of its experts, which are split in place; empty where it has none."""
    structure = find_structure(model)
    if structure.has_experts:
        take_apart(model)
    has_ffns = any(kind.ffns for kind in structure.kinds)
    return find_groups(model, "none", prune_experts=True) if has_ffns or structure.has_experts else []


def _fuse_layers(model: PreTrainedModel) -> None:
    fused = {}
    for kind in find_structure(model).kinds:
        attention = kind.attention
        if attention is not None and len(attention.producers) == 3:
            parts = {parts[0]: name for name, parts in attention.producers.items()}
            fused[f"{attention.module}.qkv_proj"] = [parts["query"], parts["key"], parts["value"]]
        for ffn in kind.ffns:
            if len(ffn.producers) == 2:
                fused[f"{ffn.output.rpartition('.')[0]}.gate_up_proj"] = list(ffn.producers)
    layout = {**model.config.layout, "fused": fused}
    modeling.fuse_layers(model, layout)
    model.config.layout = layout


def _adopt_blocks(model: PreTrainedModel) -> PreTrainedModel:
    stock = modeling.make_dense_config(model.config)
    if stock.model_type != "llama":
        raise ValueError(
            f"block_configs: the model must be a llama, whose layers that schema describes, got {stock.model_type!r}. "
            "Use uniform-padded."
        )
    _pad_values(model)
    _pad_heads(model, stock.num_key_value_heads)
    blocks = []
    for sizes in list_sizes(model):
        group = sizes.num_heads // sizes.num_key_value_heads if sizes.num_heads else None
        attention = {"no_op": group is None, "replace_with_linear": False, "n_heads_in_group": group}
        ffn = {"no_op": not sizes.width, "replace_with_linear": False, "intermediate_size": sizes.width or None}
        blocks.append({"attention": attention, "ffn": ffn})
    values = {name: value for name, value in stock.to_dict().items() if name not in ("model_type", "architectures")}
    config = DeciLMConfig(**values, block_configs=blocks)
    modeling.copy_settings(stock, config)
    adopt_stock(model, config)
    model.__class__ = DeciLMForCausalLM
    config.architectures = [DeciLMForCausalLM.__name__]
    DeciLMConfig.register_for_auto_class("AutoConfig")
    DeciLMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    return model
