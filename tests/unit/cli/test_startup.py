"""Help, refusals and `inspect` import nothing heavy; a closed pipe and a plain terminal are no failure."""

import json
import os
import subprocess
import sys

from helpers.models import ROOT

RUNS = """
import json, sys

import struprune_cli
from struprune_plugin.cli.main import main

told = []
for argv in json.loads(sys.argv[1]):
    try:
        status = main(argv)
    except SystemExit as error:
        status = error.code
    heavy = {"torch", "transformers", "llmcompressor", "datasets", "numpy"} & sys.modules.keys()
    told.append([argv, status, sorted(heavy)])
print(json.dumps(told), file=open("told.json", "w"))
"""
COMMANDS = [
    (["--help"], 0),
    (["prune", "--help"], 0),
    (["recipes"], 0),
    (["nonsense"], 2),
    (["prune", "m", "--recipe", "r", "--output", "o", "--num-samples", "x"], 2),
    (["prune", str(ROOT), "--recipe", "struprune", "--output", "o"], 2),
    (["prune", "m", "--recipe", "struprune", "--output", "o", "--set", "sparsity=["], 2),
    (["eval", "/no/such"], 2),
    (["plan", "m", "--sparsity", "30%"], 2),
    (["convert", "/no/such", "--to", "uniform-padded", "--output", "o"], 2),
    (["inspect", "OUT"], 0),
]


def test_help_refusals_and_inspect_load_nothing_heavy(opt, prune_once, tmp_path):
    """One after the other in one process, which a command that loads something would leave different."""
    out = str(prune_once(opt, "head")[1])
    commands = [([out if word == "OUT" else word for word in words], status) for words, status in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps([words for words, _ in commands])],
        cwd=tmp_path,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert json.loads((tmp_path / "told.json").read_text()) == [[words, status, []] for words, status in commands]


def test_a_closed_pipe_and_a_plain_terminal_are_no_failure(opt, prune_once):
    out = str(prune_once(opt, "head")[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "struprune_cli", "inspect", out]
    done = subprocess.run(argv, capture_output=True, env=environment | {"PYTHONIOENCODING": "ascii"}, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    piped = f"{' '.join([*argv, '--json'])}; echo $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({piped}) | head -c 10"], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stderr == "0\n"
