"""The decoder layers of a model: where they are, what their linears are called, how large they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.quantization import QuantizationMetadata
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.model.families import Family, find_family

QUANTISER_PARAMETERS = frozenset(QuantizationMetadata.all_qparam_names())


def find_decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every decoder layer, first to last."""
    family = find_family(model)
    layers = model.get_submodule(family.layers)
    return [(f"{family.layers}.{name}", layer) for name, layer in layers.named_children()]


def find_linear(layer: nn.Module, name: str) -> nn.Linear:
    """Return a linear of a decoder layer by its name within the layer."""
    return cast(nn.Linear, layer.get_submodule(name))


def list_linears(family: Family, layer: nn.Module) -> list[str]:
    """Return the names, within a decoder layer, of the linears whose parameters the budget counts."""
    names = [*family.attention.producers, family.attention.output]
    return names + ([*family.ffn.producers, family.ffn.output] if has_ffn(family, layer) else [])


def has_ffn(family: Family, layer: nn.Module) -> bool:
    """Tell whether a layer has the FFN that its family describes; a mixture of experts has not."""
    return any(name == family.ffn.output for name, _ in layer.named_modules())


def count_prunable_parameters(model: nn.Module) -> int:
    """Count the parameters, biases too, of all linears of the decoder layers: the base of every ``sparsity``.

    Experts of a mixture are not counted, they hold no units; nor is what a quantiser later in the recipe has added.
    """
    family = find_family(model)
    return sum(
        parameter.numel()
        for _, layer in find_decoder_layers(model)
        for name in list_linears(family, layer)
        for parameter_name, parameter in layer.get_submodule(name).named_parameters(recurse=False)
        if parameter_name in ("weight", "bias")
    )


def count_parameters(model: nn.Module) -> int:
    """Count a model's parameters, tied ones once, without what a quantiser later in the recipe has added."""
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if name.rpartition(".")[2] not in QUANTISER_PARAMETERS)


def describe_weights(model: nn.Module) -> str:
    """Return a digest of the decoder layers' linears that tells one dense model from another: sums, dtypes, shapes."""
    digest = hashlib.sha256()
    family = find_family(model)
    for _, layer in find_decoder_layers(model):
        for name in list_linears(family, layer):
            weight = find_linear(layer, name).weight.detach()
            values = [weight.sum(dtype=torch.float64).item(), weight.abs().sum(dtype=torch.float64).item()]
            digest.update(repr((name, str(weight.dtype), tuple(weight.shape), values)).encode())
    return digest.hexdigest()


def can_fuse_attention(model: PreTrainedModel) -> bool:
    """Tell whether layers may attend without maps: sdpa drops a soft cap."""
    cap = find_family(model).attention.logit_cap
    return model._supports_sdpa and (not cap or getattr(model.config, cap, None) is None)


def list_attention_configs(model: PreTrainedModel) -> list[tuple[nn.Module, Any]]:
    """Return every decoder layer, and the configuration that its attention module reads."""
    family = find_family(model)
    return [
        (layer, getattr(layer.get_submodule(family.attention.module), "config", model.config))
        for _, layer in find_decoder_layers(model)
    ]


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one decoder layer.

    :param num_heads: query heads
    :param num_key_value_heads: key and value heads
    :param head_dim: of queries and keys
    :param value_head_dim: of values
    :param width: FFN channels; 0 where there is no FFN to prune
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    value_head_dim: int
    width: int


def measure_layer(family: Family, layer: nn.Module) -> LayerSizes:
    """Read a decoder layer's sizes off its linears."""
    attention: Any = layer.get_submodule(family.attention.module)
    head_dim = getattr(attention, "head_dim", None) or attention.head_size
    value_dim = getattr(attention, "value_head_dim", head_dim)
    repeats = getattr(attention, "num_key_value_groups", 1)
    rows = sum_outputs(family.attention.producers, layer)
    num_key_value_heads = rows // ((repeats + 1) * head_dim + value_dim)
    width = find_linear(layer, family.ffn.output).in_features if has_ffn(family, layer) else 0
    return LayerSizes(repeats * num_key_value_heads, num_key_value_heads, head_dim, value_dim, width)


def sum_outputs(names: Iterable[str], layer: nn.Module) -> int:
    """Return the outputs of all linears of some names that a layer has."""
    found = [module for name, module in layer.named_modules() if name in names and isinstance(module, nn.Linear)]
    return sum(linear.out_features for linear in found)


def has_uniform_layers(model: nn.Module) -> bool:
    """Tell whether all layers have the same sizes (layers without an FFN apart), values as wide as queries and keys."""
    family = find_family(model)
    sizes = [measure_layer(family, layer) for _, layer in find_decoder_layers(model)]
    widths = {size.width for size in sizes if size.width}
    heads = {replace(size, width=0) for size in sizes}
    return len(widths) <= 1 and len(heads) == 1 and sizes[0].value_head_dim == sizes[0].head_dim


def read_counts(attention: nn.Module) -> dict[str, int]:
    """Return the sizes that an attention module keeps in attributes and that slicing changes, by name."""
    names = ("num_heads", "num_key_value_heads", "value_head_dim")
    return {name: getattr(attention, name) for name in names if hasattr(attention, name)}


@contextmanager
def freeze_weights(model: nn.Module) -> Iterator[None]:
    """Let no weight collect gradients; offloaded ones stay where they are."""
    with disable_onloading():
        parameters = list(model.parameters())
    flags = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
