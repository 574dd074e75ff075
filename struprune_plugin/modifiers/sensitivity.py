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

from struprune_plugin.modifiers.budget import WHOLE, Placement
from struprune_plugin.modifiers.capture import LayerCall
from struprune_plugin.modifiers.distributed import count_before, count_ranks, gather_numbers, sum_over_ranks
from struprune_plugin.modifiers.memory import to_device, to_host, wait_on_host, work_on_host
from struprune_plugin.topology import UnitGroup, find_decoder_layers, find_linear


def measure_fisher(
    model: PreTrainedModel,
    loader: Iterable[dict[str, Tensor]],
    groups: Sequence[UnitGroup],
    num_sequences: int,
    placement: Placement = WHOLE,
) -> dict[str, Tensor]:
    """Return the Fisher information of every consumer's output, mean over tokens, by group name.

    With g the gradient of -log p(y) with respect to the output, y drawn from the model's own p: ``F = E[g g^T]``, shape
    [d, d], float64. An error e there changes the model's distribution by a KL divergence of ``e^T F e / 2`` to second
    order, tokens taken as independent.

    One forward pass keeps every layer's input on the host; then each layer alone runs again and passes the gradient on.
    Only activations get gradients.

    :return: empty where the model's output is not finite: the calibration pass that follows names the linear
    :param num_sequences: at most this many sequences are used, of every process' loader an equal share
    :param placement: what is done on the host, and how many logits are held at once
    """
    sums: dict[str, Tensor] = {}
    share = -(-num_sequences // count_ranks())
    parts = _take_sequences(loader, share)
    first = count_before(sum(len(part["input_ids"]) for part in parts))
    counted, finite = 0, True
    with freeze_weights(model), HooksMixin.disable_hooks():
        for batch in tqdm(parts, desc="sensitivity"):
            calls, gradient, num_tokens = _run_forward(model, batch, first, placement)
            finite = num_tokens > 0
            if not finite:
                break
            first, counted = first + len(batch["input_ids"]), counted + num_tokens
            for (name, layer), call in zip(reversed(find_decoder_layers(model)), reversed(calls), strict=True):
                here = [group for group in groups if group.layer_name == name]
                with wait_on_host(placement.release_weights):
                    gradient = _run_backward(layer, call, here, gradient, sums)
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
    model: PreTrainedModel, batch: dict[str, Tensor], first: int, placement: Placement
) -> tuple[list[LayerCall], Tensor, int]:
    """Return every decoder layer's call, the gradient at the last one's output, and the number of tokens scored.

    No tokens are scored where the output is not finite.

    :param first: number of the batch's first sequence among all; it draws that sequence's labels, so that they do not
        depend on how sequences are split into batches or over processes
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
            valid = to_device((torch.ones_like(batch["input_ids"]) if mask is None else mask).bool(), final.device)
            above = _find_output_gradient(model, final.detach(), valid, first, placement)
            if above is None:
                return calls, final, 0
            (gradient,) = torch.autograd.grad(final, tail, above)
    finally:
        for handle in handles:
            handle.remove()
    return calls, gradient, int(valid.sum())


def _find_output_gradient(
    model: PreTrainedModel, final: Tensor, valid: Tensor, first: int, placement: Placement
) -> Tensor | None:
    """Return the gradient of -log p(y), y drawn from p, at the inputs of the output embeddings; None where not finite.

    :param final: those inputs, shape [sequences, tokens, d]
    :param valid: which tokens count, shape [sequences, tokens], bool
    """
    if placement.embed_on_host:
        with work_on_host():
            below = _find_gradient_below_head(model, to_host(final), to_host(valid), first, placement.logits)
        return None if below is None else to_device(below, final.device)
    return _find_gradient_below_head(model, final, valid, first, placement.logits)


def _find_gradient_below_head(
    model: PreTrainedModel, final: Tensor, valid: Tensor, first: int, max_logits: int
) -> Tensor | None:
    """Do the work of :func:`_find_output_gradient` where its tensors are."""
    head: Any = model.get_output_embeddings()
    cap = getattr(model.config, "final_logit_softcapping", None)
    size = max(1, max_logits // model.config.vocab_size)
    gradient, generator = torch.zeros_like(final), torch.Generator()
    for row, (sequence, counted) in enumerate(zip(final, valid, strict=True)):
        generator.manual_seed(first + row)
        for start in range(0, len(sequence), size):
            span = slice(start, start + size)
            part = sequence[span].detach().requires_grad_()
            logits = head(part).float()
            log_probs = torch.log_softmax(logits if cap is None else cap * torch.tanh(logits / cap), dim=-1)
            del logits
            if not log_probs[counted[span]].isfinite().all():
                return None
            chances = to_host(log_probs.masked_fill(~counted[span, None], 0)).exp()
            labels = to_device(torch.multinomial(chances, 1, generator=generator), log_probs.device)
            chosen = log_probs.gather(-1, labels)[counted[span]]
            gradient[row, span] = torch.autograd.grad(-chosen.sum(), part)[0]
    return gradient


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
