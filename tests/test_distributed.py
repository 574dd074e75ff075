"""Two processes on one machine, each with half of the calibration data, against one process with all of it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, VOCABULARY, make_dataset, make_opt, run_oneshot, save_model
from run_distributed import NUM_SAMPLES
from transformers import AutoModelForCausalLM

from struprune_plugin.export import read_manifest


def run_two(model, folder, **fields):
    """Run ``tests/run_distributed.py`` in two processes; return its exit status and what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    script = [str(ROOT / "tests" / "run_distributed.py"), str(model), str(folder), json.dumps(fields)]
    done = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


FIELDS = {
    "vo": {"sparsity": 0.3, "allocation_samples": NUM_SAMPLES},
    "head": {
        "sparsity": 0.3,
        "attention_unit": "head",
        "allocation": "softmax",
        "search": "full",
        "importance": "snip",
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_two_processes_equal_one(opt, tmp_path, name):
    status, output = run_two(opt, tmp_path, **FIELDS[name])
    assert status == 0, output
    assert (tmp_path / "digest0.txt").read_text() == (tmp_path / "digest1.txt").read_text()
    assert [path.name for path in tmp_path.glob("*out*")] == ["out"]
    options = {"dataset": make_dataset(NUM_SAMPLES), "num_calibration_samples": NUM_SAMPLES, "batch_size": 1}
    run_oneshot(str(opt), output_dir=tmp_path / "one", **options, **FIELDS[name])
    two, one = read_manifest(tmp_path / "out"), read_manifest(tmp_path / "one")
    assert [group["keep"] for group in two["groups"]] == [group["keep"] for group in one["groups"]]
    assert [group["damping"] for group in two["groups"]] == [group["damping"] for group in one["groups"]]
    assert two["calibration"]["num_tokens"] == one["calibration"]["num_tokens"]
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("out", "one")]
    ids = torch.randint(4, VOCABULARY, (2, 32))
    with torch.no_grad():
        logits, wanted = (model(ids).logits for model in models)
    assert (logits - wanted).norm() <= 1e-4 * wanted.norm()
    weights, expected = (model.state_dict() for model in models)
    assert weights.keys() == expected.keys()
    for key, value in weights.items():  # sums in another order, in float32, before eigenvectors that magnify that
        assert (value - expected[key]).abs().max() <= 1e-3 * expected[key].abs().max(), key


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"restoration": "admm"}, "restoration: admm must run in one process, got 2"),
        ({"tuning_epochs": 1}, "tuning_epochs above 0 must run in one process, got 2"),
        (
            {"damping": 0.0, "allocation": "uniform"},
            "layers.1.fc2: the least-squares system must have a condition number",
        ),
    ],
)
def test_two_processes_refuse_together(tmp_path, fields, message):
    """What the first process raises in the middle of a run, the other raises too, and nothing is left behind."""
    model = make_opt()
    with torch.no_grad():
        model.model.decoder.layers[1].fc1.bias[3] = -1e3  # a dead channel, which no solve without damping can bear
    status, output = run_two(save_model(model, tmp_path / "model"), tmp_path, sparsity=0.2, **fields)
    assert status == 0, output
    for rank in range(2):
        assert message in (tmp_path / f"error{rank}.txt").read_text()
    assert not list(tmp_path.glob("*out*"))
