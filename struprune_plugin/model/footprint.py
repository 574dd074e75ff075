"""Sizes of a model, in bytes and widths, for the check of a memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.model.layers import can_fuse_attention, find_layouts, find_linear, sum_outputs
from struprune_plugin.model.structure.layout import LayerLayout
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.offload_plan import Consumer, Sizes


def read_sizes(model: PreTrainedModel, groups: Sequence[UnitGroup], batch: torch.Size) -> Sizes:
    """Return the sizes of a model, its groups and a calibration batch's shape; each size is the largest over all layers."""
    layouts = find_layouts(model)
    layers = [layer for layer, _ in layouts]
    hidden = model.config.get_text_config(decoder=True).hidden_size
    consumers: dict[str, list[Consumer]] = {}
    for group in groups:
        consumer = Consumer(group.num_columns, hidden, group.unit.solve_copies, bool(group.experts))
        consumers.setdefault(group.layer_name, []).append(consumer)
    with disable_onloading():
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        head = model.get_output_embeddings()
        assert head is not None
        return Sizes(
            layer=max(map(count_bytes, layers)),
            largest=max(
                sum(p.nbytes for p in m.parameters(recurse=False)) for layer in layers for m in layer.modules()
            ),
            embeddings=count_bytes(*embeddings),
            head=count_bytes(head),
            layers=tuple(dict.fromkeys(map(tuple, consumers.values()))),
            tokens=batch.numel(),
            activations=max(_count_activations(model, layout, layer, batch) for layer, layout in layouts),
            vocabulary=model.config.get_text_config(decoder=True).vocab_size,
        )


def count_bytes(*modules: nn.Module) -> int:
    """Return the bytes of the parameters of modules and their submodules, shared ones counted once."""
    with disable_onloading():
        parameters = {id(p): p for module in modules for p in module.parameters()}
        return sum(p.nbytes for p in parameters.values())


def _count_activations(model: PreTrainedModel, layout: LayerLayout, layer: nn.Module, batch: torch.Size) -> int:
    """Return the bytes of one layer's forward pass on a micro-batch."""
    config, length, attention = model.config.get_text_config(decoder=True), batch[-1], layout.attention
    item, is_plain = model.dtype.itemsize, attention is not None and attention.is_plain
    values = 0 if attention is None else (2 if is_plain else 3) * sum_outputs(attention.producers, layer)
    widest = max(values, _count_ffn_values(config, layout, layer))
    single = (3 if is_plain else 5) * config.hidden_size  # float32 values: targets, and norms computed in float32
    per_token = item * (widest + 7 * config.hidden_size + 2 * length) + 4 * single
    maps = 0 if can_fuse_attention(model) else 12 * config.num_attention_heads * length
    return batch.numel() * (per_token + maps)


def _count_ffn_values(config: Any, layout: LayerLayout, layer: nn.Module) -> int:
    """Return the values per token that a layer's FFNs hold: those of producers and consumers, and those of the experts that a token
    visits, whose inputs and outputs are kept until the layer finishes."""
    own = [sum_outputs(ffn.producers, layer) + find_linear(layer, ffn.output).in_features for ffn in layout.ffns]
    if layout.ffns and layout.experts is None:
        return sum(own)
    named = [getattr(config, name, None) for name in ("moe_intermediate_size", "intermediate_size")]
    width = next((size for size in named if isinstance(size, int)), 0)
    visited: Any = getattr(config, "num_experts_per_tok", None) or 1
    return sum(own) + visited * (3 * width + 2 * config.hidden_size)
