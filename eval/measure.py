"""Speed and memory of models, measured side by side in one run."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy
import torch
from compressed_tensors.utils import patch_attr

from eval.account import LiveBytes


def time_turns(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each run in every turn; runs take turns, so that noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    return seconds


@contextmanager
def count_own_seconds() -> Iterator[None]:
    """With one thread on a CPU, let all clocks count this process' own seconds: others may share the machine."""
    if torch.cuda.is_available() or torch.get_num_threads() > 1:
        yield
        return
    with patch_attr(time, "perf_counter", time.process_time):
        yield


def measure_peak_bytes(model: torch.nn.Module, run: Callable[[], object]) -> int:
    """Return the bytes of a model's weights and of all tensors alive at the peak of one run."""
    weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    if next(model.parameters()).is_cuda:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        run()
        return weights + torch.cuda.max_memory_allocated() - base
    return weights + count_live_bytes(run)


def count_live_bytes(run: Callable[[], object]) -> int:
    """Return the bytes of all tensors made during one run and alive together, at their peak; on any device."""
    with LiveBytes(everything=True) as account:
        run()
    return account.peak


def fit_exponent(sizes: Sequence[float], peaks: Sequence[float]) -> float | None:
    """Return e of ``peak ~ N^e`` by least squares on logarithms; None below two sizes."""
    if len(sizes) < 2:
        return None
    return float(numpy.polyfit(numpy.log(sizes), numpy.log(peaks), 1)[0])
