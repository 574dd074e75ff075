"""The command for a real accelerator, with tiny models on a CPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from eval import accelerator


def test_every_step_prints_what_it_finds(capsys, monkeypatch):
    """In this process, in place of a second one that sees no card."""

    def prune_here(words, **_options):
        *_, model_type, fields, folder = words
        accelerator.prune_tiny(model_type, json.loads(fields), Path(folder))
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(accelerator.subprocess, "Popen", prune_here)
    assert accelerator.main(["--tiny"]) == 0
    printed = capsys.readouterr().out
    for told in (
        "rates: product of 256 x 256 in torch.bfloat16",
        "tiny, default: whole pass, 2 layers: ",
        "tiny, FASP's recipe: scaled to 4 layers: ",
        "against the CPU: llama: 100.0% of the units are the same, weights differ by 0.0e+00",
        "decoding: batch 16, eager: dense ",
        "offload under a limit: planned on the device: ",
    ):
        assert told in printed


def test_a_step_that_fails_or_takes_too_long_is_told_and_the_others_go_on(capsys, monkeypatch):
    def fail():
        yield "begins"
        raise OSError("no card\nat all")

    def hang():
        yield "begins"
        while True:
            pass

    monkeypatch.setattr(accelerator, "list_steps", lambda _tiny: {"a": fail, "b": hang, "c": lambda: iter(["done"])})
    assert accelerator.main(["--seconds", "1"]) == 1
    printed = capsys.readouterr().out
    assert "a: FAILED: OSError: no card\n" in printed
    assert "b: FAILED: TimeoutError: not finished within the 1 s" in printed
    assert "c: done" in printed


def test_measure_difference_is_relative_and_infinite_for_other_shapes():
    one = {"a": torch.tensor([2.0, -4.0])}
    assert accelerator.measure_difference(one, {"a": torch.tensor([2.0, -3.0])}) == 0.25
    assert accelerator.measure_difference(one, {"a": torch.zeros(3)}) == float("inf")
