"""Input that is broken, hostile or of no use: one line that says where and what to do, before any work."""

import json
import re
import shutil
from pathlib import Path

import pytest
from datasets import Dataset
from helpers.models import make_opt, run_oneshot, save_model

from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_MODEL, read_texts
from struprune_plugin.modifiers import checks
from struprune_plugin.modifiers.checks import check_calibration
from struprune_plugin.recipes.load import load_recipe

WEIGHTS = (Path(DEMO_MODEL) / "model.safetensors").read_bytes()
LINE = re.compile(r"struprune: error: (\S.+[.:)] [A-Z`].*[.?]|.* must .*)")  # a remedy at the end, or a contract
CONFIGS = {
    "activation": ({"activation_function": "nonsense"}, "a tiny instance can be built and run, got KeyError"),
    "width": ({"ffn_dim": 100}, r"in place of \[100\]"),
    "vocabulary": ({"vocab_size": 99}, r"in place of \[99, "),
    "heads": ({"num_attention_heads": 7}, "must hold whole weights that fit its config.json"),
    "none": ({"hidden_size": None}, "can be loaded"),
    "dtype": ({"dtype": "float99"}, "can be loaded"),
    "type": ({"model_type": 3}, "can be loaded"),
}
FILES = {
    "cut": ("model.safetensors", WEIGHTS[:-9], "must hold whole weights"),
    "tokenizer": ("tokenizer.json", b"{", "tokenizer: .* must hold a tokenizer that can be loaded"),
    "no text": ("config.json", b"\xff\xfe", "can be loaded"),
    "deep": ("config.json", b"[" * 9999, "can be loaded, got: RecursionError"),
}
TEXTS = {
    "latin": (b'{"text": "good"}\n{"text": "caf\xe9"}\n', "line 2: must be a JSON object in UTF-8"),
    "surrogate": (b'{"text": "\\ud800"}\n', r"line 1: must be a JSON object in UTF-8 .*\(not UTF-8\)"),
    "deep": (b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}\n", "line 1: must be a JSON object"),
    "nothing": (b'{"text": ""}\n' * 2000, "must hold 16 windows of 64 tokens, got 0 tokens"),
    "one word": (json.dumps({"text": "fox " * 4000}).encode(), r"distinct sequences with \d+ tokens\)"),
}
RECIPES = {
    "deep": ("a_stage: " + "{a: " * 3000 + "1" + "}" * 3000, "is not valid YAML"),
    "itself": ("a_stage: &a\n  b_modifiers: *a\n", "'b_modifiers' is not a modifier"),
    "misspelt": ("b_stage:\n  b_modifiers:\n    GPTQModifer: {}\n", "is not a modifier of StruPrune or llm-compressor"),
    "host": ("b_stage:\n  b_modifiers:\n    QuantizationModifier: {scheme: W99}\n", "QuantizationModifier: scheme"),
    "line break": ('s_stage:\n  s_modifiers:\n    "a\\nb": 1\n', r"s_stage\.s_modifiers\.'a\\nb' must be a mapping"),
    "rank": (
        "b_stage:\n  b_modifiers: {LoRARecoveryModifier: {adapters: {rank: 100000}}}",
        "rank must be less than or equal to 1024",
    ),
}
SETS = {
    "yaml": ("sparsity=[", "must be valid YAML"),
    "pattern": ("targets=['re:(']", "must be a name or a valid pattern"),
    "list": ("allocation.samples=[[1]]", "must be a valid integer"),
    "infinite": ("sparsity=1e999", "sparsity must be less than 1, got '1e999'"),
}


def refuse(capsys, tmp_path, message, model=DEMO_MODEL, **options):
    out = tmp_path / "out"
    argv = {"--recipe": "struprune", "--num-samples": "16", "--seq-length": "64", "--output": str(out)} | options
    assert cli.main(["prune", str(model), *(word for pair in argv.items() for word in pair)]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert LINE.fullmatch(line), line
    assert re.search(message, line), line
    assert not out.exists()


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(DEMO_MODEL, tmp_path / "model")


@pytest.mark.parametrize("kind", CONFIGS)
def test_configurations_that_make_no_sense(kind, model, tmp_path, capsys):
    changes, message = CONFIGS[kind]
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    refuse(capsys, tmp_path, message, model)


@pytest.mark.parametrize("kind", FILES)
def test_broken_files_of_a_model(kind, model, tmp_path, capsys):
    name, content, message = FILES[kind]
    (model / name).write_bytes(content)
    refuse(capsys, tmp_path, message, model)
    assert cli.main(["eval", str(model), "--max-tokens", "300"]) == 2
    assert LINE.fullmatch(capsys.readouterr().err.strip().splitlines()[-1])


def test_tokens_above_the_vocabulary(model, tmp_path, capsys):
    content = json.loads((model / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    for word in list(vocabulary)[300:]:
        vocabulary[word] += 5000
    (model / "tokenizer.json").write_text(json.dumps(content))
    refuse(capsys, tmp_path, "--data: token ids must be below 2048, the model's number of embeddings", model)
    assert cli.main(["eval", str(model), "--max-tokens", "300"]) == 2
    assert "text: token ids must be below 2048, the model's number of embeddings" in capsys.readouterr().err


@pytest.mark.parametrize("kind", TEXTS)
def test_calibration_text_that_is_broken_or_of_no_use(kind, tmp_path, capsys):
    content, message = TEXTS[kind]
    (tmp_path / "text.jsonl").write_bytes(content)
    refuse(capsys, tmp_path, message, **{"--data": str(tmp_path / "text.jsonl")})


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "text.jsonl").write_bytes(b"\xef\xbb\xbf" + Path(DEMO_CALIBRATION).read_bytes())
    assert read_texts(tmp_path / "text.jsonl") == read_texts(DEMO_CALIBRATION)


@pytest.mark.parametrize("kind", RECIPES)
def test_recipes_that_are_broken_or_do_not_fit(kind, tmp_path, capsys):
    content, message = RECIPES[kind]
    (tmp_path / "recipe.yaml").write_text(content)
    refuse(capsys, tmp_path, message, **{"--recipe": str(tmp_path / "recipe.yaml")})


@pytest.mark.parametrize("kind", SETS)
def test_values_that_are_none(kind, tmp_path, capsys):
    value, message = SETS[kind]
    refuse(capsys, tmp_path, message, **{"--set": value})


@pytest.mark.parametrize("option", [["--num-samples", "1" + "0" * 30], ["--seed", "9" * 30], ["--window", "²"]])
def test_absurd_numbers(option, capsys):
    command = ["eval", "m"] if option[0] == "--window" else ["prune", "m", "--recipe", "r", "--output", "o"]
    assert cli.main([*command, *option]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_yaml_merge_keys_are_merged():
    text = "a_stage:\n  a_modifiers:\n    SparsityAllocatorModifier: &all {sparsity: 0.2, dampening_frac: 0.1}\n"
    text += "b_stage:\n  b_modifiers:\n"
    loaded = load_recipe(text + "    StruPruneModifier: {<<: *all, dampening_frac: 0.2}\n")
    assert [modifier.dampening_frac for modifier in loaded.modifiers] == [0.1, 0.2]
    assert loaded.modifiers[1].sparsity == 0.2


def test_a_dead_layer_is_called_dead(tmp_path):
    model = make_opt()
    model.model.decoder.layers[1].fc1.weight.data.zero_()
    model.model.decoder.layers[1].fc1.bias.data.fill_(-1.0)
    with pytest.raises(
        ValueError, match=r"layers\.1\.fc2: the least-squares .*; if all inputs are 0, add the module to ignore"
    ):
        run_oneshot(str(save_model(model, tmp_path / "m")), sparsity=0.3, sensitivity="none")


def make_loader(rows):
    return [{"input_ids": ids} for ids in Dataset.from_dict({"x": rows}).with_format("torch")["x"][:].unsqueeze(1)]


def test_check_calibration_counts_what_differs():
    model, varied = make_opt(), [list(range(start, start + 32)) for start in range(0, 320, 32)]
    found = check_calibration(model, make_loader(varied), "fc2", 300)
    assert (found.num_sequences, found.num_tokens) == (10, 320)
    alike = make_loader([*varied[:3], *[varied[3]] * 7])
    check_calibration(model, alike, "fc2", 128)
    with pytest.raises(ValueError, match=r"\(4 distinct sequences with 128 tokens\)"):
        check_calibration(model, alike, "fc2", 129)


def test_a_process_without_text_is_refused_by_all_processes(monkeypatch):
    monkeypatch.setattr(checks, "gather", lambda value: [value, [] if isinstance(value, list) else value])
    with pytest.raises(ValueError, match="every process must have a calibration sequence, got none in 1 of 2"):
        check_calibration(make_opt(), make_loader([list(range(32))]), "fc2", 32)
