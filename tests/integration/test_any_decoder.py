"""Decoders that nobody described, from a folder to a folder: types that differ most, wrappers, code of a folder, packed weights."""

import json
from functools import partial

import pytest
import torch
from datasets import Dataset
from helpers.models import CHEAP, make_dataset, run_oneshot, save_model
from helpers.own_code import CODE, save_own
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform import AWQModifier
from llmcompressor.modifiers.transform.awq.mappings import AWQMapping
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from eval import coverage
from eval.coverage import make_config, run_type
from struprune_plugin import LoRARecoveryModifier, StruPruneModifier, read_manifest
from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import DEMO_MODEL
from struprune_plugin.export.any_class import list_padded
from struprune_plugin.export.outputs import convert_folder
from struprune_plugin.model.layers import find_layouts
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens

TYPES = {  # type -> number of layers, where it takes any: one of each kind; wrappers are below
    "gpt2": 2,  # transposed and fused linears
    "falcon": 2,  # queries, keys and values fused, one value head, a parallel residual
    "olmo2": 2,  # norms across heads, and behind the consumers
    "qwen3_5_text": 8,  # linear attention, values that are gated; states amplify rounding
    "gpt_oss": 2,  # sinks, experts
    "deepseek_v3": 2,  # latent attention, a shared expert
    "llama4_text": 2,  # every expert takes every token
    "gemma4_text": 2,  # experts and a dense FFN side by side, norms behind
    "nemotron_h": 4,  # layers of a state space, an FFN, experts or attention alone
    "lfm2": 2,  # layers of a convolution, a width made of another number
}
MIXTURES = {"gpt_oss", "deepseek_v3", "llama4_text", "gemma4_text", "nemotron_h"}
KINDS = {  # what few layers are, of types whose own order is longer
    "deepseek_v3": {"first_k_dense_replace": 1},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def make_cheap(monkeypatch):
    """Let a type's row be made in half the time: without trials, and no stage prunes once more."""
    monkeypatch.setattr(coverage, "StruPruneModifier", partial(StruPruneModifier, **CHEAP))
    for stage in ("stock class", "again"):
        monkeypatch.delitem(coverage.STAGES, stage)


@pytest.mark.parametrize(("model_type", "layers"), TYPES.items())
def test_types_that_differ_pass_every_stage(model_type, layers, monkeypatch):
    """One mixture and one dense type are pruned by the default, and once more by the stages that ask for it."""
    monkeypatch.setattr(coverage, "OPEN", coverage.OPEN | KINDS)
    monkeypatch.delitem(coverage.STAGES, "FFN")  # it is in "all"
    if model_type not in ("gpt_oss", "lfm2"):
        make_cheap(monkeypatch)
    row = run_type(model_type, layers)
    assert row["verdict"] == "pruned", row
    assert ("experts" in row["units (layers)"]) == (model_type in MIXTURES)


@pytest.mark.parametrize(("model_type", "heads"), [("llama", 4), ("qwen3", 1)])
def test_keys_that_all_heads_share_are_found_beside_the_values(model_type, heads, tmp_path):
    """One head of keys and values: every key reaches every column of what the heads give together."""
    config = make_config(model_type, 2)
    config.num_attention_heads, config.num_key_value_heads = heads, 1
    model = build_tiny(config)
    ((_, layout), *_) = find_layouts(model)
    parts = set(layout.units[0].producers.values())
    assert parts == {("query",), ("key",), ("value",)}
    model.save_pretrained(tmp_path / "dense")
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(tmp_path / "dense")
    data, ids = make_tokens(model.config)
    fields = {"sparsity": 0.03, "prune_ffn": False}
    pruned = run_oneshot(str(tmp_path / "dense"), dataset=data, output_dir=str(tmp_path / "out"), **fields)
    assert all(record.kept < record.num_units for record in read_manifest(tmp_path / "out").groups)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, pruned(input_ids=ids).logits)


@pytest.mark.parametrize("model_type", ["gpt2", "cohere2"])
def test_padded_linears_are_trained_and_quantised_like_others(model_type, tmp_path):
    """Their adapters and the quantiser's statistics have the sides of the weights, not those of the module around them."""
    model = build_tiny(make_config(model_type, 2))
    save_model(model, tmp_path / "dense")
    data, ids = make_tokens(model.config, 16)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"linears": {"targets": ["Linear"], "weights": weights}}
    recipe = [
        StruPruneModifier(sparsity=0.2, **CHEAP),
        LoRARecoveryModifier(adapters={"rank": 2}, schedule={"max_steps": 1}),
        GPTQModifier(config_groups=groups, ignore=["lm_head"]),
    ]
    quantised = run_oneshot(
        str(tmp_path / "dense"), recipe, data, num_calibration_samples=16, output_dir=str(tmp_path / "out")
    )
    padded = [said for owner in list_padded(quantised) for said in owner.struprune_padding.values()]
    assert any("pad" in said for said in padded)
    assert any("narrow" in said for said in padded)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, quantised(input_ids=ids).logits)


def test_smoothing_and_quantised_activations_work_behind_padded_linears(tmp_path):
    model = build_tiny(make_config("olmo2", 2))
    save_model(model, tmp_path / "dense")
    data, ids = make_tokens(model.config, 16)
    mapping = AWQMapping("re:.*v_proj$", ["re:.*o_proj$"])
    stages = {"awq": [AWQModifier(mappings=[mapping], duo_scaling=False, n_grid=3)], "w8a8": []}
    for name, smoothing in stages.items():
        quantiser = QuantizationModifier(targets=["Linear"], scheme="W8A8", ignore=["lm_head"])
        recipe = [StruPruneModifier(sparsity=0.2, **CHEAP), *smoothing, quantiser]
        options = {"num_calibration_samples": 16, "output_dir": str(tmp_path / name)}
        quantised = run_oneshot(str(tmp_path / "dense"), recipe, data, **options)
        assert list_padded(quantised)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        torch.testing.assert_close(loaded(input_ids=ids).logits, quantised(input_ids=ids).logits)


def test_heads_are_refused_where_values_are_padded(tmp_path):
    model = build_tiny(make_config("cohere2", 2))
    save_model(model, tmp_path / "dense")
    data, options = make_tokens(model.config, 16)[0], {"num_calibration_samples": 16}
    options |= {"sparsity": 0.2}
    run_oneshot(str(tmp_path / "dense"), dataset=data, output_dir=str(tmp_path / "once"), **options)
    with pytest.raises(ValueError, match="has lost value channels, after which whole heads cannot be removed"):
        run_oneshot(str(tmp_path / "once"), dataset=data, attention_unit="head", **options)


def test_a_stock_class_that_no_quantiser_reads_is_refused(tmp_path):
    model = build_tiny(make_config("gpt2", 2))
    save_model(model, tmp_path / "dense")
    recipe = [
        StruPruneModifier(sparsity=0.2, output="uniform", attention_unit="none"),
        GPTQModifier(targets=["Linear"], scheme="W4A16", ignore=["lm_head"]),
    ]
    with pytest.raises(ValueError, match=r"gives gpt2 its stock class, whose transposed .* Set `output: per_layer`"):
        run_oneshot(str(tmp_path / "dense"), recipe, make_tokens(model.config, 16)[0], output_dir=str(tmp_path / "out"))


def test_what_cannot_be_exchanged_is_refused_by_name():
    assert run_type("jetmoe")["verdict"].startswith(
        "refused: model: 'jetmoe' must have layers with attention or an FFN that can be cut, got none: no linear reads"
    )


def make_tokens(config, count=8):
    """Return (a data set for calibration, ids for comparisons) of tokens that an instance knows."""
    ids = draw_tokens(config, count, 32)
    return Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}), ids[:2]


# -- wrappers -------------------------------------------------------------------------------------------------------


def test_a_wrapper_keeps_what_is_not_its_decoder(tmp_path):
    dense, out = tmp_path / "dense", tmp_path / "out"
    kind = AutoModelForImageTextToText._model_mapping[CONFIG_MAPPING["gemma3"]]
    model = build_tiny(make_config("gemma3", 2), model_class=kind)
    model.save_pretrained(dense)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(dense)
    (dense / "preprocessor_config.json").write_text('{"image_processor_type":  "Own"}')
    data, ids = make_tokens(model.config)
    pruned = run_oneshot(str(dense), dataset=data, sparsity=0.2, output_dir=str(out))
    assert type(pruned).__name__ == f"StruPrune{kind.__name__}"
    (tmp_path / "padded").mkdir()
    convert_folder(out, "uniform-padded", tmp_path / "padded")
    for folder in (out, tmp_path / "padded"):
        assert (folder / "preprocessor_config.json").read_bytes() == (dense / "preprocessor_config.json").read_bytes()
    before, after = load_file(dense / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    towers = [name for name in before if "language_model" not in name and not name.startswith("lm_head")]
    assert towers
    assert all(torch.equal(before[name], after[name]) for name in towers)
    assert sum(map(torch.numel, after.values())) < sum(map(torch.numel, before.values()))
    again = AutoModelForImageTextToText.from_pretrained(out).eval()
    assert all(type(load_checkpoint(str(folder))[0]) is type(one) for folder, one in ((dense, model), (out, again)))
    torch.testing.assert_close(again(input_ids=ids).logits, pruned(input_ids=ids).logits)


# -- code of a folder -----------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path):
    """A checkpoint that brings its code."""
    return save_own(tmp_path / "own")


def test_code_of_a_folder_is_pruned_where_it_is_trusted(own, tmp_path):
    out = tmp_path / "out"
    pruned = run_oneshot(str(own), sparsity=0.3, output_dir=str(out), trust_remote_code_model=True)
    kinds = {(group.name.rpartition(".")[2], group.kind) for group in read_manifest(out).groups}
    assert kinds == {("wo", "value_channels"), ("proj", "ffn")}
    assert {name: (out / name).read_text() for name in CODE} == CODE
    again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    ids = torch.tensor([make_dataset(1)[0]["input_ids"]])
    torch.testing.assert_close(again(ids).logits, pruned(ids).logits)
    fields = {"sparsity": 0.2, "trust_remote_code_model": True}
    further = run_oneshot(str(out), output_dir=str(tmp_path / "further"), **fields)
    assert further.num_parameters() < again.num_parameters()
    run_oneshot(str(own), attention_unit="none", output="uniform", output_dir=str(tmp_path / "uniform"), **fields)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "uniform", trust_remote_code=True)
    assert type(stock).__name__ == "OwnForCausalLM"


def test_every_command_that_loads_a_model_may_trust_its_code(own, tmp_path, capsys):
    small = ["--num-samples", "8", "--seq-length", "32", "--sparsity", "0.3"]
    small += ["--set", "allocation=uniform", "--set", "sensitivity=none"]
    out, trust = str(tmp_path / "out"), "--trust-remote-code"
    commands = [
        ["plan", str(own), *small],
        ["prune", str(own), *small, "--recipe", "struprune", "--output", out],
        ["eval", out, "--window", "16", "--max-tokens", "64"],
        ["convert", out, "--to", "uniform-padded", "--output", str(tmp_path / "padded")],
        ["sweep", str(own), *small, "--window", "16", "--max-tokens", "64", "--output", str(tmp_path / "curve")],
    ]
    for words in commands:
        assert cli.main(words) == 2
        assert "trust_remote_code" in capsys.readouterr().err
        assert cli.main([*words, trust]) == 0, capsys.readouterr().err


def test_code_of_a_folder_is_refused_where_it_is_not_trusted(own):
    with pytest.raises(ValueError, match=r"model: .* must be a model folder or a hub name that can be loaded"):
        run_oneshot(str(own), sparsity=0.3)


# -- packed weights -------------------------------------------------------------------------------------------------


def pack(dense, packed, config):
    """Write a checkpoint of packed weights; give the dense one what unpacking them is to give."""
    weights, stated = load_file(dense / "model.safetensors"), json.loads((dense / "config.json").read_text())
    stored = {}
    for name, weight in weights.items():
        if config["quant_method"] == "fp8" and name.endswith("proj.weight"):
            scale = weight.abs().max() / 448
            stored |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}
            weights[name] = stored[name].float() * scale
        elif config["quant_method"] == "mxfp4" and name.endswith("_proj"):
            blocks = torch.randint(256, (*weight.mT.shape[:2], weight.shape[1] // 32, 16), dtype=torch.uint8)
            stored |= {
                f"{name}_blocks": blocks,
                f"{name}_scales": torch.full(blocks.shape[:-1], 122, dtype=torch.uint8),
            }
            codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(2).long()
            weights[name] = (FP4[codes] * 2.0 ** (122 - 127)).mT.contiguous()
        else:
            stored[name] = weight
    packed.mkdir()
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(weights, dense / "model.safetensors", {"format": "pt"})
    (packed / "config.json").write_text(json.dumps({**stated, "quantization_config": config}))
    for folder in (dense, packed):
        AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)


FP4 = torch.tensor([*(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)])
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
PACKED = {"qwen3": FP8, "qwen3_moe": FP8, "gpt_oss": {"quant_method": "mxfp4"}}
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES |= {"head_dim": 16, "intermediate_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
EXPERTS = {"qwen3_moe": EXPERTS | {"num_experts": 4}, "gpt_oss": EXPERTS | {"num_local_experts": 4}}


@pytest.mark.parametrize(("model_type", "on_disk"), [("qwen3", False), ("gpt_oss", False), ("qwen3_moe", True)])
def test_packed_weights_are_unpacked(model_type, on_disk, tmp_path, monkeypatch):
    dense, packed, out = (tmp_path / name for name in ("dense", "packed", "out"))
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**SIZES, **EXPERTS.get(model_type, {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(dense)
    pack(dense, packed, PACKED[model_type])
    data, ids = make_tokens(config)
    monkeypatch.setattr("compressed_tensors.offload.load._get_cpu_memory", lambda *_: {"cpu": 100_000})
    options = {"offload_folder": tmp_path / "disk"} if on_disk else {}
    fields = {"dataset": data, "precision": "float32", "sparsity": 0.1}
    pruned = run_oneshot(str(packed), output_dir=str(out), **fields, **options)
    wanted = run_oneshot(str(dense), **fields)
    torch.testing.assert_close(pruned(ids).logits, wanted(ids).logits)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert load_file(out / "model.safetensors").keys() == load_file(dense / "model.safetensors").keys()
    again = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(again(ids).logits, pruned(ids).logits)
