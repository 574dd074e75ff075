"""Command that watches a worker process, which runs the steps, and starts another if it dies, hangs or has lost its card.

Imports nothing heavy, so that the deadline counts from the start.
"""

from __future__ import annotations

import argparse
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

AGAIN = 3  # exit status of a worker that wants a fresh process for the steps that are left
STARTS, ENDS = "STEP STARTS ", "STEP ENDS "  # begin the lines in which a worker tells where it is
DEADLINE = 530.0  # seconds: under nine minutes
_RESERVE = 25.0  # seconds that writing down a lost step takes, imports and all


@dataclass(frozen=True)
class Loss:
    """A step whose process is gone.

    :param step: its name
    :param why: what became of it
    """

    step: str
    why: str


def watch_worker(words: Sequence[str], ends_at: float) -> tuple[int, Loss | None]:
    """Run a worker to its end, or kill it where a step takes longer than it may.

    :param ends_at: on the monotonic clock
    :return: exit status, and the step that was lost
    """
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def read(stream: object = process.stdout) -> None:
        for line in stream:  # type: ignore[attr-defined]
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    step, until = "", ends_at
    while True:
        try:
            line = lines.get(timeout=max(until - time.monotonic(), 0.01))
        except queue.Empty:
            process.kill()
            process.wait()
            return process.returncode, Loss(step, "took longer than it may, and was ended") if step else None
        if line is None:
            status = process.wait()
            return status, Loss(step, f"its process ended with status {status}") if step else None
        if line.startswith(STARTS):
            seconds, step = line.removeprefix(STARTS).rstrip("\n").split(" ", 1)
            until = min(ends_at, time.monotonic() + float(seconds))
        elif line.startswith(ENDS):
            step, until = "", ends_at
        else:
            print(line, end="", flush=True)


def supervise(worker: Sequence[str], seconds: float) -> int:
    """Start workers until the steps are done or the time is over; return the exit status.

    :param worker: its command line, without ``--seconds``
    """
    ends_at = time.monotonic() + seconds
    began, lost = time.time(), None
    while True:
        left = max(ends_at - time.monotonic(), 0.0)
        words = [*worker, "--began", str(began), "--seconds", str(max(left - _RESERVE, 0.0))]
        if lost is not None:
            words += ["--lost", lost.step, "--why", lost.why]
        # a worker that only writes down what was lost may take the reserve
        status, lost = watch_worker(words, ends_at - (_RESERVE if left > 2 * _RESERVE else 0.0))
        is_over = ends_at - time.monotonic() < (0.0 if lost else _RESERVE)
        if (status != AGAIN and lost is None) or is_over:
            return min(abs(status), 1) if lost is None else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="eval.accelerator", description="Run the checks that need a real accelerator."
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for accelerator.json and accelerator.md")
    parser.add_argument(
        "--model",
        type=Path,
        default=Path("../shared/testbed/opt-lab"),
        help="model folder that is pruned, too, if it exists",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="run only steps whose name contains this")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds for all steps")
    parser.add_argument("--reduced", action="store_true", help="use tiny shapes on a card, too")
    args = parser.parse_args()
    if not args.deadline > 0:
        parser.error(f"--deadline: must be above 0 seconds, got {args.deadline:g}. Leave it out for {DEADLINE:g}.")
    words = ["--output", str(args.output), "--model", str(args.model), "--only", args.only]
    words += ["--reduced"] if args.reduced else []
    return supervise([sys.executable, "-m", "eval.accelerator.worker", *words], args.deadline)


if __name__ == "__main__":
    sys.exit(main())
