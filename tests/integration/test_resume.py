"""A killed run goes on where it was, and ends with the bytes of one that was not."""

import json
import shutil
import signal
import time

import pytest
import torch
from helpers.families import make_model
from helpers.killed_runs import kill_after, stop_after
from helpers.models import CHEAP, make_dataset, run_oneshot, save_model, start_cli

from eval.coverage import make_config
from struprune_plugin import LoRARecoveryModifier, SparsityAllocatorModifier, StruPruneModifier, read_manifest
from struprune_plugin.model.structure.tiny import build_tiny
from struprune_plugin.storage.resume_store import ResumeStore, describe_weights

pytestmark = pytest.mark.durable

OPTIONS = {"num_calibration_samples": 8, "shuffle_calibration_samples": False}
ADMM = {"weight_update": {"method": "admm", "steps": 1, "inner_steps": 1}}
RECIPES = {
    "default": lambda: [StruPruneModifier(sparsity=0.3)],
    "stage": lambda: [SparsityAllocatorModifier(sparsity=0.3, importance="snip"), StruPruneModifier(importance="snip")],
    "admm": lambda: [StruPruneModifier(sparsity=0.3, attention_unit="head", **CHEAP, **ADMM)],
    "lora": lambda: [
        StruPruneModifier(sparsity=0.3, **CHEAP),
        LoRARecoveryModifier(adapters={"rank": 2}, schedule={"epochs": 1}),
    ],
}


def read_bytes(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("name", "count"), [("default", 3), ("stage", 1), ("admm", 2), ("lora", 4)])
def test_a_run_that_died_ends_with_the_same_bytes(opt, tmp_path, monkeypatch, name, count):
    run_oneshot(str(opt), recipe=RECIPES[name](), output_dir=str(tmp_path / "whole"), **OPTIONS)
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    options = {"output_dir": str(out), "checkpoint_dir": checkpoint, **OPTIONS}
    kill_after(count, lambda: run_oneshot(str(opt), recipe=RECIPES[name](), **options))
    assert not out.exists()
    assert len(list(checkpoint.glob("*.safetensors"))) == count
    written = stop_after(monkeypatch, 0)
    run_oneshot(str(opt), recipe=RECIPES[name](), **options)
    pruned = [part for part in written if part != "best"]  # the values that LoRA keeps
    assert len(pruned) == 4 - count, "nothing is done twice"
    assert read_bytes(out) == read_bytes(tmp_path / "whole")
    whole, found = read_manifest(tmp_path / "whole"), read_manifest(out)
    for key in ("groups", "allocation", "budget", "calibration", "settings", "model"):
        assert getattr(found, key) == getattr(whole, key), key
    assert not checkpoint.exists(), "it goes with the end of the run"


def test_a_part_that_is_not_whole_is_made_again(opt, tmp_path):
    run_oneshot(str(opt), sparsity=0.3, output_dir=str(tmp_path / "whole"), **OPTIONS)
    kill_after(3, lambda: run_oneshot(str(opt), sparsity=0.3, checkpoint_dir=tmp_path / "c", **OPTIONS))
    part = tmp_path / "c" / "layer-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    (tmp_path / "c" / "layer-00001.safetensors").write_text("{")
    run_oneshot(str(opt), sparsity=0.3, checkpoint_dir=tmp_path / "c", output_dir=str(tmp_path / "out"), **OPTIONS)
    assert read_bytes(tmp_path / "out") == read_bytes(tmp_path / "whole")


@pytest.fixture(scope="module")
def begun(opt, tmp_path_factory):
    """The checkpoint of a run that died, to be read only."""
    folder = tmp_path_factory.mktemp("begun") / "c"
    kill_after(1, lambda: run_oneshot(str(opt), sparsity=0.3, checkpoint_dir=folder, **OPTIONS))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 0.2}, "differs in recipe"),
        ({"dataset": make_dataset(seed=5)}, "differs in data"),
        ({"versions": {"torch": "1"}}, "differs in versions"),
        ({"model": True}, "differs in model"),
        ({"configuration": {"activation_function": "gelu"}}, "differs in configuration"),
    ],
)
def test_another_run_is_refused_by_name(opt, begun, tmp_path, monkeypatch, change, message):
    shutil.copytree(begun, tmp_path / "c")
    fields = {"sparsity": 0.3}
    model = str(opt)
    if "versions" in change:
        monkeypatch.setattr("struprune_plugin.modifiers.pruning.describe_versions", lambda: change["versions"])
    elif "model" in change:
        model = str(save_model(make_model("opt", seed=3), tmp_path / "other"))
    elif "configuration" in change:
        shutil.copytree(model, model := tmp_path / "other")
        config = json.loads((model / "config.json").read_text()) | change["configuration"]
        (model / "config.json").write_text(json.dumps(config))
    else:
        fields |= change
    before = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    with pytest.raises(ValueError, match=f"checkpoint_dir: .*{message}"):
        run_oneshot(str(model), checkpoint_dir=tmp_path / "c", **fields, **OPTIONS)
    assert {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()} == before


def test_a_checkpoint_folder_is_nothing_else(opt, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("dear")
    with pytest.raises(ValueError, match="checkpoint_dir: must be empty, absent or the checkpoint"):
        run_oneshot(str(opt), sparsity=0.3, checkpoint_dir=tmp_path / "mine", **OPTIONS)
    with pytest.raises(ValueError, match="checkpoint_dir: must be apart from what the run reads and writes"):
        run_oneshot(
            str(opt), sparsity=0.3, checkpoint_dir=tmp_path / "out" / "c", output_dir=str(tmp_path / "out"), **OPTIONS
        )
    with pytest.raises(ValueError, match="checkpoint_dir: calibration samples must come in the same order"):
        run_oneshot(
            str(opt),
            sparsity=0.3,
            checkpoint_dir=tmp_path / "c",
            num_calibration_samples=8,
            shuffle_calibration_samples=True,
        )
    with pytest.raises(
        ValueError, match="checkpoint_dir: holds parts of a StruPruneModifier, got a recipe without one"
    ):
        run_oneshot(str(opt), recipe=[LoRARecoveryModifier()], checkpoint_dir=tmp_path / "c", **OPTIONS)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "dear"
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_that_was_being_begun_is_empty(tmp_path):
    (tmp_path / "struprune_run.json.partial").write_text("{")
    ResumeStore(tmp_path).open({})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("")
    with pytest.raises(ValueError, match="must be empty, absent or the checkpoint of an earlier run"):
        ResumeStore(tmp_path / "other")


def test_a_checkpoint_serves_one_run_at_a_time(tmp_path):
    """Else the run that ends first would remove the other's parts."""
    with ResumeStore(tmp_path / "c") as store:
        store.open({"recipe": 1})
        message = "checkpoint_dir: must not be used by another run, got one that uses"
        with pytest.raises(ValueError, match=message), ResumeStore(tmp_path / "c") as other:
            other.open({"recipe": 1})
        store.write("layer-00000", [torch.ones(1)])
        assert store.count_bytes()
    assert not (tmp_path / "c").exists()


def test_the_identity_of_a_mixture_covers_its_experts_and_its_saved_buffers():
    model = build_tiny(make_config("glm4_moe", 2))
    found = [describe_weights(model)]
    for tensors in (model.named_parameters(), model.named_buffers()):
        with torch.no_grad():
            next(t for name, t in tensors if "experts" in name or "correction_bias" in name).add_(0.5)
        found.append(describe_weights(model))
    assert len(set(found)) == 3


def test_a_full_disk_is_told_and_earlier_parts_stay(opt, tmp_path, monkeypatch):
    times = []

    def fail(tensors, path, metadata):
        times.append(path)
        if len(times) == 3:
            raise OSError(28, "No space left on device")
        return save(tensors, path, metadata)

    from struprune_plugin.storage import resume_store as journal

    save = journal.save_file
    with monkeypatch.context() as patch:
        patch.setattr(journal, "save_file", fail)
        with pytest.raises(OSError, match=r"checkpoint_dir: layer-00001 cannot be written .* No space .* Free disk"):
            run_oneshot(str(opt), sparsity=0.3, checkpoint_dir=tmp_path / "c", **OPTIONS)
    assert sorted(path.name for path in (tmp_path / "c").glob("*.safetensors")) == [
        "allocation.safetensors",
        "layer-00000.safetensors",
    ]
    assert not list((tmp_path / "c").glob("*.partial"))
    run_oneshot(str(opt), sparsity=0.3, checkpoint_dir=tmp_path / "c", **OPTIONS)


def test_a_process_killed_for_real_goes_on(opt, tmp_path):
    """kill -9 once a layer is done."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("s_stage: {s_modifiers: {StruPruneModifier: {sparsity: 0.3}}}")
    options = ["--num-samples", "8", "--seq-length", "32"]
    command = ["prune", str(opt), "--recipe", str(recipe), *options]
    first = [*command, "--output", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "c")]
    process = start_cli(first, tmp_path / "log")
    deadline = time.monotonic() + 120
    while not (tmp_path / "c" / "layer-00000.safetensors").exists():
        assert process.is_alive(), (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    for argv in (first, [*command, "--output", str(tmp_path / "whole")]):
        process = start_cli(argv, tmp_path / "log")
        process.join(300)
        assert process.exitcode == 0, (tmp_path / "log").read_text()
    assert read_bytes(tmp_path / "out") == read_bytes(tmp_path / "whole")
    assert not (tmp_path / "c").exists()
