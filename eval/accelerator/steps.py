"""Steps in the order of their worth, and the ledger of finished ones."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eval.accelerator.__main__ import ENDS, STARTS
from eval.ledger import Ledger, describe_code

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Place:
    """Where steps run.

    :param device: the card, or the CPU
    :param reduced: tiny shapes
    :param work: folder for what steps leave to each other
    :param model: a folder with a small real model; may be missing
    """

    device: torch.device
    reduced: bool
    work: Path
    model: Path


@dataclass(frozen=True)
class Step:
    """A unit of work.

    :param name: also its heading
    :param seconds: that it may take
    :param run: returns its figures; ``passed`` says whether they are as they should be, where that can be said
    :param told: what it depends on beside the code
    """

    name: str
    seconds: float
    run: Callable[[Place], dict[str, Any]]
    told: Mapping[str, Any] = field(default_factory=dict)


class Journal:
    """What has been done of the steps, in one JSON file.

    :param began: steps that failed since then are not tried again
    """

    def __init__(self, file: Path, place: Place, began: float):
        form = "reduced" if place.reduced else "whole"
        device = torch.cuda.get_device_name() if place.device.type == "cuda" else "cpu"
        self.settings = {"form": form, "device": device, "torch": torch.__version__}
        self._ledger, self._began = Ledger(file, self.settings), began
        self._code = describe_code(_HERE, *(_HERE.parent / f"{name}.py" for name in ("profile", "scale", "speed")))

    def find(self, step: Step) -> dict[str, Any] | None:
        """Return the last row of a step, made by this code; None before the first."""
        return self._look(step)[0]

    def _look(self, step: Step) -> tuple[dict[str, Any] | None, int]:
        row, attempt = None, 0
        while (later := self._ledger.find(step.name, self._tell(step, attempt))) is not None:
            row, attempt = later, attempt + 1
        return row, attempt

    def _tell(self, step: Step, attempt: int) -> dict[str, Any]:
        return {**self._code, "seconds": step.seconds, "told": step.told, "attempt": attempt}

    def write(self, step: Step, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do a step and write its row."""
        return self._ledger.finish(step.name, self._tell(step, self._look(step)[1]), make)

    def list_waiting(self, steps: Sequence[Step]) -> list[tuple[Step, bool]]:
        """Return the steps to do, those last that failed when the command was started before, and whether they did."""
        rows = {step.name: self.find(step) for step in steps}
        fresh = [(step, False) for step in steps if rows[step.name] is None]
        failed = [(step, True) for step in steps if "error" in (rows[step.name] or {})]
        return fresh + [pair for pair in failed if (rows[pair[0].name] or {}).get("at", 0.0) < self._began]


def run_steps(
    journal: Journal, steps: Sequence[Step], place: Place, seconds: float, report: Callable[[], None]
) -> bool:
    """Run what waits, as long as the next one fits the time; tell whether a fresh process should go on.

    A step that fails on a card may leave it unusable to its process.

    :param report: called after every step
    """
    ends_at = time.monotonic() + seconds
    report()
    for step, has_failed in journal.list_waiting(steps):
        left = ends_at - time.monotonic()
        if left < (min(step.seconds, 60.0) if has_failed else step.seconds):
            continue  # a shorter one may fit
        print(f"{STARTS}{left if has_failed else step.seconds} {step.name}", flush=True)
        row = journal.write(step, partial(_attempt, step, place))
        print(f"{ENDS}{step.name}", flush=True)
        report()
        if "error" in row and place.device.type == "cuda":
            return True
    return False


def _attempt(step: Step, place: Place) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        return {**step.run(place), "seconds": time.perf_counter() - start}
    except Exception as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return {"error": f"{told} ({Path(where.filename).name}:{where.lineno})", "at": time.time()}
    finally:
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
