"""Kill a real process at random moments of a run, let the same command go on, and compare what comes out.

    python -m eval.kills --kills 20

One recipe prunes the embedded demo model, the other quantises it afterwards. Every trial starts afresh, is killed (``kill -9``)
at a moment drawn from the whole length of a run, saving included, and goes on until it ends. Prints a row a trial, and what the
checkpoint costs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from struprune_plugin.data import DEMO_MODEL
from struprune_plugin.report import format_table

PRUNE = "pruning_stage: {pruning_modifiers: {StruPruneModifier: {sparsity: 0.3}}}\n"
_FIELDS = "{targets: [Linear], scheme: W8A8, ignore: [lm_head]}"
QUANTISE = f"quantising_stage: {{quantising_modifiers: {{QuantizationModifier: {_FIELDS}}}}}\n"
RECIPES = {"pruned": PRUNE, "pruned, then W8A8": PRUNE + QUANTISE}


def start(recipe: Path, output: Path, checkpoint: Path | None, model: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "struprune_plugin.cli", "prune", model, "--recipe", str(recipe)]
    command += ["--output", str(output), "--device", "cpu"]
    if checkpoint is not None:
        command += ["--checkpoint", str(checkpoint)]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a run to end well.

    :raises RuntimeError: it did not
    """
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a run ended with {process.returncode}: {errors[-2000:]}")


def measure(recipe: Path, output: Path, checkpoint: Path | None, model: str) -> float:
    """Return the seconds of one run from start to end."""
    began = time.perf_counter()
    finish(start(recipe, output, checkpoint, model))
    return time.perf_counter() - began


def try_once(recipe: Path, work: Path, moment: float, whole: Path, model: str) -> tuple[int, bool, bool]:
    """Kill one run; return the parts that were done, whether the output was absent, and whether the bytes are the same."""
    output, checkpoint = work / "out", work / "checkpoint"
    for folder in (output, checkpoint):
        shutil.rmtree(folder, ignore_errors=True)
    process = start(recipe, output, checkpoint, model)
    time.sleep(moment)
    is_over = process.poll() is not None
    if not is_over:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    clean = is_over or not output.exists() or read_weights(output) == read_weights(whole)
    parts = len(list(checkpoint.glob("*.json"))) - 1 if checkpoint.exists() else 0
    if not output.exists():
        finish(start(recipe, output, checkpoint, model))
    return max(parts, 0), clean, read_weights(output) == read_weights(whole)


def read_weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="trials, shared between the recipes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--model", default=str(DEMO_MODEL), help="a model folder")
    args = parser.parse_args()
    rng, rows, failures = random.Random(args.seed), [], 0
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for index, (name, text) in enumerate(RECIPES.items()):
            recipe, whole = work / "recipe.yaml", work / f"whole{index}"
            recipe.write_text(text)
            plain = [measure(recipe, work / f"plain{n}-{index}", None, args.model) for n in range(2)]
            kept = [measure(recipe, whole if n else work / f"kept-{index}", work / "c", args.model) for n in range(2)]
            print(
                f"{name}: {min(plain):.1f} s, with a checkpoint {min(kept):.1f} s ({min(kept) / min(plain) - 1:+.1%})"
            )
            for _ in range(args.kills // len(RECIPES)):
                moment = rng.uniform(0, min(kept))
                parts, clean, same = try_once(recipe, work, moment, whole, args.model)
                failures += not (clean and same)
                words = "same bytes" if same else "OTHER BYTES"
                rows.append([name, f"{moment:.2f}", parts, "absent" if clean else "HALF AN OUTPUT", words])
                print(*rows[-1], sep="  ", flush=True)
    print(format_table(["recipe", "killed after, s", "parts done", "output then", "at the end"], rows))
    print(f"{len(rows) - failures} of {len(rows)} kills survived")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
