"""A run that is stopped, or whose data or statistics are bad: what it says, and that it leaves nothing behind."""

import hashlib
import itertools
import os
import re
import resource
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from helpers.models import DEFAULT, make_dataset, make_opt, run_oneshot, save_model, start_process
from torch.utils.data import DataLoader, Dataset

from struprune_plugin import StruPruneModifier, oneshot
from struprune_plugin.cli import main as cli
from struprune_plugin.storage import resume_store as journal
from struprune_plugin.storage.files import check_place
from struprune_plugin.storage.output_folder import check_output

pytestmark = pytest.mark.durable

RECIPE = """
pruning_stage:
  pruning_modifiers:
    StruPruneModifier: {sparsity: 0.3}
recovery_stage:
  recovery_modifiers:
    LoRARecoveryModifier: {adapters: {rank: 2}, schedule: {epochs: 1}}
quantization_stage:
  quantization_modifiers:
    QuantizationModifier: {scheme: W8A8, ignore: [lm_head]}
"""
STAGES = {  # stage -> what runs in its midst
    "sensitivity": "struprune_plugin.allocation.sensitivity._run_backward",
    "allocation": "struprune_plugin.allocation.curves.sum_increases",
    "statistics": "struprune_plugin.layerwise.statistics.add_batch",
    "pruning": "struprune_plugin.pruning.reconstruction.slice_group",
    "LoRA": "struprune_plugin.recovery.training.AdapterTraining.take_step",
    "quantising": "llmcompressor.modifiers.quantization.QuantizationModifier.on_calibration_end",
    "saving": "struprune_plugin.modifiers.pruning.write_manifest",
    "the last step": "struprune_plugin.storage.output_folder.flush",
}


def digest(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def inputs(opt, tmp_path_factory) -> Path:
    """A folder with all that a run reads: the model, the recipe and calibration text."""
    folder = tmp_path_factory.mktemp("inputs")
    save_model(make_opt(), folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE)
    text = "".join(f'{{"text": "Line {i}: {" ".join(str(i * j % 97) for j in range(40))}."}}\n' for i in range(30))
    (folder / "text.jsonl").write_text(text)
    return folder


def make_argv(inputs: Path, results: Path) -> list[str]:
    argv = ["prune", str(inputs / "model"), "--recipe", str(inputs / "recipe.yaml"), "--output", str(results / "out")]
    return [*argv, "--data", str(inputs / "text.jsonl"), "--num-samples", "8", "--seq-length", "32"]


@pytest.mark.parametrize(("stage", "name"), zip(STAGES, itertools.cycle(["SIGINT", "SIGTERM"]), strict=False))
def test_a_run_stopped_at_any_stage_ends_in_one_line_and_leaves_nothing(
    inputs, stage, name, tmp_path, monkeypatch, capfd
):
    before, stopped = digest(inputs), []
    temporary, results = tmp_path / "temporary", tmp_path / "results"
    temporary.mkdir()
    results.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def stop(*_args, **_kwargs):
        stopped.append(stage)
        os.kill(os.getpid(), getattr(signal, name))
        raise AssertionError("the signal came too late")

    monkeypatch.setattr(STAGES[stage], stop)
    status = cli.main(make_argv(inputs, results))
    error = capfd.readouterr().err
    assert stopped == [stage]
    assert status == {"SIGINT": 130, "SIGTERM": 143}[name]
    assert error.splitlines()[-1] == {"SIGINT": "struprune: interrupted", "SIGTERM": "struprune: terminated"}[name]
    assert "Traceback" not in error
    assert list(temporary.iterdir()) == []
    assert digest(inputs) == before
    assert list(results.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_conversion_that_is_stopped_leaves_nothing(opt, prune_once, tmp_path, monkeypatch, capfd):
    _, folder = prune_once(opt, "value_channels")
    before = digest(folder)
    monkeypatch.setattr("struprune_plugin.export.outputs.carry_files", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(["convert", str(folder), "--to", "uniform-padded", "--output", str(tmp_path / "out")]) == 143
    assert "Traceback" not in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert digest(folder) == before


def test_a_run_stopped_while_it_keeps_a_layer_goes_on(inputs, tmp_path, monkeypatch, capfd):
    """What was kept before stays, nothing half-written does, and the same command ends well."""
    argv = [*make_argv(inputs, tmp_path), "--checkpoint", str(tmp_path / "c")]
    save, times = journal.save_file, []

    def stop(tensors, path, metadata):
        times.append(path)
        save(tensors, path, metadata)
        if len(times) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(journal, "save_file", stop)
        assert cli.main(argv) == 143
    assert "Traceback" not in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    kept = sorted(path.name for path in (tmp_path / "c").iterdir())
    parts = ["allocation.safetensors", "layer-00000.safetensors"]
    assert kept == [*parts, "struprune_run.json"]
    assert cli.main(argv) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.fixture
def limit_files():
    """A function that lets no file of this process grow beyond some bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_for_real(inputs, tmp_path, limit_files, capfd):
    """The message says so in one line, the status is 1, and nothing half-written is left."""
    before = digest(inputs)
    limit_files(50_000)
    assert cli.main(make_argv(inputs, tmp_path)) == 1
    limit_files(resource.RLIM_INFINITY)
    line = capfd.readouterr().err.splitlines()[-1]
    assert re.fullmatch("struprune: error: .*(File too large|os error 27).*", line), line
    assert digest(inputs) == before
    assert list(tmp_path.iterdir()) == []


class Broken(Dataset):
    """Calibration data of which one sample cannot be read."""

    def __init__(self, bad: int):
        self.rows, self.bad = make_dataset(8).with_format("torch"), bad

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError(5, f"sample {index} cannot be read")
        return self.rows[index]


def test_a_calibration_batch_that_raises_leaves_nothing(opt, tmp_path):
    loader = DataLoader(Broken(5), batch_size=4)
    before = digest(opt)
    with pytest.raises(OSError, match="sample 5 cannot be read"):
        oneshot(model=str(opt), recipe=StruPruneModifier(sparsity=0.3), dataset=loader, output_dir=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert digest(opt) == before


# -- singular systems ---------------------------------------------------------------------------------------------


def copy_channels(layer) -> None:
    """Let every second channel of the FFN be a copy of the one before."""
    for part in (layer.fc1.weight, layer.fc1.bias):
        part.data[1::2] = part.data[::2]


def kill_channels(layer) -> None:
    """Let half of the FFN's channels be dead."""
    layer.fc1.weight.data[::2] = 0
    layer.fc1.bias.data[::2] = -1


def hold_channels(layer) -> None:
    """Let the FFN's channels be constant: the bias says what they say."""
    layer.fc1.weight.data.zero_()
    layer.fc1.bias.data.abs_().add_(0.1)


FAULTS = [copy_channels, kill_channels, hold_channels]


LOCAL = {"attention_unit": "head", "dampening_frac": 1e-3, "reconstruct": "local"}


@pytest.mark.parametrize(("fault", "fields"), [*((fault, DEFAULT) for fault in FAULTS), (copy_channels, LOCAL)])
def test_singular_statistics_are_damped(fault, fields, tmp_path):
    model = make_opt()
    fault(model.model.decoder.layers[1])
    pruned = run_oneshot(str(save_model(model, tmp_path / "m")), sparsity=0.3, **fields)
    assert all(parameter.isfinite().all() for parameter in pruned.parameters())
    assert pruned(torch.arange(4, 20)[None]).logits.isfinite().all()


def test_dead_channels_go_first(tmp_path):
    """Removing them costs nothing."""
    model = make_opt()
    kill_channels(model.model.decoder.layers[1])
    pruned = run_oneshot(str(save_model(model, tmp_path / "m")), sparsity=0.1, attention_unit="none")
    alive = pruned.model.decoder.layers[1].fc1.weight.abs().sum(1) > 0
    assert 20 < len(alive) < 40
    assert int(alive.sum()) == 20


@pytest.mark.parametrize(
    "check", [lambda out: check_output(out, False, []), lambda out: check_place("checkpoint_dir", out)]
)
def test_a_place_that_only_others_may_write_is_refused(check, tmp_path):
    """In a process of its own, which gives up root's rights where it has them."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o555)

    def run() -> int:
        if os.getuid() == 0:
            os.setuid(65534)
        with pytest.raises(ValueError, match="folder that can be written"):
            check(place / "out")
        return 0

    process = start_process(run, tmp_path / "log")
    process.join(60)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    assert list(place.iterdir()) == []
    place.rmdir()
