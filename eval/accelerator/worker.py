"""Process that runs the steps; the command starts it."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from loguru import logger

from eval.accelerator.__main__ import AGAIN
from eval.accelerator.correct import list_correct_steps, write_references
from eval.accelerator.memory import list_memory_steps
from eval.accelerator.outputs import list_output_steps
from eval.accelerator.pruning import list_speed_steps
from eval.accelerator.report import write_report
from eval.accelerator.steps import Journal, Place, Step, run_steps


def list_steps(reduced: bool) -> list[Step]:
    """Return all steps, by worth."""
    correct, outputs = list_correct_steps(reduced), list_output_steps(reduced)
    (rates, *speed), memory = list_speed_steps(reduced), list_memory_steps(reduced)
    return [rates, *correct, *speed[:2], *memory[:2], *outputs, *speed[2:], *memory[2:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--began", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--lost", help="step whose process ended without a result")
    parser.add_argument("--why", default="", help="reason, for the report")
    parser.add_argument(
        "--reference", action="store_true", help="only make the reference on the CPU that the card is compared with"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logger.remove()
    on_card = torch.cuda.is_available()
    reduced = args.reduced or not (on_card or args.reference)
    place = Place(torch.device("cuda" if on_card else "cpu"), reduced, args.output / "work", args.model)
    if args.reference:
        write_references(place)
        return 0
    journal = Journal(args.output / "accelerator.json", place, args.began)
    steps = [step for step in list_steps(reduced) if args.only in step.name]
    for step in steps:
        if step.name == args.lost:
            journal.write(step, lambda: {"error": args.why, "at": time.time()})
    again = run_steps(journal, steps, place, args.seconds, partial(write_report, journal, steps, args.output))
    rows = [journal.find(step) for step in steps]
    left = sum(row is None for row in rows)
    bad = [
        step.name
        for step, row in zip(steps, rows, strict=True)
        if row and ("error" in row or row.get("passed") is False)
    ]
    ending = f", failed: {', '.join(bad)}" if bad else ""
    print(f"{len(steps) - left} of {len(steps)} steps done{ending}{'; started again it goes on' if left else ''}")
    return AGAIN if again else int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
