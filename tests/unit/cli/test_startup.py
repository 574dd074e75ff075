"""Help, refusals and `inspect` import nothing heavy; a closed pipe and a plain terminal are no failure."""

import os
import subprocess
import sys

import pytest
from helpers.models import ROOT


def run_command(*words):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "struprune_cli", *words],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    loaded = {
        line.rsplit(b"|", 1)[1].strip().decode() for line in done.stderr.splitlines() if line.startswith(b"import time")
    }
    return done, loaded


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], 0),
        (["prune", "--help"], 0),
        (["recipes"], 0),
        (["nonsense"], 2),
        (["prune", "m", "--recipe", "r", "--output", "o", "--num-samples", "x"], 2),
        (["prune", str(ROOT), "--recipe", "struprune", "--output", "o"], 2),
        (["prune", "m", "--recipe", "struprune", "--output", "o", "--set", "sparsity=["], 2),
        (["eval", "/no/such"], 2),
        (["convert", "/no/such", "--to", "uniform-padded", "--output", "o"], 2),
        (["inspect", "OUT"], 0),
    ],
    ids=lambda words: "-".join(words)[:60] if isinstance(words, list) else "",
)
def test_help_refusals_and_inspect_load_nothing_heavy(words, status, opt, prune_once):
    done, loaded = run_command(*(str(prune_once(opt, "head")[1]) if word == "OUT" else word for word in words))
    assert done.returncode == status, done.stderr[-500:]
    assert "struprune_plugin.cli.main" in loaded or "struprune_plugin.recipes.shipped" in loaded
    assert not loaded & {"torch", "transformers", "llmcompressor", "datasets", "numpy"}


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
