"""Timing of alternating runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch


def time_runs(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the minimum seconds of each run, taken in rounds, so that other load on the machine affects all runs alike.

    With one CPU thread, process time is measured, because others may share the machine.
    """
    return {name: min(seconds) for name, seconds in time_rounds(runs, repeats).items()}


def time_rounds(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each run in every round, measured as in :func:`time_runs`."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = time.process_time if alone else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = clock()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            found[name].append(clock() - start)
    return found


def compare_rounds(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the minimum seconds of one run, and that times the median ratio of another run to it in the same rounds: load on the
    machine that lasts longer than a round changes no ratio."""
    least = min(first)
    return least, least * statistics.median(b / a for a, b in zip(first, second, strict=True))
