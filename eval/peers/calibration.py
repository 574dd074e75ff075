"""Conversion of calibration windows to calls of the first decoder layer, from which a peer continues layer by layer."""

from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.calls import LayerCall, States
from struprune_plugin.layerwise.ends import enter_batches
from struprune_plugin.runtime.device_context import DeviceContext

ROOM = DeviceContext()  # of every peer: all on the device, nothing counted


def record_calls(model: PreTrainedModel, windows: Tensor, batch_size: int = 8) -> list[LayerCall]:
    """Return what enters the first decoder layer, batch by batch; the layers themselves are not run.

    :param windows: calibration tokens, shape [windows, window], int64
    """
    batches = [{"input_ids": batch.to(model.device)} for batch in windows.split(batch_size)]
    return [flow.calls[0] for flow in enter_batches(model, batches, ROOM)]


def run_again(call: LayerCall, layer: nn.Module, hidden: Tensor) -> Tensor:
    """Return a layer's output hidden states for others than the call's."""
    return call.run(layer, ROOM, States(hidden)).hidden
