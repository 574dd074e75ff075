"""Outputs that are not what was written: `verify` and `inspect` say so, nothing goes on from them."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from helpers.models import ROOT, make_dataset, run_oneshot
from llmcompressor import oneshot as host_oneshot
from safetensors.torch import load_file, save_file

from struprune_plugin import StruPruneModifier, read_manifest
from struprune_plugin.cli import main as cli
from struprune_plugin.storage.files import digest_whole_file
from struprune_plugin.storage.listing import FILES_NAME
from struprune_plugin.storage.manifest import digest_manifest
from struprune_plugin.storage.verify import find_damage, verify_folder


@pytest.fixture
def out(opt, prune_once, tmp_path):
    """A pruned folder of one's own."""
    return shutil.copytree(prune_once(opt, "head")[1], tmp_path / "out")


def spoil_weights(out, change):
    weights = load_file(out / "model.safetensors")
    change(weights)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def set_nan(weights):
    weights["model.decoder.layers.1.fc2.weight"][0, 0] = torch.nan


def truncate(out):
    file = out / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def edit_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content, indent=1) + "\n")


DAMAGE = {
    "nan": lambda out: spoil_weights(out, set_nan),
    "truncated": truncate,
    "empty": lambda out: (out / "model.safetensors").write_bytes(b""),
    "garbage": lambda out: (out / "model.safetensors").write_bytes(b"garbage" * 99),
    "shape": lambda out: spoil_weights(out, lambda w: w.update({"lm_head.weight": torch.zeros(2, 2)})),
    "code": lambda out: (out / "modeling_struprune.py").write_text("import os\n"),
    "config": lambda out: edit_json(out / "config.json", lambda c: c.update(vocab_size=7)),
    "missing": lambda out: (out / "config.json").unlink(),
    "linked": lambda out: (
        (out / "config.json").rename(out.parent / "c") and (out / "config.json").symlink_to(out.parent / "c")
    ),
}


def test_verify_calls_an_output_whole(out, capsys):
    assert cli.main(["verify", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "model.safetensors" in printed
    assert "modeling_struprune.py is this package's own" in printed
    assert printed.endswith("is whole\n")
    listed = json.loads((out / FILES_NAME).read_text())
    assert listed["sha256"]["model.safetensors"] == digest_whole_file(out / "model.safetensors")
    (out / "notes.txt").write_text("mine")
    assert cli.main(["verify", str(out)]) == 0  # somebody's notes are no damage
    assert "not ours" in capsys.readouterr().out


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(out, kind, capsys):
    DAMAGE[kind](out)
    assert cli.main(["verify", str(out)]) == (0 if kind == "linked" else 1)
    printed = capsys.readouterr().out
    if kind == "linked":
        assert "not ours" in printed
        return
    assert "damaged: " in printed
    assert printed.endswith("is damaged\n")
    if kind == "code":
        assert "modeling_struprune.py is not this package's own" in printed
    assert cli.main(["inspect", str(out)]) == 1
    assert "struprune: damaged: " in capsys.readouterr().err
    assert cli.main(["convert", str(out), "--to", "masked", "--output", str(out.parent / "masked")]) == 2
    assert not (out.parent / "masked").exists()


def test_damage_in_the_midst_of_a_large_file_is_found_by_reading_it_all(out, monkeypatch):
    file = out / "model.safetensors"
    with file.open("r+b") as data:
        data.truncate(1 << 21)
        data.seek(0)
    listed = json.loads((out / FILES_NAME).read_text())
    from struprune_plugin.storage.files import digest_file
    from struprune_plugin.storage.listing import write_listing

    write_listing(out)
    with file.open("r+b") as data:
        data.seek(100_000)  # between two samples
        data.write(b"\x01")
    assert digest_file(file) == json.loads((out / FILES_NAME).read_text())["files"]["model.safetensors"]
    assert listed["files"].keys() == json.loads((out / FILES_NAME).read_text())["files"].keys()
    assert "model.safetensors is not as it was written" in verify_folder(out).problems
    assert "model.safetensors is not as it was written" in find_damage(out)
    monkeypatch.setattr("struprune_plugin.storage.verify._QUICK", 0)
    assert "model.safetensors is not as it was written" not in find_damage(out)


def swap_layers(manifest):
    first, second = manifest["groups"][1], manifest["groups"][3]
    first["keep"], second["keep"] = second["keep"], first["keep"]
    first["kept"], second["kept"] = second["kept"], first["kept"]


KEEPS = {
    "reversed": lambda m: m["groups"][0]["keep"].reverse(),
    "twice": lambda m: m["groups"][0]["keep"].__setitem__(0, m["groups"][0]["keep"][1]),
    "out of range": lambda m: m["groups"][0]["keep"].__setitem__(-1, 10**9),
    "negative": lambda m: m["groups"][0]["keep"].__setitem__(0, -1),
    "of another layer": swap_layers,
    "none": lambda m: m["groups"][0].update(keep=[], kept=0),
    "no number": lambda m: m["groups"][0]["keep"].__setitem__(0, True),
}


@pytest.mark.parametrize("kind", KEEPS)
@pytest.mark.parametrize("forged", [False, True], ids=["", "forged"])
def test_kept_units_that_were_changed_are_refused(out, opt, kind, forged, capsys):
    def change(manifest):
        KEEPS[kind](manifest)
        if forged:
            manifest["sha256"] = digest_manifest(manifest)

    edit_json(out / "struprune.json", change)
    if forged and kind in (
        "of another layer",
        "none",
    ):  # a forger who knows how is found by the list of files, or by another's
        assert "struprune.json is not as it was written" in verify_folder(out).problems
        return
    with pytest.raises(
        ValueError,
        match=r"struprune\.json: (groups\[0\].*keep must be sorted|groups\[0\]\.keep\[0\] must be|must be as it was written)",
    ):
        read_manifest(out)
    with pytest.raises(ValueError, match="must be"):
        StruPruneModifier(replay=str(out))
    assert cli.main(["inspect", str(out)]) == 2
    assert capsys.readouterr().err.startswith("struprune: error: ")
    assert cli.main(["convert", str(out), "--to", "masked", "--output", str(out.parent / "masked")]) == 2


def test_value_channels_must_be_as_many_in_every_head(opt, prune_once, tmp_path):
    out = shutil.copytree(prune_once(opt, "value_channels")[1], tmp_path / "out")

    def change(manifest):
        group = next(
            group
            for group in manifest["groups"]
            if group["kind"] == "value_channels" and group["kept"] < group["num_units"]
        )
        size, kept = group["num_units"] // group["num_blocks"], group["keep"]
        free = next(unit for unit in range(group["num_units"]) if unit not in kept)
        gone = next(unit for unit in kept if unit // size != free // size)
        group["keep"] = sorted({*kept, free} - {gone})
        manifest["sha256"] = digest_manifest(manifest)

    edit_json(out / "struprune.json", change)
    with pytest.raises(ValueError, match="the same number in each of 4 blocks"):
        read_manifest(out)


def test_an_output_of_the_host_s_oneshot_is_read_instead(opt, tmp_path, capsys):
    host_oneshot(
        model=str(opt),
        recipe=StruPruneModifier(sparsity=0.3),
        dataset=make_dataset(),
        output_dir=str(tmp_path / "out"),
        batch_size=4,
    )
    assert cli.main(["verify", str(tmp_path / "out")]) == 0
    assert "weights were read instead" in capsys.readouterr().out
    spoil_weights(tmp_path / "out", set_nan)
    assert cli.main(["verify", str(tmp_path / "out")]) == 1
    assert "model.decoder.layers.1.fc2.weight holds NaN or Inf" in capsys.readouterr().out


def test_a_converted_and_a_recovered_output_verify(out, opt, tmp_path):
    assert cli.main(["convert", str(out), "--to", "masked", "--output", str(tmp_path / "masked")]) == 0
    assert cli.main(["verify", str(tmp_path / "masked")]) == 0
    from struprune_plugin import LoRARecoveryModifier

    run_oneshot(
        str(out),
        recipe=LoRARecoveryModifier(adapters={"rank": 2}, schedule={"max_steps": 1}),
        output_dir=str(tmp_path / "lora"),
    )
    assert read_manifest(tmp_path / "lora").recovery.steps == 1
    assert cli.main(["verify", str(tmp_path / "lora")]) == 0


@pytest.mark.parametrize("path", ["nowhere", "tests"])
def test_verify_refuses_what_is_no_output(path, capsys):
    assert cli.main(["verify", str(ROOT / path)]) == 2
    assert "must be a pruned folder" in capsys.readouterr().err


# -- what is heavy waits --------------------------------------------------------------------------------------------


def run_command(*words, **environment):
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "struprune_plugin.cli", *words],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        timeout=120,
    )
    loaded = {
        line.rsplit(b"|", 1)[1].strip().decode() for line in done.stderr.splitlines() if line.startswith(b"import time")
    }
    return done, loaded, time.perf_counter() - began


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], 0),
        (["prune", "--help"], 0),
        (["recipes"], 0),
        (["nonsense"], 2),
        (["prune", "m", "--recipe", "r", "--output", "o", "--num-samples", "x"], 2),
        (["prune", "/no/such", "--recipe", "struprune_opt", "--output", "o"], 2),
        (["prune", "nowhere", "--recipe", "struprune_opt", "--output", "o"], 2),
        (["prune", str(ROOT), "--recipe", "struprune_opt", "--output", "o"], 2),
        (["prune", "m", "--recipe", "nowhere.yaml", "--output", "o"], 2),
        (["prune", "m", "--recipe", "struprune_opt", "--output", "o", "--data", "no.jsonl"], 2),
        (["prune", "m", "--recipe", "struprune_opt", "--output", "o", "--set", "sparsity=["], 2),
        (["prune", "m", "--recipe", "struprune_opt", "--output", "o", "--device", "tpu"], 2),
        (["eval", "/no/such"], 2),
        (["convert", "/no/such", "--to", "masked", "--output", "o"], 2),
        (["inspect", "/no/such"], 2),
        (["inspect", "OUT"], 0),
        (["verify", "OUT"], 0),
    ],
    ids=lambda words: "-".join(words)[:60] if isinstance(words, list) else "",
)
def test_help_refusals_and_inspect_load_nothing_heavy(words, status, opt, prune_once):
    done, loaded, _ = run_command(*(str(prune_once(opt, "head")[1]) if word == "OUT" else word for word in words))
    assert done.returncode == status, done.stderr[-500:]
    assert "struprune_plugin.cli.main" in loaded or "struprune_plugin.recipes.shipped" in loaded
    assert not loaded & {"torch", "transformers", "llmcompressor", "datasets", "numpy"}


def test_a_closed_pipe_and_a_plain_terminal_are_no_failure(opt, prune_once):
    out = str(prune_once(opt, "head")[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "struprune_plugin.cli", "inspect", out]
    done = subprocess.run(argv, capture_output=True, env=environment | {"PYTHONIOENCODING": "ascii"}, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    piped = f"{' '.join([*argv, '--json'])}; echo $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({piped}) | head -c 10"], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stderr == "0\n"


def test_an_output_of_the_host_s_own_oneshot_is_whole(out):
    """In a process that knows no pruned classes yet."""
    (out / FILES_NAME).unlink()
    argv = [sys.executable, "-m", "struprune_plugin.cli", "verify", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is whole" in done.stdout
