"""LLaMA with per-layer FFN widths, in the ``block_configs`` schema of the Nemotron NAS models.

vLLM reads such checkpoints with its own class of the same name (architecture ``DeciLMForCausalLM``); this file is saved with
them for transformers, and provides vLLM with the configuration. It needs only transformers.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class Block(dict):
    """JSON object whose values are also attributes, as readers of the schema expect."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _open(value: Any) -> Any:
    return Block({k: _open(v) for k, v in value.items()}) if isinstance(value, dict) else value


class Nothing(nn.Module):
    """Stand-in for removed attention or a removed FFN.

    :param parts: number of parts of the original module's output; 0 where that is a tensor
    """

    def __init__(self, parts: int):
        super().__init__()
        self.parts = parts

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, *[None] * (self.parts - 1)) if self.parts else zeros


@strict
class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"

    block_configs: list | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.block_configs = [_open(block) for block in self.block_configs or []]


class DeciLMForCausalLM(LlamaForCausalLM):
    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig):
        super().__init__(config)
        for layer, block in zip(self.model.layers, config.block_configs, strict=True):
            if block.attention.no_op:
                layer.self_attn, layer.input_layernorm = Nothing(2), nn.Identity()
            if block.ffn.no_op:
                layer.mlp, layer.post_attention_layernorm = Nothing(0), nn.Identity()
                continue
            sized = copy(config)
            sized.intermediate_size = block.ffn.intermediate_size
            layer.mlp = LlamaMLP(sized)
