"""Residence on the device and on the host: one decoder layer's weights, the next layer's in transit, and tensors that wait."""

import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import repeat

import llmcompressor.transformers.compression.compressed_tensors_utils as saving
import psutil
import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.offload.cache import OffloadCache
from compressed_tensors.utils import patch_attr, patch_attrs
from llmcompressor.utils.transformers import get_embeddings
from torch import Tensor, nn

_UNPINNED = 0.25  # fraction of the host's memory that stays free when buffers are pinned


class HostBuffers:
    """Copies of the device's tensors on the host, in buffers that are used again once they are released.

    On CUDA the buffers are pinned as long as the host has room, and all copies run on a stream of their own, beside the computing
    one. As they keep their order there, no buffer is written before it has been read.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}  # by size
        self._known = set[int]()  # addresses
        self._stream: torch.cuda.Stream | None = None
        self._read: list[torch.cuda.Event] = []  # the computing stream's last two reads

    def write(self, tensor: Tensor) -> Tensor:
        """Return a copy of a device's tensor, which may be incomplete until the device is synchronised."""
        free = self._free.setdefault(tensor.nbytes, [])
        buffer = free.pop() if free else self.allocate(tensor.nbytes)
        held = buffer.view(tensor.dtype).view(tensor.shape)
        if not tensor.is_cuda:
            return held.copy_(tensor)
        stream = self._find_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            held.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return held

    def read(self, held: Tensor, device: torch.device) -> Tensor:
        """Return a copy of a buffer on the device; at most two are on their way before the computing stream has used them."""
        if device.type != "cuda":
            return held.to(device)
        stream, computing = self._find_stream(device), torch.cuda.current_stream(device)
        self._read.append(computing.record_event())
        if len(self._read) > 2:
            self._read.pop(0).synchronize()
        with torch.cuda.stream(stream):
            copy = held.to(device, non_blocking=True)
        computing.wait_stream(stream)
        copy.record_stream(computing)
        return copy

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._stream is not None:
            self._stream.synchronize()

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor on the host is in one of the buffers."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._known

    def release(self, held: Tensor) -> None:
        """Let a buffer be written again."""
        if self.owns(held):
            self._free[held.nbytes].append(torch.empty(0, dtype=torch.uint8).set_(held.untyped_storage()))

    def allocate(self, size: int) -> Tensor:
        """Return a new buffer of some bytes."""
        memory = psutil.virtual_memory()
        pins = torch.cuda.is_available() and memory.available - size > _UNPINNED * memory.total
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pins)
        self._known.add(address := buffer.untyped_storage().data_ptr())
        weakref.finalize(buffer.untyped_storage(), self._known.discard, address)
        return buffer

    def _find_stream(self, device: torch.device) -> torch.cuda.Stream:
        self._stream = self._stream or torch.cuda.Stream(device)
        return self._stream


@contextmanager
def onload_one_layer(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Release onloaded weights of other modules while a decoder layer runs; llm-compressor would keep the embeddings beside it."""

    def drop_others(layer: nn.Module, _args: tuple) -> None:
        drop_onloaded(layer, others=True)

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.register_forward_pre_hook(drop_others, prepend=True))
        yield


@contextmanager
def read_on_host(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave the modules' own weights on the host where they are read."""
    held = (cache for module in modules for cache in (module._parameters, module._buffers))
    caches = [cache for cache in held if isinstance(cache, OffloadCache)]
    with patch_attrs(caches, "onload_device", repeat(torch.device("cpu"))):
        yield


@contextmanager
def compare_embeddings_on_host() -> Iterator[None]:
    """Let llm-compressor compare input and output embeddings on the host before it saves: a device may have no room for both."""
    compare = saving._retie_embeddings

    def compare_on_host(model: nn.Module) -> None:
        with read_on_host(module for module in get_embeddings(model) if module is not None):
            compare(model)

    with patch_attr(saving, "_retie_embeddings", compare_on_host):
        yield


def drop_onloaded(module: nn.Module, others: bool = False) -> None:
    """Drop the onloaded weights of a module, or of all others, from the device; llm-compressor onloads them again on use."""
    kept = OffloadCache.keep_onloaded_values
    if not kept:
        return
    with disable_onloading():
        of_module = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for tensor in [tensor for tensor in kept if (id(tensor) in of_module) != others]:
        del kept[tensor]


# a weight on the host, or its stand-in there; its version; its copy on the device
Fetched = tuple[Tensor, int, Tensor]


class WeightsAhead:
    """Prefetcher of one layer's weights, by a thread and, on CUDA, a stream of its own; the offload caches then hand them out."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None  # one for all layers: memory is reused only within a stream
        self._layer: nn.Module | None = None
        self._coming: Future[list[Fetched]] | None = None

    def fetch(self, layer: nn.Module) -> None:
        """Start to fetch a layer's weights; unused fetched weights of another layer are dropped."""
        if layer is self._layer:
            return
        self.drop()
        caches = [cache for cache in _list_caches(layer) if len(cache)]
        device = torch.device(caches[0].onload_device) if caches else None
        if device is not None and device.type in ("cpu", "cuda"):  # another thread may copy to these
            if device.type == "cuda":
                self._stream = self._stream or torch.cuda.Stream(device)
            self._layer, self._coming = layer, self._submit(caches)

    def _submit(self, caches: list[OffloadCache]) -> Future[list[Fetched]]:
        worker = ThreadPoolExecutor(1, thread_name_prefix="weights-ahead")
        coming = worker.submit(load_weights, caches, self._stream)
        worker.shutdown(wait=False)
        return coming

    def take(self, layer: nn.Module) -> None:
        """Hand a layer's fetched weights, if any, to the offload caches.

        Weights that have changed since are left out, and all where the device ran out of memory: llm-compressor onloads these.
        """
        if layer is not self._layer or self._coming is None:
            return
        coming, self._layer, self._coming = self._coming, None, None
        try:
            fetched = coming.result()
        except torch.OutOfMemoryError:
            return
        if not OffloadCache.offloading_disabled:
            return  # nothing would release them from the device again
        current = {id(tensor) for cache in _list_caches(layer) for tensor in cache.offloaded_values.values()}
        for offloaded, version, onloaded in fetched:
            if id(offloaded) in current and offloaded._version == version:
                if onloaded.is_cuda:
                    onloaded.record_stream(torch.cuda.current_stream(onloaded.device))
                OffloadCache.keep_onloaded_values[offloaded] = onloaded

    def drop(self) -> None:
        """Release fetched weights that were not taken."""
        coming, self._layer, self._coming = self._coming, None, None
        if coming is not None and not coming.cancel():
            coming.exception()  # waits for a copy in progress


def _list_caches(layer: nn.Module) -> list[OffloadCache]:
    """Return the offload caches of a layer's weights and buffers."""
    held = (cache for module in layer.modules() for cache in (module._parameters, module._buffers))
    return [cache for cache in held if isinstance(cache, OffloadCache)]


def load_weights(caches: list[OffloadCache], stream: torch.cuda.Stream | None = None) -> list[Fetched]:
    """Return copies of the caches' weights on the device, made in a stream of their own and complete."""
    held = [(cache, tensor) for cache in caches for tensor in cache.offloaded_values.values() if tensor is not None]
    with torch.cuda.stream(stream):
        fetched = [(tensor, tensor._version, cache.onload(tensor)) for cache, tensor in held]
        if stream is not None:
            stream.synchronize()
    return fetched
