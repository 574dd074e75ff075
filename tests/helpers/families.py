"""Tiny random models of several types, for tests."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 2048, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2}
GROUPED = SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 44}
CHANGES = {  # what a tiny model of each type needs beside the sizes
    "opt": SIZES | {"num_attention_heads": 4, "ffn_dim": 44, "word_embed_proj_dim": 32},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "qwen3": {"head_dim": 8},
    "mistral": {"head_dim": 8, "sliding_window": 8},
    "phi3": {"sliding_window": None},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"mlp_only_layers": [0]},
    "granite": {
        "residual_multiplier": 0.22,
        "logits_scaling": 4.0,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
    },
    "gpt_neox": SIZES | {"num_attention_heads": 4, "intermediate_size": 44},
    "phi": {"num_key_value_heads": 8},
}
MODEL_TYPES = ["opt", "llama", "qwen3_moe", "gemma2", "phi3", "phi", "gpt_neox"]  # each differs; eval.coverage runs all


def make_model(model_type: str, seed: int = 0, **changes):
    """A tiny random decoder in float32, with biases, norms and weights large enough to matter."""
    base = {} if "vocab_size" in CHANGES.get(model_type, {}) else GROUPED
    config = AutoConfig.for_model(model_type, **{**base, **CHANGES.get(model_type, {}), **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.data = 0.3 * noise
        elif parameter.dim() == 1:
            parameter.data = parameter.data + 0.1 * noise
        elif parameter.dim() == 2 and "embed" not in name:
            parameter.data = noise / parameter.shape[1] ** 0.5
    return model
