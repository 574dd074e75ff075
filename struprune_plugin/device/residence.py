"""What of a model is on the device: one decoder layer, or less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.offload.cache import OffloadCache
from compressed_tensors.utils import patch_attr
from llmcompressor.utils.dev import get_main_device
from torch import Tensor, nn


@contextmanager
def hold_one_layer(layers: Sequence[tuple[nn.Module, Any]], fused: bool, release: bool = False) -> Iterator[None]:
    """Let decoder layers attend without maps, and let the host's weights of other modules leave the device while one runs.

    The host forces eager attention, whose maps take [heads, tokens, tokens] twice, in float32; a causal mask is all that it
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


@contextmanager
def keep_on_host(
    embeddings: Sequence[nn.Module],
    head: nn.Module,
    to_device: Callable[[Tensor, torch.device], Tensor],
    caches: set[int],
) -> Iterator[None]:
    """Look input embeddings up where their weights are, and let the output ones be applied there.

    :param to_device: brings what was looked up to the device
    :param caches: ids of the host's caches that stay, grown while the block lasts
    """
    device = get_main_device()
    with ExitStack() as stack:
        for module in (*embeddings, head):
            for cache in (module._parameters, module._buffers):
                if isinstance(cache, OffloadCache):
                    stack.enter_context(patch_attr(cache, "onload_device", torch.device("cpu")))
                    stack.callback(caches.discard, id(cache))
                    caches.add(id(cache))
        for module in embeddings:
            handle = module.register_forward_hook(lambda _module, _args, output: to_device(output, device))
            stack.callback(handle.remove)
        yield


def _drop_others(layer: nn.Module) -> None:
    """Forget the onloaded copies, which the host keeps for a whole step, of weights that are not a layer's."""
    kept = OffloadCache.keep_onloaded_values
    if not kept:
        return
    with disable_onloading():
        ours = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    for tensor in [tensor for tensor in kept if id(tensor) not in ours]:
        del kept[tensor]


def release_weights(module: nn.Module) -> None:
    """Take the onloaded weights of a module and all below it off the device; the host loads them again when they are used."""
    kept = OffloadCache.keep_onloaded_values
    if kept:
        with disable_onloading():
            for tensor in (*module.parameters(), *module.buffers()):
                kept.pop(tensor, None)
