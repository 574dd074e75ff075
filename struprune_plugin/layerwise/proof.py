"""Whether a model, taken layer by layer, gives what its own forward pass gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.layerwise.ends import leave_layers
from struprune_plugin.layerwise.head import Head
from struprune_plugin.layerwise.passes import stream_layers
from struprune_plugin.runtime.device_context import DeviceContext

_TOLERANCE = 1e-5  # of the largest logit


@torch.no_grad()
def check_passes(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> None:
    """Refuse a model whose layers, run one after the other on what was recorded, do not give the model's own logits.

    :param model: small, in float32: all of it runs
    :param batches: with padding and without
    :raises ValueError: they do not, or as :func:`~struprune_plugin.layerwise.ends.enter_layers` and
        :func:`~struprune_plugin.layerwise.logits.measure_logits` do
    """
    context, head, flows = DeviceContext(), Head.of(model), []
    for step in stream_layers(model, batches, context, "check"):
        flows = list(step.flows)
        for flow in flows:
            flow.leave(flow.enter(step.index).run(step.layer, context), context)
    for flow, batch in zip(flows, batches, strict=True):
        wanted = model(**batch, use_cache=False).logits
        ((_, found, _),) = head.compute_logits(leave_layers(model, batch, flow.states.hidden, context))
        kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        error = float((found - wanted)[kept].abs().max() / wanted[kept].abs().max())
        if not error <= _TOLERANCE:
            raise ValueError(
                f"model: {type(model).__name__} must give the same logits layer by layer as whole, got a difference of {error:.1e} "
                "of the largest. Choose another model."
            )
