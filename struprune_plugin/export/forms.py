"""Other forms of a pruned checkpoint: for stock classes, and for readers of ``block_configs``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from struprune_plugin.export import modeling_struprune as modeling
from struprune_plugin.export.convert import adopt_stock, can_hold_heads, make_uniform_config
from struprune_plugin.export.llama_cpp import FILE_NAME, check_gguf, write_gguf
from struprune_plugin.export.manifest import MANIFEST_NAME, read_manifest
from struprune_plugin.export.modeling_block_configs import DeciLMConfig, DeciLMForCausalLM
from struprune_plugin.model.families import check_model_type, find_family
from struprune_plugin.model.layers import find_decoder_layers, measure_layer
from struprune_plugin.model.surgery import grow_group
from struprune_plugin.model.units import UnitGroup, find_groups

Form = Literal["uniform-padded", "masked", "block_configs", "static", "gguf"]


def load_pruned(folder: Path) -> PreTrainedModel:
    """Load the model of a pruned folder, in its own dtype, on the host.

    :raises ValueError: no pruned folder in the per-layer form, or a quantised one
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except Exception as error:  # a broken file raises whatever its many readers met
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{folder}: must be a pruned folder that can be loaded, got: {first} Give the output of a pruning run."
        ) from None
    if not type(model).__name__.startswith(modeling.PREFIX):
        raise ValueError(
            f"{folder}: must be a pruned folder in the per-layer form, got a stock {type(model).__name__}, which loads as it is."
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"{folder}: must not be quantised, it is. Convert first, quantise afterwards.")
    find_family(model)  # refuses the static form
    return model


def convert_folder(source: Path, form: Form, output: Path) -> None:
    """Write a pruned folder in another form: the same function, other shapes.

    - ``uniform-padded``: all layers padded with zeros to the largest: stock classes load it
    - ``masked``: the dense model's shapes, zeros where units went: stock classes load it
    - ``block_configs``: every layer's own FFN width, attention padded to the dense model's, as Nemotron NAS models
    - ``static``: every layer's own sizes, linears that read the same input joined: the fewest steps in transformers
    - ``gguf``: one file for llama.cpp: every layer's own FFN width and heads, values padded to the width of keys

    :param output: an empty folder
    :raises ValueError: the family or the folder cannot take that form
    """
    model = load_pruned(source)
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
    if (source / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(source).save_pretrained(output)


def _grow(model: PreTrainedModel, group: UnitGroup, num_units: int, keep: torch.Tensor | None = None) -> None:
    """Grow a group in place; the units present come first in every block where ``keep`` does not say which they are."""
    larger = group.resize(num_units)
    if keep is None:
        per_block, present = num_units // group.num_blocks, group.num_units // group.num_blocks
        keep = torch.arange(num_units).view(group.num_blocks, per_block)[:, :present].flatten()
    grow_group(model.get_submodule(group.layer_name), larger, keep)


def _restore_units(model: PreTrainedModel, manifest: dict[str, Any]) -> None:
    settings = manifest["settings"]
    fields = (settings["attention_unit"], settings["prune_ffn"], settings["targets"], settings["ignore"])
    entries = {entry["name"]: entry for entry in manifest["groups"]}
    family, config = find_family(model), modeling.make_dense_config(model.config)
    largest = max(getattr(config, family.ffn.width_key), config.hidden_size, *_measure_heads(config))
    for group in find_groups(model, *fields):
        entry = entries.get(group.name)
        if entry is None or entry["kept"] != group.num_units or not entry["num_units"] <= largest:
            raise ValueError(
                f"{group.name}: the manifest must speak of its {group.num_units} units, of at most {largest}, got "
                f"{entry and (entry['kept'], entry['num_units'])}. Use the manifest that was written with the model."
            )
        _grow(model, group, entry["num_units"], torch.tensor(entry["keep"]))
    for name, layer in find_decoder_layers(model):
        sizes = measure_layer(family, layer)
        wanted = (config.num_attention_heads, getattr(config, family.ffn.width_key))
        if (sizes.num_heads, sizes.width or wanted[1]) != wanted or sizes.value_head_dim != sizes.head_dim:
            raise ValueError(
                f"{name}: masked must start from a model that was pruned in one run, got sizes that an earlier run made. "
                "Use uniform-padded."
            )
    adopt_stock(model, config)


def _measure_heads(config: Any) -> tuple[int, int]:
    """Return the heads of a dense model and the channels in all of them."""
    heads = config.num_attention_heads
    return heads, heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def _pad_values(model: PreTrainedModel) -> None:
    for group in find_groups(model, "vo", prune_ffn=False):
        sizes = measure_layer(find_family(model), model.get_submodule(group.layer_name))
        if sizes.value_head_dim < sizes.head_dim:
            _grow(model, group, group.num_blocks * sizes.head_dim)


def _pad_heads(model: PreTrainedModel, num_heads: int) -> None:
    for group in find_groups(model, "head", prune_ffn=False):
        if group.num_units < num_heads:
            _grow(model, group, num_heads)


def _pad_layers(model: PreTrainedModel) -> None:
    family = find_family(model)
    sizes = [measure_layer(family, layer) for _, layer in find_decoder_layers(model)]
    width = max(size.width for size in sizes)
    dense = _measure_dense_heads(model)
    most = max(size.num_key_value_heads for size in sizes)
    num_heads = next(count for count in range(most, dense + 1) if can_hold_heads(model, count))
    config = make_uniform_config(model, num_heads, width)
    _pad_values(model)
    _pad_heads(model, num_heads)
    if width:
        for group in find_groups(model, "none"):
            if group.num_units < width:
                _grow(model, group, width)
    adopt_stock(model, config)


def _fuse_layers(model: PreTrainedModel) -> None:
    family = find_family(model)
    fused = {}
    for owner, name, producers, parts in (
        (family.attention.module, "qkv_proj", family.attention.producers, 3),
        (family.ffn.output.rpartition(".")[0], "gate_up_proj", family.ffn.producers, 2),
    ):
        if len(producers) == parts:  # else the family has them joined, or nothing to join
            fused[f"{owner}.{name}"] = list(producers)
    layout = {**model.config.layout, "fused": fused}
    modeling.fuse_layers(model, layout)
    model.config.layout = layout


def _measure_dense_heads(model: PreTrainedModel) -> int:
    """Return the value heads that every layer of the dense model has."""
    config, (_, layer) = modeling.make_dense_config(model.config), find_decoder_layers(model)[0]
    sizes = measure_layer(find_family(model), layer)
    return config.num_attention_heads * sizes.num_key_value_heads // sizes.num_heads


def _adopt_blocks(model: PreTrainedModel) -> PreTrainedModel:
    stock = modeling.make_dense_config(model.config)
    if stock.model_type != "llama":
        supported = check_model_type("llama").model_types[0]
        raise ValueError(
            f"block_configs: the model must be a {supported}, whose layers that schema describes, got {stock.model_type!r}. "
            "Use uniform-padded."
        )
    _pad_values(model)
    _pad_heads(model, _measure_dense_heads(model))
    family = find_family(model)
    blocks = []
    for _, layer in find_decoder_layers(model):
        sizes = measure_layer(family, layer)
        group = sizes.num_heads // sizes.num_key_value_heads
        blocks.append(
            {
                "attention": {"no_op": False, "replace_with_linear": False, "n_heads_in_group": group},
                "ffn": {"no_op": False, "replace_with_linear": False, "intermediate_size": sizes.width},
            }
        )
    values = {name: value for name, value in stock.to_dict().items() if name not in ("model_type", "architectures")}
    config = DeciLMConfig(**values, block_configs=blocks)
    modeling.copy_settings(stock, config)
    adopt_stock(model, config)
    model.__class__ = DeciLMForCausalLM
    config.architectures = [DeciLMForCausalLM.__name__]
    DeciLMConfig.register_for_auto_class("AutoConfig")
    DeciLMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    return model
