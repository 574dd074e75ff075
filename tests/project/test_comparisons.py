"""Commands under eval/ that compare with what others publish: a board's protocol, two models of a family, the picture of sizes."""

import json
import shutil
import sys

import pytest
import torch
from helpers.families import make_model
from helpers.models import save_model

from eval import arena, family, methods, picture, zeroshot
from struprune_plugin.evaluation.scoring import load_checkpoint, measure_perplexity
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_TEST
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters

LOCAL = {"mixed_calibration.jsonl": DEMO_CALIBRATION, "wikitext2_test.jsonl": DEMO_TEST, "books_test.jsonl": DEMO_TEST}
SIZES = ("--num-samples", "8", "--window", "32", "--max-tokens", "320")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, source in LOCAL.items():
        shutil.copy(source, folder / name)
    return folder


def run(monkeypatch, module, *words) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()


def test_arena_scores_what_is_at_hand_and_names_what_is_not(opt, texts, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(zeroshot.TASKS_FOLDER, tmp_path / "tasks")
    rows = [{"query": f"Query {i}:", "choices": ["one", "a much longer choice"], "gold": i % 2} for i in range(4)]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = folder / "struprune_piqa.yaml"
    task.write_text(task.read_text().replace("../shared/testbed/zeroshot", str(tmp_path)))
    hellaswag = folder / "struprune_hellaswag.yaml"
    hellaswag.write_text(hellaswag.read_text().replace("../shared/testbed/zeroshot", str(tmp_path)))  # not there
    for module in (arena, zeroshot):
        monkeypatch.setattr(module, "TASKS_FOLDER", folder)
    check = arena.check_tasks

    def check_tasks(tasks, *where, **options):
        if not where:
            raise ValueError("--tasks: the data must be at hand, got no hub.")
        return check(tasks, *where, **options)

    def fail(_):
        raise ConnectionError("no hub")

    monkeypatch.setattr(arena, "check_tasks", check_tasks)
    monkeypatch.setattr(arena, "read_hub_text", fail)
    words = (
        "--model",
        opt,
        "--data",
        texts,
        *SIZES,
        "--keep",
        "0.7",
        "--methods",
        "FASP",
        "--output",
        tmp_path / "out",
    )
    run(monkeypatch, arena, *words)
    told = capsys.readouterr().out
    made = json.loads((tmp_path / "out" / "arena.json").read_text())
    assert made.keys() == {"1 | dense", "0.7 | FASP"}
    row = made["0.7 | FASP"]
    assert row["perplexity"].keys() == {"WikiText-2"}
    assert row["accuracy"].keys() == {"PIQA"}
    assert row["missing"].keys() == {"C4", "BoolQ", "ARC-e", "ARC-c", "WinoGrande", "HellaSwag", "OBQA"}
    assert row["notes"].keys() == {"WikiText-2", "PIQA", "trial"}
    assert row["removed"] == pytest.approx(0.3, abs=0.01)
    model, tokenizer = load_checkpoint(str(opt))
    share = count_prunable_parameters(model) / count_parameters(model)
    assert row["removed_of_model"] == pytest.approx(row["removed"] * share)
    text = "\n\n".join(json.loads(line)["text"] for line in DEMO_TEST.read_text(encoding="utf-8").splitlines())
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][:320])
    assert made["1 | dense"]["perplexity"]["WikiText-2"] == pytest.approx(measure_perplexity(model, tokens, 32))
    assert "C4: left out, no hub" in told
    assert "mean: of 1 of 7 tasks" in told
    run(monkeypatch, arena, *words)  # reads the rows back
    assert json.loads((tmp_path / "out" / "arena.json").read_text()) == made


def test_arena_takes_the_hubs_tasks_where_they_are_there(monkeypatch):
    monkeypatch.setattr(arena, "check_tasks", lambda tasks: f"index of {tasks[0]}")
    monkeypatch.setattr(arena, "read_hub_text", lambda source: f"text of {source}")
    board = arena.find_board(arena.find_sources(None))
    assert board.texts == {"WikiText-2": "text of wikitext2", "C4": "text of c4"}
    assert board.tasks == {name: (task, f"index of {task}") for name, task in arena.TASKS.items()}
    assert not board.missing
    assert not board.notes


def test_family_prunes_the_large_model_to_the_small_ones_size(texts, tmp_path, monkeypatch, capsys):
    large = save_model(make_model("llama", num_hidden_layers=3), tmp_path / "large")
    small = save_model(make_model("llama", num_hidden_layers=2), tmp_path / "small")
    words = ("--model", large, "--small", small, "--data", texts, *SIZES, "--output", tmp_path / "out")
    run(monkeypatch, family, *words)
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())
    wanted = count_parameters(load_checkpoint(str(small))[0])
    assert rows["small"]["parameters"] == wanted
    assert rows["large, pruned"]["parameters"] == pytest.approx(wanted, rel=0.01)
    sizes = [rows[name]["parameters"] for name in ("large, pruned", "large")]
    assert rows["large, pruned"]["removed_of_model"] == pytest.approx(1 - sizes[0] / sizes[1])
    for row in rows.values():
        assert row["bits_per_byte"].keys() == row["perplexity"].keys()
    assert "the pruned large model is better on" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--small: must have fewer parameters"):
        family.find_sparsity(str(small), str(large))


def test_picture_draws_rows_of_quality_and_refuses_older_ones(tmp_path, monkeypatch, capsys):
    def row(perplexity, removed):
        shares = {"removed": removed, "removed_of_model": 0.8 * removed}
        return {"how": {"model": ["tiny"]}, "perplexity": {"t": perplexity}, **shares}

    rows = {"dense": row(10.0, 0.0), "0.3 | FASP": row(20.0, 0.3), f"0.3 | {methods.OURS}": row(14.0, 0.3)}
    rows |= {"0.5 | FASP": {"refused": "too much"}, "0.3 | FLAP": row(30.0, 0.3)}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    words = ("--rows", file, "--only", f"FASP,{methods.OURS}")
    run(monkeypatch, picture, *words, "--file", tmp_path / "docs" / "sizes.svg")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["FASP", methods.OURS, "dense"]
    assert lines[2].split()[1:] == ["30.0%", "24.0%", "20"]
    assert (tmp_path / "docs" / "sizes.svg").read_text().startswith("<?xml")
    del rows["0.3 | FASP"]["removed_of_model"]
    file.write_text(json.dumps(rows))
    with pytest.raises(SystemExit, match=r"got the older rows 0\.3 \| FASP\. Run eval\.quality"):
        run(monkeypatch, picture, *words, "--file", tmp_path / "sizes.svg")
