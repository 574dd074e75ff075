"""The recipe field ``precision``: what a run computes in, told in the log, the manifest and the plan; both answers are played."""

import json

import pytest
import torch
from helpers.families import make_model
from helpers.models import DEFAULT, make_dataset, make_opt, run_oneshot, save_model
from safetensors.torch import load_file

from struprune_plugin import LoRARecoveryModifier, StruPruneModifier, oneshot, read_manifest
from struprune_plugin.cli import main as cli
from struprune_plugin.runtime.device_context import DeviceContext

CAN, CANNOT = {"avx512_bf16": True}, {"avx2": True}
TOLD = "float32 (this device has no bfloat16 products); saved in bfloat16"
TRIALS = {"allocation": {"rule": "error_curve", "samples": 4, "trial_samples": 2}, "sparsity": 0.25}
RUNS = {  # every kind of pass
    "default": ("llama", TRIALS),
    "a mixture": ("qwen3_moe", {**DEFAULT, "experts": "channels", "sparsity": 0.25}),
    "whole experts": ("qwen3_moe", {"experts": "whole", "sparsity": 0.3, "allocation": "uniform"}),
    "ADMM": ("opt", {"weight_update": {"method": "admm", "steps": 1}, "sparsity": 0.2, "allocation": "uniform"}),
    "SNIP": ("llama", {"importance": "snip", "sparsity": 0.2, "allocation": "uniform"}),
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """Folders of tiny models in bfloat16, made once each."""
    made = {}

    def find(kind):
        if kind not in made:
            model = make_opt() if kind == "opt" else make_model(kind)
            made[kind] = save_model(model.bfloat16(), tmp_path_factory.mktemp(kind) / kind)
        return str(made[kind])

    return find


def play(monkeypatch, flags):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)


def prune(model, out, **fields):
    run_oneshot(model, StruPruneModifier(**fields), output_dir=out)
    return load_file(out / "model.safetensors")


def are_equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", RUNS)
def test_auto_is_float32_where_the_processor_has_no_products_of_the_dtype(kind, narrow, tmp_path, monkeypatch):
    name, fields = RUNS[kind]
    play(monkeypatch, CANNOT)
    found, wanted, model = (
        prune(narrow(name), tmp_path / each, precision=each, **fields) for each in ("auto", "float32", "model")
    )
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert are_equal(found, wanted)
    assert not are_equal(found, model)
    assert [read_manifest(tmp_path / each).computed_in for each in ("auto", "model")] == [TOLD, "bfloat16"]


def test_auto_is_the_model_s_dtype_elsewhere(narrow, tmp_path, monkeypatch):
    play(monkeypatch, CAN)
    found, wanted = (prune(narrow("llama"), tmp_path / each, precision=each, **TRIALS) for each in ("auto", "model"))
    assert are_equal(found, wanted)
    assert read_manifest(tmp_path / "auto").computed_in == "bfloat16"


def test_layers_run_in_float32_and_states_wait_in_the_model_s_dtype(narrow, tmp_path, monkeypatch):
    products, waiting = set(), set()
    linear, park = torch.nn.functional.linear, DeviceContext.offload

    def multiply(inputs, weight, bias=None):
        products.add((inputs.dtype, weight.dtype))
        return linear(inputs, weight, bias)

    def watch(context, tensor, what="states"):
        waiting.add((tensor.dtype, tensor.dim(), what))
        return park(context, tensor, what)

    play(monkeypatch, CANNOT)
    monkeypatch.setattr(torch.nn.functional, "linear", multiply)
    monkeypatch.setattr(DeviceContext, "offload", watch)
    prune(narrow("llama"), tmp_path / "out", **TRIALS)
    assert products == {(torch.float32, torch.float32)}
    assert (torch.bfloat16, 3, "states") in waiting
    assert (torch.float32, 3, "states") not in waiting


def test_recovery_trains_in_float32_and_saves_in_the_model_s_dtype(narrow, tmp_path, monkeypatch):
    outs = {}
    for answer, flags in (("can", CAN), ("cannot", CANNOT)):
        play(monkeypatch, flags)
        stages = [StruPruneModifier(sparsity=0.2, allocation="uniform", sensitivity="none")]
        stages.append(LoRARecoveryModifier(schedule={"max_steps": 2}))
        run_oneshot(narrow("llama"), stages, output_dir=tmp_path / answer)
        outs[answer] = read_manifest(tmp_path / answer).recovery
        dtypes = {tensor.dtype for tensor in load_file(tmp_path / answer / "model.safetensors").values()}
        assert dtypes == {torch.bfloat16}
    assert [outs[answer].computed_in for answer in outs] == ["bfloat16", TOLD]
    assert outs["can"].losses == pytest.approx(outs["cannot"].losses, rel=0.01)


def test_plan_and_eval_tell_and_count_it(narrow, monkeypatch, capsys):
    shown = {}
    for answer, flags in (("can", CAN), ("cannot", CANNOT)):
        play(monkeypatch, flags)
        assert cli.main(["plan", narrow("llama"), "--quiet", "--json"]) == 0
        shown[answer] = json.loads(capsys.readouterr().out)["needs"]
        scored = [
            "eval",
            narrow("llama"),
            "--dtype",
            "bfloat16",
            "--window",
            "32",
            "--max-tokens",
            "256",
            "--json",
            "--quiet",
        ]
        assert cli.main(scored) == 0
        shown[answer]["perplexity"] = json.loads(capsys.readouterr().out)["scores"][narrow("llama")]["perplexity"]
    assert [shown[answer]["computed_in"] for answer in shown] == ["bfloat16", TOLD]
    assert shown["cannot"]["device"] > shown["can"]["device"]
    assert [shown["cannot"][name] for name in ("weights", "movable")] == [
        shown["can"][name] for name in ("weights", "movable")
    ]
    assert shown["can"]["perplexity"] == pytest.approx(shown["cannot"]["perplexity"], rel=0.01)
    assert shown["can"]["perplexity"] != shown["cannot"]["perplexity"]


def test_a_stopped_run_does_not_continue_in_another_dtype(narrow, tmp_path, monkeypatch):
    run = {"model": narrow("llama"), "recipe": "struprune", "checkpoint_dir": tmp_path / "store"}
    run |= {"dataset": make_dataset(), "shuffle_calibration_samples": False, "output_dir": tmp_path / "out"}

    def stop(*_args, **_kwargs):
        raise KeyboardInterrupt

    play(monkeypatch, CANNOT)
    monkeypatch.setattr("struprune_plugin.modifiers.pruning.AllocationPass", stop)
    with pytest.raises(KeyboardInterrupt):
        oneshot(**run)
    play(monkeypatch, CAN)
    with pytest.raises(ValueError, match="holds the checkpoint of another run, which differs in"):
        oneshot(**run)


def test_other_values_are_refused():
    with pytest.raises(ValueError, match="precision"):
        StruPruneModifier(sparsity=0.2, precision="half")
