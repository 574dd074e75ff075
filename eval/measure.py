"""Speed and memory of models, measured side by side in one run."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def time_side_by_side(runs: Mapping[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """Return the median seconds of each run; rounds are interleaved, so that noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextmanager
def count_own_seconds() -> Iterator[None]:
    """With one thread on a CPU, let all clocks count this process' own seconds: others may share the machine."""
    if torch.cuda.is_available() or torch.get_num_threads() > 1:
        yield
        return
    with patch_attr(time, "perf_counter", time.process_time):
        yield


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages made while it is active, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key and key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


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
    with _LiveBytes() as account:
        run()
    return account.peak
