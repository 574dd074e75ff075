"""Gradients of the whole dense model's loss at its linears, batch by batch, for importances that ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.model.layers import find_linear, freeze_weights
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.device_context import find_free_bytes


@dataclass(frozen=True)
class LinearGradient:
    """One linear in one backward pass.

    :param group: that the linear belongs to
    :param name: in the layer
    :param inputs: shape [batch, sequence, n]
    :param outputs: shape [batch, sequence, rows]
    :param gradient: of the summed loss, at the inputs of a consumer where these were asked for, else at the outputs
    """

    group: UnitGroup
    name: str
    linear: nn.Linear
    inputs: Tensor
    outputs: Tensor
    gradient: Tensor


def check_gradient_memory(model: PreTrainedModel, batch_shape: torch.Size, method: str, extra_bytes: int = 0) -> None:
    """Refuse gradients of a model that, with its activations, exceeds the free memory.

    Weights once, and per layer and token about 34 hidden sizes of activations plus the attention maps, and the logits
    three times, all in the model's dtype or float32.

    :param method: for the message
    :param extra_bytes: that the method holds besides
    :raises ValueError: the estimate and what is free
    """
    batch, length = batch_shape
    config = model.config.get_text_config(decoder=True)
    heads = max(getattr(module, "num_heads", 1) for module in model.modules())
    per_layer = batch * length * (34 * config.hidden_size + 3 * heads * length)
    activations = 4 * (config.num_hidden_layers * per_layer + 3 * batch * length * config.vocab_size)
    needed = extra_bytes + activations + sum(p.numel() * p.element_size() for p in model.parameters())
    free = find_free_bytes() or psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"importance: {method} must hold the whole model and its activations, about {needed / 1e9:.1f} GB, got "
            f"{free / 1e9:.1f} GB free. Lower batch_size, or use a layer-wise importance: obs or wanda."
        )


def visit_gradients(
    model: PreTrainedModel,
    loader: Iterable[dict[str, Tensor]],
    groups: Sequence[UnitGroup],
    progress: str,
    at_consumer_inputs: bool = False,
) -> Iterator[tuple[int, list[LinearGradient]]]:
    """Run the model forth and back on every batch; give (tokens predicted, every linear's gradient).

    The loss is next-token cross entropy, summed, padding left out. Only activations get gradients; weights collect none.

    :param at_consumer_inputs: take the gradient at the consumers' inputs; at their outputs else
    """
    linears = {
        (group.name, name): (group, find_linear(model.get_submodule(group.layer_name), name))
        for group in groups
        for name in (group.consumer, *group.producers)
    }
    seen: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def watch(key: tuple[str, str]) -> Any:
        return lambda _module, args, output: seen.update({key: (args[0], output)})

    embeddings: Any = model.get_input_embeddings()
    with ExitStack() as stack, freeze_weights(model):
        for key, (_, linear) in linears.items():
            stack.callback(linear.register_forward_hook(watch(key)).remove)
        stack.callback(embeddings.register_forward_hook(lambda _m, _a, out: out.requires_grad_()).remove)
        for batch in tqdm(loader, desc=progress):
            with torch.enable_grad():
                loss, num_tokens = _find_loss(model, batch)
                wanted = [
                    seen[key][0] if at_consumer_inputs and key[1] == group.consumer else seen[key][1]
                    for key, (group, _) in linears.items()
                ]
                gradients = torch.autograd.grad(loss, wanted)
            parts = [
                LinearGradient(group, key[1], linear, seen[key][0].detach(), seen[key][1].detach(), gradient)
                for (key, (group, linear)), gradient in zip(linears.items(), gradients, strict=True)
            ]
            seen.clear()
            yield num_tokens, parts


def _find_loss(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the summed next-token cross entropy, and over how many tokens."""
    mask = batch.get("attention_mask")
    labels = batch["input_ids"] if mask is None else batch["input_ids"].masked_fill(mask == 0, -100)
    labels = labels[:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).logits[:, :-1].float()
    labels = labels.to(logits.device).flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")  # a mean is the batch's
    return loss, int((labels != -100).sum())
