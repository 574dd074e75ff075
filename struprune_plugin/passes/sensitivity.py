"""How much the model's output suffers from an error in the output of one module, one decoder layer on the device at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from llmcompressor.modifiers.utils.hooks import HooksMixin
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.device.ranks import count_before, count_ranks, gather_numbers, sum_over_ranks
from struprune_plugin.device.room import Room
from struprune_plugin.layer.calls import LayerCall, Stopped, pass_by, split_tokens, take_hidden
from struprune_plugin.maths.statistics import multiply_by_itself, multiply_in_order
from struprune_plugin.model.families import find_family
from struprune_plugin.model.footprint import count_bytes
from struprune_plugin.model.layers import find_decoder_layers, find_linear, freeze_weights
from struprune_plugin.model.surgery import read_weight
from struprune_plugin.model.units.group import UnitGroup, select_groups

_DRAWN = 64  # tokens whose labels are drawn at once
_HELD = 0.25  # of the model's bytes, and of the host's free ones, for the hidden states of all layers at once


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
    All batches go through a layer before the next one's turn, so that its weights come to the device once either way. Only
    activations get gradients.

    :return: empty where the model's output is not finite: the calibration pass that follows names the linear
    :param num_sequences: at most this many sequences are used, of every process' loader an equal share
    :param room: its placement says what is done on the host, and how many logits are held at once
    """
    sums: dict[str, Tensor] = {}
    parts = _take_sequences(loader, -(-num_sequences // count_ranks()))
    first = count_before(sum(len(part["input_ids"]) for part in parts))
    counted, finite = 0, True
    layers = find_decoder_layers(model)
    with (
        freeze_weights(model),
        HooksMixin.disable_hooks(),
        tqdm(total=2 * len(layers) * len(parts), desc="sensitivity") as bar,
    ):
        wraps = bool(parts) and _gives_tuples(model, parts[0])
        for batches in _split_batches(model, parts):
            flows = [_enter_layers(model, batch, wraps, room) for batch in batches]
            _run_forward([layer for _, layer in layers], flows, room, bar)
            for flow in flows:
                num_tokens = _turn_round(model, flow, wraps, first, room)
                finite = finite and num_tokens > 0
                first, counted = first + len(flow.batch["input_ids"]), counted + num_tokens
            if not finite:
                break
            for index in reversed(range(len(layers))):
                name, layer = layers[index]
                with room.hold(layer, layers[index - 1][1] if index else None), room.wait_on_host():
                    _run_backward(layer, index, select_groups(groups, name), flows, sums, room, bar)
    counts = gather_numbers(counted, finite)
    if not all(row[1] for row in counts):
        return {}
    total = sum(row[0] for row in counts)
    return {name: sum_over_ranks(part) / total for name, part in sums.items()}


@dataclass
class _Flow:
    """One batch on its way through the layers and back; what waits, waits on the host.

    :param calls: of every layer
    :param hidden: output of the last one so far
    :param gradient: at that output, and then below
    """

    batch: dict[str, Tensor]
    calls: list[LayerCall]
    hidden: Tensor
    gradient: Tensor | None = None


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


def _split_batches(model: PreTrainedModel, parts: Sequence[dict[str, Tensor]]) -> Iterator[list[dict[str, Tensor]]]:
    """Give together the batches whose hidden states, of all layers, take no more than a share of the model or of free memory."""
    room = _HELD * min(count_bytes(model), psutil.virtual_memory().available)
    each = len(find_decoder_layers(model)) * model.config.hidden_size * model.dtype.itemsize
    taken: list[dict[str, Tensor]] = []
    for part in parts:
        if taken and each * (part["input_ids"].numel() + sum(b["input_ids"].numel() for b in taken)) > room:
            yield taken
            taken = []
        taken.append(part)
    if taken:
        yield taken


def _run_base(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return what enters the output embeddings."""
    mask = batch.get("attention_mask")
    return model.base_model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).last_hidden_state


def _gives_tuples(model: PreTrainedModel, batch: dict[str, Tensor]) -> bool:
    """Tell whether decoder layers give tuples, from one call of the first."""
    seen: list[Any] = []

    def see(_module: nn.Module, _args: tuple, output: Any) -> None:
        seen.append(output)
        raise Stopped

    handle = find_decoder_layers(model)[0][1].register_forward_hook(see)
    try:
        with suppress(Stopped), torch.no_grad():
            _run_base(model, {name: part[:1] for name, part in batch.items()})
    finally:
        handle.remove()
    return isinstance(seen[0], tuple)


@torch.no_grad()
def _enter_layers(model: PreTrainedModel, batch: dict[str, Tensor], wraps: bool, room: Room) -> _Flow:
    """Return a batch at the first layer, and what every layer is called with."""
    calls: list[LayerCall] = []

    def record(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        before = calls[-1] if calls else None
        calls.append(LayerCall.record(args, kwargs, before, room, None if before is None else before.hidden))

    layers = [layer for _, layer in find_decoder_layers(model)]
    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        with pass_by(layers, None, wraps, room):
            _run_base(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return _Flow(batch, calls, calls[0].hidden)


@torch.no_grad()
def _run_forward(layers: Sequence[nn.Module], flows: Sequence[_Flow], room: Room, bar: tqdm) -> None:
    """Run all layers, each on all batches, and keep what enters them."""
    for index, layer in enumerate(layers):
        with room.hold(layer, layers[index + 1] if index + 1 < len(layers) else None):
            for flow in flows:
                call = flow.calls[index]
                call.hidden = flow.hidden
                flow.hidden = room.park(call.repeat(layer, room))
                bar.update()


def _turn_round(model: PreTrainedModel, flow: _Flow, wraps: bool, first: int, room: Room) -> int:
    """Run what stands on the last layer; leave the gradient at that layer's output. Return the number of tokens scored.

    No tokens are scored where the output is not finite.

    :param first: number of the batch's first sequence among all; it draws that sequence's labels, so that they do not
        depend on how sequences are split into batches or over processes
    """
    tail: list[Tensor] = []

    def cut(_module: nn.Module, _args: tuple, output: Any) -> Any:
        hidden = take_hidden(output).detach().requires_grad_()
        tail.append(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    layers = [layer for _, layer in find_decoder_layers(model)]
    mask = flow.batch.get("attention_mask")
    handle = layers[-1].register_forward_hook(cut)
    try:
        with torch.enable_grad(), pass_by(layers, flow.hidden, wraps, room):
            final = _run_base(model, flow.batch)
            valid = (torch.ones_like(flow.batch["input_ids"]) if mask is None else mask).bool()
            valid = room.to_device(valid, final.device)
            above = _find_output_gradient(model, final.detach(), valid, first, room)
            if above is None:
                return 0
            (gradient,) = torch.autograd.grad(final, tail, above)
    finally:
        handle.remove()
    flow.gradient = room.park(gradient)
    return int(valid.sum())


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
            shaped = shape_logits(model, logits)
            above = torch.softmax(shaped.detach(), dim=-1)  # the gradient of -log p(y) by these: p, less one at y
            if not above[counted[span], 0].isfinite().all():  # what is not finite makes its whole row NaN
                return None
            labels = draw_labels(above, draws[span])
            above.scatter_add_(-1, labels, above.new_full(labels.shape, -1.0))
            above[~counted[span]] = 0
            if shaped is not logits:
                (above,) = torch.autograd.grad(shaped, logits, above)
            del logits, shaped
            gradient[row, span] = multiply_in_order(above, read_weight(head)[0])
    return gradient


def draw_labels(probs: Tensor, draws: Tensor) -> Tensor:
    """Return the token at which each distribution's running sum passes its draw, shape [tokens, 1], int64.

    One number a token is drawn on the host, whatever the vocabulary, so that every device finds the same labels.

    :param probs: shape [tokens, V]
    :param draws: uniform in [0, 1), shape [tokens], float64
    """
    labels = []
    for part, draw in zip(probs.split(_DRAWN), draws.split(_DRAWN), strict=True):
        heights = part.cumsum(-1, dtype=torch.float64)
        labels.append(torch.searchsorted(heights, draw[:, None] * heights[:, -1:], right=True))
    return torch.cat(labels).clamp(max=probs.shape[-1] - 1)


def shape_logits(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """Scale and cap what the head gives, as the model's own forward pass does."""
    family = find_family(model)
    if family.logit_scale:
        logits = logits / getattr(model.config, family.logit_scale)
    cap = getattr(model.config, family.logit_cap, None) if family.logit_cap else None
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _run_backward(
    layer: nn.Module,
    index: int,
    groups: Sequence[UnitGroup],
    flows: Sequence[_Flow],
    sums: dict[str, Tensor],
    room: Room,
    bar: tqdm,
) -> None:
    """Run one layer forth and back on all batches; add ``g g^T`` at its consumers, and leave the gradients at its input.

    The sums grow on the device where the placement has room for them.

    :param index: the layer's
    """
    outputs: dict[str, Tensor] = {}

    def see(name: str) -> Any:
        return lambda _module, _args, output: outputs.update({name: output})

    grows_on_host = room.placement.gather_on_host or room.placement.release_weights
    handles = [find_linear(layer, group.consumer).register_forward_hook(see(group.name)) for group in groups]
    try:
        for flow in flows:
            call = flow.calls[index]
            hidden = room.to_device(call.hidden, call.device).requires_grad_()
            assert flow.gradient is not None
            with torch.enable_grad():
                output = call.repeat(layer, room, hidden)
                wanted = [hidden, *(outputs.pop(group.name) for group in groups)]
                below, *found = torch.autograd.grad(output, wanted, room.to_device(flow.gradient, call.device))
            del output, wanted
            flow.gradient = room.park(below)
            for group, gradients in zip(groups, found, strict=True):
                _add_products(sums, group.name, gradients, call, room, grows_on_host)
            bar.update()
    finally:
        for handle in handles:
            handle.remove()
    for group in groups:
        sums[group.name] = room.to_host(sums[group.name])


def _add_products(
    sums: dict[str, Tensor], name: str, gradients: Tensor, call: LayerCall, room: Room, grows_on_host: bool
) -> None:
    """Add ``g g^T`` of one batch to a sum, sequence by sequence."""
    tokens = None if call.tokens is None else room.to_device(call.tokens, gradients.device)
    gradients = gradients.flatten(0, -2).float()
    for part in split_tokens(tokens, len(gradients), call.length):
        gram = multiply_by_itself(gradients[part])
        gram = (room.to_host(gram) if grows_on_host else gram).double()
        total = sums.get(name)
        if total is not None and not grows_on_host:
            total = room.to_device(total, gradients.device)
        sums[name] = gram if total is None else total.add_(gram)
