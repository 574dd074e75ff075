"""Pass over the decoder layers of a model: one layer at a time on the device, all batches through it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.utils import patch_attr, patch_attrs
from llmcompressor.modeling.moe import context as context_of_experts
from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.helpers import DisableQuantization, calibration_forward_context
from loguru import logger
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.layerwise.ends import BatchFlow, enter_batches
from struprune_plugin.layerwise.statistics import LayerStatistics
from struprune_plugin.layerwise.wide_layers import compute_wide
from struprune_plugin.model.experts import run_experts_fast
from struprune_plugin.model.layers import can_fuse_attention, find_decoder_layers
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.precision import Precision, describe_precision, find_widened
from struprune_plugin.runtime.residence import onload_one_layer


@dataclass(frozen=True)
class LayerStep:
    """Decoder layer in its turn, with its weights on the device, and all batches."""

    index: int
    name: str
    layer: nn.Module
    flows: Sequence[BatchFlow]

    @property
    def progress(self) -> str:
        """Position in the pass, for progress bars."""
        return f"({self.index + 1}/{len(self.flows[0].calls)}): "

    def observe(self, statistics: LayerStatistics, groups: Sequence[UnitGroup], batches: slice = slice(None)) -> None:
        """Run the layer on batches while statistics are gathered."""
        for flow in tqdm(self.flows[batches], desc=f"{self.progress}calibration", leave=False):
            output = statistics.run_layer(self.layer, groups, flow.enter(self.index))
            if output is not None:
                flow.states = output.map(statistics.context.offload)


@torch.no_grad()
def stream_layers(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    context: DeviceContext,
    progress: str,
    propagates: bool = False,
) -> Iterator[LayerStep]:
    """Yield every decoder layer in order, its weights on the device until the next layer is requested.

    :param progress: label of the progress bar; empty for no bar
    :param propagates: whether a layer runs again once it has been changed, and so the next one sees its outputs
    """
    flows = enter_batches(model, batches, context)
    for index, name, layer, following in tqdm(list(walk_layers(model)), desc=progress, disable=not progress):
        with context.onload_layer(layer, following):
            yield LayerStep(index, name, layer, flows)
            for flow in flows if propagates else ():
                flow.advance(index, layer, context)
            for flow in flows:
                flow.forget(index, context)


def walk_layers(
    model: PreTrainedModel, backward: bool = False
) -> Iterator[tuple[int, str, nn.Module, nn.Module | None]]:
    """Yield (index, name, layer, following layer) of the decoder layers in the order of a pass."""
    visits = [(index, *named) for index, named in enumerate(find_decoder_layers(model))][:: -1 if backward else 1]
    for place, visit in enumerate(visits):
        yield *visit, visits[place + 1][2] if place + 1 < len(visits) else None


@contextmanager
def calibrating(model: PreTrainedModel) -> Iterator[None]:
    """Disable cache, gradients, head and quantisers in the block, as llm-compressor's pipeline does, but fuse attention."""
    with ExitStack() as stack:
        with disable_onloading():  # the head's weights are read for their shape alone
            stack.enter_context(calibration_forward_context(model))
        stack.enter_context(DisableQuantization(model))
        stack.enter_context(fuse_attention(model))
        yield


@contextmanager
def fuse_attention(model: PreTrainedModel) -> Iterator[None]:
    """Compute attention without maps and, where the model needs none, without a mask, if fused attention is exact, else eagerly.

    llm-compressor forces eager attention, whose mask is dense even where no token is padding. transformers loads models with fused
    attention that it is not exact for.
    """
    kind = "sdpa" if can_fuse_attention(model) else "eager"
    modules: list[Any] = [model, *(module for _, layer in find_decoder_layers(model) for module in layer.modules())]
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    with patch_attrs(configs.values(), "_attn_implementation", repeat(kind)):
        yield


@contextmanager
def enter_device_context(
    model: PreTrainedModel, offload: bool = False, precision: Precision = "auto"
) -> Iterator[DeviceContext]:
    """Yield a device context that holds one decoder layer on the device at a time and measures the device's memory.

    :param offload: whether moments, solves and embeddings are on the host
    :param precision: dtype of the layers while they run: ``auto``, ``model`` or ``float32``
    :raises torch.OutOfMemoryError: the message says what lowers the need
    """
    with ExitStack() as stack:
        stack.enter_context(patch_attr(context_of_experts, "_CALIBRATE_ALL_EXPERTS", False))  # each sees its own tokens
        stack.enter_context(run_experts_fast(model))
        stack.enter_context(fuse_attention(model))
        device = get_main_device()
        widened = find_widened(precision, device)
        stack.enter_context(compute_wide(model, widened))
        stack.enter_context(onload_one_layer([layer for _, layer in find_decoder_layers(model)]))
        context = DeviceContext(offload)
        context.widened, context.computed_in = widened, describe_precision(model.dtype, precision, device)
        logger.info(f"layers compute in {context.computed_in}")
        if offload:
            embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
            head = model.get_output_embeddings()
            assert head is not None
            stack.enter_context(context.apply_on_host(embeddings, head))
        try:
            yield context
        except torch.OutOfMemoryError as error:
            remedy = "shorter sequences or a smaller batch_size" if offload else "`offload: true` (--set offload=true)"
            raise torch.OutOfMemoryError(f"the device has too little memory. Use {remedy}. {error}") from error
