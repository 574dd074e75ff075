"""Give a sliced model the classes and the configuration under which it saves and loads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from compressed_tensors.distributed import is_source_process
from compressed_tensors.offload.module import unwrap_offload_forward
from huggingface_hub.errors import StrictDataclassError
from loguru import logger
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from struprune_plugin.export import modeling_struprune as modeling
from struprune_plugin.export.classes import name_auto_classes
from struprune_plugin.export.recipe import tidy_recipe
from struprune_plugin.model.families import Family, find_family
from struprune_plugin.model.layers import find_decoder_layers, has_ffn, measure_layer


def describe_layout(family: Family) -> dict[str, Any]:
    """Return what a pruned checkpoint's configuration says of its layers' linears."""
    rows = {**family.attention.producers, **family.ffn.producers}
    return {
        "layers": family.layers,
        "attention": family.attention.module,
        "rows": {name: list(parts) for name, parts in rows.items()},
        "columns": {family.attention.output: "attention", family.ffn.output: "ffn"},
        "width_key": family.ffn.width_key,
        "interleaved": family.attention.interleaved,
    }


def adopt_attention(model: nn.Module) -> None:
    """Let the attention modules of a dense model take values of any width; their function stays the same."""
    family = find_family(model)
    for _, layer in find_decoder_layers(model):
        attention = layer.get_submodule(family.attention.module)
        with _keep_offload(attention):
            modeling.adopt_attention(attention, describe_layout(family))


@contextmanager
def _keep_offload(module: nn.Module) -> Iterator[None]:
    """Let a module's class change, and with it the forward function that the host's offloading wraps."""
    with unwrap_offload_forward(module):
        yield
        module.__dict__.pop("forward", None)


def adopt_config(model: PreTrainedModel) -> None:
    """Turn a sliced model into its pruned class, with a configuration read off the shapes of its layers."""
    old, family = model.config, find_family(model)
    config: Any = _make_pruned_config(old, family)
    layers = [(layer, measure_layer(family, layer)) for _, layer in find_decoder_layers(model)]
    config.value_head_dim = config.layout["head_dim"] = layers[0][1].head_dim
    has_groups = hasattr(config, "num_key_value_heads")  # asked before layers differ, after which no one value is left
    per_layer: dict[int, dict[str, int]] = {}
    for index, (layer, sizes) in enumerate(layers):
        per_layer[index] = {"num_attention_heads": sizes.num_heads, "value_head_dim": sizes.value_head_dim}
        if has_groups:
            per_layer[index]["num_key_value_heads"] = sizes.num_key_value_heads
        if has_ffn(family, layer):
            per_layer[index][family.ffn.width_key] = sizes.width
    config.per_layer_config = per_layer
    modeling.share_config(model, old, config)
    name = type(model).__name__
    if not name.startswith(modeling.PREFIX):
        with _keep_offload(model):
            model.__class__ = modeling.derive_class(modeling.PREFIX + name)
    config.architectures = [type(model).__name__]
    config.auto_map = name_auto_classes(config)


def adopt_stock(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Turn a model whose layers are all of the sizes that a stock configuration says into the stock class."""
    old, family = model.config, find_family(model)
    for _, layer in find_decoder_layers(model):
        attention: Any = layer.get_submodule(family.attention.module)
        if hasattr(attention, "wide"):
            with _keep_offload(layer.get_submodule(family.attention.module)):
                modeling.release_attention(attention)
    modeling.copy_settings(old, config)
    modeling.share_config(model, old, config)
    with _keep_offload(model):
        model.__class__ = next(c for c in type(model).__mro__ if not c.__name__.startswith(modeling.PREFIX))
    config.architectures = [type(model).__name__]


def make_uniform_config(model: PreTrainedModel, num_key_value_heads: int, width: int) -> PreTrainedConfig:
    """Return the stock configuration of a model whose layers all have these sizes.

    :param width: FFN channels; 0 leaves them as they are
    :raises ValueError: the stock class cannot have that many heads
    """
    family, config = find_family(model), model.config
    if type(config).__name__.startswith(modeling.PREFIX):
        config = modeling.make_dense_config(config)
    values = config.to_dict()
    sizes = measure_layer(family, find_decoder_layers(model)[0][1])
    num_heads = num_key_value_heads * sizes.num_heads // sizes.num_key_value_heads
    if num_heads != config.num_attention_heads:
        if not family.attention.free_heads:
            raise ValueError(
                f"{type(config).__name__}: the stock class must have heads of hidden_size / num_attention_heads channels, "
                f"got {num_heads} heads of {sizes.head_dim}. Keep all heads, or the per-layer form."
            )
        values.update(num_attention_heads=num_heads, num_key_value_heads=num_key_value_heads, head_dim=sizes.head_dim)
    if width:
        values[family.ffn.width_key] = width
    for name in ("model_type", "architectures", "transformers_version"):
        values.pop(name, None)
    try:
        return type(config)(**values)
    except StrictDataclassError as error:
        raise ValueError(f"{type(config).__name__}: {num_heads} heads are refused: {error}") from None


def can_hold_heads(model: PreTrainedModel, num_key_value_heads: int) -> bool:
    """Tell whether a model's stock class can be configured with that many value heads in every layer."""
    try:
        make_uniform_config(model, num_key_value_heads, 0)
    except ValueError:
        return False
    return True


def _make_pruned_config(old: PreTrainedConfig, family: Family) -> PreTrainedConfig:
    """Return a pruned model's configuration without its layers' sizes."""
    values = old.to_dict()
    for name in ("model_type", "architectures", "auto_map", "transformers_version", "per_layer_config"):
        values.pop(name, None)
    stock = type(old).__name__.removeprefix(modeling.PREFIX)
    config = modeling.derive_class(modeling.PREFIX + stock)(**values)
    config.layout = describe_layout(family)
    modeling.copy_settings(old, config)
    return config


def wrap_save(model: PreTrainedModel, after: Callable[[str], object]) -> None:
    """Keep ``model.save_pretrained`` from writing the dense config over the pruned one, and add to what it writes.

    The host, once a checkpoint is written, replaces its config.json by the original one that it finds through
    ``config._name_or_path``; so that name is blank while saving, and only then (a later run needs it).

    :param after: called with the folder when everything else is written
    """
    inner = model.save_pretrained

    def save_pretrained(save_directory: str, *args: Any, **kwargs: Any) -> None:
        name = model.config._name_or_path
        model.config._name_or_path = ""
        try:
            with _quiet_host(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
                inner(save_directory, *args, **kwargs)
        finally:
            model.config._name_or_path = name
        if is_source_process():  # one of several processes writes, as in the host's own save
            tidy_recipe(save_directory)
            after(str(save_directory))

    save_pretrained._overridden = True  # type: ignore[attr-defined]  # the host wraps only what lacks this mark
    model.save_pretrained = save_pretrained


@contextmanager
def _quiet_host() -> Iterator[None]:
    """Silence the host's warning that it cannot find the original config, which is what we want of it."""
    module = "llmcompressor.transformers.compression.compressed_tensors_utils"
    logger.disable(module)
    try:
        yield
    finally:
        logger.enable(module)
