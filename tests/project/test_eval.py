"""The commands under eval/: rows, peers and the paper's tables, on tiny models."""

import argparse
import dataclasses
import json
import math
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from helpers.families import make_model
from helpers.models import ROOT, save_model
from transformers import AutoTokenizer

from eval import ledger, memory, methods, paper_sizes, paper_tables, quality, rows, zeroshot
from eval.vocabulary import list_weights, take_rows
from struprune_plugin import LoRARecoveryModifier, StruPruneModifier
from struprune_plugin.entrypoint import load_recipe
from struprune_plugin.evaluation import text as data
from struprune_plugin.evaluation.scoring import load_checkpoint, measure_perplexity
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_TEST
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters
from struprune_plugin.vocabulary.trim_plan import Ranking, check_source, plan_trim

LOCAL = {  # file of a data folder -> what stands in for it
    "mixed_calibration.jsonl": DEMO_CALIBRATION,
    "books_train.jsonl": DEMO_CALIBRATION,
    "wikitext2_test.jsonl": DEMO_TEST,
    "books_test.jsonl": DEMO_TEST,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, source in LOCAL.items():
        shutil.copy(source, folder / name)
    return folder


def read_command(*words):
    return rows.read_workload(rows.make_parser().parse_args([*map(str, words), "--output", "."]))


@pytest.fixture(scope="module")
def work(opt, texts):
    sizes = ("--num-samples", 8, "--recovery-samples", 10, "--window", 32, "--max-tokens", 320)
    return read_command("--model", opt, "--data", texts, *sizes)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("closed_form", "Closed form (Algorithm 1)"),
        ("asymptotic", "Asymptotics (Algorithm 2)"),
        ("asymptotic_distribute", "Asymptotics (Algorithm 3)"),
        ("snip", "SNIP (w/ correction)"),
        ("l0", "L0 (w/ correction)"),
        ("magnitude", "Magnitude (w/ correction)"),
    ],
)
def test_the_papers_recipes_are_its_rows(recipe, name):
    (modifier,) = load_recipe(ROOT / "recipes" / f"paper_{recipe}.yaml").modifiers
    row = methods.SETS["paper"][name]
    assert modifier.dump_fields() == StruPruneModifier(sparsity=0.2, **row.fields).dump_fields()


def test_recovery_rows_train_as_the_shipped_recipe():
    modifier = load_recipe(ROOT / "recipes" / "struprune_lora.yaml").modifiers[-1]
    row = methods.SETS["recovery"]["default + LoRA"]
    assert LoRARecoveryModifier(**row.recovery, group=modifier.group).model_dump() == modifier.model_dump()


def test_the_papers_figures_have_rows():
    assert set(paper_tables.PAPER_PERPLEXITY) <= set(paper_tables.MAIN) | set(paper_tables.METHODS)


def test_ledger_makes_a_row_once_and_again_when_it_is_made_otherwise(tmp_path):
    made = []
    for how, count in (({"x": 1}, 1), ({"x": 1}, 1), ({"x": 2}, 2)):
        row = ledger.Ledger(tmp_path / "rows.json").finish("row", how, lambda: made.append(1) or {"value": len(made)})
        assert row["value"] == len(made) == count


@pytest.fixture
def counted(opt, texts, tmp_path, monkeypatch):
    """Rows of a model and texts that a test may change; a function that returns which of them are made anew."""
    folder, data_folder = (Path(shutil.copytree(source, tmp_path / source.name)) for source in (opt, texts))
    sizes = ("--num-samples", 8, "--recovery-samples", 10, "--window", 32, "--max-tokens", 320)
    work, made = read_command("--model", folder, "--data", data_folder, *sizes), []
    monkeypatch.setattr(rows, "score_dense", lambda _: made.append("dense") or {})
    monkeypatch.setattr(
        rows, "run_row", lambda row, *_: made.append(row.peer or f"ours{len(row.recovery or {}) > 0:d}") or {}
    )
    chosen = {"ours": methods.DEFAULT, "recovered": rows.Row({}, {"schedule": {"max_steps": 3}}), "FASP": methods.FASP}

    def run(changed=work):
        made.clear()
        rows.run_rows(ledger.Ledger(tmp_path / "rows.json"), changed, chosen, [0.3])
        return list(made)

    everything = ["dense", "ours0", "ours1", methods.FASP.peer]
    assert run() == everything
    assert run() == []
    return argparse.Namespace(run=run, all=everything, model=folder, data=data_folder, work=work)


def test_rows_are_made_again_when_sources_sizes_or_texts_of_theirs_change(counted, monkeypatch):
    digest = ledger.digest_sources
    for changed, again in (("struprune_plugin", counted.all), ("peers", [methods.FASP.peer])):
        with monkeypatch.context() as patch:
            patch.setattr(ledger, "digest_sources", lambda s, name=changed: "new" if s.name == name else digest(s))
            assert counted.run() == again
        counted.run()
    for change, again in (
        ({"window": 16}, [0, 1, 2, 3]),
        ({"num_samples": 4}, [1, 2, 3]),
        ({"recovery_samples": 5}, [2]),
    ):
        work = dataclasses.replace(counted.work, **change)
        assert counted.run(work) == [counted.all[index] for index in again]
        counted.run()
    for name, again in (("mixed_calibration", [1, 2, 3]), ("books_train", [2]), ("wikitext2_test", [0, 1, 2, 3])):
        file = counted.data / f"{name}.jsonl"  # under the same name
        file.write_text(file.read_text(encoding="utf-8") + '{"text": "more"}\n', encoding="utf-8")
        assert counted.run() == [counted.all[index] for index in again]


def test_run_row_prunes_and_scores_by_fields(work):
    row = rows.run_row(methods.SETS["admm"]["FFN by wanda: ADMM"], 0.3, work)
    assert row["removed"] == pytest.approx(0.3, abs=0.005)
    assert row["perplexity"].keys() == work.texts.keys()


def test_a_smaller_vocabulary_is_scored_per_token_of_the_whole_one(work, opt):
    """By hand, on the dense logits of the tokens that stay: a first token's parts are read, all others' are counted."""
    (model, tokenizer), (dense, _) = load_checkpoint(str(opt)), load_checkpoint(str(opt))
    tokens = data.tokenize_texts(tokenizer, data.read_texts(DEMO_TEST), 321)[1:]  # without the token that begins a text
    assert rows.measure_text(dense, tokenizer, tokens, work) == measure_perplexity(dense, tokens, 32)
    plan = plan_trim(check_source(str(opt)), Ranking(DEMO_CALIBRATION, 0.4))
    smaller, kept = take_rows(model, plan, list_weights(model)), torch.tensor(plan.kept)
    total, firsts = 0.0, set()
    for window in tokens.view(-1, 32).tolist():
        texts = tokenizer.decode(window[:1]), tokenizer.decode(window[1:])
        first, rest = (smaller(text, add_special_tokens=False)["input_ids"] for text in texts)
        firsts.add(len(first))
        with torch.no_grad():
            logs = dense(kept[first + rest][None]).logits[0][:, kept].log_softmax(-1)
        total -= sum(float(logs[len(first) + place - 1, token]) for place, token in enumerate(rest))
    assert max(firsts) > 1
    found = rows.measure_text(model, smaller, tokens, work)
    assert math.log(found) == pytest.approx(total / (31 * 10), rel=1e-5)


@pytest.mark.parametrize("name", ["COMPACT", "StruPrune after COMPACT's rows"])
def test_a_row_with_fewer_tokens_tells_the_whole_models_share(name, work, opt):
    row = rows.run_row(methods.SETS["peers"][name], 0.3, dataclasses.replace(work, divergence=True))
    dense = load_checkpoint(str(opt))[0]
    base = count_prunable_parameters(dense) / count_parameters(dense)
    assert row["removed_of_model"] == pytest.approx(0.3 * base, abs=0.002)
    assert 0 < row["removed"] < 0.9 * 0.3
    assert row["perplexity"].keys() == work.texts.keys()
    assert all(map(math.isnan, row["divergence"].values()))


def test_shares_of_experts_are_of_their_parameters(texts, tmp_path):
    folder = save_model(make_model("qwen3_moe", moe_intermediate_size=64, num_hidden_layers=2), tmp_path / "moe")
    sizes = ("--num-samples", 8, "--window", 32, "--max-tokens", 200)
    mixture = read_command("--model", folder, "--data", texts, *sizes)
    for name in ("REAP", "channels"):
        told = rows.run_row(methods.SETS["experts"][name], 0.25, mixture)
        assert told["removed"] == pytest.approx(0.25, abs=0.01), name


def test_a_row_that_is_refused_does_not_stop_the_others(work, tmp_path):
    chosen = {"too much": rows.Row(methods.spell(attention_unit="none")), "FASP": methods.FASP}
    found = rows.run_rows(ledger.Ledger(tmp_path / "rows.json"), work, chosen, [0.6])
    (told,) = rows.list_refusals(found)
    assert told.startswith("0.6 | too much: refused, sparsity=0.6: the chosen units must hold")
    assert found["0.6 | FASP"]["removed"] == pytest.approx(0.6, abs=0.01)


def test_hub_texts_are_joined_and_cut_as_the_papers_do(opt, monkeypatch):
    def load(path, split, streaming, **_):
        names = {"Salesforce/wikitext": ["", " = A = ", "b c"], "allenai/c4": ["one", "two"]}
        return [{"text": f"{text} {split}" if text else ""} for text in names[path]]

    monkeypatch.setattr(data, "load_dataset", load)
    tokenizer = AutoTokenizer.from_pretrained(opt)
    work = read_command("--model", opt)
    assert (work.num_samples, work.window, work.texts) == (128, 2048, {"WikiText-2": "wikitext2", "C4": "c4"})
    for source, text in (("wikitext2", "\n\n = A =  test\n\nb c test"), ("c4", "one validation two validation")):
        assert rows.read_tokens(source, tokenizer, work).tolist() == tokenizer(text)["input_ids"]
        shorter = read_command("--model", opt, "--window", 4)  # as published: no token at the start of every window
        assert rows.read_tokens(source, tokenizer, shorter).tolist() == tokenizer(text)["input_ids"]


# -- the paper's tables -------------------------------------------------------------------------------------------


def run_tables(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["paper_tables", *map(str, words)])
    paper_tables.main()


def test_perplexity_tables_stand_beside_the_papers_and_resume(opt, texts, tmp_path, monkeypatch):
    few = {name: paper_tables.MAIN[name] for name in ("FASP", "Asymptotics (Algorithm 2)")}
    monkeypatch.setattr(paper_tables, "MAIN", few)
    words = ("--model", opt, "--data", texts, "--num-samples", 8, "--window", 32, "--max-tokens", 320)
    run_tables(monkeypatch, *words, "--table", "main", "--sparsity", "0.2,0.4", "--output", tmp_path)
    text = (tmp_path / "main.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("FASP") and "/" in line]
    assert "30 / –" in line
    assert "28 / –" in line
    assert "OPT-125M" in text
    table = json.loads((tmp_path / "main.json").read_text())
    assert [row[0] for row in table["rows"]] == ["dense", *few]
    assert table["data"]["0.4 | FASP"]["removed"] == pytest.approx(0.4, abs=0.01)

    def fail(*_):
        raise AssertionError("a finished row was made again")

    monkeypatch.setattr(rows, "run_row", fail)
    run_tables(monkeypatch, *words, "--table", "main", "--sparsity", "0.2,0.4", "--output", tmp_path)
    assert (tmp_path / "main.md").read_text() == text
    monkeypatch.setattr(paper_tables, "METHODS", few)  # every table leaves the rows of the others alone
    for table in ("methods", "main"):
        run_tables(monkeypatch, *words, "--table", table, "--sparsity", "0.2,0.4", "--output", tmp_path)
    command = ["quality", *map(str, words), "--rows", "paper", "--sparsity", "0.2", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setitem(methods.SETS, "paper", few)
    monkeypatch.setattr(quality, "plot_quality", lambda *_: None)  # another test draws
    quality.main()  # shares the finished rows
    assert "0.2 | FASP" in (tmp_path / "paper.md").read_text()


def test_params_and_figure_need_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(paper_sizes, "OPT_SIZES", dict(list(paper_sizes.OPT_SIZES.items())[:2]))
    monkeypatch.setattr(paper_tables, "OPT_SIZES", paper_sizes.OPT_SIZES)
    for name in ("params", "figure"):
        run_tables(monkeypatch, "--table", name, "--output", tmp_path)
    row = json.loads((tmp_path / "params.json").read_text())["rows"][0]
    assert {"OPT-125M", "10.4M", "7,087,872", "20.8", "14.2"} <= set(row)
    assert json.loads((tmp_path / "ratios.json").read_text())["rows"][0][1] == "4,718,592"
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="--model: must be"):
        run_tables(monkeypatch, "--table", "main", "--output", tmp_path)


@pytest.fixture
def few_words(monkeypatch):
    """Published shapes with a small vocabulary, whose logits take most of the time."""
    make = paper_sizes.make_opt_config
    for module in (paper_sizes, memory):
        monkeypatch.setattr(module, "make_opt_config", lambda name, **changes: make(name, vocab_size=512, **changes))


def test_memory_growth_measures_and_reads_finished_rows(tmp_path, monkeypatch, few_words):
    for module in (paper_sizes, memory):
        monkeypatch.setattr(module, "OPT_SIZES", {"OPT-125M": (32, 2, 4), "OPT-350M": (48, 2, 4)})
    monkeypatch.setattr(memory, "MEMORY_MODELS", ("OPT-125M", "OPT-350M"))
    monkeypatch.setattr(memory, "PAPER_MEMORY", {"FASP": (0.24, 0.69)})
    command = ["memory", "--length", "32", "--modes", "default", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    memory.main()
    monkeypatch.setattr(memory, "measure_pruning_memory", lambda *_: pytest.fail("measured again"))
    memory.main()
    data = json.loads((tmp_path / "memory-growth.json").read_text())
    for row in data["rows"].values():
        assert row["peak_bytes"] > row["layer_bytes"]
    assert data["exponents"].keys() == {"default"}
    assert (tmp_path / "memory-growth.png").stat().st_size > 0


@pytest.mark.parametrize("name", methods.SETS)
def test_the_fields_of_every_row_are_the_recipes(name):
    for key, row in methods.SETS[name].items():
        assert "," not in key, "--only splits there"
        if row.peer:
            module, function = row.peer.split(":")
            assert callable(getattr(import_module(module), function))
        else:
            StruPruneModifier(**{"sparsity": 0.3, **row.fields})
        LoRARecoveryModifier(**(row.recovery or {}))


def test_format_quality_compares_peers_at_equal_parameters():
    def row(perplexity, removed):
        share = {"removed": removed, "removed_of_model": 0.8 * removed}
        return {"perplexity": {"t": perplexity}, **share, "seconds": 5.0}

    made = {
        "dense": row(10.0, 0.0),
        "0.3 | FASP": row(20.0, 0.3),
        "0.3 | SliceGPT": row(14.0, 0.15),
        "0.3 | COMPACT": {**row(14.0, 0.05), "removed_of_model": 0.12},  # rows of the vocabulary, too
        f"0.3 | {methods.OURS}": row(14.0, 0.3),
    }
    lines = {line.split("  ")[0]: line for line in quality.format_quality(made).splitlines()}
    assert lines[f"0.3 | {methods.OURS}"].split()[-5:] == ["14.00", "4.00", "30.00%", "24.00%", "5.0"]
    assert lines["0.3 | SliceGPT"].split()[-1] == "2.00", "4 where the default has 2 at 15 % removed"
    assert lines["0.3 | COMPACT"].split()[-1] == "2.00"
    assert lines["0.3 | FASP"].split()[-1] == "2.50"


# -- zero-shot ------------------------------------------------------------------------------------------------------


@pytest.fixture
def items(tmp_path, monkeypatch):
    """The task files, on items of six demo words each."""
    folder = Path(shutil.copytree(zeroshot.TASKS_FOLDER, tmp_path / "tasks"))
    for name in ("hellaswag", "piqa"):
        rows_ = [{"query": f"Query {i}:", "choices": ["one", "a much longer choice"], "gold": i % 2} for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))
        file = folder / f"struprune_{name}.yaml"
        file.write_text(file.read_text().replace("../shared/testbed/zeroshot", str(tmp_path)))
    monkeypatch.setattr(zeroshot, "TASKS_FOLDER", folder)
    return tmp_path


def test_zeroshot_prefers_the_likelier_choice_by_length_for_acc_norm(opt, items):
    """Against log-likelihoods summed by hand, on every item."""
    model, tokenizer = load_checkpoint(str(opt))
    scores = zeroshot.score_tasks(model, tokenizer, ["PIQA"])["PIQA"]
    right = {"acc": 0, "acc_norm": 0}
    for line in (items / "piqa.jsonl").read_text().splitlines():
        item, values = json.loads(line), []
        for choice in item["choices"]:
            context, whole = (tokenizer(t)["input_ids"] for t in (item["query"], f"{item['query']} {choice}"))
            with torch.no_grad():
                logs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            values.append(sum(float(logs[i - 1, whole[i]]) for i in range(len(context), len(whole))))
        by_length = [value / len(choice) for value, choice in zip(values, item["choices"], strict=True)]
        for metric, liked in (("acc", values), ("acc_norm", by_length)):
            right[metric] += liked.index(max(liked)) == item["gold"]
    assert {metric: scores[metric] for metric in right} == {metric: count / 6 for metric, count in right.items()}


def test_llama_sizes_are_the_published_ones():
    totals = {
        name: paper_sizes.count_sizes(name, paper_sizes.make_llama_config(name)).total
        for name in paper_sizes.LLAMA2_SIZES
    }
    assert totals == {"LLaMA-2-7B": 6738415616, "LLaMA-2-13B": 13015864320, "LLaMA-2-70B": 68976648192}


def test_estimate_growth_finds_the_exponents():
    sizes = [paper_sizes.ModelSize("", 0, round(n**0.5), n, round(n**0.75), 0, 0) for n in (10**4, 10**8, 10**12)]
    assert paper_sizes.estimate_growth(sizes) == pytest.approx({"depth": 0.5, "width": 0.75})


def test_fit_exponent_finds_it():
    assert memory.fit_exponent([1e6, 1e8, 1e10], [1e3, 1e4, 1e5]) == pytest.approx(0.5)
    assert memory.fit_exponent([1e6], [1e3]) is None
