"""The commands under eval/ that measure speed, on tiny models; no assertion on a clock."""

import json
import sys

import pytest
import torch
from helpers.models import make_opt

from eval import speed


def run_command(module, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()


def test_speed_compares_models_pruned_here_with_the_dense_one(opt, tmp_path, monkeypatch):
    sizes = ["--batch", "1,2", "--length", "16", "--new-tokens", "2", "--repeats", "1"]
    options = ["--sparsity", "0.3", "--width-multiple", "1,8", "--attention-unit", "none"]
    run_command(speed, monkeypatch, "--dense", opt, *options, *sizes, "--output", tmp_path)
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert [(row["model"], row["batch"]) for row in rows] == [
        (model, batch) for batch in (1, 2) for model in (str(opt), "0.3, multiple 1", "0.3, multiple 8")
    ]
    assert rows[0]["parameters"] == rows[0]["prefill_speedup"] == 1
    dense = make_opt()
    linears = sum(m.weight.numel() for m in dense.modules() if isinstance(m, torch.nn.Linear))
    gone = (1 - rows[2]["linears"]) * linears / (2 * dense.config.hidden_size)  # channels, of all layers
    assert gone == pytest.approx(8 * round(gone / 8))
    assert gone > 0
    assert "0.3, multiple 8" in (tmp_path / "speed.md").read_text()
