"""The command for a real accelerator, in its reduced form on a CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

from eval import accelerator


def test_the_reduced_form_does_every_kind_of_step_once_and_reads_it_back(tmp_path, monkeypatch):
    """In this process, in place of one per step."""

    def run_here(_name, step, file, _reduced):
        file.write_text(json.dumps(step.run()))
        return json.loads(file.read_text())

    def prune_here(words, **_options):
        *_, model_type, fields, _, folder = words
        accelerator.prune_tiny(model_type, json.loads(fields), Path(folder))

    monkeypatch.setattr(sys, "argv", ["accelerator", "--output", str(tmp_path)])
    monkeypatch.setattr(accelerator, "run_step", run_here)
    monkeypatch.setattr(accelerator.subprocess, "run", prune_here)
    assert accelerator.main() == 0
    rows = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert len(rows) == 4
    case = rows["correct-default-llama-reduced"]
    assert case["same_units"] == 1.0
    assert case["weights"] == 0
    text = (tmp_path / "accelerator.md").read_text()
    assert "per layer" in text
    assert "multiple 8" in text
    monkeypatch.setattr(accelerator, "run_step", lambda *_: pytest.fail("done already"))
    assert accelerator.main() == 0


@pytest.mark.parametrize(
    ("action", "told"), [("time.sleep(60)", "took longer than 1 s"), ("sys.exit('no card\\nat all')", "at all")]
)
def test_a_step_that_hangs_or_dies_is_told(tmp_path, monkeypatch, action, told):
    run = accelerator.subprocess.run
    script = [sys.executable, "-c", f"import sys, time; {action}"]
    monkeypatch.setattr(accelerator.subprocess, "run", lambda _words, **options: run(script, **options))
    step = accelerator.Step(1.0, dict)
    row = accelerator.run_step("speed: tiny", step, tmp_path / "row.json", True)
    assert told in row["error"]
    assert f"speed: tiny: {row['error']}" in accelerator.make_report({"speed: tiny": row}, [])


def test_measure_difference_is_relative_and_infinite_for_other_shapes():
    one = {"a": torch.tensor([2.0, -4.0])}
    assert accelerator.measure_difference(one, {"a": torch.tensor([2.0, -3.0])}) == 0.25
    assert accelerator.measure_difference(one, {"a": torch.zeros(3)}) == float("inf")
