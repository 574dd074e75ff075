"""Conversion of a pruned checkpoint to other forms: for stock classes, and for llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from struprune_plugin.export import stock_config
from struprune_plugin.export.any_class import grow_padded, release_heads, replace_conv1d
from struprune_plugin.export.convert import adopt_stock, carry_files, keep_generation_settings
from struprune_plugin.export.llama_cpp_gguf import FILE_NAME, check_gguf, write_gguf
from struprune_plugin.model.experts import take_apart
from struprune_plugin.model.groups import find_groups
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.locate import is_pruned, make_dense_config
from struprune_plugin.model.surgery import grow_group
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.runtime.torch_state import reset_torch
from struprune_plugin.storage.checkpoint import load_whole, read_config

Form = Literal["uniform-padded", "gguf"]
_ALIGNED = 8  # widths of experts are multiples of it: torch's kernels for packed experts need strides of 16 bytes


@reset_torch()
def convert_folder(source: Path, form: Form, output: Path, trust_remote_code: bool = False) -> None:
    """Write a pruned folder in another form, with the same function and other shapes.

    - ``uniform-padded``: all layers padded with zeros to the largest; stock classes load it
    - ``gguf``: one file for llama.cpp with per-layer FFN widths and heads, values padded to the width of keys

    :param output: an empty folder
    :param trust_remote_code: run the code that comes with the folder, which a class outside transformers needs
    :raises ValueError: the folder is not a pruned one in the per-layer form, is not whole, is quantised, or cannot be converted
    """
    read_config(str(source), trust_remote_code=trust_remote_code)  # refuses in its own words
    model = load_whole(AutoModelForCausalLM, str(source), dtype="auto", trust_remote_code=trust_remote_code)
    if not is_pruned(type(model)):
        raise ValueError(
            f"{source}: must be a pruned folder in the per-layer form, got a stock {type(model).__name__}. It "
            "loads as it is, without a conversion."
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"{source}: must not be quantised, got a quantised model. Convert the unquantised output, and quantise afterwards."
        )
    if form == "gguf":
        config = make_dense_config(model.config)
        check_gguf(config, source / "tokenizer.json")
        grow_padded(model)
        write_gguf(model, config, source, output / FILE_NAME)
        return
    _pad_layers(model)
    with keep_generation_settings():
        model.save_pretrained(output)
    carry_files(str(source), output, model.config)


def _pad(model: PreTrainedModel, groups: Sequence[UnitGroup], wanted: Sequence[int]) -> None:
    """Grow groups of heads or channels in place to at least ``wanted`` units each, by zeros after the present ones."""
    for group, num_units in zip(groups, wanted, strict=True):
        if group.num_units < num_units:
            layer, present = model.get_submodule(group.layer_name), torch.arange(group.num_units)
            grow_group(layer, group.resize(num_units), present)


def _pad_layers(model: PreTrainedModel) -> None:
    """Pad values to the dense width, heads to the largest number of any layer, FFNs of equal dense width to a common width."""
    dense, changes = stock_config.build_stock(model, {})[0], dict[str, int]()
    replace_conv1d(dense)
    release_heads(model)
    grow_padded(model)
    now, before = stock_config.list_sizes(model), stock_config.list_sizes(dense)
    if any(size.num_heads < dense_size.num_heads for size, dense_size in zip(now, before, strict=True)):
        most, every = (max(size.num_key_value_heads for size in sizes) for sizes in (now, before))
        heads = next(count for count in range(most, every + 1) if stock_config.can_hold_heads(model, count))
        changes = stock_config.change_heads(model, heads)
        groups = find_groups(model, "head", prune_ffn=False)
        _pad(model, groups, [heads] * len(groups))
    whole = [group.num_units for group in _list_ffns(dense)]
    if whole:
        groups, widths = _list_ffns(model), dict[int, int]()
        for group, wide in zip(groups, whole, strict=True):
            width = min(-(-group.num_units // _ALIGNED) * _ALIGNED, wide) if group.mixture else group.num_units
            widths[wide] = max(widths.get(wide, 0), width)
        _pad(model, groups, [widths[wide] for wide in whole])
    try:
        config = stock_config.find_stock_config(model, changes)
    except ValueError:  # no key of the configuration holds the width
        if not whole:
            raise
        _pad(model, _list_ffns(model), whole)
        config = stock_config.find_stock_config(model, changes)
    adopt_stock(model, config)


def _list_ffns(model: PreTrainedModel) -> list[UnitGroup]:
    """Return the groups of a model's FFNs and of its experts, which are split in place; empty where it has none."""
    structure = find_structure(model)
    if structure.has_experts:
        take_apart(model)
    has_ffns = any(kind.ffns for kind in structure.kinds)
    return find_groups(model, "none", prune_experts=True) if has_ffns or structure.has_experts else []
