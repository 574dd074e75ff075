"""Collectives of a run over several processes (``torchrun``), each with the model and its part of the calibration data.

Sums over tokens are reduced; the first process decides, and sends its decisions. Without a process group nothing is done here.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from compressed_tensors.distributed import get_source_rank, init_dist, is_distributed, is_source_process
from torch import Tensor

Result = TypeVar("Result")


def join_processes() -> None:
    """Initialise the process group that ``torchrun`` prepared, unless it already exists."""
    if is_distributed() or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if torch.accelerator.is_available():
        init_dist()
    else:
        dist.init_process_group("gloo")


def count_ranks() -> int:
    """Return the number of processes that work on this run."""
    return dist.get_world_size() if is_distributed() else 1


def wait_for_all() -> None:
    """Block until every process has reached this call."""
    if is_distributed():
        dist.barrier()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place in every process, and return it."""
    if is_distributed():
        wire = tensor.to(_find_device())
        dist.all_reduce(wire)
        tensor.copy_(wire)
    return tensor


def gather(value: Result) -> list[Result]:
    """Return the values of all processes, by rank: numbers, bytes, lists of these, or tensors on the host."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * count_ranks()
    dist.all_gather_object(values, value)
    return values


def count_before(value: int) -> int:
    """Return the sum of a number over the processes of lower rank."""
    return sum(gather(value)[: dist.get_rank()]) if is_distributed() else 0


def split_range(length: int) -> range:
    """Return this process' part of ``range(length)``: contiguous, of nearly equal length, in the order of the ranks."""
    if not is_distributed():
        return range(length)
    rank, ranks = dist.get_rank(), count_ranks()
    return range(length * rank // ranks, length * (rank + 1) // ranks)


def compute_on_rank0(compute: Callable[[], Result], device: torch.device | None = None) -> Result:
    """Compute in the first process and return its result in all, bit for bit; where it raises, the others raise, too.

    :param device: device of the result's tensors in the other processes
    """
    if not is_distributed():
        return compute()
    result: Any = None
    content, failed = io.BytesIO(), None
    if is_source_process():
        try:
            torch.save(result := compute(), content)
        except Exception as error:  # the others wait for an answer
            failed = error
    sent: list[Any] = [content.getvalue(), failed and str(failed)]
    dist.broadcast_object_list(sent, src=get_source_rank(), device=_find_device())
    if sent[1] is not None:
        raise failed or ValueError(sent[1])
    if is_source_process():
        return result
    return torch.load(io.BytesIO(sent[0]), map_location=device, weights_only=False)  # of the first process' own making


def _find_device() -> torch.device:
    """Return the device whose tensors the process group can send: NCCL only sends from its accelerator."""
    if dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def check_one_process(what: str, remedy: str) -> None:
    """Raise where there are several processes, for stages with per-token variables or training."""
    if count_ranks() > 1:
        raise ValueError(f"{what} works in one process only, got {count_ranks()}. {remedy}")
