"""Kill a real process at random moments of a run, continue it by the same command, and compare the outputs.

    python -m eval.kills --recipe pruned --kills 10
    python -m eval.kills --recipe quantised --phase saving --kills 5
    python -m eval.kills --recipe recovered --phase recovering --kills 6
    python -m eval.kills --cost MODEL

One recipe prunes the embedded demo model, another quantises it afterwards, a third trains it towards the dense one. Every trial
starts with an empty ``--checkpoint``, is killed (``kill -9``) at a random moment of the part of the run that ``--phase`` names, and
the same command then continues to the end. ``again`` also kills the continued command, up to five times. Prints a row per trial:
the files at the kill, and whether the output equals that of an uninterrupted run in every byte with nothing else left.
``--cost`` prints the share of a run's seconds that its checkpoint takes, both measured in that run.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from struprune_plugin.evaluation.text import DEMO_MODEL
from struprune_plugin.reporting.tables import format_table
from struprune_plugin.storage.listing import FILES_NAME
from struprune_plugin.storage.manifest import MANIFEST_NAME, read_manifest

PRUNE = "pruning_stage: {pruning_modifiers: {StruPruneModifier: {sparsity: 0.3}}}\n"
QUANTISE = "quantising_stage: {quantising_modifiers: {GPTQModifier: {scheme: W8A8, ignore: [lm_head]}}}\n"
_TRAINING = "{schedule: {max_steps: 6, epochs: 3}, batch_size: 4, holdout: {steps: 4}, checkpoint_steps: 2}"
RECOVER = f"recovery_stage: {{recovery_modifiers: {{RecoveryModifier: {_TRAINING}}}}}\n"
RECIPES = {"pruned": PRUNE, "quantised": PRUNE + QUANTISE, "recovered": PRUNE + RECOVER}
# of a run, in order; "again" is any of them, several times, "recovering" is of a recipe that recovers alone
PHASES = ("working", "layers done", "recovering", "saving", "over")
_AGAIN = 5
_GOOD = "same bytes"
_POLL = 0.002  # seconds
_VOLATILE = ("stages", "seconds")  # of a manifest, at any depth; its own digest is of these too


@dataclass(frozen=True)
class Command:
    """One command that prunes, and the places that it writes to, all in a folder of its own.

    :param work: that folder
    :param words: of the command line that are the same in every trial
    :param num_layers: of the model
    """

    work: Path
    words: list[str]
    num_layers: int

    @property
    def output(self) -> Path:
        return self.work / "out"

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint"

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "struprune_plugin.cli", "prune", *self.words]
        command += ["--output", str(self.output), "--checkpoint", str(self.checkpoint)]
        environment = {**os.environ, "TQDM_DISABLE": "1"}
        process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(end, process)  # it has a session of its own
        return process

    def count_parts(self) -> int:
        """Return the parts that are done: what was measured before the first layer, and layers."""
        return max(0, len(list(self.checkpoint.glob("*.json"))) - 1)  # one says which run it is

    def find_phase(self) -> str | None:
        """Return the phase that a run is in by what it has written; None before it writes anything."""
        if self.output.exists():
            return "over"
        scratch = next(self.work.glob(".out.partial-*"), None)
        if scratch is None:
            return None
        if next((scratch / "new").glob("*"), None) or (scratch / "finished").exists():
            return "saving"
        if next(self.checkpoint.glob("teacher-*.json"), None) or next(self.checkpoint.glob("recovery-*.json"), None):
            return "recovering"
        return "layers done" if len(list(self.checkpoint.glob("layer-*.json"))) >= self.num_layers else "working"


@dataclass
class Timing:
    """When the phases of an uninterrupted run began, in seconds after its start."""

    began: dict[str, float] = field(default_factory=dict)

    def measure(self, phase: str) -> float:
        """Return how long a phase lasted."""
        begins = [*(self.began[name] for name in PHASES if name in self.began)]
        return next((other - self.began[phase] for other in begins if other > self.began[phase]), 0.0)


def end(process: subprocess.Popen[str]) -> None:
    """Leave no run behind."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def follow(command: Command, process: subprocess.Popen[str]) -> Timing:
    """Wait for a run to end well, and say when its phases began.

    :raises RuntimeError: it did not end well
    """
    timing, start = Timing(), time.perf_counter()
    while process.poll() is None:
        phase = command.find_phase()
        if phase is not None:
            timing.began.setdefault(phase, time.perf_counter() - start)
        time.sleep(_POLL)
    timing.began.setdefault("over", time.perf_counter() - start)
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a run ended with {process.returncode}: {errors[-2000:]}")
    return timing


def kill_within(command: Command, phase: str, delay: float) -> str:
    """Start the command, kill it so many seconds after a phase began, and return the phase that it was killed in."""
    process = command.start()
    wanted = PHASES.index(phase)
    while process.poll() is None:
        found = command.find_phase()
        if found is not None and PHASES.index(found) >= wanted:
            break
        time.sleep(_POLL)
    time.sleep(delay)
    is_over = process.poll() is not None
    if not is_over:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return "over" if is_over else command.find_phase() or "nothing written"


def read_output(folder: Path) -> dict[str, str]:
    """Return a digest of every file of an output; of its manifest without what no two runs share."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.name == MANIFEST_NAME:
            manifest = drop_volatile(read_manifest(file).model_dump())
            found[file.name] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        elif file.is_file() and file.name != FILES_NAME:  # which holds the digest of the manifest
            found[file.relative_to(folder).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def drop_volatile(value: Any) -> Any:
    """Return a value of a manifest without what no two runs share."""
    if isinstance(value, dict):
        return {name: drop_volatile(part) for name, part in value.items() if name not in _VOLATILE}
    return [drop_volatile(part) for part in value] if isinstance(value, list) else value


def try_once(command: Command, phase: str, timing: Timing, whole: dict[str, str], rng: random.Random) -> list[str]:
    """Kill one run, or several in a row, let the command go on to its end, and return a row of what became of it."""
    for folder in (command.output, command.checkpoint):
        shutil.rmtree(folder, ignore_errors=True)
    killed: list[str] = []
    for _ in range(_AGAIN if phase == "again" else 1):
        name = {"any": "working", "again": rng.choice([n for n in PHASES[:-1] if n in timing.began])}.get(phase, phase)
        length = timing.began["over"] - timing.began["working"] if phase == "any" else timing.measure(name)
        found = kill_within(command, name, rng.uniform(0, length))
        killed.append(f"{found}, {command.count_parts()} parts")
        if command.output.exists():
            break
    is_half = command.output.exists() and read_output(command.output) != whole
    if not command.output.exists():
        follow(command, command.start())
    if is_half:
        return ["; ".join(killed), "HALF AN OUTPUT"]
    problems = [] if read_output(command.output) == whole else ["OTHER BYTES"]
    may_stay = {"out", "recipe.yaml", *(["checkpoint"] if found == "over" else [])}
    kept = ""
    for path in sorted(command.work.iterdir()):
        if path.name.startswith("out.finished-") and read_output(path) == whole:
            kept = ", and what had been finished is kept beside it"
            shutil.rmtree(path)
        elif path.name not in may_stay:
            problems.append(f"{path.name} LEFT")
    return ["; ".join(killed), ", ".join(problems) or _GOOD + kept]


def run_kills(args: argparse.Namespace) -> int:
    """Run the trials, print a row each; return how many failed."""
    rng, failures = random.Random(args.seed), 0
    rows: list[list[str]] = []
    model = Path(args.model)
    before = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in model.iterdir() if file.is_file()}
    with tempfile.TemporaryDirectory() as temporary:
        recipe = Path(temporary) / "recipe.yaml"
        recipe.write_text(RECIPES[args.recipe])
        words = [args.model, "--recipe", str(recipe), "--num-samples", str(args.num_samples), "--device", "cpu"]
        num_layers = json.loads((model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
        command = Command(Path(temporary), words, num_layers)
        timing = follow(command, command.start())
        whole = read_output(command.output)
        if args.phase not in (*timing.began, "any", "again"):
            raise SystemExit(
                f"--phase: must be a phase of the recipe, got {args.phase}; there are {', '.join(timing.began)}"
            )
        print(", ".join(f"{name} after {seconds:.1f} s" for name, seconds in timing.began.items()), flush=True)
        while len(rows) < args.kills:
            row = try_once(command, args.phase, timing, whole, rng)
            if row[0] == "over, 0 parts" and row[1] == _GOOD:
                continue  # the run was faster than the one that was timed: nothing was killed
            failures += not row[1].startswith(_GOOD)
            rows.append([args.recipe, *row])
            print(*rows[-1], sep="  ", flush=True)
    after = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in model.iterdir() if file.is_file()}
    print(format_table(["recipe", "killed in", "at the end"], rows))
    print(
        f"{len(rows) - failures} of {len(rows)} survived; the model is {'untouched' if after == before else 'CHANGED'}"
    )
    return failures + (after != before)


# -- what a checkpoint costs --------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds inside some functions, however they call each other."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, self._depth = time.perf_counter(), self._depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - start

        return timed


@contextmanager
def time_checkpoint() -> Iterator[Stopwatch]:
    """Give the seconds that a run in this process spends for its checkpoint alone."""
    from struprune_plugin.modifiers import allocator, planning, setup
    from struprune_plugin.pruning.resume import LayerLog
    from struprune_plugin.storage.resume_store import ResumeStore

    places: list[tuple[Any, str]] = [(setup, "open_store")]
    places += [(module, name) for module in (allocator, planning) for name in ("keep_allocation", "take_allocation")]
    places += [(LayerLog, "keep"), (LayerLog, "take"), (ResumeStore, "clear"), (ResumeStore, "__init__")]
    watch = Stopwatch()
    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(patch.object(owner, name, watch.wrap(getattr(owner, name))))
        yield watch


def measure_cost(args: argparse.Namespace) -> None:
    """Prune once with a checkpoint, and print its share of the seconds."""
    from struprune_plugin import StruPruneModifier, oneshot
    from struprune_plugin.evaluation.text import DEMO_CALIBRATION, load_tokenizer, make_calibration_dataset

    dataset = make_calibration_dataset(DEMO_CALIBRATION, load_tokenizer(args.cost), args.num_samples, 256)
    with tempfile.TemporaryDirectory() as temporary, time_checkpoint() as watch:
        start = time.perf_counter()
        oneshot(
            model=args.cost,
            recipe=StruPruneModifier(sparsity=0.3),
            dataset=dataset,
            output_dir=Path(temporary) / "out",
            checkpoint_dir=Path(temporary) / "checkpoint",
            num_calibration_samples=args.num_samples,
            batch_size=8,
            shuffle_calibration_samples=False,
        )
        total = time.perf_counter() - start
    share = watch.seconds / (total - watch.seconds)
    print(
        f"{args.cost}, {args.num_samples} × 256 tokens: {total:.2f} s, of which the checkpoint {watch.seconds:.2f} s: "
        f"{share:.1%} of a run without one"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="pruned")
    parser.add_argument(
        "--phase", choices=["any", *PHASES[:-1], "again"], default="any", help="part of the run in which to kill"
    )
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="number of trials")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--model", default=str(DEMO_MODEL), help="model folder")
    parser.add_argument("--num-samples", type=int, default=32, metavar="N", help="calibration samples of 256 tokens")
    parser.add_argument(
        "--cost", metavar="MODEL", help="print the cost of a checkpoint on this model, and kill nothing"
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = parser.parse_args()
    if args.cost:
        measure_cost(args)
        return 0
    return int(bool(run_kills(args)))


if __name__ == "__main__":
    sys.exit(main())
