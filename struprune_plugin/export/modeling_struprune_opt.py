"""OPT with layers of different sizes. This file travels with every pruned checkpoint and needs transformers alone.

The configuration is OPT's, with two additions: ``head_dim`` (of queries and keys, for all layers) and the per-layer
values of ``ffn_dim``, ``num_attention_heads`` and ``value_head_dim`` in transformers' own ``per_layer_config``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.opt.configuration_opt import OPTConfig
from transformers.models.opt.modeling_opt import (
    OPTAttention,
    OPTDecoder,
    OPTDecoderLayer,
    OPTForCausalLM,
    OPTLearnedPositionalEmbedding,
    OPTModel,
    OPTPreTrainedModel,
    eager_attention_forward,
)


@strict
class StruPruneOPTConfig(OPTConfig):
    """OPT's configuration with per-layer ``ffn_dim``, ``num_attention_heads`` and ``value_head_dim``."""

    model_type = "struprune_opt"

    head_dim: int | None = None
    value_head_dim: int | None = None

    def validate_architecture(self) -> None:
        """Layers differ in their heads, so hidden_size need not be a multiple of any head count."""


class StruPruneOPTAttention(OPTAttention):
    """OPT attention with any number of heads, and values of another width than queries and keys."""

    def __init__(self, config: StruPruneOPTConfig, layer_idx: int):
        nn.Module.__init__(self)
        layer = config.per_layer_config[layer_idx]
        self.config = config
        self.layer_idx = layer_idx
        self.embed_dim = config.hidden_size
        self.num_heads = layer.num_attention_heads
        self.head_dim = config.head_dim
        self.value_head_dim = layer.value_head_dim
        self.dropout = config.attention_dropout
        self.enable_bias = config.enable_bias
        self.is_causal = True
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(self.embed_dim, self.num_heads * self.head_dim, bias=self.enable_bias)
        self.v_proj = nn.Linear(self.embed_dim, self.num_heads * self.value_head_dim, bias=self.enable_bias)
        self.q_proj = nn.Linear(self.embed_dim, self.num_heads * self.head_dim, bias=self.enable_bias)
        self.out_proj = nn.Linear(self.num_heads * self.value_head_dim, self.embed_dim, bias=self.enable_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, length, _ = hidden_states.size()
        query = (self.q_proj(hidden_states) * self.scaling).view(batch, -1, self.num_heads, self.head_dim)
        key = self.k_proj(hidden_states).view(batch, -1, self.num_heads, self.head_dim)
        value = self.v_proj(hidden_states).view(batch, -1, self.num_heads, self.value_head_dim)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        if self.config._attn_implementation != "eager" and self.value_head_dim < self.head_dim:
            # fused kernels want one width for all three; the cache holds the narrow values
            value = nn.functional.pad(value, (0, self.head_dim - self.value_head_dim))
        output, attention = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=1.0,  # the queries are scaled already, as in OPT
            **kwargs,
        )
        return self.out_proj(output[..., : self.value_head_dim].reshape(batch, length, -1)), attention


class StruPruneOPTDecoderLayer(OPTDecoderLayer):
    def __init__(self, config: StruPruneOPTConfig, layer_idx: int):
        GradientCheckpointingLayer.__init__(self)
        width, affine = config.hidden_size, config.layer_norm_elementwise_affine
        ffn_dim = config.per_layer_config[layer_idx].ffn_dim
        self.embed_dim = width
        self.self_attn = StruPruneOPTAttention(config, layer_idx)
        self.do_layer_norm_before = config.do_layer_norm_before
        self.dropout = config.dropout
        self.activation_fn = ACT2FN[config.activation_function]
        self.self_attn_layer_norm = nn.LayerNorm(width, elementwise_affine=affine)
        self.fc1 = nn.Linear(width, ffn_dim, bias=config.enable_bias)
        self.fc2 = nn.Linear(ffn_dim, width, bias=config.enable_bias)
        self.final_layer_norm = nn.LayerNorm(width, elementwise_affine=affine)


class StruPruneOPTPreTrainedModel(OPTPreTrainedModel):
    config_class = StruPruneOPTConfig
    _no_split_modules = ["OPTDecoderLayer", "StruPruneOPTDecoderLayer"]  # noqa: RUF012 (transformers' own form)
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": StruPruneOPTDecoderLayer,
        "attentions": StruPruneOPTAttention,
    }


class StruPruneOPTDecoder(StruPruneOPTPreTrainedModel, OPTDecoder):
    def __init__(self, config: StruPruneOPTConfig):
        StruPruneOPTPreTrainedModel.__init__(self, config)
        width, embedding = config.hidden_size, config.word_embed_proj_dim
        self.dropout = config.dropout
        self.layerdrop = config.layerdrop
        self.padding_idx = config.pad_token_id
        self.max_target_positions = config.max_position_embeddings
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, embedding, self.padding_idx)
        self.embed_positions = OPTLearnedPositionalEmbedding(config.max_position_embeddings, width)
        self.project_in = nn.Linear(embedding, width, bias=False) if embedding != width else None
        self.project_out = nn.Linear(width, embedding, bias=False) if embedding != width else None
        self.final_layer_norm = None
        if config.do_layer_norm_before and not config._remove_final_layer_norm:
            self.final_layer_norm = nn.LayerNorm(width, elementwise_affine=config.layer_norm_elementwise_affine)
        self.layers = nn.ModuleList(StruPruneOPTDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.post_init()


class StruPruneOPTModel(StruPruneOPTPreTrainedModel, OPTModel):
    def __init__(self, config: StruPruneOPTConfig):
        StruPruneOPTPreTrainedModel.__init__(self, config)
        self.decoder = StruPruneOPTDecoder(config)
        self.post_init()


class StruPruneOPTForCausalLM(StruPruneOPTPreTrainedModel, OPTForCausalLM):
    def __init__(self, config: StruPruneOPTConfig):
        StruPruneOPTPreTrainedModel.__init__(self, config)
        self.model = StruPruneOPTModel(config)
        self.lm_head = nn.Linear(config.word_embed_proj_dim, config.vocab_size, bias=False)
        self.post_init()
