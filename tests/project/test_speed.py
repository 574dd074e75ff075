"""The commands under eval/ that measure or estimate speed, on tiny models; no assertion on a clock."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from helpers.models import make_opt
from transformers import AutoConfig, AutoModelForCausalLM

from eval import profile, scale, speed
from struprune_plugin.evaluation.text import DEMO_CALIBRATION
from struprune_plugin.linalg.second_moments import MomentSums


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


def test_profile_sets_every_stage_beside_its_floor(opt, tmp_path, monkeypatch):
    sizes = ["--samples", "8", "--length", "32", "--sparsity", "0.3"]
    run_command(
        profile, monkeypatch, "--model", opt, "--data", DEMO_CALIBRATION, *sizes, "--fasp", "--output", tmp_path
    )
    record = json.loads((tmp_path / "profile.json").read_text())
    assert f"FASP: {record['fasp']:.2f} s" in (tmp_path / "profile.md").read_text()
    assert {"sensitivity", "allocate", "statistics", "whole pass"} <= record["stages"].keys() & record["floor"].keys()
    assert record["floor"]["statistics"] == pytest.approx(2 * record["floor"]["forward"] + record["floor"]["gram"])
    run_command(scale, monkeypatch, "--profile", tmp_path / "profile.json", "--output", tmp_path)
    record = json.loads((tmp_path / "scale.json").read_text())
    assert record["measured"] == json.loads((tmp_path / "profile.json").read_text())["stages"]["whole pass"]


def test_scale_counts_parameters_and_moments_as_they_are():
    model = make_opt()
    size = scale.Size("tiny", hidden=24, ffn=40, layers=3, kv_width=24, linears=2)
    weights = [m.weight for m in model.model.decoder.layers[0].modules() if isinstance(m, torch.nn.Linear)]
    assert size.layer == sum(weight.numel() for weight in weights)
    held = sum(4 * sum(p.numel() for p in MomentSums((n, 24), "cpu", torch.float32).list_parts()) for n in (40, 24))
    assert scale.count_traffic(size, scale.Job(1, 2))["between"] == 3 * held + 8 * 24 * 64


def test_scale_measures_the_widths_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(scale, "_WIDTHS", (224, 448))
    header, _, *rows = scale.study_widths([224], 0.3, scale.CARD).splitlines()
    assert "float64 / float32" in header
    measured, counted = (row.split() for row in rows)
    assert measured[0] == "224"
    assert len(measured) == 10
    assert counted[0] == "448"
    assert len(counted) == 5


def test_scale_splits_over_cards_what_is_per_token_only():
    size, job = scale.LARGE, scale.Job(128, 2048)
    one, eight = (scale.count_seconds(size, job, scale.CARD, ranks) for ranks in (1, 8))
    for name in ("passes", "Gram products", "host traffic", "sensitivity"):
        assert eight[name] == pytest.approx(one[name] / 8)
    for name in ("selection", "solves", "allocation, curves"):
        assert eight[name] == one[name]
    read = (
        4 * size.attention + (2 * 3 + 2) * size.hidden * size.ffn
    )  # all twice; attention twice more, FFN producers once
    maps = 4 * 4 * job.tokens * job.length * size.hidden
    assert one["passes"] == pytest.approx(size.layers * (2 * job.tokens * read + maps) / scale.CARD.model)


def test_scale_counts_experts_by_the_tokens_that_visit_them(capsys):
    size, job = scale.MIXTURES[0], scale.Job(128, 2048)
    config = AutoConfig.for_model(
        *("qwen3_moe",),
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_hidden_layers=1,
    )
    config.update({"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 8})
    with torch.device("meta"):
        layer = AutoModelForCausalLM.from_config(config).model.layers[0]
    linears = sum(p.numel() for name, p in layer.named_parameters() if "norm" not in name and "gate." not in name)
    assert size.layer == linears
    assert size.layer - size.visited == 120 * 3 * 2048 * 768
    more = scale.count_mixture(replace(size, experts=256), job, scale.CARD)
    less = scale.count_mixture(size, job, scale.CARD)
    assert more["passes"] == less["passes"]
    assert more["Gram products"] == less["Gram products"]
    values = less["solves"] - scale.count_mixture(size, job, scale.CARD, values=False)["solves"]
    assert more["solves"] - values == pytest.approx(2 * (less["solves"] - values))
    table = scale.make_mixture_tables(job, scale.CARD, 100.0)
    assert "Qwen3-30B-A3B's shape: 30.5 B parameters" in table
    assert "gpt-oss-20b's shape: 20.9 B parameters" in table
