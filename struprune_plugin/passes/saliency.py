"""Gradient saliency of every unit, from forward and backward passes over the whole dense model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.device.ranks import gather_numbers, sum_over_ranks
from struprune_plugin.device.room import find_free_bytes
from struprune_plugin.maths.elimination import expand_units
from struprune_plugin.maths.importance import score_snip
from struprune_plugin.model.layers import find_linear, freeze_weights
from struprune_plugin.model.surgery import sum_rows
from struprune_plugin.model.units.group import UnitGroup


def check_gradient_memory(model: PreTrainedModel, batch_shape: torch.Size) -> None:
    """Refuse gradients of a model that, with its activations, exceeds the free memory.

    Weights once, and per layer and token about 34 hidden sizes of activations plus the attention maps, and the logits
    three times, all in the model's dtype or float32.

    :raises ValueError: the estimate and what is free
    """
    batch, length = batch_shape
    config = model.config
    heads = max(getattr(module, "num_heads", 1) for module in model.modules())
    per_layer = batch * length * (34 * config.hidden_size + 3 * heads * length)
    activations = 4 * (config.num_hidden_layers * per_layer + 3 * batch * length * config.vocab_size)
    needed = activations + sum(p.numel() * p.element_size() for p in model.parameters())
    free = find_free_bytes() or psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"importance: snip must hold the whole model and its activations, about {needed / 1e9:.1f} GB, got "
            f"{free / 1e9:.1f} GB free. Lower batch_size, or use a layer-wise importance: obs or wanda."
        )


def measure_snip(
    model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup]
) -> dict[str, Tensor]:
    """Return :func:`~struprune_plugin.maths.importance.score_snip` of every unit of every group, by group name.

    The loss is next-token cross entropy, padding left out. Only activations get gradients; weights collect none.
    """
    linears: dict[tuple[str, str], nn.Linear] = {
        (group.name, name): find_linear(model.get_submodule(group.layer_name), name)
        for group in groups
        for name in (group.consumer, *group.producers)
    }
    sums: dict[tuple[str, str], Tensor] = {}
    seen: dict[tuple[str, str], Tensor] = {}
    consumers = {(group.name, group.consumer) for group in groups}

    def watch(key: tuple[str, str]) -> Any:
        def hook(_module: nn.Module, args: tuple, output: Tensor) -> None:
            seen[key] = args[0] if key in consumers else output

        return hook

    handles = [linear.register_forward_hook(watch(key)) for key, linear in linears.items()]
    embeddings: Any = model.get_input_embeddings()
    handles.append(embeddings.register_forward_hook(lambda _m, _a, out: out.requires_grad_()))
    counted = 0
    try:
        with freeze_weights(model):
            for batch in tqdm(loader, desc="snip gradients"):
                counted += _add_batch(model, batch, linears, consumers, seen, sums)
    finally:
        for handle in handles:
            handle.remove()
    num_tokens = max(sum(row[0] for row in gather_numbers(counted)), 1)
    for key, total in sums.items():
        sums[key] = sum_over_ranks(total) / num_tokens
    return {group.name: _score(group, sums) for group in groups}


def _add_batch(
    model: PreTrainedModel,
    batch: dict[str, Tensor],
    linears: dict[tuple[str, str], nn.Linear],
    consumers: set[tuple[str, str]],
    seen: dict[tuple[str, str], Tensor],
    sums: dict[tuple[str, str], Tensor],
) -> int:
    """Add a batch to the sums; return the number of tokens predicted."""
    mask = batch.get("attention_mask")
    labels = batch["input_ids"] if mask is None else batch["input_ids"].masked_fill(mask == 0, -100)
    labels = labels[:, 1:]
    with torch.enable_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).logits[:, :-1].float()
        labels = labels.to(logits.device).flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")  # a mean is the batch's
        keys = list(linears)
        gradients = torch.autograd.grad(loss, [seen[key] for key in keys])
    for key, gradient in zip(keys, gradients, strict=True):
        value = seen[key].detach()
        if key not in consumers and linears[key].bias is not None:
            value = value - linears[key].bias.detach()  # a producer's bias is no weight
        products = (value.double() * gradient.double()).view(len(batch["input_ids"]), -1, value.shape[-1])
        for total in products.sum(1):  # sequence by sequence, however they are batched
            sums[key] = sums[key] + total if key in sums else total
    seen.clear()
    return int((labels != -100).sum())


def _score(group: UnitGroup, sums: dict[tuple[str, str], Tensor]) -> Tensor:
    consumer = group.to_unit_order(sums[group.name, group.consumer])
    units = torch.arange(group.num_units, device=consumer.device)
    producers = [sum_rows(group, name, sums[group.name, name]) for name in group.producers]
    return score_snip(consumer, expand_units(units, group.columns_per_unit).view(group.num_units, -1), producers)
