"""Collectives of a run over several processes (``torchrun``), each with the model and its part of the calibration data.

Sums over tokens are reduced; the first process decides, and sends its decisions: tensors as tensors, the rest as JSON. Without a
process group nothing is done here.
"""

import json
import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from compressed_tensors.distributed import get_source_rank, init_dist, is_distributed, is_source_process
from torch import Tensor

from struprune_plugin.runtime.records import join_tensors, split_tensors

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
    """Return the values of all processes, by rank: numbers, strings, or lists of these."""
    if not is_distributed():
        return [value]
    content = _to_wire(json.dumps(value).encode())
    sizes = [content.new_zeros(1, dtype=torch.int64) for _ in range(count_ranks())]
    dist.all_gather(sizes, torch.full_like(sizes[0], len(content)))
    lengths = [int(size) for size in sizes]
    parts = [content.new_zeros(max(lengths)) for _ in lengths]
    dist.all_gather(parts, torch.nn.functional.pad(content, (0, max(lengths) - len(content))))
    return [json.loads(_to_bytes(part[:length])) for part, length in zip(parts, lengths, strict=True)]


def count_before(value: int) -> int:
    """Return the sum of a number over the processes of lower rank."""
    return sum(gather(value)[: dist.get_rank()]) if is_distributed() else 0


def split_range(length: int) -> range:
    """Return this process' part of ``range(length)``: contiguous, of nearly equal length, in the order of the ranks."""
    if not is_distributed():
        return range(length)
    rank, ranks = dist.get_rank(), count_ranks()
    return range(length * rank // ranks, length * (rank + 1) // ranks)


def compute_on_rank0(
    compute: Callable[[], Result], result_type: Any = None, device: torch.device | None = None
) -> Result:
    """Compute in the first process and return its result in all, bit for bit; where it raises, the others raise, too.

    :param result_type: type of the result, see :func:`~struprune_plugin.runtime.records.split_tensors`
    :param device: device of the result's tensors in the other processes
    """
    if not is_distributed():
        return compute()
    result: Any = None
    tensors, message, failed = list[Tensor](), dict[str, Any](), None
    if is_source_process():
        try:
            message["record"], tensors = split_tensors(result := compute())
            message["tensors"] = [(str(part.dtype).removeprefix("torch."), [*part.shape]) for part in tensors]
        except Exception as error:  # the others wait for an answer
            message, failed = {"error": str(error)}, error
    message = json.loads(_to_bytes(_broadcast(_to_wire(json.dumps(message).encode()))))
    if "error" in message:
        raise failed or ValueError(message["error"])
    if is_source_process():
        for tensor in tensors:
            wire = tensor.detach().to(_find_device()).contiguous().view(-1).view(torch.uint8)
            _broadcast(wire, len(wire))
        return result
    for name, shape in message["tensors"]:
        dtype: torch.dtype = getattr(torch, name)
        wire = _broadcast(torch.empty(0, dtype=torch.uint8, device=_find_device()), math.prod(shape) * dtype.itemsize)
        tensors.append(wire.view(dtype).view(shape).to(device))
    return join_tensors(message["record"], result_type, tensors.__getitem__)


def _to_wire(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(_find_device())


def _to_bytes(wire: Tensor) -> bytes:
    return wire.cpu().numpy().tobytes()


def _broadcast(wire: Tensor, size: int | None = None) -> Tensor:
    """Return the bytes of the first process in all.

    :param size: their number; None where only the first process knows it
    """
    if size is None:
        length = torch.full((1,), len(wire), dtype=torch.int64, device=wire.device)
        dist.broadcast(length, get_source_rank())
        size = int(length)
    wire = wire if is_source_process() else wire.new_empty(size)
    if size:
        dist.broadcast(wire, get_source_rank())
    return wire


def _find_device() -> torch.device:
    """Return the device whose tensors the process group can send: NCCL only sends from its accelerator."""
    if dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def check_one_process(what: str, remedy: str) -> None:
    """Raise where there are several processes, for stages with per-token variables or training."""
    if count_ranks() > 1:
        raise ValueError(f"{what} works in one process only, got {count_ranks()}. {remedy}")
