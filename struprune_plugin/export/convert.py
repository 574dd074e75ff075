"""Give a sliced model the classes and the configuration under which it saves and loads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from compressed_tensors.offload.module import unwrap_offload_forward
from loguru import logger
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from struprune_plugin.export import modeling_struprune_opt as opt
from struprune_plugin.export.recipe import tidy_recipe
from struprune_plugin.topology import find_decoder_layers

_CLASSES = {  # stock class name -> the class that takes layers of any size
    "OPTForCausalLM": opt.StruPruneOPTForCausalLM,
    "OPTModel": opt.StruPruneOPTModel,
    "OPTDecoder": opt.StruPruneOPTDecoder,
    "OPTDecoderLayer": opt.StruPruneOPTDecoderLayer,
    "OPTAttention": opt.StruPruneOPTAttention,
}


def register_auto_classes() -> None:
    """Make transformers load pruned checkpoints without a trust flag, and save their modelling file with them."""
    AutoConfig.register(opt.StruPruneOPTConfig.model_type, opt.StruPruneOPTConfig, exist_ok=True)
    AutoModelForCausalLM.register(opt.StruPruneOPTConfig, opt.StruPruneOPTForCausalLM, exist_ok=True)
    opt.StruPruneOPTConfig.register_for_auto_class("AutoConfig")
    opt.StruPruneOPTForCausalLM.register_for_auto_class("AutoModelForCausalLM")


def adopt_attention(model: nn.Module) -> None:
    """Let the attention modules of a dense model take values of any width; their function stays the same."""
    for _, layer in find_decoder_layers(model):
        attention: Any = layer.self_attn
        if type(attention).__name__ == "OPTAttention":
            _change_class(attention)
            attention.value_head_dim = attention.head_dim


def _change_class(module: nn.Module) -> None:
    """Change a module's class, and with it the forward function that the host's offloading wraps."""
    with unwrap_offload_forward(module):
        module.__class__ = _CLASSES[type(module).__name__]
        module.__dict__.pop("forward", None)


def adopt_config(model: PreTrainedModel) -> None:
    """Turn a sliced model into its pruned class, with a configuration read off the shapes of its layers."""
    dense = model.config
    layers: list[Any] = [layer for _, layer in find_decoder_layers(model)]
    values = dense.to_dict()
    for name in ("model_type", "architectures", "auto_map", "transformers_version", "per_layer_config"):
        values.pop(name, None)
    config = opt.StruPruneOPTConfig(**values)
    config.head_dim = layers[0].self_attn.head_dim
    if config.value_head_dim is None:
        config.value_head_dim = config.head_dim
    config.per_layer_config = {
        i: {
            "ffn_dim": layer.fc2.in_features,
            "num_attention_heads": layer.self_attn.num_heads,
            "value_head_dim": layer.self_attn.value_head_dim,
        }
        for i, layer in enumerate(layers)
    }
    config.dtype = dense.dtype
    config._name_or_path = dense._name_or_path
    config._attn_implementation = dense._attn_implementation
    for module in model.modules():
        if getattr(module, "config", None) is dense:
            module.config = config
        if type(module).__name__ in _CLASSES:
            _change_class(module)
    config.architectures = [type(model).__name__]


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
        tidy_recipe(save_directory)
        after(str(save_directory))

    save_pretrained._overridden = True  # type: ignore[attr-defined]  # the host wraps only what lacks this mark
    model.save_pretrained = save_pretrained


@contextmanager
def _quiet_host():  # type: ignore[no-untyped-def]
    """Silence the host's warning that it cannot find the original config, which is what we want of it."""
    module = "llmcompressor.transformers.compression.compressed_tensors_utils"
    logger.disable(module)
    try:
        yield
    finally:
        logger.enable(module)
