"""What the execution device holds while layers are pruned: its allocator's counters, or, on a CPU, an exact account.

On a CPU nothing moves: the host's offload caches, our recorded hidden states and what is computed on are tensors of one
memory, often the same ones. So the account plays an accelerator: while it is open, moves to and from the device
(:func:`to_device`, :func:`to_host`, the host's caches of weights and of activations) copy, and every tensor is on one
side. What an operation makes is on the device unless all tensors that it reads are on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.offload.cache import CPUCache, DiskCache, OffloadCache
from compressed_tensors.utils import patch_attr
from llmcompressor.pipelines.cache import IntermediatesCache, IntermediateValue, OverrideEqMode
from llmcompressor.utils.dev import get_main_device
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from struprune_plugin.surgery import release_weights
from struprune_plugin.topology import find_decoder_layers, find_family

ON_ACCELERATOR = "accelerator bytes allocated"
ON_CPU = "account of the tensors that an accelerator would hold"
UNMEASURED = "not measured (measure_memory: true counts it on a CPU)"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages on the device, now and at their peak; kernels' inner workspaces stay unseen.

    :param everything: count all that operations make, of the host's tensors too
    :ivar live: bytes now
    :ivar peak: most bytes since it was last set
    """

    def __init__(self, everything: bool = False) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._held: set[int] = set()  # addresses of the storages on the device
        self._to_host: bool | None = False if everything else None  # what a move, the operation in progress, decides

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf.untyped_storage() for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        made = [storage for storage in made if storage.data_ptr() not in self._held]
        if made and self._to_host is not True:
            read = {a.untyped_storage().data_ptr() for a in tree_iter((args, kwargs)) if isinstance(a, Tensor)}
            if self._to_host is False or not read or not read.isdisjoint(self._held):
                for storage in made:
                    if storage.data_ptr() not in read:
                        self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key and key not in self._held:  # meta tensors have no address
            self._held.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.live -= size

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is on the device."""
        return tensor.untyped_storage().data_ptr() in self._held

    def move(self, tensor: Tensor, to_host: bool) -> Tensor:
        """Return a tensor on the other side, copied unless it is there."""
        if self.holds(tensor) != to_host or tensor.is_meta:
            return tensor
        before, self._to_host = self._to_host, to_host
        try:
            return tensor.clone()
        finally:
            self._to_host = before


class DeviceAccount:
    """The peak of the bytes on the device, over any span.

    :param live: the account of a CPU; None for the accelerator's counters
    """

    def __init__(self, live: LiveBytes | None):
        self.live = live
        self._before = 0  # peak since the enclosing span began, up to the last reset of the counters
        self.measure = ON_CPU if live else ON_ACCELERATOR

    def _read(self) -> int:
        return self.live.peak if self.live else torch.cuda.max_memory_allocated()

    def _reset(self) -> None:
        if self.live:
            self.live.peak = self.live.live
        else:
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def watch(self) -> Iterator[list[int]]:
        """Give a list that holds the peak once the block is over; blocks may be nested."""
        outer, self._before = max(self._before, self._read()), 0
        self._reset()
        peak: list[int] = []
        try:
            yield peak
        finally:
            peak.append(max(self._before, self._read()))
            self._before = max(outer, peak[0])


_open: DeviceAccount | None = None
_host_caches: set[int] = set()  # of weights that are never onloaded


@contextmanager
def open_account(on_cpu: bool) -> Iterator[DeviceAccount | None]:
    """Count what the device holds inside; an account that is open already goes on.

    :param on_cpu: count on a CPU too, at the price of copies; there is no account otherwise
    """
    global _open
    if _open is not None or not (on_cpu or torch.cuda.is_available()):
        yield _open
        return
    with ExitStack() as stack:
        live = None
        if not torch.cuda.is_available():
            live = stack.enter_context(LiveBytes())
            stack.enter_context(_let_caches_copy(live))
        _open = DeviceAccount(live)
        try:
            yield _open
        finally:
            _open = None


@contextmanager
def hold_one_layer(model: PreTrainedModel, release: bool = False, embed_on_host: bool = False) -> Iterator[None]:
    """Let decoder layers attend without maps, and let the host's weights of other modules leave the device while one runs.

    The host forces eager attention, whose maps take [heads, tokens, tokens] twice, in float32; a causal mask is all that it
    needs that for. It also keeps the embeddings on the device beside the first layer.

    :param release: let the weights of every module of a layer leave once it has run
    :param embed_on_host: look embeddings up on the host
    """
    family = find_family(model)
    fused = can_fuse_attention(model)
    handles = []
    for _, layer in find_decoder_layers(model):
        config = getattr(layer.get_submodule(family.attention), "config", model.config)
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
        with _keep_embeddings_on_host(model) if embed_on_host else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _keep_embeddings_on_host(model: PreTrainedModel) -> Iterator[None]:
    """Look input embeddings up where their weights are, and let the output ones be applied there."""
    device = get_main_device()
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    with ExitStack() as stack:
        for module in (*embeddings, model.get_output_embeddings()):
            for cache in (module._parameters, module._buffers):
                if isinstance(cache, OffloadCache):
                    stack.enter_context(patch_attr(cache, "onload_device", torch.device("cpu")))
                    stack.callback(_host_caches.discard, id(cache))
                    _host_caches.add(id(cache))
        for module in embeddings:
            handle = module.register_forward_hook(lambda _module, _args, output: to_device(output, device))
            stack.callback(handle.remove)
        yield


def can_fuse_attention(model: PreTrainedModel) -> bool:
    """Tell whether layers may attend without maps: sdpa drops a soft cap."""
    return model._supports_sdpa and getattr(model.config, "attn_logit_softcapping", None) is None


def _drop_others(layer: nn.Module) -> None:
    """Forget the onloaded copies, which the host keeps for a whole step, of weights that are not a layer's."""
    kept = OffloadCache.keep_onloaded_values
    if not kept:
        return
    with disable_onloading():
        ours = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    for tensor in [tensor for tensor in kept if id(tensor) not in ours]:
        del kept[tensor]


@contextmanager
def work_on_host(active: bool = True) -> Iterator[torch.device]:
    """Count what is made inside, on the device given, as the host's; a block with False inside counts as usual again."""
    live = None if _open is None else _open.live
    before = live._to_host if live else None
    try:
        if live:
            live._to_host = True if active else None
        yield torch.device("cpu")
    finally:
        if live:
            live._to_host = before


def find_free_bytes() -> int | None:
    """Return what the accelerator has free, less a tenth for what is not counted; None without one."""
    return round(0.9 * torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None


@contextmanager
def wait_on_host(active: bool) -> Iterator[None]:
    """Let what a backward pass needs wait on the host."""
    if not active:
        yield
        return

    def pack(tensor: Tensor) -> tuple[Tensor, torch.device]:
        return to_host(tensor), tensor.device

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: to_device(*held)):
        yield


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor on the host, without its graph."""
    if _open is None or _open.live is None:
        return tensor.detach().cpu()
    return _open.live.move(tensor.detach(), to_host=True)


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on the execution device."""
    if _open is None or _open.live is None:
        return tensor.to(device, dtype)
    return _open.live.move(tensor, to_host=False).to(dtype or tensor.dtype)


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
        return lambda cache, offloaded: turn(onload(cache, offloaded), to_host=id(cache) in _host_caches)

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
