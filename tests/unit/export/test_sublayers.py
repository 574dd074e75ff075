"""Whole sublayers and layers, taken by hand out of models of several types: the dense model with these branches times zero."""

import json
from copy import deepcopy

import pytest
import torch
from helpers.families import make_model
from helpers.models import SHAPES, make_opt
from transformers import AutoModelForCausalLM, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from struprune_plugin.export.any_class import list_absent, replace_conv1d
from struprune_plugin.export.convert import adopt_attention, adopt_config
from struprune_plugin.export.layer_list import drop_layers
from struprune_plugin.export.sublayers import allow_sublayers, find_sublayers, remove_sublayer, restore_sublayers
from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.linalg.second_moments import with_bias_index
from struprune_plugin.model.layers import find_decoder_layers, find_layouts, has_uniform_layers
from struprune_plugin.model.structure.tiny import build_tiny
from struprune_plugin.model.surgery import read_consumer, set_consumer, slice_group
from struprune_plugin.model.units import find_groups

TYPES = [
    "opt",
    "opt post_norm",
    "opt no_bias",
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "phi",
    "phi3",
    "gpt2",
]
LAYERS = 6
GONE = {2: ("attention", "ffn"), 3: ("attention",), 4: ("ffn",)}  # kinds of modules, by layer
GENERATE = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}


def make(name):
    kind, _, shape = name.partition(" ")
    if kind == "opt":
        return make_opt(num_hidden_layers=LAYERS, **SHAPES[shape or "pre_norm"])
    if kind == "gpt2":
        model = build_tiny(CONFIG_MAPPING[kind](n_layer=LAYERS))
        replace_conv1d(model)
        return model
    return make_model(kind, num_hidden_layers=LAYERS)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")  # gemma2 has a soft cap


def find(model, kinds="both"):
    return allow_sublayers(model, find_groups(model, "value_channels"), kinds)


def take(model, groups, keeps=lambda group: False):
    """Take what GONE says out of a model, and of its copy by zeros; return that."""
    masked = deepcopy(model)
    for group in groups:
        if group.module_kind in GONE.get(group.layer_index, ()) and not keeps(group):
            layer = masked.get_submodule(group.layer_name)
            set_consumer(layer, group, 0 * read_consumer(layer, group))
            remove_sublayer(model.get_submodule(group.layer_name), group)
    return masked


@pytest.fixture(scope="module", params=TYPES)
def saved(request, tmp_path_factory):
    """(the dense model with zeros, the model without, its folder), to be read only."""
    model, folder = make(request.param), tmp_path_factory.mktemp("sublayers")
    groups = find(model)
    before = sum(p.numel() for p in model.parameters())
    masked = take(model, groups)
    gone = [g for g in groups if g.module_kind in GONE.get(g.layer_index, ())]
    assert len(gone) == 4
    after = sum(p.numel() for p in model.parameters())
    shared = 64 if request.param == "phi" else 0  # one norm before attention and the FFN, which goes with the second
    assert before - after == sum(g.num_units * g.unit_cost + g.rest for g in gone) + shared
    drop_layers(model)
    adopt_config(model)
    model.save_pretrained(folder)
    return masked, model, folder


@pytest.fixture
def prompts():
    return torch.randint(4, 60, (2, 11), generator=torch.Generator().manual_seed(3))


def test_loaded_again_it_gives_what_the_dense_model_gives_with_zeros(saved, prompts):
    masked, model, folder = saved
    again = load(folder).eval()
    assert type(again).__name__.startswith("StruPrune")
    torch.testing.assert_close(model(prompts).logits, masked(prompts).logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again(prompts).logits, masked(prompts).logits, rtol=1e-4, atol=1e-4)
    again.save_pretrained(folder / "again")
    third = load(folder / "again").eval()
    assert torch.equal(third(prompts).logits, again(prompts).logits)


def test_what_is_gone_is_neither_in_the_modules_nor_in_the_file(saved):
    masked, _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    again = load(folder)
    layers = [layer for _, layer in find_decoder_layers(again)]
    is_whole = "word_embed_proj_dim" in config and not config["do_layer_norm_before"]  # norms on the stream itself stay
    assert len(layers) == LAYERS - 1 + is_whole
    skipped = [list_absent(layer) for layer in layers]
    assert [bool(names) for names in skipped] == [False] * 2 + [True] * (2 + is_whole) + [False]
    assert all(not any(p.numel() == 0 for p in layer.parameters()) for layer in layers)
    said = config.get("per_layer_config") or {}
    if said:
        assert [{*said.get(str(i), {}).get("skip", ())} for i in range(len(layers))] == [{*names} for names in skipped]
    assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in masked.parameters())
    assert not has_uniform_layers(again)
    for _, layout in find_layouts(again):
        assert layout.ffns or layout.attention or is_whole


def test_it_generates_what_the_dense_model_generates_with_zeros(saved, prompts):
    masked, _, folder = saved
    again = load(folder).eval()
    wanted = masked.eval().generate(prompts, use_cache=False, **GENERATE)
    assert torch.equal(again.generate(prompts, use_cache=True, **GENERATE), wanted)
    assert torch.equal(again.generate(prompts, use_cache=False, **GENERATE), wanted)
    mask = torch.ones_like(prompts).index_fill(1, torch.arange(4), 0)
    padded = [
        each.generate(prompts, attention_mask=mask, use_cache=cached, **GENERATE)
        for each in (again, masked)
        for cached in (True, False)
    ]
    assert all(torch.equal(one, padded[0]) for one in padded)


def test_the_cache_holds_nothing_of_what_is_gone(saved, prompts):
    masked, _, folder = saved
    again = load(folder).eval()
    cache = again(prompts, use_cache=True).past_key_values
    held = [index for index, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None]
    assert len(held) == sum(bool(layout.attention) for _, layout in find_layouts(again))
    assert cache.get_seq_length() == 11
    static = StaticCache(config=again.config, max_cache_len=32)
    steps = [again(prompts[:, :6], past_key_values=static).logits, again(prompts[:, 6:], past_key_values=static).logits]
    torch.testing.assert_close(torch.cat(steps, 1), masked(prompts).logits, rtol=1e-4, atol=1e-4)


def test_gradients_flow_to_every_weight_that_is_left(saved, prompts):
    model = load(saved[2]).train()
    model(prompts, labels=prompts).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["opt", "llama", "gemma3_text"])
def test_whole_layers_alone_leave_a_model_of_the_stock_class(name, prompts, tmp_path):
    model = make(name)
    groups = find(model)
    masked = take(model, groups, keeps=lambda group: group.layer_index != 2)
    stock, before = type(model), deepcopy(model.config)
    drop_layers(model)
    assert len(find_decoder_layers(model)) == model.config.num_hidden_layers == LAYERS - 1
    if getattr(before, "layer_types", None):
        assert model.config.layer_types == [kind for i, kind in enumerate(before.layer_types) if i != 2]
    positions = [layer.self_attn.layer_idx for _, layer in find_decoder_layers(model)]
    assert positions == list(range(LAYERS - 1))
    model.save_pretrained(tmp_path)
    again = stock.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(prompts).logits, masked(prompts).logits, rtol=1e-4, atol=1e-4)
    wanted = masked.eval().generate(prompts, use_cache=False, **GENERATE)
    assert torch.equal(again.generate(prompts, use_cache=True, **GENERATE), wanted)


def test_sublayers_beside_narrow_values_and_fewer_channels(prompts, tmp_path):
    model = make("qwen3")
    groups = find(model)
    masked = take(model, groups)
    left = [group for group in groups if group.module_kind not in GONE.get(group.layer_index, ())]
    adopt_attention(model, left)
    for group in left:
        keep = torch.arange(group.num_units).view(group.num_blocks, -1)[:, ::2].flatten()
        layer, other = model.get_submodule(group.layer_name), masked.get_submodule(group.layer_name)
        weight = read_consumer(layer, group)
        mask = torch.zeros(weight.shape[1], dtype=torch.bool)
        mask[with_bias_index(unit_columns(keep, group.columns_per_unit), group.num_columns)] = True
        slice_group(layer, group, keep, weight[:, mask])
        set_consumer(other, group, weight * mask)
    drop_layers(model)
    adopt_config(model)
    model.save_pretrained(tmp_path)
    again = load(tmp_path).eval()
    torch.testing.assert_close(again(prompts).logits, masked(prompts).logits, rtol=1e-4, atol=1e-4)
    wanted = masked.eval().generate(prompts, use_cache=False, **GENERATE)
    assert torch.equal(again.generate(prompts, use_cache=True, **GENERATE), wanted)


def test_restored_sublayers_are_zeros_of_the_dense_size(saved, prompts, tmp_path):
    masked, _, folder = saved
    model = load(folder).eval()
    restore_sublayers(model)
    assert not any(list_absent(layer) for _, layer in find_decoder_layers(model))
    torch.testing.assert_close(model(prompts).logits, masked(prompts).logits, rtol=1e-4, atol=1e-4)


def test_the_first_attention_of_every_type_stays():
    for name, leaders in (("llama", {0}), ("gemma2", {0, 1}), ("gemma3_text", {0, 5})):
        found = find_sublayers(make(name))
        assert {i for i, layer in enumerate(found) if layer["self_attn.o_proj"].flaw} == leaders
        assert not any(layer["mlp.down_proj"].flaw for layer in found)
    groups = find(make("llama"), "attention")
    assert [group.sublayer is not None for group in groups] == [False, False, *[True, False] * (LAYERS - 1)]


def test_what_cannot_be_proved_is_refused_by_name():
    """BLOOM gives the residual stream to its attention and FFN, which add it themselves."""
    model = build_tiny(CONFIG_MAPPING["bloom"](n_layer=3))
    with pytest.raises(
        ValueError,
        match=r"`sublayers: both` finds no module that can be removed whole .* removing it changes the logits",
    ):
        find(model)
    with pytest.raises(
        ValueError, match=r"`sublayers: ffn` finds no module that can be removed whole \(no ffn among the units"
    ):
        allow_sublayers(make("llama"), find_groups(make("llama"), "value_channels", prune_ffn=False), "ffn")


def test_layers_that_the_class_would_make_of_another_kind_stay_in_the_list(prompts, tmp_path):
    """Qwen3's mixtures name their dense layers by position."""
    model = make_model("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0, 2])
    groups = find(model)
    masked = take(model, groups)
    drop_layers(model)
    assert len(find_decoder_layers(model)) == 4
    adopt_config(model)
    model.save_pretrained(tmp_path)
    again = load(tmp_path).eval()
    torch.testing.assert_close(again(prompts).logits, masked(prompts).logits, rtol=1e-4, atol=1e-4)
