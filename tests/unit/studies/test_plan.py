"""``struprune plan``: what it says without calibration is what the run then leaves."""

import json
import shutil

import pytest
import torch
from helpers.models import make_dataset, run_oneshot, save_model, save_opt
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from struprune_plugin import StruPruneModifier
from struprune_plugin.allocation.curves import count_moment_bytes
from struprune_plugin.cli import main as cli
from struprune_plugin.model import units
from struprune_plugin.model.layers import count_parameters, find_decoder_layers
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.reporting.tables import measure_weight_bytes
from struprune_plugin.studies.plan import (
    Workload,
    count_kept_moments,
    count_needs,
    list_engines,
    outline_run,
    read_shapes,
)

SMALL = ["--num-samples", "8", "--seq-length", "32"]


def load(name="struprune", **changes):
    return load_recipe(name, changes=changes)


@pytest.mark.parametrize("unit", ["value_channels", "head", "none"])
def test_sizes_are_those_of_the_output(opt, prune_once, unit):
    model, out = prune_once(opt, unit)
    after = outline_run(read_shapes(str(opt)), load(sparsity=0.3, attention_unit=unit).modifiers).after
    assert after.parameters == pytest.approx(count_parameters(model), rel=0.01)
    assert after.bytes == pytest.approx(measure_weight_bytes(out), rel=0.05)  # a header, which tiny models feel


SIZES = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": []}


def save_mixture(folder):
    return save_model(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, head_dim=8, **MIXTURE)), folder)


def test_sizes_of_a_mixture_are_those_of_the_output(tmp_path):
    dense, out = save_mixture(tmp_path / "dense"), tmp_path / "out"
    recipe = {"sparsity": 0.3, "attention_unit": "none", "allocation": "uniform"}
    pruned = run_oneshot(
        str(dense), output_dir=str(out), dataset=make_dataset(24), num_calibration_samples=24, **recipe
    )
    after = outline_run(read_shapes(str(dense)), load("struprune", **recipe).modifiers).after
    assert after.parameters == count_parameters(pruned)
    assert after.bytes == pytest.approx(measure_weight_bytes(out), rel=0.05)


def test_bytes_of_host_and_device_are_told_of_a_packed_mixture(tmp_path, capsys):
    layers = {"layer_types": ["full_attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(**SIZES, head_dim=8, **layers, quantization_config={"quant_method": "mxfp4"})
    config.save_pretrained(tmp_path)
    shapes, argv = read_shapes(str(tmp_path)), ["plan", str(tmp_path), "--sparsity", "0.3"]
    assert cli.main([*argv, "--json", *SMALL]) == 0
    plan = json.loads(capsys.readouterr().out)
    needs, layer = plan["needs"], sum(p.nbytes for p in find_decoder_layers(shapes.model)[0][1].parameters())
    assert shapes.dtype is torch.bfloat16
    assert needs["packed"] == "mxfp4"
    assert needs["weights"] == 2 * plan["before"]["parameters"]
    assert needs["host"] > needs["weights"]
    assert 2 * layer < needs["device"]
    assert cli.main([*argv, "--quiet", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "stored in mxfp4, dequantised as it is loaded" in printed
    assert "on the device  " in printed


def test_the_device_holds_no_more_for_more_layers(tmp_path):
    needs = []
    for layers in (2, 6):
        model = AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": layers}, head_dim=8, **MIXTURE)
        )
        shapes = read_shapes(str(save_model(model, tmp_path / str(layers))))
        needs.append(count_needs(shapes, load("struprune", sparsity=0.3).modifiers, Workload(8, 32, 8)))
    assert needs[0].device == needs[1].device
    assert needs[0].host < needs[1].host


def test_a_configuration_alone_is_planned(opt, tmp_path, capsys):
    shutil.copy(opt / "config.json", tmp_path)
    assert cli.main(["plan", str(tmp_path), "--sparsity", "0.3", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert cli.main(["plan", str(opt), "--sparsity", "0.3", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert alone["after"] == whole["after"]
    assert alone["recipe"] == "struprune"


def test_engines_depend_on_what_differs():
    assert "stock class" in list_engines(load("struprune_uniform").modifiers)["transformers"]
    assert list_engines(load(attention_unit="head").modifiers)["vLLM"].startswith(
        "with this package"
    )  # docs/serving.md
    assert list_engines(load("struprune_w8a8").modifiers)["vLLM"].startswith("not with its CPU kernels")
    assert list_engines(load().modifiers, mixture=True)["vLLM"].startswith("no: its Transformers backend")
    assert list_engines(load("struprune_uniform").modifiers, mixture=True)["vLLM"] == "yes, as its own class"
    assert "compressed-tensors" in list_engines(load("struprune_w8a8").modifiers)["transformers"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sparsity", "0.99"], "Lower sparsity"),
        (["--recipe", "RECOVERY"], "must have a StruPruneModifier"),
        (["--recipe", "BARE"], "must give a sparsity"),
    ],
)
def test_what_cannot_be_planned_is_refused(opt, tmp_path, capsys, argv, message):
    (tmp_path / "RECOVERY").write_text("a_stage: {b_modifiers: {LoRARecoveryModifier: {adapters: {rank: 2}}}}")
    (tmp_path / "BARE").write_text("a_stage: {b_modifiers: {StruPruneModifier: {attention_unit: vo}}}")
    argv = [str(tmp_path / word) if word in ("RECOVERY", "BARE") else word for word in argv]
    assert cli.main(["plan", str(opt), *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_configuration_that_nobody_meant_is_refused(tmp_path, capsys):
    folder = save_opt(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    assert cli.main(["plan", str(folder)]) == 2
    assert "num_hidden_layers must be in [1, 4096]" in capsys.readouterr().err


def test_moments_that_trials_keep_are_those_of_all_but_whole_experts(opt):
    groups = units.find_groups(AutoModelForCausalLM.from_pretrained(opt), "value_channels")
    for experts in ("channels", "whole"):
        kept = count_kept_moments(StruPruneModifier(sparsity=0.1, experts=experts), groups, 24)
        assert kept == count_moment_bytes(groups, 24) > 0
