"""How much the model's output suffers from an error in the output of one module, one decoder layer on the device at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from llmcompressor.modifiers.utils.hooks import HooksMixin
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.device.ranks import count_before, count_ranks, gather_numbers, sum_over_ranks
from struprune_plugin.device.room import Room
from struprune_plugin.layer.calls import LayerCall, split_tokens, take_hidden
from struprune_plugin.maths.statistics import multiply_by_itself, multiply_in_order
from struprune_plugin.model.families import find_family
from struprune_plugin.model.layers import find_decoder_layers, find_linear, freeze_weights
from struprune_plugin.model.surgery import read_weight
from struprune_plugin.model.units.group import UnitGroup, select_groups

_DRAWN = 64  # tokens whose labels are drawn at once


def measure_fisher(
    model: PreTrainedModel,
    loader: Iterable[dict[str, Tensor]],
    groups: Sequence[UnitGroup],
    num_sequences: int,
    room: Room,
) -> dict[str, Tensor]:
    """Return the Fisher information of every consumer's output, mean over tokens, by group name.

    With g the gradient of -log p(y) with respect to the output, y drawn from the model's own p: ``F = E[g g^T]``, shape
    [d, d], float64. An error e there changes the model's distribution by a KL divergence of ``e^T F e / 2`` to second
    order, tokens taken as independent.

    One forward pass keeps every layer's input on the host; then each layer alone runs again and passes the gradient on.
    Only activations get gradients.

    :return: empty where the model's output is not finite: the calibration pass that follows names the linear
    :param num_sequences: at most this many sequences are used, of every process' loader an equal share
    :param room: its placement says what is done on the host, and how many logits are held at once
    """
    sums: dict[str, Tensor] = {}
    share = -(-num_sequences // count_ranks())
    parts = _take_sequences(loader, share)
    first = count_before(sum(len(part["input_ids"]) for part in parts))
    counted, finite = 0, True
    with freeze_weights(model), HooksMixin.disable_hooks():
        for batch in tqdm(parts, desc="sensitivity"):
            calls, gradient, num_tokens = _run_forward(model, batch, first, room)
            finite = num_tokens > 0
            if not finite:
                break
            first, counted = first + len(batch["input_ids"]), counted + num_tokens
            for (name, layer), call in zip(reversed(find_decoder_layers(model)), reversed(calls), strict=True):
                here = select_groups(groups, name)
                with room.wait_on_host():
                    gradient = _run_backward(layer, call, here, gradient, sums, room)
    counts = gather_numbers(counted, finite)
    if not all(row[1] for row in counts):
        return {}
    total = sum(row[0] for row in counts)
    return {name: sum_over_ranks(part) / total for name, part in sums.items()}


def _take_sequences(loader: Iterable[dict[str, Tensor]], num_sequences: int) -> list[dict[str, Tensor]]:
    """Return the first sequences, in the loader's batches."""
    parts: list[dict[str, Tensor]] = []
    left = num_sequences
    for batch in loader:
        parts.append({name: part[:left] for name, part in batch.items() if name in ("input_ids", "attention_mask")})
        left -= len(parts[-1]["input_ids"])
        if left <= 0:
            break
    return parts


def _run_forward(
    model: PreTrainedModel, batch: dict[str, Tensor], first: int, room: Room
) -> tuple[list[LayerCall], Tensor, int]:
    """Return every decoder layer's call, the gradient at the last one's output, and the number of tokens scored.

    No tokens are scored where the output is not finite.

    :param first: number of the batch's first sequence among all; it draws that sequence's labels, so that they do not
        depend on how sequences are split into batches or over processes
    """
    calls: list[LayerCall] = []
    tail: list[Tensor] = []

    def record(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.append(LayerCall.record(args, kwargs, calls[-1] if calls else None, room))

    def cut(_module: nn.Module, _args: tuple, output: Any) -> Any:
        hidden = take_hidden(output).detach().requires_grad_()
        tail.append(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    layers = [layer for _, layer in find_decoder_layers(model)]
    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    handles.append(layers[-1].register_forward_hook(cut))
    mask = batch.get("attention_mask")
    try:
        with torch.enable_grad():
            final = model.base_model(
                input_ids=batch["input_ids"], attention_mask=mask, use_cache=False
            ).last_hidden_state
            valid = room.to_device((torch.ones_like(batch["input_ids"]) if mask is None else mask).bool(), final.device)
            above = _find_output_gradient(model, final.detach(), valid, first, room)
            if above is None:
                return calls, final, 0
            (gradient,) = torch.autograd.grad(final, tail, above)
    finally:
        for handle in handles:
            handle.remove()
    return calls, gradient, int(valid.sum())


def _find_output_gradient(
    model: PreTrainedModel, final: Tensor, valid: Tensor, first: int, room: Room
) -> Tensor | None:
    """Return the gradient of -log p(y), y drawn from p, at the inputs of the output embeddings; None where not finite.

    :param final: those inputs, shape [sequences, tokens, d]
    :param valid: which tokens count, shape [sequences, tokens], bool
    """
    if room.placement.embed_on_host:
        with room.on_host():
            below = _find_gradient_below_head(model, room.to_host(final), room.to_host(valid), first, room)
        return None if below is None else room.to_device(below, final.device)
    return _find_gradient_below_head(model, final, valid, first, room)


def _find_gradient_below_head(
    model: PreTrainedModel, final: Tensor, valid: Tensor, first: int, room: Room
) -> Tensor | None:
    """Do the work of :func:`_find_output_gradient` where its tensors are."""
    head: Any = model.get_output_embeddings()
    size = max(1, room.placement.logits // model.config.vocab_size)
    gradient, generator = torch.zeros_like(final), torch.Generator()
    for row, (sequence, counted) in enumerate(zip(final, valid, strict=True)):
        generator.manual_seed(first + row)
        draws = room.to_device(torch.rand(len(sequence), generator=generator, dtype=torch.float64), final.device)
        for start in range(0, len(sequence), size):
            span = slice(start, start + size)
            logits = head(sequence[span]).detach().float().requires_grad_()
            log_probs = torch.log_softmax(shape_logits(model, logits), dim=-1)
            if not log_probs[counted[span]].isfinite().all():
                return None
            labels = draw_labels(log_probs.detach(), draws[span])
            chosen = log_probs.gather(-1, labels)[counted[span]]
            (above,) = torch.autograd.grad(-chosen.sum(), logits)
            del logits, log_probs
            gradient[row, span] = multiply_in_order(above, read_weight(head)[0])
    return gradient


def draw_labels(log_probs: Tensor, draws: Tensor) -> Tensor:
    """Return the token at which each distribution's running sum passes its draw, shape [tokens, 1], int64.

    One number a token is drawn on the host, whatever the vocabulary, so that every device finds the same labels.

    :param log_probs: shape [tokens, V]
    :param draws: uniform in [0, 1), shape [tokens], float64
    """
    labels = []
    for part, draw in zip(log_probs.split(_DRAWN), draws.split(_DRAWN), strict=True):
        heights = part.exp().cumsum(-1, dtype=torch.float64)
        labels.append(torch.searchsorted(heights, draw[:, None] * heights[:, -1:], right=True))
    return torch.cat(labels).clamp(max=log_probs.shape[-1] - 1)


def shape_logits(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """Scale and cap what the head gives, as the model's own forward pass does."""
    family = find_family(model)
    if family.logit_scale:
        logits = logits / getattr(model.config, family.logit_scale)
    cap = getattr(model.config, family.logit_cap, None) if family.logit_cap else None
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _run_backward(
    layer: nn.Module,
    call: LayerCall,
    groups: Sequence[UnitGroup],
    gradient: Tensor,
    sums: dict[str, Tensor],
    room: Room,
) -> Tensor:
    """Run one layer forth and back; add ``g g^T`` at its consumers, and return the gradient at its input."""
    outputs: dict[str, Tensor] = {}

    def see(name: str) -> Any:
        return lambda _module, _args, output: outputs.update({name: output})

    handles = [find_linear(layer, group.consumer).register_forward_hook(see(group.name)) for group in groups]
    hidden = room.to_device(call.hidden, call.device).requires_grad_()
    try:
        with torch.enable_grad():
            output = call.repeat(layer, room, hidden)
            below, *found = torch.autograd.grad(output, [hidden, *(outputs[group.name] for group in groups)], gradient)
    finally:
        for handle in handles:
            handle.remove()
    tokens = None if call.tokens is None else room.to_device(call.tokens, below.device)
    for group, gradients in zip(groups, found, strict=True):
        gradients = gradients.flatten(0, -2).float()
        for part in split_tokens(tokens, len(gradients), call.length):
            gram = room.to_host(multiply_by_itself(gradients[part])).double()
            sums[group.name] = sums[group.name] + gram if group.name in sums else gram
    return below
