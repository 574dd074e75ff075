"""Placement of a run's tensors, and the time and peak device memory of its stages."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from compressed_tensors.offload import disable_offloading
from llmcompressor.utils.dev import get_main_device
from torch import Tensor, nn

from struprune_plugin.runtime.residence import HostBuffers, WeightsAhead, drop_onloaded, read_on_host


@dataclass
class StageRecord:
    """Wall time of one stage of a run, over all its spans, and peak bytes on the device; None where they are not measured."""

    seconds: float = 0.0
    peak_bytes: int | None = None


class DeviceContext:
    """Placement of a run's tensors, moves between device and host, and a record of the stages.

    :ivar solves_on_host: whether moments, solves and embeddings are on the host; otherwise they are on the device, and so are the
        next layer's weights, which are fetched ahead
    :ivar widened: dtypes whose layers compute in float32
    :ivar computed_in: dtype in which the model's layers compute and, where it is another than theirs, why
    :ivar on_device: bytes that stay on the device between the layers, by what they hold
    :ivar stages: records by name, in the order of their first spans
    """

    def __init__(self, offload: bool = False):
        self.solves_on_host = offload
        self.widened: Collection[torch.dtype] = ()
        self.computed_in = ""
        self.on_device: Mapping[str, int] = {}
        self.stages: dict[str, StageRecord] = {}
        self._ahead, self._buffers = WeightsAhead(), HostBuffers()
        self._open: list[StageRecord] = []

    @property
    def measure(self) -> str:
        """Meaning of ``peak_bytes``."""
        return "accelerator bytes allocated" if torch.cuda.is_available() else "not measured: no accelerator"

    def offload(self, tensor: Tensor, what: str = "states") -> Tensor:
        """Return a tensor without its graph, to be read by :meth:`to_device` or :meth:`to_solver`, or after the end of the stage.

        It stays where it is if its kind is kept on the device. Otherwise it is copied to the host, on an accelerator at the same
        time as other work.

        :param what: ``states``, ``fisher`` or ``moments``; any other kind goes to the host
        """
        if what in self.on_device:
            return tensor.detach()
        return self.to_host(tensor) if tensor.device.type == "cpu" else self._buffers.write(tensor.detach())

    def discard(self, tensor: Tensor) -> None:
        """Let the memory of an offloaded tensor be written again; nobody reads the tensor after this."""
        self._buffers.release(tensor)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host, without its graph; waits for the device."""
        if self._buffers.owns(tensor):
            self._buffers.wait()
        return tensor.detach().cpu()

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor on a device."""
        if device.type != "cpu" and self._buffers.owns(tensor):
            tensor = self._buffers.read(tensor, device)
        return tensor.to(device)

    def to_solver(self, tensor: Tensor) -> Tensor:
        """Return a tensor, without its graph, where systems are solved: on the host with ``offload``, else on the device."""
        return self.to_host(tensor) if self.solves_on_host else self.to_device(tensor.detach(), self.solve_device)

    @property
    def solve_device(self) -> torch.device:
        """Device on which systems are solved."""
        return torch.device("cpu") if self.solves_on_host else get_main_device()

    @contextmanager
    def apply_on_host(self, embeddings: Sequence[nn.Module], head: nn.Module) -> Iterator[None]:
        """Apply input embeddings and the output embeddings on the host, where their weights are."""
        device = get_main_device()
        with ExitStack() as stack:
            stack.enter_context(read_on_host((*embeddings, head)))
            for module in embeddings:
                handle = module.register_forward_hook(lambda _module, _args, output: self.to_device(output, device))
                stack.callback(handle.remove)
            yield

    @contextmanager
    def onload_layer(self, layer: nn.Module, following: nn.Module | None) -> Iterator[None]:
        """Keep a layer's weights on the device during the block, once something uses them, and fetch those of the following layer,
        unless the block fails."""
        with disable_offloading():
            self._ahead.take(layer)
            if following is not None and not self.solves_on_host:
                self._ahead.fetch(following)
            try:
                yield
            except BaseException:
                self._ahead.drop()
                raise

    @contextmanager
    def offload_saved(self, layer: nn.Module) -> Iterator[None]:
        """Store what the layer's forward pass saves for the backward pass on the host, with ``offload``, its weights, too."""
        if not self.solves_on_host:
            yield
            return

        def pack(tensor: Tensor) -> tuple[Tensor, torch.device]:
            return self.to_host(tensor), tensor.device

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: self.to_device(*saved)):
            yield
        drop_onloaded(layer)

    def take_peak(self) -> int | None:
        """Return the peak bytes on the device since the last call; None where they are not measured."""
        if not torch.cuda.is_available():
            return None
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds and the peak memory of the block to a stage; blocks may be nested."""
        start = time.perf_counter()
        record = self.stages.setdefault(name, StageRecord())
        self._note_peak()
        self._open.append(record)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._note_peak()
        self._open.pop()
        record.seconds += time.perf_counter() - start

    def _note_peak(self) -> None:
        """Raise the peaks of the stages that are open to the bytes held since the last call."""
        if (peak := self.take_peak()) is not None:
            for record in self._open:
                record.peak_bytes = max(peak, record.peak_bytes or 0)


def find_free_bytes() -> int | None:
    """Return the accelerator's bytes that are not allocated, less a tenth for uncounted ones; None without an accelerator."""
    if not torch.cuda.is_available():
        return None
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return round(0.9 * (torch.cuda.mem_get_info()[0] + unused))
