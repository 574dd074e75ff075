"""What all commands have in common: JSON alone on stdout, silence, versions, completions, one progress bar."""

import io
import json
import os
import subprocess
import sys
import time

import pytest
from conftest import ROOT

import struprune_plugin
from struprune_plugin import cli, console
from struprune_plugin.modifiers.outline import list_stages
from struprune_plugin.progress import RunProgress, Stage
from struprune_plugin.recipe import load_recipe
from struprune_plugin.shipped import list_recipes

COMMANDS = cli._make_parser()._subparsers._group_actions[0].choices


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_json_and_quiet(command):
    options = COMMANDS[command]._option_string_actions
    assert options["--json"].nargs == options["--quiet"].nargs == 0


def test_version_and_help_take_no_time():
    start = time.perf_counter()
    argv = [sys.executable, "-m", "struprune_plugin.cli", "--version"]
    run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout == f"struprune {struprune_plugin.__version__}\n"
    assert time.perf_counter() - start < 2  # torch alone takes longer than that on a busy machine
    heavy = "import sys, struprune_plugin.cli as c; c._make_parser(); print({'torch', 'transformers'} & {*sys.modules})"
    script = f"import sys; sys.argv = ['struprune']; {heavy}"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


def test_json_is_alone_on_stdout(capsys):
    assert cli.main(["recipes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == list_recipes().keys()


def test_what_a_command_prints_under_json_goes_to_stderr(capsys):
    parser = cli._make_parser()
    args = parser.parse_args(["recipes", "--json"])
    with console.open_output(args):
        print("chatter")
        console.show(args, [1], "text")
    printed = capsys.readouterr()
    assert (json.loads(printed.out), printed.err) == ([1], "chatter\n")


def test_colours_are_for_terminals_alone(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    args = cli._make_parser().parse_args(["recipes"])
    args.stdout, table = terminal, "file  bytes\n────  ─────\na         1"
    console.show(args, {}, table)
    assert terminal.getvalue().startswith("\x1b[1mfile  bytes\x1b[0m\n")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not console.has_colours(terminal)
    assert not console.has_colours(io.StringIO())


def test_a_shell_is_told_commands_options_and_recipes():
    pytest.importorskip("argcomplete", reason="argcomplete (the extra `completion`) is not installed")

    def complete(line):
        script = "import os, sys; os.dup2(1, 8); sys.argv = ['struprune']; from struprune_plugin import cli; cli.main()"
        environment = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
        run = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=60
        )
        return {word.strip() for word in run.stdout.split("\n")}

    assert {"prune", "plan", "recipes"} <= complete("struprune ")
    assert {"--recipe", "--sparsity"} <= complete("struprune prune --")
    assert {"struprune_opt", "struprune_llama"} <= complete("struprune prune m --recipe stru")


# -- one bar for a whole run ----------------------------------------------------------------------------------------

DEFAULT = [Stage("sensitivity", 15, "sensitivity"), Stage("allocation", 20), Stage("pruning", 65)]


def test_progress_grows_from_pass_to_pass():
    progress = RunProgress(DEFAULT)
    seen = []
    for bar, done, total in [
        ("Loading weights", 5, 5),
        ("sensitivity", 1, 2),
        ("Preparing cache", 0, 4),
        ("Preparing cache", 4, 4),
        ("(1/4): Calibrating", 4, 4),
        ("(4/4): Propagating", 4, 4),
        ("Preparing cache", 0, 4),
        ("(2/4): Calibrating", 0, 4),
        ("(2/3): fc2 statistics", 2, 4),
        ("(2/4): Propagating", 2, 4),
    ]:
        progress.see(bar, done, total)
        seen.append((progress.label, round(progress.fraction, 3)))
    assert seen[:3] == [("loading", 0.0), ("sensitivity", 0.075), ("allocation", 0.15)]
    assert seen[5:7] == [("allocation step 4/4", 0.35), ("pruning", 0.35)]
    assert seen[7] == ("pruning step 2/4", round(0.35 + 0.65 / 4, 3))
    assert [fraction for _, fraction in seen] == sorted(fraction for _, fraction in seen)


TWO_RUNS = """
import json, sys
from struprune_plugin.cli import main

for argv in json.loads(sys.argv[1]):
    assert main(argv) == 0
    for stream in (sys.stdout, sys.stderr):
        print("END", file=stream, flush=True)
"""


def test_quiet_leaves_results_alone_and_one_bar_is_drawn_for_a_whole_run(opt, tmp_path):
    """In a process of its own: what is drawn and logged is settled when the host is imported."""
    demo = str(opt)
    scored = ["eval", demo, "--max-tokens", "128", "--window", "64", "--quiet", "--json"]
    pruned = ["prune", demo, "--recipe", "struprune_opt", "--output", str(tmp_path / "out"), "--set", "max_swaps=0"]
    runs = json.dumps([scored, [*pruned, "--num-samples", "8", "--seq-length", "32"]])
    inherited = {name: value for name, value in os.environ.items() if name != "LLM_COMPRESSOR_LOG_LEVEL"}
    run = subprocess.run(
        [sys.executable, "-c", TWO_RUNS, runs],
        env=inherited | {"PYTHONPATH": str(ROOT), "TQDM_DISABLE": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    quiet, _, drawn = run.stderr.partition("END\n")
    assert quiet == ""
    assert json.loads(run.stdout.partition("END\n")[0])["scores"][demo]["perplexity"] > 1
    lines = [line for line in drawn.partition("END\n")[0].replace("\r", "\n").splitlines() if line.strip()]
    assert lines[-1].startswith("done 100%"), lines
    assert all("left" in line for line in lines), lines  # none of the host's many


def test_stages_are_those_of_the_recipe():
    for recipe in list_recipes().values():
        stages = list_stages(load_recipe(str(recipe)).modifiers)
        assert [name for name, _, bar in stages if not bar].count("pruning") == 1, recipe.name
        assert [name for name, *_ in stages].count("trials") <= 1, recipe.name
    assert [name for name, _, _ in list_stages(load_recipe("struprune_lora_w4a16").modifiers)] == [
        *("sensitivity", "allocation", "trials", "pruning", "teacher", "recovery", "GPTQ"),
    ]
