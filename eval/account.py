"""Exact account, on a CPU, of the memory that an accelerator would hold.

On a CPU nothing moves: the host's offload caches, our recorded hidden states and what is computed on are tensors of one memory,
often the same ones. So the account plays an accelerator: while it is open, moves to and from the device copy (those of
:class:`~struprune_plugin.runtime.device_context.DeviceContext`, of the host's caches of weights and of activations), and every
tensor is on one side. What an operation makes is on the device unless all tensors that it reads are on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from compressed_tensors.offload.cache import CPUCache, DiskCache, OffloadCache
from compressed_tensors.utils import patch_attr
from llmcompressor.pipelines.cache import IntermediatesCache, IntermediateValue, OverrideEqMode
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from struprune_plugin.allocation import candidates, curves
from struprune_plugin.layerwise import passes, statistics
from struprune_plugin.modifiers import pruning, recovery
from struprune_plugin.pruning import prune_layer, reconstruction
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.precision import Precision
from struprune_plugin.runtime.residence import WeightsAhead, load_weights

_SOLVERS: list[tuple[Any, str]] = [  # functions that work on the host with ``offload``
    *((module, "compute_on_rank0") for module in (prune_layer, curves, candidates)),
    *((statistics, name) for name in ("make_sums", "assemble_moments")),
    (reconstruction, "solve_weights"),
]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages on the device, now and at their peak; kernels' inner workspaces stay unseen.

    :cvar granule: bytes that storages are counted in whole multiples of
    :param everything: count all that operations make, of the host's tensors too
    :ivar live: bytes now
    :ivar peak: most bytes since it was last set
    :ivar host_caches: ids of the host's caches whose weights are never onloaded
    """

    granule = 1

    def __init__(self, everything: bool = False) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.host_caches: set[int] = set()
        self._held: set[int] = set()  # addresses of the storages on the device
        self._to_host: bool | None = False if everything else None  # what a move, the operation in progress, decides

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [tensor.untyped_storage() for tensor in _find_tensors((result,))]
        made = [storage for storage in made if storage.data_ptr() not in self._held]
        if made and self._to_host is not True:
            read = {tensor.untyped_storage().data_ptr() for tensor in _find_tensors((*args, *(kwargs or {}).values()))}
            if self._to_host is False or not read or not read.isdisjoint(self._held):
                for storage in made:
                    if storage.data_ptr() not in read:
                        self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), -(-storage.nbytes() // self.granule) * self.granule
        if key and key not in self._held:  # meta tensors have no address
            self._held.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.live -= size

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return tensor.untyped_storage().data_ptr() in self._held

    def move(self, tensor: Tensor, to_host: bool) -> Tensor:
        """Return a tensor on the other side, copied unless it is there."""
        if self.holds(tensor) != to_host or tensor.is_meta:
            return tensor
        with self.decide(to_host):
            return tensor.clone()

    @contextmanager
    def decide(self, to_host: bool | None) -> Iterator[None]:
        """Count what is made inside as the host's or the device's; by what it reads where None."""
        before, self._to_host = self._to_host, to_host
        try:
            yield
        finally:
            self._to_host = before


def _find_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among what an operation reads or makes, which lie there or in lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _find_tensors(value)
    return found


class WeightsAtOnce(WeightsAhead):
    """Fetches in this thread, which counts."""

    def _submit(self, caches: list[OffloadCache]) -> Future[Any]:
        coming: Future[Any] = Future()
        coming.set_result(load_weights(caches))
        return coming


class CountedContext(DeviceContext):
    """A device context whose moves copy, and are counted.

    :ivar live: what lies on the device
    """

    def __init__(self, offload: bool, live: LiveBytes):
        super().__init__(offload)
        self.live, self._ahead = live, WeightsAtOnce()

    @classmethod
    @contextmanager
    def open(cls, offload: bool = False) -> Iterator[CountedContext]:
        """Yield a context whose account is open during the block."""
        with LiveBytes() as live, _let_caches_copy(live), ExitStack() as stack:
            for module, name in _SOLVERS if offload else ():
                stack.enter_context(patch_attr(module, name, live.decide(True)(getattr(module, name))))
            yield cls(offload, live)

    @property
    def measure(self) -> str:
        return "account of the tensors that an accelerator would hold"

    def take_peak(self) -> int:
        peak, self.live.peak = self.live.peak, self.live.live
        return peak

    def to_host(self, tensor: Tensor) -> Tensor:
        return self.live.move(tensor.detach(), to_host=True)

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        return self.live.move(tensor, to_host=False)

    @contextmanager
    def apply_on_host(self, embeddings: Sequence[nn.Module], head: nn.Module) -> Iterator[None]:
        caches = {id(cache) for module in (*embeddings, head) for cache in (module._parameters, module._buffers)}
        self.live.host_caches |= caches

        def enter(_module: nn.Module, args: tuple) -> tuple:
            return (self.live.move(args[0], to_host=True), *args[1:])

        with super().apply_on_host(embeddings, head), head.register_forward_pre_hook(enter):
            yield
        self.live.host_caches -= caches


@contextmanager
def count_memory() -> Iterator[None]:
    """Count what an accelerator would hold in every run inside; where there is one, its own counters tell."""
    if torch.accelerator.is_available():
        yield
        return

    @contextmanager
    def enter(model: PreTrainedModel, offload: bool = False, precision: Precision = "auto") -> Iterator[DeviceContext]:
        with (
            CountedContext.open(offload) as context,
            patch_attr(passes, "DeviceContext", lambda _: context),
            passes.enter_device_context(model, offload, precision),
        ):
            yield context

    with patch_attr(pruning, "enter_device_context", enter), patch_attr(recovery, "enter_device_context", enter):
        yield


@contextmanager
def _let_caches_copy(live: LiveBytes) -> Iterator[None]:
    """Let the host's caches of weights and activations copy where, on a CPU alone, they would share."""

    def turn(tensor: Tensor | None, to_host: bool) -> Tensor | None:
        if tensor is None:
            return None
        with torch.no_grad():
            moved = live.move(tensor, to_host)
        if moved is not tensor:  # as the host's send_tensors
            moved.__class__, moved.__dict__ = tensor.__class__, tensor.__dict__.copy()
        return moved

    def wrap_onload(onload: Any) -> Any:
        return lambda cache, offloaded: turn(onload(cache, offloaded), to_host=id(cache) in live.host_caches)

    def offload(_cache: CPUCache, tensor: Tensor | None) -> Tensor | None:
        return turn(tensor, to_host=True)

    inner_onload, inner_offload = IntermediatesCache._onload_value, IntermediatesCache._offload_value

    def onload_value(cls: Any, intermediate: IntermediateValue) -> Any:
        value = inner_onload.__func__(cls, intermediate)  # type: ignore[attr-defined]
        return live.move(value, to_host=False) if isinstance(value, Tensor) else value

    def offload_value(cls: Any, value: Any, offload_device: Any, onload_device: Any = None) -> Any:
        if isinstance(value, Tensor):
            with OverrideEqMode():
                if value not in cls.offload_values and live.holds(value):
                    cls.offload_values[value] = live.move(value, to_host=True)
        return inner_offload.__func__(cls, value, offload_device, onload_device)  # type: ignore[attr-defined]

    with ExitStack() as stack:
        for cache in (CPUCache, DiskCache):
            stack.enter_context(patch_attr(cache, "onload", wrap_onload(cache.onload)))
        stack.enter_context(patch_attr(CPUCache, "offload", offload))
        stack.enter_context(patch_attr(IntermediatesCache, "_onload_value", classmethod(onload_value)))
        stack.enter_context(patch_attr(IntermediatesCache, "_offload_value", classmethod(offload_value)))
        yield
