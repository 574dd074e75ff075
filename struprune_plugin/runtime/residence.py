"""Weights on the device: one decoder layer, or less, and the next one's in transit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.offload.cache import OffloadCache
from torch import Tensor, nn


@contextmanager
def hold_one_layer(layers: Sequence[tuple[nn.Module, Any]], fused: bool, release: bool = False) -> Iterator[None]:
    """Let decoder layers attend without maps, and let the host's weights of other modules leave the device while one runs.

    llm-compressor forces eager attention, whose maps take [heads, tokens, tokens] twice, in float32; a causal mask is all that it
    needs that for. It also keeps the embeddings on the device beside the first layer.

    :param layers: every decoder layer, and the configuration that its attention module reads
    :param fused: whether they may attend without maps
    :param release: let the weights of every module of a layer leave once it has run
    """
    handles = []
    for layer, config in layers:
        before: list[str] = []

        def enter(module: nn.Module, _args: Any, config: Any = config, before: Any = before) -> None:
            _drop_others(module)
            before.append(config._attn_implementation)
            if fused:
                config._attn_implementation = "sdpa"

        def leave(_module: nn.Module, _args: Any, _output: Any, config: Any = config, before: Any = before) -> None:
            config._attn_implementation = before.pop()

        handles.append(layer.register_forward_pre_hook(enter, prepend=True))
        handles.append(layer.register_forward_hook(leave, always_call=True))
        for module in layer.modules() if release else ():
            if module._parameters:
                handles.append(module.register_forward_hook(lambda module, _args, _output: release_weights(module)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _drop_others(layer: nn.Module) -> None:
    """Forget the onloaded copies, which llm-compressor keeps for a whole step, of weights that are not a layer's."""
    kept = OffloadCache.keep_onloaded_values
    if not kept:
        return
    with disable_onloading():
        ours = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    for tensor in [tensor for tensor in kept if id(tensor) not in ours]:
        del kept[tensor]


def release_weights(module: nn.Module) -> None:
    """Take the onloaded weights of a module and all below it off the device; llm-compressor loads them again when they are used."""
    kept = OffloadCache.keep_onloaded_values
    if kept:
        with disable_onloading():
            for tensor in (*module.parameters(), *module.buffers()):
                kept.pop(tensor, None)


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

    Another thread makes the copies, on a card in a stream of their own: neither the card nor the thread that feeds it waits.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None  # one for all layers: its memory is reused in that stream alone
        self._layer: nn.Module | None = None
        self._coming: Future[list[_Fetched]] | None = None

    def fetch(self, layer: nn.Module) -> None:
        """Begin to fetch a layer's weights; those of another layer that nobody took are let go."""
        if layer is self._layer:
            return
        self.drop()
        caches = [cache for cache in _list_caches(layer) if len(cache)]
        device = torch.device(caches[0].onload_device) if caches else None
        if device is not None and device.type in ("cpu", "cuda"):  # whose copies another thread may make
            self._layer, self._coming = layer, self._submit(caches, device)

    def _submit(self, caches: list[OffloadCache], device: torch.device) -> Future[list[_Fetched]]:
        worker = ThreadPoolExecutor(1, thread_name_prefix="weights-ahead")
        coming = worker.submit(self._load_beside, caches, device)
        worker.shutdown(wait=False)
        return coming

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
            return load_weights(caches)
        self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            fetched = load_weights(caches)
            self._stream.synchronize()
        return fetched

    def drop(self) -> None:
        """Release what was fetched and not taken."""
        coming, self._layer, self._coming = self._coming, None, None
        if coming is not None and not coming.cancel():
            coming.exception()  # a copy that is being made ends first


def _list_caches(layer: nn.Module) -> list[OffloadCache]:
    """Return the host's caches of a layer's weights and buffers."""
    held = (cache for module in layer.modules() for cache in (module._parameters, module._buffers))
    return [cache for cache in held if isinstance(cache, OffloadCache)]


def load_weights(caches: list[OffloadCache]) -> list[_Fetched]:
    """Copy the weights of caches to the device."""
    offloaded = [
        (cache, tensor) for cache in caches for tensor in cache.offloaded_values.values() if tensor is not None
    ]
    return [_Fetched(tensor, tensor._version, cache.onload(tensor)) for cache, tensor in offloaded]
