import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from helpers.models import CHEAP, DEFAULT, ROOT, W8A8, make_dataset, make_opt, run_oneshot, save_opt, start_process
from llmcompressor.logger import LoggerConfig, configure_logger
from llmcompressor.modifiers.quantization import QuantizationModifier
from loguru import logger
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from struprune_plugin import SparsityAllocatorModifier, StruPruneModifier, oneshot, read_manifest
from struprune_plugin.registration import LOUD

GOOD = {"prune_stage": {"prune_modifiers": {"StruPruneModifier": {"sparsity": 0.3}}}}


def broken_model(tmp_path, name, value=float("inf")):
    model = make_opt()
    model.get_parameter(name).data[0] = value
    model.save_pretrained(tmp_path / "broken")
    save_opt(tmp_path / "tokenizer")
    return {"model": str(tmp_path / "broken"), "tokenizer": str(tmp_path / "tokenizer")}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "neither sparsity nor budget, and no SparsityAllocatorModifier stage comes before"),
        ({"sparsity": 0.9, "attention_unit": "none"}, r"removable .* Lower sparsity to at most 0\.\d+"),
        ({"sparsity": 0.3, "targets": ["re:.*nothing"]}, "'re:.*nothing' must match"),
        ({"sparsity": 0.3, "width_multiple": 64}, r"multiples of 64 \(width_multiple: 64\), more than the width 40"),
        ({"sparsity": 0.3, "dataset": make_dataset(2, 16)}, "fc2: .* at least 41 calibration tokens .* got 32 in 2"),
        ({"sparsity": 0.3, "dataset": make_dataset(4, 80)}, "at most 64 tokens long, .* got 80"),
        ({"sparsity": 0.3, "allocation": {"rule": "softmax", "max_sparsity": 0.2}}, r"max_sparsity: must be .* 0\.4"),
        ({"sparsity": 0.01, "width_multiple": 24}, "must let the modules remove .* Lower width_multiple"),
        ({"sparsity": 0.3, "pipeline": "basic"}, "pipeline: must be 'independent', .* got 'basic'"),
        ({"num_calibration_sample": 4}, "must be an argument of oneshot. Did you mean num_calibration_samples?"),
        ({"overwrit": True}, "must be an argument of oneshot. Did you mean overwrite?"),
        ({"recipe_args": ["sparsity=0.5"]}, r"recipe_args: must be left out, .* Pass changes=\{…\}"),
        ({"use_loss_mask": True}, "use_loss_mask: must be left out, got True"),
        ({"tokenizer": "no/tokenizer"}, "no/tokenizer"),
        ({"recipe": [SparsityAllocatorModifier(sparsity=0.3)]}, "exactly one SparsityAllocatorModifier must"),
        (
            {"recipe": [StruPruneModifier(sparsity=0.3), SparsityAllocatorModifier(sparsity=0.3)]},
            "exactly one SparsityAllocatorModifier must",
        ),
        (
            {"recipe": [StruPruneModifier(sparsity=0.3), StruPruneModifier(sparsity=0.2)]},
            "must have one StruPr.*, got 2",
        ),
        (
            {"recipe": [SparsityAllocatorModifier(sparsity=0.3), StruPruneModifier(sparsity=0.2)]},
            "sparsity must be left out",
        ),
        (
            {"recipe": [StruPruneModifier(sparsity=0.3), QuantizationModifier(scheme="W4A16", ignore=["lm_head"])]},
            r"multiples of 128 \(QuantizationModifier: weights in groups of 128\), more than the width",
        ),
        (
            {"recipe": [SparsityAllocatorModifier(sparsity=0.3), StruPruneModifier()], "pipeline": "sequential"},
            "pipeline: must be 'independent'",
        ),
    ],
)
def test_oneshot_refuses_before_calibration_and_writes_nothing(opt, tmp_path, fields, message, monkeypatch):
    def fail(*_args, **_kwargs):
        raise AssertionError("calibration started")

    monkeypatch.setattr("struprune_plugin.layerwise.statistics.LayerStatistics.run_layer", fail)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        run_oneshot(str(opt), **fields, output_dir=str(out))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["sparsity", "reconstruct", "output"])
def test_a_field_of_the_recipe_is_no_argument(opt, name):
    with pytest.raises(ValueError, match=f'got a field of the recipe. Pass changes={{"{name}"'):
        oneshot(str(opt), "struprune", **{name: 0.3})


def test_modifiers_serve_one_run(opt):
    recipe = [StruPruneModifier(sparsity=0.3, **CHEAP)]
    run_oneshot(str(opt), recipe)
    with pytest.raises(ValueError, match="recipe: its modifiers have been in a run"):
        run_oneshot(str(opt), recipe)


def test_a_base_model_is_found_from_anywhere(opt, tmp_path, monkeypatch):
    monkeypatch.chdir(opt.parent)
    run_oneshot(opt.name, sparsity=0.3, output_dir=str(tmp_path / "out"))
    assert read_manifest(tmp_path / "out").model.base == str(opt)


def test_oneshot_refuses_to_run_without_calibration_text(opt, tmp_path):
    with pytest.raises(ValueError, match="calibration text must be given"):
        oneshot(model=str(opt), recipe=StruPruneModifier(sparsity=0.3), output_dir=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["layers.1.fc1.bias", "embed_positions.weight"])
def test_oneshot_refuses_broken_weights_by_name(tmp_path, name):
    options = broken_model(tmp_path, f"model.decoder.{name}")
    with pytest.raises(ValueError, match=rf"{name}: must be finite, got NaN or Inf"):
        run_oneshot(options["model"], sparsity=0.3, tokenizer=options["tokenizer"], output_dir=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_oneshot_refuses_broken_activations_by_name(tmp_path):
    options = broken_model(tmp_path, "model.decoder.layers.0.self_attn_layer_norm.weight", 3e38)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.out_proj: activations must be finite"):
        run_oneshot(options["model"], sparsity=0.3, tokenizer=options["tokenizer"], output_dir=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("sensitivity", ["fisher", "none"])
def test_oneshot_refuses_broken_logits(tmp_path, sensitivity):
    options = broken_model(tmp_path, "model.decoder.final_layer_norm.weight", 3e38)
    options |= {"sensitivity": sensitivity, "allocation": {"rule": "error_curve", "trial_samples": 2}}
    with pytest.raises(ValueError, match="model: logits must be finite, got NaN or Inf"):
        run_oneshot(sparsity=0.3, **options, output_dir=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_files_are_those_of_the_models_revision(opt, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    stored = tmp_path / "hub" / "models--mine--tiny"
    (stored / "refs").mkdir(parents=True)
    for name, commit in (("main", 40 * "a"), ("v2", 40 * "b")):
        (stored / "refs" / name).write_text(commit)
        shutil.copytree(opt, stored / "snapshots" / commit)
        (stored / "snapshots" / commit / "LICENSE").write_text(name)
    run_oneshot("mine/tiny", sparsity=0.3, model_revision="v2", output_dir=str(tmp_path / "out"))
    assert (tmp_path / "out" / "LICENSE").read_text() == "v2"


def test_oneshot_refuses_other_architectures_by_config_alone(tmp_path):
    MambaForCausalLM(MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'mamba' must have layers with attention or an FFN that can be cut"):
        run_oneshot(str(tmp_path), sparsity=0.3)


def test_oneshot_refuses_what_is_no_model_and_no_recipe(opt, tmp_path):
    with pytest.raises(ValueError, match=r"recipe: must be a file, .* got None"):
        oneshot(model=str(opt), recipe=None)
    with pytest.raises(ValueError, match="model: must be a folder, a hub name or a loaded model, got int"):
        oneshot(model=5, recipe=StruPruneModifier(sparsity=0.3))
    with pytest.raises(ValueError, match="must be a causal language model, got OPTModel"):
        oneshot(model=make_opt().model, recipe=StruPruneModifier(sparsity=0.3))
    make_opt().config.save_pretrained(tmp_path / "empty")
    with pytest.raises(ValueError, match="must hold whole weights"):
        oneshot(model=str(tmp_path / "empty"), recipe=StruPruneModifier(sparsity=0.3))


@pytest.mark.parametrize(
    "broken",
    [
        "pruning.reconstruction.solve_kept_weights",
        "allocation.curves.sum_increases",
        "layerwise.dense_reference.DenseReference.find_target",
    ],
)
def test_a_failed_run_leaves_no_hooks_on_a_loaded_model(opt, monkeypatch, broken):
    def fail(*_args, **_kwargs):
        raise RuntimeError("solver broke")

    monkeypatch.setattr(f"struprune_plugin.{broken}", fail)  # in a layer's pass, or at its end
    model = AutoModelForCausalLM.from_pretrained(opt)
    with pytest.raises(RuntimeError, match="solver broke"):
        run_oneshot(model, sparsity=0.3, tokenizer=str(opt), allocation="softmax")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model(torch.arange(4, 20)[None]).logits.isfinite().all()


def test_oneshot_refuses_quantised_models(opt, tmp_path):
    run_oneshot(str(opt), recipe=f"q_stage:\n  {W8A8}", output_dir=str(tmp_path / "quantised"))
    with pytest.raises(ValueError, match="must not be quantised yet"):
        run_oneshot(str(tmp_path / "quantised"), sparsity=0.3, output_dir=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


FRESH = """
import os, sys

heard = open("heard", "w")
shown = [os.dup(stream) for stream in (1, 2)]
for stream in (1, 2):
    os.dup2(heard.fileno(), stream)
import struprune_plugin
for stream, before in enumerate(shown, 1):
    os.dup2(before, stream)
assert open("heard").read() == "", "what is logged on import would end up before JSON"

from datasets import load_from_disk
from llmcompressor import oneshot
from transformers import AutoModelForCausalLM

options = {"dataset": load_from_disk("data"), "num_calibration_samples": 8, "batch_size": 4}
oneshot(model=sys.argv[1], recipe="recipe.yaml", output_dir="out", **options)
assert type(AutoModelForCausalLM.from_pretrained("out")).__name__ == "StruPruneOPTForCausalLM", "without a trust flag"
"""


def test_a_bare_import_is_silent_and_registers_everything_for_the_hosts_oneshot(opt, tmp_path):
    """README: ``import struprune_plugin`` and the host's own oneshot, in a fresh process; with nothing else of ours imported."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(GOOD))
    make_dataset().save_to_disk(tmp_path / "data")
    environment = {name: value for name, value in os.environ.items() if name != "LLM_COMPRESSOR_LOG_LEVEL"}
    command = [sys.executable, "-c", FRESH, str(opt)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert read_manifest(tmp_path / "out").budget.asked_sparsity == 0.3


def test_a_run_from_python_says_each_thing_once(opt, tmp_path, monkeypatch):
    """In a copy of this process, on stdout."""
    monkeypatch.delenv("LLM_COMPRESSOR_LOG_LEVEL", raising=False)

    def run():
        os.chdir(tmp_path)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        configure_logger(LoggerConfig())  # as llm-compressor's import does
        logger.disable(LOUD)  # as our own import does
        data = {"dataset": make_dataset(), "num_calibration_samples": 8, "batch_size": 4}
        oneshot(model=str(opt), recipe=GOOD, output_dir="out", **data)
        return 0

    process = start_process(run, tmp_path / "log")
    process.join(300)
    told = (tmp_path / "log").read_text()
    assert process.exitcode == 0, told
    assert told.count(" removed (") == 1, "the table tells them"
    assert "wrote out" in told
    assert "No accelerator available" not in told
    assert len(told.split("pruned from")[1].splitlines()) <= 25


def test_the_calibration_order_does_not_depend_on_what_was_drawn_before(opt):
    """llm-compressor shuffles the samples by torch's own state."""
    drawn, found = [], {}
    for name, before, how in (("a", 0, {}), ("b", 1, {}), ("c", 1, {"seed": 7})):
        torch.manual_seed(before)
        data = {"dataset": make_dataset(32), "num_calibration_samples": 8, "batch_size": 4}
        found[name] = oneshot(str(opt), StruPruneModifier(sparsity=0.3, **CHEAP), **data, **how).state_dict()
        drawn.append(torch.rand(1))
    torch.manual_seed(1)
    assert torch.equal(drawn[1], torch.rand(1)), "the process' own state is as before"
    same = {name: torch.equal(weight, found["b"][name]) for name, weight in found["a"].items()}
    assert all(same.values())
    assert any(
        weight.shape != found["c"][k].shape or not torch.equal(weight, found["c"][k])
        for k, weight in found["a"].items()
    )


def test_an_earlier_output_is_overwritten_and_nothing_else(opt, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    for overwrite, message in ((False, "must be empty or absent"), (True, "must hold an earlier output of StruPrune")):
        with pytest.raises(ValueError, match=f"output_dir: {message}"):
            run_oneshot(str(opt), sparsity=0.3, output_dir=str(out), overwrite=overwrite)
    assert (out / "precious.txt").read_text() == "mine"
    (out / "precious.txt").unlink()
    run_oneshot(str(opt), sparsity=0.3, output_dir=str(out))
    with pytest.raises(ValueError, match="tokens"):  # a run that fails later loses nothing either
        run_oneshot(str(opt), sparsity=0.2, output_dir=str(out), overwrite=True, dataset=make_dataset(1, 8))
    assert read_manifest(out).budget.asked_sparsity == 0.3
    run_oneshot(str(opt), sparsity=0.2, output_dir=str(out), overwrite=True)
    assert read_manifest(out).budget.asked_sparsity == 0.2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_inputs_are_never_overwritten(opt, prune_once, tmp_path):
    """The model is here an earlier output of ours, which alone could be replaced."""
    model = shutil.copytree(prune_once(opt, "value_channels")[1], tmp_path / "model")
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    options = {"sparsity": 0.3, "output_dir": model, "overwrite": True, "tokenizer": str(opt)}
    for given in (model, AutoModelForCausalLM.from_pretrained(model)):
        with pytest.raises(ValueError, match="must not be or hold the input"):
            run_oneshot(given, **options)
    with pytest.raises(ValueError, match="must not be or hold the input"):
        run_oneshot(str(opt), recipe=str(model / "recipe.yaml"), output_dir=model, overwrite=True, tokenizer=str(opt))
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before


def test_bfloat16_models_stay_bfloat16(opt, tmp_path):
    make_opt().bfloat16().save_pretrained(tmp_path / "m")
    model = run_oneshot(str(tmp_path / "m"), sparsity=0.3, tokenizer=str(opt), output_dir=str(tmp_path / "out"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in (*model.parameters(), *again.parameters())} == {torch.bfloat16}
    ids = torch.arange(4, 20)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_oneshot_refuses_a_model_that_came_from_no_folder():
    with pytest.raises(ValueError, match="must come from a folder or the hub"):
        run_oneshot(make_opt(), sparsity=0.3)


def test_a_model_larger_than_the_memory_is_pruned_off_the_disk(opt, prune_once, tmp_path, monkeypatch):
    """Most weights lie on the disk, the first few in memory: the same model comes out, bit by bit."""
    fields = {"sparsity": 0.3, **DEFAULT}
    plain, folder = prune_once(opt, "value_channels")
    monkeypatch.setattr("compressed_tensors.offload.load._get_cpu_memory", lambda *_: {"cpu": 200_000})
    offloaded = run_oneshot(str(opt), **fields, output_dir=str(tmp_path / "out"), offload_folder=tmp_path / "disk")
    kinds = {type(module._parameters).__name__ for module in offloaded.modules()}
    assert {"DiskCache", "CPUCache"} <= kinds
    first, second = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, tmp_path / "out"))
    assert first.keys() == second.keys() == plain.state_dict().keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
