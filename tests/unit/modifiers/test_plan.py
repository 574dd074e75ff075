"""``struprune plan``: what it says without calibration is what the run then leaves."""

import json
import shutil

import pytest
import torch
from helpers.models import make_dataset, run_oneshot, save_model, save_opt
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from struprune_plugin import SparsityAllocatorModifier, StruPruneModifier
from struprune_plugin.cli import main as cli
from struprune_plugin.model.layers import count_parameters, find_decoder_layers
from struprune_plugin.modifiers.plan import Workload, build_shapes, plan_run
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.storage.files import measure_weight_bytes

SMALL = ["--num-samples", "8", "--seq-length", "32"]


def plan(folder, **changes):
    return plan_run(str(folder), load_recipe("struprune", changes).modifiers, Workload(8, 32, 8))


@pytest.mark.parametrize("unit", ["value_channels", "head", "none"])
def test_sizes_are_those_of_the_output(opt, prune_once, unit):
    model, out = prune_once(opt, unit)
    found = plan(opt, sparsity=0.3, attention_unit=unit)
    assert found.parameters[1] == pytest.approx(count_parameters(model), rel=0.01)
    assert found.bytes[1] == pytest.approx(measure_weight_bytes(out), rel=0.05)  # a header, which tiny models feel


SIZES = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": []}


def test_an_allocator_stage_counts_as_in_the_run(opt):
    stages = [SparsityAllocatorModifier(sparsity=0.3, attention_unit="none"), StruPruneModifier()]
    assert plan_run(str(opt), stages, Workload(8, 32, 8)) == plan(
        opt, sparsity=0.3, allocation="softmax", attention_unit="none"
    )


def save_mixture(folder):
    return save_model(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, head_dim=8, **MIXTURE)), folder)


def test_sizes_of_a_mixture_are_those_of_the_output(tmp_path):
    dense, out = save_mixture(tmp_path / "dense"), tmp_path / "out"
    recipe = {"sparsity": 0.3, "attention_unit": "none", "allocation": "uniform"}
    pruned = run_oneshot(
        str(dense), output_dir=str(out), dataset=make_dataset(24), num_calibration_samples=24, **recipe
    )
    found = plan(dense, **recipe)
    assert found.parameters[1] == count_parameters(pruned)
    assert found.bytes[1] == pytest.approx(measure_weight_bytes(out), rel=0.05)


def test_bytes_of_host_and_device_are_told_of_a_packed_mixture(tmp_path, capsys):
    layers = {"layer_types": ["full_attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(**SIZES, head_dim=8, **layers, quantization_config={"quant_method": "mxfp4"})
    config.save_pretrained(tmp_path)
    shapes, argv = build_shapes(str(tmp_path), config), ["plan", str(tmp_path), "--sparsity", "0.3"]
    assert cli.main([*argv, "--json", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    needs, layer = found["needs"], sum(p.nbytes for p in find_decoder_layers(shapes)[0][1].parameters())
    assert shapes.dtype is torch.bfloat16
    assert needs["weights"] == 2 * found["parameters"][0]
    assert needs["movable"]["states"]
    assert 2 * layer < needs["device"]
    assert cli.main([*argv, "--quiet", *SMALL]) == 0
    printed = capsys.readouterr().out
    gone = 1 - found["parameters"][1] / found["parameters"][0]
    assert f"sparsity 0.3 of the layers' linear parameters, {gone:.1%} of the whole model\n" in printed
    both = 2 * config.vocab_size * config.hidden_size
    assert found["embeddings"] == both
    assert f"embeddings and head  {both / found['parameters'][0]:.1%} of the model's parameters, from which" in printed
    assert "on the device  " in printed


@pytest.mark.parametrize("unit", ["value_channels", "none"])
def test_the_device_holds_no_more_for_more_layers(tmp_path, unit):
    needs = []
    for layers in (2, 6):
        model = AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": layers}, head_dim=8, **MIXTURE)
        )
        needs.append(plan(save_model(model, tmp_path / str(layers)), sparsity=0.3, attention_unit=unit).needs)
    assert needs[0].device == needs[1].device
    assert needs[0].weights < needs[1].weights


def test_a_configuration_alone_is_planned(opt, tmp_path, capsys):
    shutil.copy(opt / "config.json", tmp_path)
    assert cli.main(["plan", str(tmp_path), "--sparsity", "0.3", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert cli.main(["plan", str(opt), "--sparsity", "0.3", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (alone["parameters"], alone["bytes"]) == (whole["parameters"], whole["bytes"])
    assert alone["recipe"] == "struprune"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sparsity", "0.99"], "Lower sparsity"),
        (["--recipe", "RECOVERY"], "must have a StruPruneModifier"),
        (["--recipe", "BARE"], "gives neither sparsity nor budget"),
        (["--recipe", "LATE"], "exactly one SparsityAllocatorModifier must come before the StruPruneModifier"),
        (["--recipe", "ZEROS"], "must come before quantisers, their smoothing and rotation, and sparsity modifiers"),
    ],
)
def test_what_cannot_be_planned_is_refused(opt, tmp_path, capsys, argv, message):
    (tmp_path / "RECOVERY").write_text("a_stage: {b_modifiers: {LoRARecoveryModifier: {adapters: {rank: 2}}}}")
    (tmp_path / "BARE").write_text("a_stage: {b_modifiers: {StruPruneModifier: {attention_unit: vo}}}")
    pruning = "b_stage: {b_modifiers: {StruPruneModifier: {sparsity: 0.2}}}"
    (tmp_path / "LATE").write_text(pruning + "\nc_stage: {c_modifiers: {SparsityAllocatorModifier: {}}}")
    zeros = "a_stage: {b_modifiers: {ConstantPruningModifier: {targets: [Linear], start: 0, end: 1}}}\n"
    (tmp_path / "ZEROS").write_text(zeros + pruning)
    argv = [str(tmp_path / word) if word.isupper() else word for word in argv]
    assert cli.main(["plan", str(opt), *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_configuration_that_nobody_meant_is_refused(tmp_path, capsys):
    folder = save_opt(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    assert cli.main(["plan", str(folder)]) == 2
    assert "num_hidden_layers must be in [1, 4096]" in capsys.readouterr().err
