"""How much the model's output suffers from an error in the output of one module, one decoder layer on the device at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from llmcompressor.modifiers.utils.hooks import HooksMixin
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.modifiers.budget import MAX_LOGITS
from struprune_plugin.modifiers.capture import LayerCall
from struprune_plugin.modifiers.memory import to_device, to_host
from struprune_plugin.topology import UnitGroup, find_decoder_layers, find_linear


def measure_fisher(
    model: PreTrainedModel,
    loader: Iterable[dict[str, Tensor]],
    groups: Sequence[UnitGroup],
    num_sequences: int,
    max_logits: int = MAX_LOGITS,
) -> dict[str, Tensor]:
    """Return the Fisher information of every consumer's output, mean over tokens, by group name.

    With g the gradient of -log p(y) with respect to the output, y drawn from the model's own p: ``F = E[g g^T]``, shape
    [d, d], float64. An error e there changes the model's distribution by a KL divergence of ``e^T F e / 2`` to second
    order, tokens taken as independent.

    One forward pass keeps every layer's input on the host; then each layer alone runs again and passes the gradient on.
    Only activations get gradients.

    :return: empty where the model's output is not finite: the calibration pass that follows names the linear
    :param max_logits: held at once
    :param num_sequences: at most this many sequences of the loader are used
    """
    sums: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    counted = 0
    with freeze_weights(model), HooksMixin.disable_hooks():
        batches = _split_batches(loader, num_sequences, model.config.vocab_size)
        for batch in tqdm(batches, desc="sensitivity"):
            calls, gradient, num_tokens = _run_forward(model, batch, generator, max_logits)
            if not num_tokens:
                return {}
            counted += num_tokens
            for (name, layer), call in zip(reversed(find_decoder_layers(model)), reversed(calls), strict=True):
                here = [group for group in groups if group.layer_name == name]
                gradient = _run_backward(layer, call, here, gradient, sums)
    return {name: total / counted for name, total in sums.items()}


def _split_batches(loader: Iterable[dict[str, Tensor]], num_sequences: int, vocabulary: int) -> list[dict[str, Tensor]]:
    """Return the first sequences in micro-batches whose logits, in float32, stay small."""
    parts: list[dict[str, Tensor]] = []
    left = num_sequences
    for batch in loader:
        tensors = {name: part[:left] for name, part in batch.items() if name in ("input_ids", "attention_mask")}
        ids = tensors["input_ids"]
        left -= len(ids)
        size = max(1, MAX_LOGITS // (ids.shape[1] * vocabulary))
        splits = {name: part.split(size) for name, part in tensors.items()}
        parts += [dict(zip(splits, values, strict=True)) for values in zip(*splits.values(), strict=True)]
        if left <= 0:
            break
    return parts


@contextmanager
def freeze_weights(model: nn.Module) -> Iterator[None]:
    """Let no weight collect gradients; offloaded ones stay where they are."""
    with disable_onloading():
        parameters = list(model.parameters())
    flags = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _run_forward(
    model: PreTrainedModel, batch: dict[str, Tensor], generator: torch.Generator, max_logits: int
) -> tuple[list[LayerCall], Tensor, int]:
    """Return every decoder layer's call, the gradient at the last one's output, and the number of tokens scored.

    No tokens are scored where the output is not finite.
    """
    calls: list[LayerCall] = []
    tail: list[Tensor] = []

    def record(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.append(LayerCall.record(args, kwargs, calls[-1] if calls else None))

    def cut(_module: nn.Module, _args: tuple, output: Any) -> Any:
        hidden = (output[0] if isinstance(output, tuple) else output).detach().requires_grad_()
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
            hidden = final.flatten(0, -2) if mask is None else final[mask.bool()]
            above = _find_output_gradient(model, hidden.detach(), generator, max_logits)
            if above is None:
                return calls, hidden, 0
            (gradient,) = torch.autograd.grad(hidden, tail, above)
    finally:
        for handle in handles:
            handle.remove()
    return calls, gradient, len(hidden)


def _find_output_gradient(
    model: PreTrainedModel, hidden: Tensor, generator: torch.Generator, max_logits: int
) -> Tensor | None:
    """Return the gradient of -log p(y), y drawn from p, at the inputs of the output embeddings; None where not finite.

    :param hidden: shape [tokens, d]
    """
    head: Any = model.get_output_embeddings()
    cap = getattr(model.config, "final_logit_softcapping", None)
    found = []
    for part in hidden.split(max(1, max_logits // model.config.vocab_size)):
        part = part.detach().requires_grad_()
        logits = head(part).float()
        log_probs = torch.log_softmax(logits if cap is None else cap * torch.tanh(logits / cap), dim=-1)
        del logits
        if not log_probs.isfinite().all():
            return None
        labels = torch.multinomial(to_host(log_probs).exp(), 1, generator=generator)
        loss = -log_probs.gather(1, to_device(labels, log_probs.device)).sum()
        found.append(torch.autograd.grad(loss, part)[0])
    return torch.cat(found)


def _run_backward(
    layer: nn.Module, call: LayerCall, groups: Sequence[UnitGroup], gradient: Tensor, sums: dict[str, Tensor]
) -> Tensor:
    """Run one layer forth and back; add ``g g^T`` at its consumers, and return the gradient at its input."""
    outputs: dict[str, Tensor] = {}

    def see(name: str) -> Any:
        return lambda _module, _args, output: outputs.update({name: output})

    handles = [find_linear(layer, group.consumer).register_forward_hook(see(group.name)) for group in groups]
    hidden = to_device(call.hidden, call.device).requires_grad_()
    try:
        with torch.enable_grad():
            output = call.repeat(layer, hidden)
            below, *found = torch.autograd.grad(output, [hidden, *(outputs[group.name] for group in groups)], gradient)
    finally:
        for handle in handles:
            handle.remove()
    for group, part in zip(groups, found, strict=True):
        part = part.flatten(0, -2).float()
        if call.tokens is not None:
            part = part[to_device(call.tokens, part.device)]
        gram = to_host(part.T @ part).double()
        sums[group.name] = sums[group.name] + gram if group.name in sums else gram
    return below
