"""Modules that shrink by tensors and numbers of their own: exact, saved, loaded, pruned again, refused where a model lacks them."""

from types import SimpleNamespace

import pytest
import torch
from helpers.families import make_model
from helpers.killed_runs import kill_after
from helpers.models import CHEAP, make_dataset, run_oneshot, save_model
from llmcompressor.modifiers.quantization import QuantizationModifier
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from struprune_plugin import StruPruneModifier
from struprune_plugin.cli import main as cli
from struprune_plugin.model.groups import list_groups
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.surgery import grow_group
from struprune_plugin.model.unit_kind import UNIT_KINDS
from struprune_plugin.storage.manifest import read_manifest

DELTA = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
FALCON = {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": False, "ssm_multipliers": [0.5, 2.0, 1.5, 0.7, 1.2]}
GROUPS = {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2}
GROUPS |= {"ssm_state_size": 8, "chunk_size": 8}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
TYPES = {  # kind of units, share that goes, and what a tiny model of the type needs
    "lfm2": ("convolution", 0.02, {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
    "qwen3_5_text": ("recurrent_heads", 0.05, DELTA),
    "qwen3_next": ("recurrent_heads", 0.15, DELTA | MIXTURE),  # rows head by head
    "bamba": ("recurrent_heads", 0.05, MAMBA | {"attn_layer_indices": [1]}),  # a norm over all heads
    "falcon_h1": ("recurrent_heads", 0.1, FALCON),  # beside attention, with a buffer that loading computes
    "nemotron_h": ("recurrent_heads", 0.02, GROUPS),  # heads of groups, a norm over each
}


@pytest.fixture(scope="module", params=TYPES)
def pruned(request, tmp_path_factory):
    """(kind, dense folder, pruned model in memory, its folder, share that went)."""
    kind, share, changes = TYPES[request.param]
    work = tmp_path_factory.mktemp(request.param)
    folder = save_model(make_model(request.param, **changes), work / "dense")
    fields = {"units": [kind], "sparsity": share, **CHEAP}
    model = run_oneshot(str(folder), **fields, output_dir=str(work / "out")).eval()
    return kind, folder, model, work / "out", share


@torch.no_grad()
def run_with_cache(model, tokens):
    """The logits of a prompt and of the tokens after it, read one by one from a cache; and the cache."""
    made = model(tokens[:, :5], use_cache=True)
    logits = [made.logits]
    for at in range(5, tokens.shape[1]):
        made = model(tokens[:, at : at + 1], past_key_values=made.past_key_values, use_cache=True)
        logits.append(made.logits)
    return torch.cat(logits, 1), made.past_key_values


def count_state(cache):
    held = [vars(layer).get(name) for layer in cache.layers for name in ("conv_states", "recurrent_states")]
    parts = [part for one in held if one is not None for part in (one.values() if isinstance(one, dict) else [one])]
    return sum(part.numel() for part in parts if part is not None)


def test_saved_and_loaded_it_gives_the_same_with_a_smaller_cache(pruned):
    kind, dense, model, out, _ = pruned
    groups = read_manifest(out).groups
    assert {group.kind for group in groups} == {kind}
    assert any(group.kept < group.num_units for group in groups)
    loaded, whole = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (out, dense))
    tokens = torch.arange(4, 20)[None]
    wanted = model(tokens, use_cache=False).logits
    torch.testing.assert_close(loaded(tokens, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)
    (found, cache), (_, before) = run_with_cache(loaded, tokens), run_with_cache(whole, tokens)
    torch.testing.assert_close(found, run_with_cache(model, tokens)[0], rtol=1e-4, atol=1e-4)
    assert 0 < count_state(cache) < count_state(before)


def test_it_is_converted_to_the_stock_class_and_pruned_again(pruned, tmp_path):
    kind, _, model, out, share = pruned
    tokens = torch.arange(4, 20)[None]
    assert cli.main(["convert", str(out), "--to", "uniform-padded", "--output", str(tmp_path / "stock")]) == 0
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(stock).__module__.startswith("transformers.")
    torch.testing.assert_close(stock(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    again = run_oneshot(str(out), units=[kind], sparsity=share, **CHEAP, output_dir=str(tmp_path / "again")).eval()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(loaded(tokens).logits, again(tokens).logits, rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["convolution", "recurrent_heads"])
def test_kinds_that_a_model_lacks_are_refused_with_those_that_it_has(kind, save_family, tmp_path):
    with pytest.raises(
        ValueError, match=f"units: must name kinds that 'llama' has, got '{kind}'; it has value_channels, ffn"
    ):
        run_oneshot(str(save_family("llama")), units=["ffn", kind], sparsity=0.1, output_dir=str(tmp_path / "out"))


STOCK = {"qwen3_5_text": 0.15, "qwen3_next": 0.15, "falcon_h1": 0.15}  # share that goes of all layers alike


@pytest.mark.parametrize("model_type", STOCK)
def test_in_one_size_the_stock_class_loads_it_where_its_configuration_has_the_numbers(model_type, tmp_path):
    kind, _, changes = TYPES[model_type]
    dense, out = str(save_model(make_model(model_type, **changes), tmp_path / "dense")), tmp_path / "out"
    model = run_oneshot(dense, units=[kind], output="uniform", sparsity=STOCK[model_type], output_dir=str(out)).eval()
    assert len({(group.num_units, group.kept) for group in read_manifest(out).groups}) == 1
    assert not [*out.glob("*.py")]
    loaded, tokens = AutoModelForCausalLM.from_pretrained(out).eval(), torch.arange(4, 20)[None]
    assert type(loaded) is type(model) is type(AutoModelForCausalLM.from_pretrained(dense))
    for run in (lambda each: each(tokens, use_cache=False).logits, lambda each: run_with_cache(each, tokens)[0]):
        wanted = run(model)
        torch.testing.assert_close(run(loaded), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    texts = [each.generate(tokens, max_new_tokens=8, do_sample=False) for each in (loaded, model)]
    assert torch.equal(*texts)
    again = run_oneshot(str(out), units=["ffn"], sparsity=0.1, output="uniform", output_dir=str(tmp_path / "again"))
    assert type(again) is type(model)


@pytest.mark.parametrize(
    ("model_type", "kinds"), [("falcon_h1", {"recurrent_heads", "head", "ffn"}), ("lfm2", {"head", "ffn"})]
)
def test_in_one_size_recipes_that_name_no_units_take_those_that_the_stock_class_can_have(model_type, kinds, tmp_path):
    dense = str(save_model(make_model(model_type, **TYPES[model_type][2]), tmp_path / "dense"))
    out, fields = tmp_path / "out", {"output": "uniform", "attention_unit": "head", "sparsity": 0.25}
    model = run_oneshot(
        dense, dataset=make_dataset(16), **fields, num_calibration_samples=16, output_dir=str(out)
    ).eval()
    assert {group.kind for group in read_manifest(out).groups} == kinds
    loaded, tokens = AutoModelForCausalLM.from_pretrained(out), torch.arange(4, 20)[None]
    assert type(loaded) is type(model)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_in_one_size_a_folder_with_different_sizes_is_refused(pruned, tmp_path):
    _, _, _, out, _ = pruned
    with pytest.raises(ValueError, match=r"Convert the model first|got none of the units ffn"):
        run_oneshot(str(out), units=["ffn"], output="uniform", sparsity=0.1, output_dir=str(tmp_path / "again"))


@pytest.mark.parametrize("model_type", ["lfm2", "bamba", "nemotron_h"])
def test_in_one_size_units_whose_number_no_key_sets_are_refused_by_name(model_type, tmp_path):
    kind, _, changes = TYPES[model_type]
    dense = str(save_model(make_model(model_type, **changes), tmp_path / "dense"))
    fields = {"units": [kind, "ffn"], "output": "uniform", "sparsity": 0.1}
    with pytest.raises(ValueError, match=rf"got units: {kind} \(.*(no key|eps)"):
        run_oneshot(dense, **fields, output_dir=str(tmp_path / "out"))


def test_recipes_that_name_no_units_take_them_unless_attention_stays_whole(tmp_path):
    dense, kinds = str(save_model(make_model("falcon_h1", **FALCON), tmp_path / "dense")), []
    for fields in ({}, {"attention_unit": "none"}):
        run_oneshot(dense, sparsity=0.3, **fields, output_dir=str(tmp_path / "out"), overwrite=True)
        kinds.append({group.kind for group in read_manifest(tmp_path / "out").groups})
    assert kinds == [{"recurrent_heads", "value_channels", "ffn"}, {"ffn"}]


def test_a_run_killed_after_one_layer_goes_on_to_the_same_bytes(pruned, tmp_path):
    kind, dense, _, out, share = pruned

    def run(folder):
        options = {"output_dir": str(tmp_path / folder), "checkpoint_dir": str(tmp_path / "store")}
        run_oneshot(str(dense), units=[kind], sparsity=share, **CHEAP, **options)

    kill_after(2, lambda: run("killed"))  # allocation, one layer
    run("resumed")
    first, resumed = (folder / "model.safetensors" for folder in (out, tmp_path / "resumed"))
    assert first.read_bytes() == resumed.read_bytes()
    assert (out / "config.json").read_bytes() == (tmp_path / "resumed" / "config.json").read_bytes()


def test_groups_of_heads_keep_the_same_number():
    structure = find_structure(make_model("nemotron_h", **GROUPS))
    (unit,) = (unit for unit in structure.list_units() if unit.by_name)
    group = list_groups(make_model("nemotron_h", **GROUPS), [UNIT_KINDS.parse("recurrent_heads")])[0]
    assert (group.num_units, group.num_blocks, group.columns_per_unit) == (8, 2, 8)
    assert unit.tensors["mixer.conv1d.weight"] == ("channel", "shared")


@pytest.mark.parametrize("model_type", ["lfm2", "falcon_h1"])
def test_a_quantiser_and_adapters_take_the_smaller_modules(model_type, tmp_path):
    kind, share, changes = TYPES[model_type]
    dense = str(save_model(make_model(model_type, **changes), tmp_path / "dense"))
    modifier = StruPruneModifier(units=[kind], sparsity=share, **CHEAP)
    recipe = [modifier, QuantizationModifier(scheme="W8A8", ignore=["lm_head"])]
    run_oneshot(dense, recipe, output_dir=str(tmp_path / "quantised"))
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised")(torch.arange(4, 20)[None]).logits
    assert out.isfinite().all()
    run_oneshot(dense, units=[kind], sparsity=share, output_dir=str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    adapted = get_peft_model(model, LoraConfig(target_modules=["in_proj", "out_proj"], r=2, init_lora_weights=False))
    wanted = adapted(torch.arange(4, 20)[None]).logits
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(torch.arange(4, 20)[None]).logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_tensor_with_one_unit_left_does_not_say_where_units_are():
    """Kimi's decays have the shape [1, 1, heads, 1]."""
    layer = nn.Module()
    layer.decay = nn.Parameter(torch.ones(1, 1, 1, 1))
    group = SimpleNamespace(producers={}, tensors={"decay": ()}, find_kept_rows=lambda name, keep: keep)
    with pytest.raises(ValueError, match="decay: must keep at least two units"):
        grow_group(layer, group, torch.tensor([0]))
