"""Compare the predictions of ``struprune plan`` with the figures of the run.

    python -m eval.forecast --models MODEL --num-samples 64 --seq-length 256

Plans, prunes and measures every model in separate processes, one after the other. Prints one line per figure; the exit status is 1
if a figure differs by more than ``--within``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from eval.measure import time_side_by_side
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.reporting.tables import format_table, measure_weight_bytes

_PEAK = 1024  # bytes a unit of ru_maxrss


def run_command(words: list[str]) -> tuple[dict[str, Any], float, int]:
    """Return what a command prints as JSON, its seconds of wall time and its peak memory in bytes."""
    command = [sys.executable, "-m", "struprune_plugin.cli", *words, "--json", "--quiet"]
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            raise SystemExit(f"{' '.join(command)}: must end well, got status {status}.")
        out.seek(0)
        return json.load(out), seconds, usage.ru_maxrss * _PEAK


def measure_speed(dense: str, pruned: str, length: int) -> tuple[float, float]:
    """Return how much faster a prompt and one token more are, on the whole models."""
    models = {path: load_checkpoint(path)[0] for path in (dense, pruned)}
    found = []
    for tokens in (torch.full((1, length), 5), torch.full((1, 1), 5)):
        runs = {path: (lambda m=model, t=tokens: m(t, use_cache=False)) for path, model in models.items()}
        with torch.no_grad():
            seconds = time_side_by_side(runs, 5)
        found.append(seconds[dense] / seconds[pruned])
    return found[0], found[1]


def count_cache(folder: str) -> int:
    """Return the keys and values that a model holds of one token, read off its cache."""
    with torch.no_grad():
        held = load_checkpoint(folder)[0](torch.full((1, 1), 5), use_cache=True).past_key_values
    return sum(layer.keys.numel() + layer.values.numel() for layer in held.layers)


def compare(model: str, options: list[str], scratch: Path) -> list[tuple[str, float, float]]:
    """Return (figure, planned, met) of one model."""
    plan, _, _ = run_command(["plan", model, *options])
    out = str(scratch / Path(model).name)
    pruned, seconds, peak = run_command(["prune", model, "--recipe", plan["recipe"], "--output", out, *options])
    manifest, costs, after = pruned["manifest"], plan["costs"], plan["after"]
    item = round(plan["before"]["bytes"] / plan["before"]["parameters"])
    prefill, decode = measure_speed(model, out, 256)
    return [
        ("parameters", after["parameters"], manifest["model"]["parameters_after"]),
        ("weights on disk", after["bytes"], measure_weight_bytes(out)),
        ("cache a token", after["cache"], count_cache(out) * item),
        ("seconds", costs["seconds"], seconds),
        ("peak memory", costs["peak_bytes"], peak),
        ("speed-up, prompt", costs["prefill"], prefill),
        ("speed-up, one token", costs["decode"], decode),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--sparsity", default="0.3")
    parser.add_argument("--num-samples", default="64")
    parser.add_argument("--seq-length", default="256")
    parser.add_argument("--set", action="append", default=[], help="field of the recipe, as in `struprune prune`")
    parser.add_argument("--within", type=float, default=0.25)
    args = parser.parse_args()
    options = ["--sparsity", args.sparsity, "--num-samples", args.num_samples, "--seq-length", args.seq_length]
    options += [word for change in args.set for word in ("--set", change)]
    worst = 0.0
    for model in args.models:
        with tempfile.TemporaryDirectory() as scratch:
            rows = compare(model, options, Path(scratch))
        worst = max([worst, *(abs(planned / met - 1) for _, planned, met in rows)])
        cells = [[name, f"{planned:,.4g}", f"{met:,.4g}", f"{planned / met - 1:+.0%}"] for name, planned, met in rows]
        print(f"{Path(model).name}, {args.num_samples} × {args.seq_length} tokens")
        print(format_table(["", "planned", "met", "off by"], cells), flush=True)
    print(f"furthest off: {worst:.0%} (allowed {args.within:.0%})")
    return int(worst > args.within)


if __name__ == "__main__":
    sys.exit(main())
