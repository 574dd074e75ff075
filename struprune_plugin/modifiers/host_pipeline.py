"""Setup of llm-compressor's calibration pipeline, for the plugin's own layer loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from compressed_tensors.utils import patch_attr
from llmcompressor.modeling.moe import context as context_of_experts
from llmcompressor.utils.helpers import DisableQuantization, calibration_forward_context
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.model.layers import can_fuse_attention, list_attention_configs
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.offload_plan import OffloadPlan
from struprune_plugin.runtime.residence import hold_one_layer


@contextmanager
def calibrating(model: PreTrainedModel) -> Iterator[None]:
    """Disable cache, gradients, head and quantisers in the block, as llm-compressor's pipeline does."""
    with calibration_forward_context(model), DisableQuantization(model):
        yield


@contextmanager
def enter_device_context(model: PreTrainedModel, placement: OffloadPlan) -> Iterator[DeviceContext]:
    """Yield a device context that holds one decoder layer on the device at a time and measures the device's memory."""
    layers = list_attention_configs(model)
    with ExitStack() as stack:
        stack.enter_context(patch_attr(context_of_experts, "_CALIBRATE_ALL_EXPERTS", False))  # each sees its own tokens
        stack.enter_context(hold_one_layer(layers, can_fuse_attention(model), placement.release_weights))
        context = stack.enter_context(DeviceContext.open(placement))
        if placement.embed_on_host:
            embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
            head = model.get_output_embeddings()
            assert head is not None
            stack.enter_context(context.keep_on_host(embeddings, head))
        yield context
