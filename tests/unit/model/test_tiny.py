"""Tiny instances: one of every sort of class, from the sizes that the real ones have."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from struprune_plugin.model.structure.finder import _describe_type
from struprune_plugin.model.structure.tiny import TinyRun, build_tiny, find_class, shrink_config

TOKENS = torch.randint(4, 100, (1, 12), generator=torch.Generator().manual_seed(0))
MODELS = {  # type -> what its default configuration leaves open
    "llama": {"num_hidden_layers": 24, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8},
    "opt": {},
    "mpt": {},
    "phi3": {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 32.0, "short_factor": [1.0] * 48}
    },
    "gemma4_text": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gpt_oss": {},
    "deepseek_v3": {"num_hidden_layers": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4},
    },
    "mistral3": {},
}
MODELS["phi3"]["rope_parameters"]["long_factor"] = [2.0] * 48
LAYERED = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "no_rope_layers",
    "num_hidden_layers",
    "n_layers",
    "n_layer",
)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_class_is_built_small_with_all_layers_and_runs(model_type):
    config = CONFIG_MAPPING[model_type](**MODELS[model_type])
    before = copy.deepcopy(config.to_dict())
    state = torch.random.get_rng_state()
    model = build_tiny(config)
    assert config.to_dict() == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.training
    assert 1e5 < sum(weight.numel() for weight in model.parameters()) < 1.2e7
    text, small = config.get_text_config(), model.config.get_text_config()
    assert all(getattr(small, name, None) == getattr(text, name, None) for name in LAYERED)
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32
        assert weight.isfinite().all(), name
        assert weight.std() > 0 or weight.numel() == 1, name
    logits = model(TOKENS).logits
    assert logits.isfinite().all()
    assert logits.std() > 1e-2
    again = dict(build_tiny(config).named_parameters())
    assert all(torch.equal(weight, again[name]) for name, weight in model.named_parameters())
    assert not all(torch.equal(a, b) for a, b in zip(again.values(), build_tiny(config, 1).parameters(), strict=True))


def test_sizes_tell_what_they_are():
    small = shrink_config(AutoConfig.for_model("qwen2_moe", num_attention_heads=16, num_key_value_heads=4))
    assert (small.hidden_size, small.num_attention_heads, small.num_key_value_heads) == (96, 6, 2)
    assert (small.intermediate_size, small.moe_intermediate_size, small.shared_expert_intermediate_size) == (
        112,
        52,
        144,
    )
    assert (small.num_experts, small.num_experts_per_tok) == (4, 2)


@pytest.mark.parametrize(("heads", "expected"), [(32, 6), (1, 1), (8, 2)])
def test_key_and_value_heads_keep_their_sort(heads, expected):
    assert shrink_config(AutoConfig.for_model("llama", num_key_value_heads=heads)).num_key_value_heads == expected


def test_a_small_configuration_stays():
    config = AutoConfig.for_model("llama", **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 44})
    config.num_attention_heads = config.num_key_value_heads = 8
    config.head_dim, config.max_position_embeddings = 8, 64
    assert shrink_config(config).to_dict() == config.to_dict()


def test_layers_that_differ_still_do():
    layers = {0: {"intermediate_size": 6000}, 2: {"intermediate_size": 9000, "num_key_value_heads": 4}}
    config = AutoConfig.for_model("llama", num_hidden_layers=4, num_key_value_heads=8, per_layer_config=layers)
    small = shrink_config(config)
    assert [layer.intermediate_size for layer in small.per_layer_config] == [120, 112, 120, 112]
    assert [layer.num_key_value_heads for layer in small.per_layer_config] == [2, 2, 2, 2]
    assert config.to_dict()["per_layer_config"]["0"] == {"intermediate_size": 6000}


def test_special_tokens_stay_in_the_vocabulary_and_quantisation_goes():
    config = AutoConfig.for_model("llama", vocab_size=128256, eos_token_id=[128001, 128009], bos_token_id=5)
    config.pad_token_id, config.quantization_config = 128009, {"quant_method": "fp8"}
    small = shrink_config(config)
    assert (small.eos_token_id, small.pad_token_id, small.bos_token_id) == ([158, 159], 159, 5)
    assert not hasattr(small, "quantization_config")
    assert config.quantization_config


def test_a_wrapper_gives_its_text_class_or_itself():
    assert find_class(CONFIG_MAPPING["qwen3_5"]())[0].__name__ == "Qwen3_5ForCausalLM"
    config = CONFIG_MAPPING["qwen3_5"]()
    kind = AutoModelForImageTextToText._model_mapping[type(config)]
    model = build_tiny(config, model_class=kind)
    assert type(model) is kind
    assert model(TOKENS).logits.isfinite().all()
    assert model.config.vision_config.depth == 2


def test_rounding_that_a_model_amplifies_is_no_difference():
    linear = torch.nn.Linear(8, 8, bias=False)
    for strength, most in ((1.0, 1e-5), (1e4, 1e-2)):
        run = TinyRun(linear, torch.ones(1, 8), lambda model, tokens, by=strength: torch.sin(by * model(tokens)))
        logits = run().detach()
        for difference in (1e-6, 1e-3, 0.1):
            found = logits + difference * logits.abs().max()
            assert (run.describe_difference(found, logits) == "") == (difference < most), (strength, difference)
    assert "1.0e-01 of the largest" in run.describe_difference(1.1 * logits, logits)


def test_layers_in_which_activations_are_sparse_are_a_type_of_their_own():
    """In Gemma 3n's first layers channels depend on each other; the others lose theirs."""
    kinds, sparsity = ["sliding_attention"] * 3 + ["full_attention"], [0.95, 0.95, 0.0, 0.0]
    options = {"intermediate_size": [2048] * 4, "activation_sparsity_pattern": sparsity, "num_kv_shared_layers": 0}
    model = build_tiny(CONFIG_MAPPING["gemma3n_text"](num_hidden_layers=4, layer_types=kinds, **options))
    types = [_describe_type(layer) for layer in model.model.layers]
    assert types[0] == types[1]
    assert len(set(types)) == 3
