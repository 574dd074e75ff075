"""One pruning run over several processes, each with its own part of the calibration data (``torchrun``).

Every process holds the model and runs its own batches. What sums over tokens is summed over the processes; what is
decided is decided once, by the first process, and sent to the others. Without a process group everything here is a no-op.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from compressed_tensors.distributed import get_source_rank, init_dist, is_distributed, is_source_process
from torch import Tensor

from struprune_plugin.runtime.payload import dump, load

Result = TypeVar("Result")


def join_processes() -> None:
    """Make the process group that ``torchrun`` prepared, where nobody has made it yet."""
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
    """Return once every process is here."""
    if is_distributed():
        dist.barrier()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Add up a tensor over all processes, in place, and return it; the same in all of them."""
    if is_distributed():
        wire = tensor.to(_find_device())
        dist.all_reduce(wire)
        tensor.copy_(wire)
    return tensor


def find_rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if is_distributed() else 0


def send_from(tensor: Tensor, rank: int) -> None:
    """Set a tensor in all processes to that of one of them, in place; all may hold the same memory."""
    if is_distributed():
        wire = tensor.to(_find_device())
        dist.broadcast(wire, src=rank)
        if wire is not tensor and dist.get_rank() != rank:
            tensor.copy_(wire)


def reduce_sums(parts: Iterable[Tensor]) -> None:
    """Add up tensors over all processes, in place; whole in the first process only, which is the one that solves."""
    if is_distributed():
        for part in parts:
            wire = part.to(_find_device())
            dist.reduce(wire, dst=get_source_rank())
            part.copy_(wire)


def gather(value: Result) -> list[Result]:
    """Return every process' value, by rank: numbers, bytes, lists of these, or tensors on the host."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * count_ranks()
    dist.all_gather_object(values, value)
    return values


def count_before(value: int) -> int:
    """Return the sum of a number over the processes before this one."""
    return sum(gather(value)[: dist.get_rank()]) if is_distributed() else 0


def split_range(length: int) -> range:
    """Return this process' part of ``range(length)``: contiguous, as equal as can be, in the order of the ranks."""
    if not is_distributed():
        return range(length)
    rank, ranks = dist.get_rank(), count_ranks()
    return range(length * rank // ranks, length * (rank + 1) // ranks)


def compute_on_rank0(compute: Callable[[], Result], kind: Any, device: torch.device) -> Result:
    """Compute in the first process and return its result in all, bit by bit; all raise its exceptions.

    :param kind: type of the result, which :func:`~struprune_plugin.runtime.payload.dump` must know
    :param device: where the others want its tensors
    """
    if not is_distributed():
        return compute()
    source, wire = get_source_rank(), _find_device()

    def share(header: list[Any]) -> list[Any]:
        dist.broadcast_object_list(header, src=source, device=wire)
        return header

    result: Any = None
    if is_source_process():
        try:
            result = compute()
        except Exception as error:  # the others wait for an answer
            share([str(error), None, None])
            raise
        record, tensors = dump(result)
        share([None, record, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}])
    else:
        problem, record, forms = share([None, None, None])
        if problem is not None:
            raise ValueError(problem)
        tensors = {name: torch.empty(shape, dtype=dtype, device=wire) for name, (shape, dtype) in forms.items()}
    for tensor in tensors.values():
        dist.broadcast(tensor.contiguous().to(wire), src=source)
    if is_source_process():
        return result
    return load(kind, record, {name: tensor.to(device) for name, tensor in tensors.items()})


def do_once(act: Callable[[], str | None]) -> str:
    """Let the first process act, the others wait, and all know what it returns or raises."""
    return compute_on_rank0(lambda: act() or "", str, torch.device("cpu"))


def _find_device() -> torch.device:
    """Return where the process group can read tensors: NCCL only on its accelerator."""
    if dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def check_one_process(what: str, remedy: str) -> None:
    """Refuse what works on every token's own variables, or trains, where the data are spread over processes.

    :raises ValueError: there are several processes
    """
    if count_ranks() > 1:
        raise ValueError(f"{what} must run in one process, got {count_ranks()}. {remedy}")
