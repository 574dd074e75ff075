"""The tools that measure a recovery, on tiny models."""

import json
import sys

import pytest
from helpers.models import save_opt

from eval import memory, paper_sizes, recovery, scale
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, read_texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    pieces = " ".join(read_texts(DEMO_CALIBRATION)).split()
    names = ("books_calibration", "books_train", "books_test", "wikitext2_valid", "wikitext2_test")
    for number, name in enumerate(names):
        part = " ".join(pieces[400 * number : 400 * number + 400])
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": part}) + "\n")
    return folder


def run(monkeypatch, module, *words):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()


def describe_work(model, texts):
    words = ("--model", model, "--data", texts, "--window", 32, "--num-samples", 4)
    return (*words, "--tokens", 512, "--max-tokens", 128)


def test_recovery_tells_curves_and_what_a_step_costs(texts, tmp_path, monkeypatch, capsys):
    model = save_opt(tmp_path / "model")
    words = describe_work(model, texts)
    words += ("--points", 2, "--batch-size", 4, "--rows", "LoRA, KL;full, KL + hidden", "--repeats", 1)
    run(monkeypatch, recovery, *words, "--output", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "recovery.json").read_text())
    for row in told["curves"].values():
        assert [point["tokens"] for point in row["curve"]] == [0, 2 * 4 * 31, 15 * 31]
        assert row["perplexity"] == {name: row["curve"][row["best"]][name] for name in recovery.TEXTS}
        assert min(point["holdout"] for point in row["curve"]) == row["curve"][row["best"]]["holdout"]
    steps = told["steps"]
    assert steps["peak_bytes"]["ordinary loop"] > steps["model_bytes"]
    assert steps["peak_bytes"]["under one layer"] < steps["peak_bytes"]["ordinary loop"]
    loops = {"ordinary loop", "ordinary loop, embeddings too"}
    assert steps["seconds"].keys() == {"under one layer", "RecoveryModifier, memory: model", *loops}
    assert set(told["curves"]) == {"ours | LoRA, KL", "ours | full, KL + hidden"}
    assert "tokens trained" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    monkeypatch.setattr(recovery, "recover", lambda *_: pytest.fail("a finished row was made again"))
    run(monkeypatch, recovery, *words, "--only", "curves", "--output", tmp_path / "out")


def test_recovery_of_what_a_peer_left(texts, tmp_path, monkeypatch):
    model = save_opt(tmp_path / "model")
    words = describe_work(model, texts)
    words += ("--points", 1, "--rows", "full, cross entropy", "--only", "curves", "--peers", "FASP")
    run(monkeypatch, recovery, *words, "--output", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert set(told["curves"]) == {"ours | full, cross entropy", "FASP | full, cross entropy"}
    first, last = (told["curves"]["FASP | full, cross entropy"]["curve"][i]["tokens"] for i in (0, -1))
    assert first == 0
    assert last > 0


def test_recovery_refuses_an_unknown_row_before_it_prunes(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recovery, "prune", lambda *_: pytest.fail("pruned"))
    words = (*describe_work(tmp_path, texts), "--rows", "LoRA, KL;none such", "--output", tmp_path / "out")
    with pytest.raises(SystemExit):
        run(monkeypatch, recovery, *words)
    assert "got none such. Correct the names." in capsys.readouterr().err


def test_memory_of_recovery_is_three_layers_and_a_micro_batch(tmp_path, monkeypatch):
    for module in (paper_sizes, memory):
        monkeypatch.setattr(module, "OPT_SIZES", {"OPT-125M": (128, 2, 4), "OPT-350M": (160, 2, 4)})
    monkeypatch.setattr(memory, "MEMORY_MODELS", ("OPT-125M", "OPT-350M"))
    monkeypatch.setattr(memory, "PAPER_MEMORY", {"FASP": (0.24, 0.69)})
    run(monkeypatch, memory, "--length", 16, "--modes", "recovery;recovery, 5 layers", "--output", tmp_path)
    data = json.loads((tmp_path / "memory-growth.json").read_text())
    for name in ("OPT-125M", "OPT-350M"):
        usual, more = (data["rows"][f"{name} | {mode}"] for mode in ("recovery", "recovery, 5 layers"))
        assert more["budget_bytes"] == 5 * more["layer_bytes"] + more["activation_bytes"]
        assert usual["peak_bytes"] <= 3 * usual["layer_bytes"] + usual["activation_bytes"]
        assert usual["peak_bytes"] < more["peak_bytes"] <= more["budget_bytes"]
    assert data["exponents"].keys() == {"recovery", "recovery, 5 layers"}


def test_scale_counts_a_recovery(capsys, monkeypatch):
    run(monkeypatch, scale, "--recovery")
    assert "70B class: 68 B parameters in 80 layers, 30% removed" in capsys.readouterr().out
    job = scale.Recovery()
    hours = scale.count_recovery(scale.RECOVERED, job, scale.CARD)
    longer = scale.count_recovery(scale.RECOVERED, scale.Recovery(tokens=2 * job.tokens), scale.CARD)
    assert sum(longer.values()) == pytest.approx(2 * sum(hours.values()))
    larger = scale.count_recovery(scale.RECOVERED, scale.Recovery(batch=2 * job.batch), scale.CARD)
    weights = "traffic: weights, gradients"
    assert larger[weights] == pytest.approx(hours[weights] / 2), "weights travel once a step, not once a sequence"


def test_scale_counts_the_recipe_of_adapters():
    job = scale.Recovery(tokens=400_000, batch=4, length=512)
    small, large = (scale.count_adapters(size, job, scale.CARD) for size in (scale.EIGHT, scale.RECOVERED))
    assert all(large[name] > small[name] for name in small if name != "head")
    wider = scale.count_adapters(scale.EIGHT, scale.replace(job, batch=16), scale.CARD)
    assert wider["traffic: weights"] == pytest.approx(small["traffic: weights"] / 4), "weights travel once per step"
    assert wider["layers"] == pytest.approx(small["layers"]), "operations are counted per token"
    table = scale.make_adapter_table((scale.EIGHT, scale.RECOVERED), job)
    assert "8B class" in table
    assert f"{sum(large.values()):.1f} min" in table
