"""Conversion of a sliced model to the class and configuration with which it is saved and loaded."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compressed_tensors.distributed import is_source_process
from loguru import logger
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from struprune_plugin.export import modeling_struprune as modeling
from struprune_plugin.export.any_class import (
    build_dense,
    describe_form,
    describe_linears,
    describe_parameters,
    grow_padded,
    keep_offload,
    list_padded,
    make_dense_config,
    mark_padded,
    restore_conv1d,
)
from struprune_plugin.export.classes import name_auto_classes, register_type
from struprune_plugin.export.custom_code import derive_beside, is_custom
from struprune_plugin.model.experts import pack_experts
from struprune_plugin.model.layers import find_layouts, find_linear, measure_layer
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.layout import LayerLayout, Structure
from struprune_plugin.model.structure.locate import find_stock
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.model.units.kinds import VALUE, describe_padding
from struprune_plugin.runtime.residence import compare_embeddings_on_host
from struprune_plugin.storage.checkpoint import find_checkpoint

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_WIDTH_KEYS = ("intermediate_size", "ffn_dim")  # in classes whose attention can be narrowed
_HOST_SAVING = "llmcompressor.transformers.compression.compressed_tensors_utils"


def describe_layout(structure: Structure, width_key: str) -> dict[str, Any]:
    """Return the layout of the layers' linears for a checkpoint with narrowed attention."""
    attention = next(kind.attention for kind in structure.kinds if kind.attention)
    ffns = [ffn for kind in structure.kinds for ffn in kind.ffns]
    rows = {**attention.producers, **{name: parts for ffn in ffns for name, parts in ffn.producers.items()}}
    return {
        "layers": structure.layers,
        "attention": attention.module,
        "rows": {name: list(parts) for name, parts in rows.items()},
        "columns": {attention.output: "attention", **{ffn.output: "ffn" for ffn in ffns}},
        "width_key": width_key,
        "interleaved": bool(attention.repeated),
    }


def can_narrow(model: PreTrainedModel) -> bool:
    """Return whether attention accepts values of any width without padding: in classes whose forward pass is rewritten for it."""
    config, structure = model.config, find_structure(model)
    if config.get_text_config(decoder=True) is not config or describe_form(config) == "linears":
        return False
    modules = {
        layout.attention and find_stock(type(_find_attention(layer, layout))) for layer, layout in find_layouts(model)
    }
    one_each = all(len(kind.ffns) <= 1 for kind in structure.kinds)
    known = all(module and module.__name__ in modeling.NARROWING for module in modules)
    return known and one_each and not is_custom(model) and not list_padded(model)


def check_heads(model: PreTrainedModel) -> None:
    """Raise where whole heads cannot be removed from the model's attention.

    :raises ValueError: heads are coupled with each other, or the attention modules do not run with fewer heads
    """
    attentions = [layout.attention for _, layout in find_layouts(model) if layout.attention]
    if not any(attention.has_heads for attention in attentions):
        problem = "has none whose heads are independent of each other"
    elif not all(attention.takes_fewer_heads for attention in attentions) and not can_narrow(model):
        problem = "has modules that do not run with fewer heads"
    elif list_padded(model):
        problem = "has lost value channels, after which whole heads cannot be removed in this class"
    else:
        return
    raise ValueError(
        f"`attention_unit: head` cannot be used with {model.config.model_type!r}, whose attention {problem}. Set "
        "`attention_unit: value_channels` or `attention_unit: none`."
    )


def adopt_attention(model: PreTrainedModel, groups: Sequence[UnitGroup]) -> None:
    """Convert the attention modules of a dense model to accept values of any width; their function does not change.

    :param groups: groups to be pruned
    """
    if can_narrow(model):
        said = describe_layout(find_structure(model), _find_width_key(model.config))
        for attention in [_find_attention(*each) for each in find_layouts(model) if each[1].attention]:
            with keep_offload(attention):
                modeling.adopt_attention(attention, said)
        return
    for group in groups:
        if group.unit is VALUE:
            layer = model.get_submodule(group.layer_name)
            spread, gather = describe_padding(group)
            linears = {name: find_linear(layer, name) for name in (*spread, group.consumer)}
            if not any(hasattr(linear, "gather") for linear in linears.values()):
                for name, linear in linears.items():
                    mark_padded(linear, spread.get(name), None if name in spread else gather)


def _find_attention(layer: nn.Module, layout: LayerLayout) -> nn.Module:
    assert layout.attention is not None
    return layer.get_submodule(layout.attention.module)


def _find_width_key(config: PreTrainedConfig) -> str:
    values = config.to_dict()
    return next(name for name in _WIDTH_KEYS if name in values)


def adopt_config(model: PreTrainedModel) -> None:
    """Convert a sliced model to its pruned class, with a configuration read from the shapes of its layers.

    :raises ValueError: a tensor outside the linears of decoder layers differs from the dense class
    """
    pack_experts(model)
    old, structure, auto_map = model.config, find_structure(model), None
    narrows = can_narrow(model)
    layout = describe_layout(structure, _find_width_key(old)) if narrows else describe_linears(model, structure.layers)
    if narrows and structure.has_experts:
        dense = build_dense(find_stock(type(model)), make_dense_config(old))
        layout |= describe_parameters(model, dense, structure.layers)
    if is_custom(model):
        config_class, model_class, auto_map = derive_beside(model)
    else:
        config_class = register_type(find_stock(type(old)))
        model_class = modeling.derive_class(modeling.PREFIX + find_stock(type(model)).__name__)
    config: Any = copy.copy(old)  # text and vision configurations stay shared with the modules
    config.__class__, config.layout = config_class, layout
    if narrows:
        _set_sizes(config, model)
    config.auto_map = auto_map or name_auto_classes(config)
    modeling.share_config(model, old, config)
    with keep_offload(model):
        model.__class__ = model_class
    config.architectures = [model_class.__name__]


def _set_sizes(config: Any, model: PreTrainedModel) -> None:
    """Set the sizes of every layer in the configuration of a model with narrowed attention."""
    sizes = [(layout, measure_layer(layout, layer)) for layer, layout in find_layouts(model)]
    config.value_head_dim = config.layout["head_dim"] = sizes[0][1].head_dim
    config.per_layer_config = None  # with that of an earlier run, single values cannot be read
    has_groups = hasattr(config, "num_key_value_heads")
    per_layer: dict[int, dict[str, Any]] = {}
    for index, (layout, size) in enumerate(sizes):
        per_layer[index] = {}
        if layout.attention:
            per_layer[index] |= {"num_attention_heads": size.num_heads, "value_head_dim": size.value_head_dim}
            if has_groups:
                per_layer[index]["num_key_value_heads"] = size.num_key_value_heads
        if layout.ffns:
            per_layer[index][config.layout["width_key"]] = size.width
    config.per_layer_config = per_layer


def adopt_stock(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Convert a model whose layers all have the sizes of a stock configuration to the stock class.

    Padded linears grow to these sizes, experts are packed.
    """
    pack_experts(model)
    old: Any = model.config
    for module in model.modules():
        if hasattr(module, "wide"):
            with keep_offload(module):
                modeling.release_attention(module)
    for linear in list_padded(model):
        grow_padded(linear)
    restore_conv1d(model)
    modeling.copy_settings(old, config)
    parts = [(old, config), *((getattr(old, key, None), getattr(config, key, None)) for key in config.sub_configs)]
    for before, after in parts:
        if before is not None:
            modeling.share_config(model, before, after)
    with keep_offload(model):
        model.__class__ = find_stock(type(model))
    config.architectures = [type(model).__name__]
    if is_custom(model):  # saved with its original code
        type(config).register_for_auto_class("AutoConfig")
        type(model).register_for_auto_class("AutoModelForCausalLM")


def copy_processor(source: str, output: Path) -> None:
    """Copy the image processor's files of a wrapper to the output folder, if its checkpoint has them."""
    folder = find_checkpoint(source) if source else None
    for name in _PROCESSOR_FILES if folder else ():
        if (folder / name).is_file() and not (output / name).exists():  # type: ignore[operator]
            shutil.copyfile(folder / name, output / name)  # type: ignore[operator]


def wrap_save(model: PreTrainedModel, after: Callable[[str], object]) -> None:
    """Wrap ``model.save_pretrained`` so that it keeps the pruned configuration and calls ``after``.

    After a checkpoint is written, llm-compressor replaces its config.json by the original one that it finds through
    ``config._name_or_path``. That name is therefore blank while saving, and only then (a later run needs it).

    :param after: called with the folder after everything else has been written
    """
    inner = model.save_pretrained

    def save_pretrained(save_directory: str, *args: Any, **kwargs: Any) -> None:
        name = model.config._name_or_path
        model.config._name_or_path = ""
        logger.disable(_HOST_SAVING)  # warns that it cannot find the original config, as intended
        try:
            with warnings.catch_warnings(), compare_embeddings_on_host():
                warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
                inner(save_directory, *args, **kwargs)
        finally:
            logger.enable(_HOST_SAVING)
            model.config._name_or_path = name
        if is_source_process():  # one of several processes writes, as in llm-compressor's own save
            copy_processor(name, Path(save_directory))
            after(str(save_directory))

    save_pretrained._overridden = True  # type: ignore[attr-defined]  # llm-compressor wraps only what lacks this mark
    model.save_pretrained = save_pretrained
