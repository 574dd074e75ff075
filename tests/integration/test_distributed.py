"""Two processes on one machine, each with half of the calibration data, against one process with all of it."""

import os
import socket
from functools import partial

import pytest
import torch
from helpers.families import make_model
from helpers.mixtures import make_mixture
from helpers.models import VOCABULARY, make_opt, run_oneshot, save_model, start_process
from helpers.run_distributed import NUM_SAMPLES, read_options, run_jobs
from transformers import AutoModelForCausalLM

from struprune_plugin.pruning import reconstruction
from struprune_plugin.storage.manifest import read_manifest

FIELDS = {
    "value_channels": {
        "sparsity": 0.3,
        "sensitivity": {"samples": NUM_SAMPLES},
        "allocation": {"rule": "error_curve", "trial_samples": 0, "samples": NUM_SAMPLES},
    },
    "head": {
        "sparsity": 0.3,
        "attention_unit": "head",
        "allocation": {"rule": "softmax", "temperature": [0.3, 8.0]},
        "importance": "snip",
    },
}
WHOLE = {  # of a mixture, beside values; the saved mixture is another model than the other jobs'
    "sparsity": 0.3,
    "sensitivity": {"samples": NUM_SAMPLES},
    "allocation": {"rule": "error_curve", "trial_samples": 0, "samples": NUM_SAMPLES},
}
COUPLED = {"sparsity": 0.1, "units": ["recurrent_heads"]}  # behind them is a norm, so that a last solve closes the cut
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "attn_layer_indices": [1]}
SQUARE = {
    "sparsity": 0.1,
    "attention_unit": "none",
    "output": "uniform",
    "allocation": "uniform",
}  # weights turned in place
TRIED = {"sparsity": 0.3, "num_samples": 16, "allocation": {"rule": "error_curve", "trial_samples": 4, "samples": 8}}
REFUSED = {  # fields -> what both processes say
    "admm": ({"weight_update": "admm"}, "weight_update: admm works in one process only, got 2"),
    "lora": ({"lora": {}}, "LoRARecoveryModifier works in one process only, got 2. Prune with several, then train"),
    "singular": ({"dampening_frac": 0.0}, "layers.1.fc2: the least-squares system must have a condition number"),
}


def make_dead():
    """A model with a dead channel, which no solve without dampening can bear."""
    model = make_opt()
    with torch.no_grad():
        model.model.decoder.layers[1].fc1.bias[3] = -1e3
    return model


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return save_model(make_mixture("glm4_moe", vocab_size=VOCABULARY), tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def bamba(tmp_path_factory):
    return save_model(make_model("bamba", **MAMBA), tmp_path_factory.mktemp("bamba"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return save_model(make_model("gpt2"), tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def two_processes(opt, mixture, bamba, gpt2, tmp_path_factory):
    """A folder for every job of ``FIELDS`` and ``REFUSED``, which one pair of processes ran one after the other.

    Refusals come first, so that what follows shows that they leave the processes in step.
    """
    folders = {
        name: tmp_path_factory.mktemp(name) for name in (*REFUSED, *FIELDS, "tried", "whole", "coupled", "square")
    }
    dead = save_model(make_dead(), tmp_path_factory.mktemp("dead"))
    jobs = [
        [str(dead), str(folders[name]), fields if "lora" in fields else {"sparsity": 0.2, **fields}]
        for name, (fields, _) in REFUSED.items()
    ]
    jobs += [[str(opt), str(folders[name]), fields] for name, fields in {**FIELDS, "tried": TRIED}.items()]
    others = [(mixture, "whole", WHOLE), (bamba, "coupled", COUPLED), (gpt2, "square", SQUARE)]
    jobs += [[str(model), str(folders[name]), fields] for model, name, fields in others]
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    log = tmp_path_factory.mktemp("logs")
    processes = [start_process(partial(run_rank, rank, port, jobs), log / f"{rank}") for rank in range(2)]
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0, 0], (log / "0").read_text() + (log / "1").read_text()
    return folders


def run_rank(rank, port, jobs):
    """Run the jobs as one of two processes, with what torchrun tells each."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    if rank:
        reconstruction.solve_weights = refuse_to_solve
    run_jobs(jobs)


def refuse_to_solve(*_):
    raise AssertionError("the first process solves, and sends its weights")


@pytest.mark.parametrize("name", [*FIELDS, "whole", "coupled", "square"])
def test_two_processes_equal_one(opt, mixture, bamba, gpt2, two_processes, name, tmp_path):
    folder, fields = two_processes[name], {**FIELDS, "whole": WHOLE, "coupled": COUPLED, "square": SQUARE}[name]
    assert (folder / "digest0.txt").read_text() == (folder / "digest1.txt").read_text()
    assert [path.name for path in folder.glob("*out*")] == ["out"]
    model = {"whole": mixture, "coupled": bamba, "square": gpt2}.get(name, opt)
    run_oneshot(str(model), output_dir=tmp_path / "one", **read_options(fields))
    two, one = read_manifest(folder / "out"), read_manifest(tmp_path / "one")
    assert [group.keep for group in two.groups] == [group.keep for group in one.groups]
    assert two.experts == one.experts
    assert bool(one.experts) == (name == "whole")
    assert [group.damping for group in two.groups] == [group.damping for group in one.groups]
    assert two.calibration.num_tokens == one.calibration.num_tokens
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (folder / "out", tmp_path / "one")]
    ids = torch.randint(4, VOCABULARY, (2, 32))
    with torch.no_grad():
        logits, wanted = (model(ids).logits for model in models)
    assert (logits - wanted).norm() <= 1e-4 * wanted.norm()
    weights, expected = (model.state_dict() for model in models)
    assert weights.keys() == expected.keys()
    for key, value in weights.items():  # sums in another order, in float32, before eigenvectors that magnify that
        assert (value - expected[key]).abs().max() <= 1e-3 * expected[key].abs().max(), key


def test_two_processes_try_plans_and_take_the_same(two_processes):
    """On sequences of their own each, so that a divergence is not that of one process with all of them."""
    folder = two_processes["tried"]
    assert (folder / "digest0.txt").read_text() == (folder / "digest1.txt").read_text()
    allocation = read_manifest(folder / "out").allocation
    assert {"error_curve", "uniform"} <= allocation.tried.keys()
    assert allocation.tried[allocation.taken] == min(allocation.tried.values())


@pytest.mark.parametrize("name", REFUSED)
def test_two_processes_refuse_together(two_processes, name):
    """What the first process raises in the middle of a run, the other raises too, and nothing is left behind."""
    for rank in range(2):
        assert REFUSED[name][1] in (two_processes[name] / f"error{rank}.txt").read_text()
    assert not list(two_processes[name].glob("*out*"))
