"""One pruning run over several processes, each with its own part of the calibration data (``torchrun``).

Every process holds the model and runs its own batches. What sums over tokens is summed over the processes; what is
decided is decided once, by the first process, and sent to the others. Without a process group everything here is a no-op.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from compressed_tensors.distributed import get_source_rank, init_dist, is_distributed, is_source_process
from torch import Tensor

Parcel = tuple[dict[str, Any], list[Tensor]]  # JSON, and the tensors that it goes with
Decided = TypeVar("Decided")


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


def reduce_sums(parts: Iterable[Tensor]) -> None:
    """Add up tensors over all processes, in place; whole in the first process only, which is the one that solves."""
    if is_distributed():
        for part in parts:
            wire = part.to(_find_device())
            dist.reduce(wire, dst=get_source_rank())
            part.copy_(wire)


def gather_numbers(*values: int) -> list[list[int]]:
    """Return every process' numbers, by rank."""
    mine = torch.tensor(values, dtype=torch.int64)
    if not is_distributed():
        return [mine.tolist()]
    parts = [torch.zeros_like(mine, device=_find_device()) for _ in range(count_ranks())]
    dist.all_gather(parts, mine.to(_find_device()))
    return [part.tolist() for part in parts]


def gather_sequences(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return every process' sequences of numbers, in the order of the ranks.

    :param parts: of this process, shape [numbers] each, int64, on the host
    """
    if not is_distributed():
        return list(parts)
    lengths = gather_numbers(len(parts), sum(map(len, parts)))
    most, total = (max(row[i] for row in lengths) for i in (0, 1))
    sizes = gather_numbers(*map(len, parts), *[0] * (most - len(parts)))
    numbers = torch.cat([*parts, torch.zeros(total - lengths[dist.get_rank()][1], dtype=torch.int64)]).to(
        _find_device()
    )
    wires = [torch.empty_like(numbers) for _ in range(count_ranks())]
    dist.all_gather(wires, numbers)
    pairs = zip(wires, sizes, lengths, strict=True)
    return [part for wire, size, row in pairs for part in wire[: row[1]].cpu().split(size[: row[0]])]


def count_before(value: int) -> int:
    """Return the sum of a number over the processes before this one."""
    if not is_distributed():
        return 0
    return sum(row[0] for row in gather_numbers(value)[: dist.get_rank()])


def gather_digests(digest: bytes) -> list[bytes]:
    """Return every process' digest, by rank."""
    return [bytes(row) for row in gather_numbers(*digest)]


def split_range(length: int) -> range:
    """Return this process' part of ``range(length)``: contiguous, as equal as can be, in the order of the ranks."""
    if not is_distributed():
        return range(length)
    rank, ranks = dist.get_rank(), count_ranks()
    return range(length * rank // ranks, length * (rank + 1) // ranks)


def decide_once(
    decide: Callable[[], Decided],
    pack: Callable[[Decided], Parcel],
    unpack: Callable[[Parcel], Decided],
    device: torch.device,
) -> Decided:
    """Let the first process decide, and return its decision, to the bit, in all; what it raises, all raise.

    :param pack: turns a decision into what goes over the wire
    :param unpack: the reverse
    :param device: where the others want the tensors
    """
    if not is_distributed():
        return decide()
    if not is_source_process():
        return unpack(_receive(device))
    try:
        decision = decide()
    except Exception as error:  # the others wait for an answer
        _send({"error": str(error)}, [])
        raise
    _send(*pack(decision))
    return decision


def do_once(act: Callable[[], str | None]) -> str:
    """Let the first process act, the others wait, and all know what it returns or raises."""
    return decide_once(
        lambda: act() or "", lambda text: ({"text": text}, []), lambda parcel: parcel[0]["text"], torch.device("cpu")
    )


def _send(record: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Send a JSON header, its length first, and then the tensors that it describes."""
    shapes = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
    header = torch.tensor(list(json.dumps([record, shapes]).encode()), dtype=torch.uint8)
    for part in (torch.tensor([len(header)]), header, *tensors):
        dist.broadcast(part.contiguous().to(_find_device()), src=get_source_rank())


def _receive(device: torch.device) -> Parcel:
    def take(shape: list[int], dtype: torch.dtype) -> Tensor:
        part = torch.empty(shape, dtype=dtype, device=_find_device())
        dist.broadcast(part, src=get_source_rank())
        return part

    header = take([int(take([1], torch.int64))], torch.uint8)
    record, shapes = json.loads(bytes(header.tolist()))
    if "error" in record:
        raise ValueError(record["error"])
    return record, [take(shape, getattr(torch, dtype)).to(device) for shape, dtype in shapes]


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
