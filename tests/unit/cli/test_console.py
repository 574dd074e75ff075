"""What all commands have in common: JSON alone on stdout, silence, versions, completions."""

import json
import os
import resource
import subprocess
import sys

import pytest
import typer
from helpers.models import ROOT
from llmcompressor.utils.metric_logging import CompressionLogger
from torch import nn

import struprune_plugin
from struprune_plugin.cli import console
from struprune_plugin.cli import main as cli
from struprune_plugin.recipes.shipped import list_recipes

COMMANDS = typer.main.get_command(cli.make_app()).commands


def test_no_flag_has_a_negation():
    for name, command in COMMANDS.items():
        assert not [parameter.name for parameter in command.params if parameter.secondary_opts], name


def test_version_takes_no_time():
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    argv = [sys.executable, "-m", "struprune_cli", "--version"]
    run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout == f"struprune {struprune_plugin.__version__}\n"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime - start.ru_utime < 1  # seconds of work, not of waiting; torch alone takes longer


def test_json_is_alone_on_stdout(capsys):
    assert cli.main(["recipes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == list_recipes().keys()


def test_what_a_command_prints_under_json_goes_to_stderr(capsys):
    def run():
        screen = console.Screen(as_json=True, quiet=False)
        print("chatter")
        screen.show([1], "text")

    assert console.run_command(run) == 0
    printed = capsys.readouterr()
    assert (json.loads(printed.out), printed.err) == ([1], "chatter\n")


@pytest.mark.parametrize("level", ["", "WARNING"])
def test_seconds_of_modules_without_names_are_logged_where_somebody_asks(level, monkeypatch, capsys):
    monkeypatch.setenv("LLM_COMPRESSOR_LOG_LEVEL", level)
    console.Screen(as_json=False, quiet=False).set_log()
    with CompressionLogger(nn.Linear(1, 1)) as log:
        log.set_results(loss=2.0)
    assert ("error 2.00" in capsys.readouterr().err) == bool(level)


def test_a_shell_is_told_commands_and_options():
    def complete(*words):
        environment = {"_STRUPRUNE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": " ".join(["struprune", *words])}
        argv = [sys.executable, "-m", "struprune_cli"]
        run = subprocess.run(argv, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)
        return run.stdout

    assert all(word in complete("") for word in ("prune", "plan", "recipes"))
    assert all(word in complete("prune", "--") for word in ("--recipe", "--sparsity"))


TWO_RUNS = """
import json, sys

import struprune_cli
from struprune_plugin.cli.main import main

for argv in json.loads(sys.argv[1]):
    assert main(argv) == 0
    for stream in (sys.stdout, sys.stderr):
        print("END", file=stream, flush=True)
"""


def test_quiet_leaves_results_alone(opt, tmp_path):
    """In a process of its own: what is drawn and logged is settled when llm-compressor is imported."""
    scored = ["eval", str(opt), "--max-tokens", "128", "--window", "64", "--quiet", "--json"]
    pruned = ["prune", str(opt), "--recipe", "struprune", "--output", str(tmp_path / "out"), "--quiet"]
    runs = json.dumps([scored, [*pruned, "--num-samples", "8", "--seq-length", "32"]])
    hidden = ("LLM_COMPRESSOR_LOG_LEVEL", "TQDM_DISABLE")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    run = subprocess.run(
        [sys.executable, "-c", TWO_RUNS, runs],
        env=inherited | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == "END\nEND\n"
    assert json.loads(run.stdout.partition("END\n")[0])["scores"][str(opt)]["perplexity"] > 1
