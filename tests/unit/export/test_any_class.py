"""Models of any class: cut by hand, saved, loaded."""

import copy
import json

import pytest
import torch
from helpers.cuts import cut_units
from helpers.own_code import CODE, save_own
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Emu3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Mistral3ForConditionalGeneration,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from struprune_plugin.export import any_class, convert, modeling_struprune, stock_config
from struprune_plugin.export.modeling_struprune import narrow, pad
from struprune_plugin.export.outputs import convert_folder
from struprune_plugin.model.structure.tiny import build_tiny

FEW = {"num_hidden_layers": 4}
TYPES = {  # those that no run of tests/integration/test_any_decoder.py prunes
    "bloom": {"n_layer": 2},
    "gemma3n_text": {  # a pattern above 0 lets channels depend on each other, by their spread
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [64] * 4},
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "falcon_h1": FEW,  # buffers that are in no file
    "emu3_text_model": FEW,  # known to the auto class by the whole model's type
}
OTHERS = {"gpt2": {"n_layer": 2}, "gptj": {"n_layer": 2}, "qwen3_5_text": FEW, "olmo2": FEW}
WRAPPERS = {"gemma3": Gemma3ForConditionalGeneration, "mistral3": Mistral3ForConditionalGeneration}
KINDS = {**WRAPPERS, "emu3_text_model": Emu3ForCausalLM}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def make_tiny(model_type: str):
    config = CONFIG_MAPPING[model_type](**{**TYPES, **OTHERS}.get(model_type, {}))
    if model_type in WRAPPERS:
        config.text_config.num_hidden_layers = 4
        if getattr(config.text_config, "layer_types", None):
            config.text_config.layer_types = config.text_config.layer_types[-4:]
    model = build_tiny(config, model_class=KINDS.get(model_type))
    any_class.replace_conv1d(model)
    return model


def make_pruned(model_type):
    model = make_tiny(model_type)
    return model, cut_units(model, "value_channels", is_uneven=True)


def read_ids(model, count=11):
    return torch.arange(5, 5 + count)[None] % model.config.get_text_config().vocab_size


@pytest.mark.parametrize("model_type", [*TYPES, "gemma3"])
def test_any_class_is_pruned_saved_and_loaded(model_type, tmp_path):
    model, masked = make_pruned(model_type)
    ids = read_ids(model)
    logits = model(ids).logits
    torch.testing.assert_close(logits, masked(ids).logits, rtol=1e-4, atol=1e-5 * logits.abs().max().item())
    others = {name: tensor for name, tensor in masked.state_dict().items() if ".layers." not in name}
    convert.adopt_config(model)
    assert torch.equal(model(ids).logits, logits)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    auto = AutoModelForImageTextToText if model_type in WRAPPERS else AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path, **EAGER)
    assert type(again) is type(model)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(model)
    assert torch.equal(again(ids).logits, logits)
    states = model.state_dict(), again.state_dict()
    assert [*states[0]] == [*states[1]]
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())
    if model_type in WRAPPERS:
        assert all(torch.equal(states[1][name], tensor) for name, tensor in others.items())
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    assert torch.equal(again.generate(ids, **options), again.generate(ids, use_cache=False, **options))


def test_configuration_is_the_dense_one_with_a_layout(tmp_path):
    model, _ = make_pruned("gpt2")
    dense = model.config.to_dict()
    convert.adopt_config(model)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "struprune_gpt2"
    assert config["architectures"] == ["StruPruneGPT2LMHeadModel"]
    assert config["layout"]["layers"] == "transformer.h"
    assert config["layout"]["conv1d"]
    assert [*config["layout"]["linears"][0]] == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_struprune.StruPruneGPT2LMHeadModel"
    own = {"model_type", "architectures", "auto_map", "layout", "dtype", "_name_or_path", "per_layer_config"}
    again = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {n: v for n, v in again.items() if n not in own} == {n: v for n, v in dense.items() if n not in own}
    assert type(AutoModel.from_pretrained(tmp_path)).__name__ == "StruPruneGPT2Model"


@pytest.mark.parametrize("model_type", ["gpt2", "mistral3", "bloom"])
def test_uniform_layers_become_a_stock_model_by_measure(model_type, tmp_path):
    """One width in all layers; values grow back with zeros."""
    model = make_tiny(model_type)
    dense = model.num_parameters()
    masked = cut_units(model, "value_channels", prune_ffn=model_type != "bloom")  # its configuration has no key
    convert.adopt_config(model)
    model.save_pretrained(tmp_path / "pruned")
    convert_folder(tmp_path / "pruned", "uniform-padded", tmp_path / "stock")
    auto = AutoModelForImageTextToText if model_type in WRAPPERS else AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path / "stock", **EAGER)
    assert type(again) is type(masked)
    assert not [*(tmp_path / "stock").glob("*.py")]
    torch.testing.assert_close(again(read_ids(model)).logits, masked(read_ids(model)).logits, rtol=1e-4, atol=1e-5)
    assert again.num_parameters() < dense or model_type == "bloom"
    found = stock_config.find_stock_config(model)
    found.auto_map = {"AutoConfig": "configuration_own.OwnConfig"}  # of code in the source folder that was not run
    convert.adopt_stock(model, found)
    assert "auto_map" not in model.config.to_dict()
    assert torch.equal(model(read_ids(model)).logits, again(read_ids(model)).logits)


@pytest.mark.parametrize(
    ("model_type", "holds"), [("llama", True), ("gpt2", False), ("gpt_oss", False), ("minimax", False)]
)
def test_a_class_holds_fewer_heads_if_these_linears_alone_change(model_type, holds):
    """GPT-2 divides its width by the heads, gpt-oss has a sink for each, MiniMax counts those of linear attention, too."""
    assert stock_config.can_hold_heads(make_tiny(model_type), 1) is holds


def test_a_width_is_found_though_another_key_has_the_same_value():
    """GPT-2 leaves its FFN's width open; the number of positions happens to be the same."""
    config = CONFIG_MAPPING["gpt2"](vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, n_ctx=128)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.transformer.h:
        keep = torch.arange(100)
        layer.mlp.c_fc.weight = nn.Parameter(layer.mlp.c_fc.weight[:, keep])
        layer.mlp.c_fc.bias = nn.Parameter(layer.mlp.c_fc.bias[keep])
        layer.mlp.c_proj.weight = nn.Parameter(layer.mlp.c_proj.weight[keep])
    found = stock_config.find_stock_config(model)
    assert (found.n_inner, found.n_positions) == (100, 128)


def test_what_no_key_can_say_is_refused(tmp_path):
    model, _ = make_pruned("gptj")
    with pytest.raises(ValueError, match=r"n_inner.*must give the model's shapes, got: transformer\.h\.0\.mlp"):
        stock_config.find_stock_config(model, {"n_inner": 100})
    with pytest.raises(ValueError, match=r"GPTJConfig: \{.*\} must give the model's shapes"):
        stock_config.find_stock_config(model)


def test_only_linears_of_decoder_layers_may_differ():
    model, _ = make_pruned("olmo2")
    norm = model.model.layers[1].post_attention_layernorm
    norm.weight = nn.Parameter(norm.weight[:-1])
    with pytest.raises(ValueError, match=r"model\.layers\.1\.post_attention_layernorm\.weight: must have the shape"):
        convert.adopt_config(model)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, x, *, scale=1.0):
        return self.join(self.first(x)) * scale

    def join(self, x):
        return self.second(x)


def test_a_view_runs_the_stock_code_on_padded_linears():
    """Hooks, and whatever replaces a linear, see the channels of its weights; unknown arguments reach the stock code."""
    torch.manual_seed(0)
    model, seen = nn.ModuleDict({"pair": Pair()}), []
    modeling_struprune.adopt_padding(model["pair"], "first", {"pad": {"blocks": 2, "segments": [[1, 3, 5]]}})
    modeling_struprune.adopt_padding(model["pair"], "second", {"narrow": {"blocks": 2, "segments": [[1, 2, 5]]}})
    pair, x = model["pair"], torch.randn(7, 4)
    wide = nn.functional.pad(pair.first(x).view(7, 2, 3), (0, 2))
    wanted = pair.second(wide[..., :2].flatten(1)) * 2
    pair.second.register_forward_hook(lambda _module, args, output: seen.append((args[0].shape, output.shape)))
    for run in (pair, copy.deepcopy(pair)):
        assert torch.equal(run(x, scale=2), wanted)
    assert seen == [((7, 4), (7, 3))] * 2
    pair.second = nn.Sequential(pair.second)
    assert torch.equal(pair(x, scale=2), wanted)
    assert torch.equal(torch.export.export(pair, (x,), {"scale": 2}).module()(x, scale=2), wanted)
    assert torch.equal(torch.compile(pair, fullgraph=True, backend="eager")(x, scale=2), wanted)
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        pair(x, size=2)


def test_a_class_that_does_not_read_the_linear_is_refused():
    owner = Pair()
    owner.third = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"Pair: its code in transformers .* must call the linear 'third', and"):
        modeling_struprune.adopt_padding(owner, "third", {})


def test_padded_and_narrow_are_inverse():
    form = {"blocks": 2, "segments": [[1, 4, 4], [2, 2, 3]]}
    states = torch.arange(32.0).view(2, 16)
    wide = pad(states, form)
    assert wide.shape == (2, 20)
    assert torch.equal(narrow(wide, form), states)
    assert wide[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 6, 7, 0, 8, 9, 10, 11, 12, 13, 0, 14, 15, 0]


def cut_block(layer, width):
    """Leave the first channels of one of its blocks."""
    layer.fc.weight, layer.fc.bias = nn.Parameter(layer.fc.weight[:width]), nn.Parameter(layer.fc.bias[:width])
    layer.proj.weight = nn.Parameter(layer.proj.weight[:, :width])
    layer.fc.out_features = layer.proj.in_features = width


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """(the sliced model, its folder) of a class that came with its checkpoint."""
    folder = save_own(tmp_path_factory.mktemp("mine"), vocab_size=64, width=28, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    for index, layer in enumerate(model.model.layers):
        for linear in (layer.fc, layer.proj):
            nn.init.normal_(linear.weight)
        cut_block(layer, 20 + index)
    convert.adopt_config(model)
    out = tmp_path_factory.mktemp("out")
    model.save_pretrained(out)
    return model, out


def test_code_of_a_folder_travels_unchanged(mine, tmp_path):
    model, out = mine
    assert {name: (out / name).read_text() for name in CODE} == CODE
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "struprune_custom_own"
    assert config["auto_map"] == {
        "AutoConfig": "modeling_struprune_custom.StruPruneOwnConfig",
        "AutoModel": "modeling_struprune_custom.StruPruneOwnModel",
        "AutoModelForCausalLM": "modeling_struprune_custom.StruPruneOwnForCausalLM",
    }
    again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    ids = read_ids(model)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(again.generate(ids, max_new_tokens=3), model.generate(ids, max_new_tokens=3))
    again.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.glob("*.py")} == {file.name for file in out.glob("*.py")}
    third = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert torch.equal(third(ids).logits, model(ids).logits)


def test_uniform_layers_of_such_code_are_saved_as_it_came(mine, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(mine[1], trust_remote_code=True)
    cut_block(model.model.layers[1], 20)
    logits = model(read_ids(model)).logits
    convert.adopt_stock(model, stock_config.find_stock_config(model))
    model.save_pretrained(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.glob("*.py")} == CODE
    assert json.loads((tmp_path / "config.json").read_text())["width"] == 20
    again = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(again).__name__ == "OwnForCausalLM"
    assert torch.equal(again(read_ids(model)).logits, logits)


def test_code_that_no_checkpoint_brought_is_refused():
    class LooseForCausalLM(AutoModelForCausalLM._model_mapping[CONFIG_MAPPING["olmo2"]]):
        pass

    model, _ = make_pruned("olmo2")
    model.__class__ = LooseForCausalLM
    with pytest.raises(ValueError, match="LooseForCausalLM: the class must come with its checkpoint"):
        convert.adopt_config(model)


def test_a_mask_that_a_class_with_transposed_linears_makes_is_made_again(tmp_path):
    model = build_tiny(CONFIG_MAPPING["openai-gpt"](n_layer=2))
    any_class.replace_conv1d(model)
    cut_units(model, "none")
    convert.adopt_config(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again.transformer.h[0].attn.bias, model.transformer.h[0].attn.bias)
    assert torch.equal(again(read_ids(model)).logits, model.eval()(read_ids(model)).logits)
