import io
import json
import re
from contextlib import redirect_stdout

import pytest
from helpers.models import ROOT

from struprune_plugin import read_manifest
from struprune_plugin.cli import main as cli
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_MODEL

RECIPE = str(ROOT / "recipes" / "struprune.yaml")
SMALL = ["--num-samples", "8", "--seq-length", "128"]
PRUNE = ["prune", str(DEMO_MODEL), "--recipe", RECIPE, "--output", "OUT"]
TRIM = ["trim", str(DEMO_MODEL), "--text", str(DEMO_CALIBRATION)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The demo model, pruned through the command line; a little calibration is enough here. Its folder, what was printed."""
    out, printed = tmp_path_factory.mktemp("cli") / "out", io.StringIO()
    argv = ["prune", str(DEMO_MODEL), "--recipe", RECIPE, "--output", str(out), *SMALL, "--sparsity", "0.3"]
    with redirect_stdout(printed):
        assert (
            cli.main(
                [*argv, "--set", "attention_unit=head", "--set", "allocation=uniform", "--set", "sensitivity=none"]
            )
            == 0
        )
    return out, printed.getvalue()


@pytest.fixture(scope="module")
def pruned(run):
    return run[0]


def test_prune_says_what_came_out_and_where_to_go_next_in_a_few_lines(run):
    out, printed = run
    assert "30.000%" in printed
    assert f"wrote {out}" in printed
    assert f"struprune eval {DEMO_MODEL} {out}" in printed
    assert len(printed.splitlines()) <= 25


def test_inspect_prints_layers_and_json(pruned, capsys):
    assert cli.main(["inspect", str(pruned)]) == 0
    printed = capsys.readouterr().out
    assert "model.decoder.layers.0.self_attn.out_proj" in printed
    assert "heads" in printed
    assert cli.main(["inspect", str(pruned), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == read_manifest(pruned).model_dump()


def test_eval_scores_dense_and_pruned_side_by_side(pruned, capsys):
    assert cli.main(["eval", str(DEMO_MODEL), str(pruned), "--max-tokens", "4096", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    dense, small = scores[str(DEMO_MODEL)], scores[str(pruned)]
    assert 30 < dense["perplexity"] < small["perplexity"] < 100
    assert small["parameters"] < dense["parameters"]
    assert small["bytes"] < dense["bytes"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["prune", "nowhere", "--recipe", RECIPE, "--output", "OUT"], "must be a model folder or a hub name"),
        (["prune", str(DEMO_MODEL), "--recipe", "nowhere.yaml", "--output", "OUT"], "'nowhere.yaml' is neither an"),
        ([*PRUNE, "--sparsity", "30"], "'--sparsity': must be at least 0 and below 1, got '30'. For 30 %, write 0.3"),
        ([*PRUNE, "--sparsity", "30%"], "For 30 %, write 0.3"),
        ([*PRUNE, "--sparsity", "1"], "below 1, got .1."),
        ([*PRUNE, "--sparsity", "0.99"], "Lower sparsity"),
        ([*PRUNE, "--set", "prune_fnn=1"], r"has a field 'prune_fnn'. Did you mean prune_ffn\?"),
        ([*PRUNE, "--set", "damping"], "must be FIELD=VALUE"),
        ([*PRUNE, "--set", "sparsity=0.1", "--sparsity", "0.2"], "sparsity must be set once, got 'sparsity=0.1'"),
        ([*PRUNE, "--data", "no.jsonl"], "no.jsonl: must be an existing JSON-lines"),
        ([*PRUNE, "--data", "no/such"], "--data: 'no/such' must be a JSON-lines file or a hub data set"),
        ([*PRUNE, "--num-samples", "9999"], "Lower the number of"),
        ([*PRUNE, "--num-samples", "2"], "at least 769 calibration tokens"),
        ([*PRUNE, "--seq-length", "300"], "256 tokens long, the model's number of positions, got 300"),
        (
            ["prune", str(DEMO_MODEL), "--recipe", RECIPE, "--output", str(ROOT / "tests")],
            "--output: must be empty or absent",
        ),
        (["inspect", str(ROOT / "tests")], "must be a pruned folder with a struprune.json"),
        (
            ["eval", "no/such"],
            r"the hub cannot be reached \(HF_HUB_OFFLINE is set\). Correct it, or .*`hf download no/such",
        ),
        (["eval", str(DEMO_MODEL), "--window", "512"], "--window: must be at most the model's 256 positions, got 512"),
        (["eval", str(DEMO_MODEL), "--tasks", "x", "--include-path", "none"], "dir 'none' does not exist"),
        (["convert", str(DEMO_MODEL), "--to", "gguf", "--output", "OUT"], "gguf: model_type must be .llama."),
        ([*PRUNE, "--offload", RECIPE], "--offload: must be in a folder that can be written"),
        ([*PRUNE, "--checkpoint", f"{ROOT}/LICENSE/c"], "--checkpoint: must be in a folder that can be written"),
        (["eval", str(DEMO_MODEL), "--tasks", "no_such_task"], r"--tasks: \['no_such_task'\] must be known to lm-eval"),
        (["eval", str(DEMO_MODEL), "--tasks", "arc_easy"], "--tasks: the data of arc_easy must be at hand, got"),
        (["eval", str(DEMO_MODEL), "--limit", "4"], "--limit: must come with --tasks, got 4 alone"),
        (["eval", str(DEMO_MODEL), "--include-path", str(ROOT)], "--include-path: must come with --tasks, got"),
        (["eval", str(DEMO_MODEL), "--tasks", "x", "--max-tokens", "9"], "--max-tokens: must come with --text, got 9"),
        (["eval", str(DEMO_MODEL), "--max-tokens", "9"], "--text: must hold at least one window of 256 tokens, got 9"),
        ([*TRIM, "--limit", "2"], "--limit: must be in"),
        ([*TRIM, "--text", "no/such"], "--text: 'no/such' must be a JSON-lines file or a hub data set"),
        (
            [*TRIM, "--limit", "0.0001"],
            "--text: the held-out tenth must have at least 20000 tokens for `vocabulary: auto`",
        ),
        ([*TRIM, "--plot", "OUT"], "--plot: must end in .svg, .png or .pdf"),
        (["sweep", str(DEMO_MODEL), "--output", RECIPE], "--output: must be in a folder that can be written"),
        (["sweep", str(DEMO_MODEL), "--output", "OUT", "--set", "reconstruct=no"], "reconstruct must be"),
    ],
)
def test_bad_input_exits_2_with_one_line_and_writes_nothing(argv, message, tmp_path, capsys):
    argv = [str(tmp_path / "out") if word == "OUT" else word for word in argv]
    assert cli.main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("struprune: error: ")
    assert re.search(message, error), error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv",
    [[], ["prune"], ["eval"], ["prune", "m", "--num-samples", "0"], ["nonsense"], ["prune", "m", "--seq-length", "1"]],
)
def test_usage_errors_exit_2_with_one_line(argv, capsys):
    assert cli.main(argv) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_prune_leaves_no_offloaded_weights(opt, tmp_path):
    small = ["--num-samples", "8", "--seq-length", "32"]
    argv = ["prune", str(opt), "--recipe", RECIPE, "--output", str(tmp_path / "out"), *small]
    assert cli.main([*argv, "--set", "offload=true", "--offload", str(tmp_path / "scratch")]) == 0
    assert read_manifest(tmp_path / "out").settings["offload"] is True
    assert not list((tmp_path / "scratch").iterdir())


def test_overwriting_never_takes_an_input(pruned, capsys):
    for argv in (
        ["convert", str(pruned), "--to", "uniform-padded", "--output", str(pruned)],
        ["prune", str(pruned), "--recipe", RECIPE, "--output", str(pruned)],
        ["prune", str(DEMO_MODEL), "--recipe", str(pruned / "recipe.yaml"), "--output", str(pruned)],
        ["prune", str(DEMO_MODEL), "--recipe", RECIPE, "--data", str(pruned / "recipe.yaml"), "--output", str(pruned)],
    ):
        before = {path.name: path.stat().st_mtime_ns for path in pruned.iterdir()}
        assert cli.main([*argv, "--overwrite"]) == 2
        assert "must not be or hold the input" in capsys.readouterr().err
        assert {path.name: path.stat().st_mtime_ns for path in pruned.iterdir()} == before
