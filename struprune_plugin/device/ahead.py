"""The next decoder layer's weights, on their way to the device while the layer before them is worked on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from compressed_tensors.offload.cache import OffloadCache
from torch import Tensor, nn

_IN_BACKGROUND = ("cpu", "cuda")  # devices whose copies another thread may make


@dataclass(frozen=True)
class _Fetched:
    """One weight.

    :param offloaded: the host's, or what stands for it on the disk
    :param version: of its contents, when it was fetched
    :param onloaded: on the device
    """

    offloaded: Tensor
    version: int
    onloaded: Tensor


class WeightsAhead:
    """Fetches one layer's weights ahead of their use; the host's caches get them once that layer is run.

    On a card they travel in a stream of their own, made by another thread, so that neither the card nor the thread that
    feeds it waits. Counted tensors, and devices that are played, are those of one thread: there they are fetched at once.

    :param counted: whether an account counts what is made
    """

    def __init__(self, counted: bool = False) -> None:
        self._counted = counted
        self._stream: torch.cuda.Stream | None = (
            None  # one for all layers: a stream's memory is reused in that stream alone
        )
        self._layer: nn.Module | None = None
        self._coming: Future[list[_Fetched]] | None = None

    def fetch(self, layer: nn.Module) -> None:
        """Begin to fetch a layer's weights; those of another layer that nobody took are let go."""
        if layer is self._layer:
            return
        self.drop()
        caches = [cache for cache in _list_caches(layer) if len(cache)]
        if not caches:
            return
        self._layer = layer
        device = torch.device(caches[0].onload_device)
        if self._counted or device.type not in _IN_BACKGROUND:
            self._coming = Future()
            self._coming.set_result(_load(caches))
            return
        worker = ThreadPoolExecutor(1, thread_name_prefix="weights-ahead")
        self._coming = worker.submit(self._load_beside, caches, device)
        worker.shutdown(wait=False)

    def take(self, layer: nn.Module) -> None:
        """Hand a layer's fetched weights to the host's caches; nothing happens where none were fetched.

        A weight that has been changed or replaced since is left out, and so is everything where the device had no room: the
        host then fetches what it needs itself.
        """
        if layer is not self._layer or self._coming is None:
            return
        coming, self._layer, self._coming = self._coming, None, None
        try:
            fetched = coming.result()
        except torch.OutOfMemoryError:
            return
        if not OffloadCache.offloading_disabled:
            return  # nothing would take them off the device again
        current = {id(tensor) for cache in _list_caches(layer) for tensor in cache.offloaded_values.values()}
        for part in fetched:
            if id(part.offloaded) in current and part.offloaded._version == part.version:
                if part.onloaded.is_cuda:
                    part.onloaded.record_stream(torch.cuda.current_stream(part.onloaded.device))
                OffloadCache.keep_onloaded_values[part.offloaded] = part.onloaded

    def _load_beside(self, caches: list[OffloadCache], device: torch.device) -> list[_Fetched]:
        """Load weights in a stream beside the one that computes; they are there once this returns."""
        if device.type != "cuda":
            return _load(caches)
        self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            fetched = _load(caches)
            self._stream.synchronize()
        return fetched

    def drop(self) -> None:
        """Let go of what was fetched and not taken."""
        coming, self._layer, self._coming = self._coming, None, None
        if coming is not None and not coming.cancel():
            coming.exception()  # a copy that is being made ends first


def _list_caches(layer: nn.Module) -> list[OffloadCache]:
    """Return the host's caches of a layer's weights and buffers."""
    held = (cache for module in layer.modules() for cache in (module._parameters, module._buffers))
    return [cache for cache in held if isinstance(cache, OffloadCache)]


def _load(caches: list[OffloadCache]) -> list[_Fetched]:
    offloaded = [
        (cache, tensor) for cache in caches for tensor in cache.offloaded_values.values() if tensor is not None
    ]
    return [_Fetched(tensor, tensor._version, cache.onload(tensor)) for cache, tensor in offloaded]
