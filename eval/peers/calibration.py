"""Conversion of calibration windows to calls of the first decoder layer, from which a peer continues layer by layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.runtime.device_context import DeviceContext


class _FirstLayerReached(Exception):
    """Ends a forward pass that has shown all that is wanted of it."""


ROOM = DeviceContext()  # of every peer: all on the device, nothing counted


def record_calls(model: PreTrainedModel, windows: Tensor, batch_size: int = 8) -> list[LayerCall]:
    """Return what enters the first decoder layer, batch by batch; the layers themselves are not run.

    :param windows: calibration tokens, shape [windows, window], int64
    """
    calls: list[LayerCall] = []

    def record(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.append(LayerCall.record(args, kwargs, calls[-1] if calls else None, ROOM))
        raise _FirstLayerReached

    _, first = find_decoder_layers(model)[0]
    handle = first.register_forward_pre_hook(record, with_kwargs=True)
    try:
        for batch in windows.split(batch_size):
            try:
                model(input_ids=batch.to(model.device), use_cache=False)
            except _FirstLayerReached:
                continue
    finally:
        handle.remove()
    return calls
