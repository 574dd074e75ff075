"""The bytes and widths that a memory budget is judged by, read off a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from compressed_tensors.offload import disable_onloading
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.device.placement import Consumer, Sizes
from struprune_plugin.model.families import Family, find_family
from struprune_plugin.model.layers import can_fuse_attention, find_decoder_layers, find_linear, has_ffn, sum_outputs
from struprune_plugin.model.units.group import UnitGroup


def read_sizes(model: PreTrainedModel, groups: Sequence[UnitGroup], batch: torch.Size) -> Sizes:
    """Read sizes off a model, its groups and the shape of a calibration batch; the largest of all layers count."""
    family, layers = find_family(model), [layer for _, layer in find_decoder_layers(model)]
    hidden = model.config.hidden_size
    consumers: dict[str, list[Consumer]] = {}
    for group in groups:
        consumer = Consumer(group.num_columns, hidden, group.unit.solve_copies)
        consumers.setdefault(group.layer_name, []).append(consumer)
    with disable_onloading():
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        head = model.get_output_embeddings()
        assert head is not None
        return Sizes(
            layer=max(map(_count_bytes, layers)),
            largest=max(_count_own(module) for layer in layers for module in layer.modules()),
            embeddings=_count_bytes(*embeddings),
            head=_count_bytes(head),
            layers=tuple(dict.fromkeys(map(tuple, consumers.values()))),
            tokens=batch.numel(),
            activations=max(_count_activations(model, family, layer, batch) for layer in layers),
        )


def count_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a model's weights, shared ones once."""
    with disable_onloading():
        return _count_bytes(model)


def count_cache_channels(group: UnitGroup, num_units: int) -> int:
    """Return the channels that a token's keys and values take in a layer's cache once a group has so many units; 0 for the FFN."""
    if group.unit.is_ffn:
        return 0
    smaller = group.resize(num_units)
    return smaller.unit.count_heads(smaller, num_units) * (
        smaller.wiring.part_rows["key"] + smaller.wiring.part_rows["value"]
    )


def _count_activations(model: PreTrainedModel, family: Family, layer: nn.Module, batch: torch.Size) -> int:
    """Return the bytes of one layer's forward pass on a micro-batch."""
    hidden, length = model.config.hidden_size, batch[-1]
    item = find_linear(layer, family.attention.output).weight.element_size()
    attention = (3 if family.attention.rotary else 2) * sum_outputs(family.attention.producers, layer)
    widest = max(attention, _count_ffn_values(model, family, layer))
    single = (5 if family.attention.rotary else 3) * hidden  # float32: targets, and norms that widen
    per_token = item * (widest + 7 * hidden + 2 * length) + 4 * single
    maps = 0 if can_fuse_attention(model) else 12 * model.config.num_attention_heads * length
    return batch.numel() * (per_token + maps)


def _count_ffn_values(model: PreTrainedModel, family: Family, layer: nn.Module) -> int:
    """Return the values a token that an FFN holds: of its producers and its consumer, or of the experts a token visits."""
    if has_ffn(family, layer):
        return sum_outputs(family.ffn.producers, layer) + find_linear(layer, family.ffn.output).in_features
    width = getattr(model.config, "moe_intermediate_size", 0)
    return 3 * width * getattr(model.config, "num_experts_per_tok", 1)


def _count_bytes(*modules: nn.Module) -> int:
    """Return the bytes of the weights of modules and all below them, shared ones once."""
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return sum(p.numel() * p.element_size() for p in parameters.values())


def _count_own(module: nn.Module) -> int:
    """Return the bytes of the weights that a module holds itself."""
    return sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
