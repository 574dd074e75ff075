import json
import os
from pathlib import Path

import pytest
import torch
from compressed_tensors.offload import offload_module
from helpers.models import run_oneshot
from llmcompressor.transformers.compression import compressed_tensors_utils as host_saving
from transformers import AutoConfig, AutoModelForCausalLM, OPTForCausalLM

from eval.groups import find_groups
from struprune_plugin.export import modeling_struprune
from struprune_plugin.export.convert import adopt_config, adopt_paddings, wrap_save

SAVED = {"pre_norm": "value_channels", "post_norm": "head", "no_bias": "value_channels"}  # shape -> attention unit


@pytest.fixture(scope="module", params=SAVED)
def saved(request, save_shape, prune_once):
    """(model in memory, its folder), pruned by 0.4 in every shape, for every test to read and none to change."""
    return prune_once(save_shape(request.param), SAVED[request.param], 0.4)


@pytest.fixture
def prompts():
    return torch.randint(4, 2048, (2, 12), generator=torch.Generator().manual_seed(7))


def test_save_reload_difference_is_zero(saved, prompts, tmp_path):
    model, out = saved
    again = AutoModelForCausalLM.from_pretrained(out)
    assert type(again) is modeling_struprune.StruPruneOPTForCausalLM
    assert torch.equal(model(prompts).logits, again(prompts).logits)
    again.save_pretrained(tmp_path)
    third = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(prompts).logits, third(prompts).logits)
    configs = [AutoConfig.from_pretrained(folder).to_dict() for folder in (out, tmp_path)]
    assert configs[0] | {"_name_or_path": ""} == configs[1] | {"_name_or_path": ""}


def test_embeddings_are_compared_on_the_host_before_they_are_saved(opt, tmp_path, monkeypatch):
    model, seen = AutoModelForCausalLM.from_pretrained(opt), []
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    for module in embeddings:
        offload_module(module, "meta", "cpu")  # a device on which nothing can be compared
    monkeypatch.setattr(
        host_saving, "_retie_embeddings", lambda _: seen.extend(m.weight.device.type for m in embeddings)
    )
    model.save_pretrained = lambda folder: (Path(folder).mkdir(), host_saving._retie_embeddings(model))
    wrap_save(model, lambda _: None)
    model.save_pretrained(tmp_path / "out")
    assert seen == ["cpu", "cpu"]
    assert all(module.weight.device.type == "meta" for module in embeddings)


def test_config_keeps_per_layer_sizes_and_names_the_modelling_file(saved):
    """The host overwrites config.json with the dense one unless it is kept from it (host.md section 3)."""
    model, out = saved
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "struprune_opt"
    assert config["architectures"] == ["StruPruneOPTForCausalLM"]
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_struprune.StruPruneOPTForCausalLM"
    assert "allow_global_per_layer_attribute_access" not in config
    sizes = [layer.fc2.in_features for layer in model.model.decoder.layers]
    assert [c.ffn_dim for c in AutoConfig.from_pretrained(out).per_layer_config] == sizes
    assert max(sizes) < 40


def test_output_folder_is_complete(saved):
    _, out = saved
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "recipe.yaml"}
    assert expected | {"struprune.json", "modeling_struprune.py", "tokenizer_config.json"} <= set(os.listdir(out))


def test_stock_opt_refuses_layers_of_different_sizes(saved):
    """Better an error than a dense model built in silence."""
    _, out = saved
    with pytest.raises(Exception, match=r"per-layer|mismatch|size|divisible"):
        OPTForCausalLM.from_pretrained(out)


def test_adopt_config_of_a_dense_model_keeps_its_logits(opt, prompts):
    model = OPTForCausalLM.from_pretrained(opt)
    before = model(prompts).logits
    adopt_paddings(model, find_groups(model, "value_channels"))
    adopt_config(model)
    assert torch.equal(model(prompts).logits, before)


def test_value_channels_are_refused_where_zeros_stand_for_heads(save_family, prune_once, tmp_path):
    """Both paddings at once have no form; a class that counts its heads by itself gets zeros for those that went."""
    out = prune_once(save_family("phi3"), "head")[1]
    with pytest.raises(ValueError, match="has lost heads that it counts by itself"):
        run_oneshot(str(out), sparsity=0.1, output_dir=str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()
