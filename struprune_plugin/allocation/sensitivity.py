"""Measurements of the whole dense model, once per run: saliency of units, and sensitivity to errors in each module's output."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import psutil
import torch
from compressed_tensors.offload import disable_offloading, disable_onloading
from llmcompressor.utils.helpers import DisableQuantization
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.allocation.curves import split_batches
from struprune_plugin.layerwise.calls import list_parts, mark_tokens
from struprune_plugin.layerwise.capture import join_rows, measure_rms, split_tokens
from struprune_plugin.layerwise.ends import BatchFlow, compute_logits, enter_batches
from struprune_plugin.layerwise.passes import walk_layers
from struprune_plugin.linalg.second_moments import multiply_by_itself, multiply_in_parts
from struprune_plugin.linalg.solve import sqrt_psd
from struprune_plugin.model.layers import count_parameters, find_decoder_layers, freeze_weights, read_hidden_size
from struprune_plugin.model.unit_kind import UnitGroup, select_groups
from struprune_plugin.pruning.importance import Importance
from struprune_plugin.pruning.problem import Sensitivity
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import count_before, count_ranks, gather, sum_over_ranks

_DRAWN = 64  # tokens whose labels are drawn at once
_HELD = 0.25  # share of the model's bytes and of the host's free memory for the hidden states of all layers


def measure_sensitivity(
    model: PreTrainedModel,
    loader: Iterable[dict[str, Tensor]],
    groups: Sequence[UnitGroup],
    context: DeviceContext,
    importance: Importance,
    samples: int | None,
) -> Sensitivity:
    """Return the measurements that a run needs.

    :param importance: its saliency is measured, if it needs one
    :param samples: sequences for the Fisher information; None where it is not needed
    """
    saliency, roots = dict[str, Tensor](), dict[str, Tensor]()
    if importance.gradients:
        with context.stage("gradients"):
            saliency = importance.measure(model, loader, groups)
    if samples is not None:
        with context.stage("sensitivity"), DisableQuantization(model):
            fisher = measure_fisher(model, loader, groups, samples, context)
            for name in list(fisher):
                roots[name] = context.offload(sqrt_psd(context.to_solver(fisher.pop(name))), "fisher")
    return Sensitivity(roots, saliency)


def measure_fisher(
    model: PreTrainedModel,
    loader: Iterable[dict[str, Tensor]],
    groups: Sequence[UnitGroup],
    num_sequences: int,
    context: DeviceContext,
) -> dict[str, Tensor]:
    """Return the Fisher information of every module's output, mean over tokens, by :attr:`UnitGroup.output_name`.

    With g the gradient of -log p(y) with respect to the output, y drawn from the model's own p: ``F = E[g g^T]``, shape [d, d],
    float64. An error e there changes the model's distribution by a KL divergence of ``e^T F e / 2`` to second order, tokens
    taken as independent. Where a norm rescales the output, e is the error divided by the output's RMS, and g multiplied by it.

    One forward pass stores every layer's input; then each layer alone runs again and propagates the gradient, for all batches, so
    that its weights are moved to the device once per direction. Only activations get gradients.

    :param num_sequences: maximum number of sequences, an equal share of every process' loader
    :return: empty if a layer's output is not finite: the calibration pass that follows reports the linear
    :raises ValueError: the logits alone are not finite
    """
    sums: dict[str, Tensor] = {}
    parts, _ = split_batches(list(loader), -(-num_sequences // count_ranks()))
    before = count_before(sum(len(part["input_ids"]) for part in parts))
    counted, finite = 0, True
    with freeze_weights(model):
        for batches in _fit_batches(model, parts, context):
            flows = enter_batches(model, batches, context)
            for index, _, layer, following in tqdm(list(walk_layers(model)), desc="sensitivity, forward"):
                with torch.no_grad(), context.onload_layer(layer, following):
                    for flow in flows:
                        flow.advance(index, layer, context)
            with disable_offloading():
                for flow in flows:
                    num_tokens = _run_head_backward(model, flow, before, context)
                    finite = finite and num_tokens is not None
                    before, counted = before + len(flow.batch["input_ids"]), counted + (num_tokens or 0)
            if not finite:
                break
            for index, name, layer, following in tqdm(list(walk_layers(model, True)), desc="sensitivity, backward"):
                with context.onload_layer(layer, following):
                    _run_backward(layer, index, select_groups(groups, name), flows, sums, context)
    counts = gather((counted, finite))
    if not all(row[1] for row in counts):
        return {}
    total = sum(row[0] for row in counts)
    for name, part in sums.items():
        sums[name] = context.offload(sum_over_ranks(context.to_solver(part)).div_(total), "fisher")
    return sums


def _fit_batches(
    model: PreTrainedModel, parts: Sequence[dict[str, Tensor]], context: DeviceContext
) -> Iterator[list[dict[str, Tensor]]]:
    """Yield lists of batches whose hidden states, of all layers, fit in what the device keeps for states, or else in a share of
    the model's size and of the host's free memory."""
    with disable_onloading():
        item = model.dtype.itemsize
    on_host = _HELD * min(count_parameters(model) * item, psutil.virtual_memory().available)
    each = len(find_decoder_layers(model)) * read_hidden_size(model) * item
    most, taken = context.on_device.get("states", on_host) / each, list[dict[str, Tensor]]()
    for part in parts:
        if taken and sum(batch["input_ids"].numel() for batch in [part, *taken]) > most:
            yield taken
            taken = []
        taken.append(part)
    if taken:
        yield taken


def _run_head_backward(model: PreTrainedModel, flow: BatchFlow, first: int, context: DeviceContext) -> int | None:
    """Store the gradient of -log p(y), y drawn from p, at the last layer's output. Return the number of scored tokens, None where
    that output is not finite.

    :param first: index of the batch's first sequence among all, which seeds its labels: they do not depend on the batches
    """
    lengths = mark_tokens(flow.batch).sum(1).tolist()
    hidden = context.to_device(flow.states.hidden, flow.calls[-1].device).detach().requires_grad_()
    generator, head, seen = torch.Generator(), model.get_output_embeddings(), dict[str, Tensor]()

    def widen(_head: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Compute what follows the head in float32, from a leaf: gradients of 16-bit models are rounded only behind it."""
        seen.update(inputs=args[0], outputs=output.detach().float().requires_grad_())
        return seen["outputs"]

    with torch.enable_grad(), head.register_forward_hook(widen):
        for row, length in enumerate(lengths):
            logits = compute_logits(model, flow.batch, row, hidden, context)
            above = torch.softmax(logits.detach(), dim=-1)  # the gradient of -log p(y) here: p, minus one at y
            if not above[:length, 0].isfinite().all():  # one nonfinite logit makes its row NaN
                if hidden.isfinite().all():
                    raise ValueError(
                        "model: logits must be finite, got NaN or Inf. Load it in a wider dtype (bfloat16 or float32)."
                    )
                return None
            draws = torch.rand(length, generator=generator.manual_seed(first + row), dtype=torch.float64)
            labels = draw_labels(above[:length], draws.to(logits.device))
            above[:length].scatter_add_(-1, labels, above.new_full(labels.shape, -1.0))
            above[length:] = 0
            (above,) = torch.autograd.grad(logits, seen["outputs"], above)
            inputs = seen.pop("inputs")
            gradient = multiply_in_parts(above.flatten(0, -2), head.weight)
            gradient = context.to_device(gradient.view(inputs.shape).to(inputs.dtype), inputs.device)
            inputs.backward(gradient)
            del logits, above, seen["outputs"]
    assert hidden.grad is not None
    flow.above = [context.offload(hidden.grad)]
    return sum(lengths)


def draw_labels(probs: Tensor, draws: Tensor) -> Tensor:
    """Return the token at which each distribution's cumulative sum exceeds its draw, shape [tokens, 1], int64.

    :param probs: shape [tokens, V]
    :param draws: uniform in [0, 1), shape [tokens], float64; drawn on the host, so that every device gives the same labels
    """
    labels = []
    for part, draw in zip(probs.split(_DRAWN), draws.split(_DRAWN), strict=True):
        heights = part.cumsum(-1, dtype=torch.float64)
        labels.append(torch.searchsorted(heights, draw[:, None] * heights[:, -1:], right=True))
    return torch.cat(labels).clamp(max=probs.shape[-1] - 1)


def _run_backward(
    layer: nn.Module,
    index: int,
    groups: Sequence[UnitGroup],
    flows: Sequence[BatchFlow],
    sums: dict[str, Tensor],
    context: DeviceContext,
) -> None:
    """Run one layer forward and backward on all batches, add ``g g^T`` at its consumers, store the gradients at its input."""
    outputs, scales = dict[str, Tensor](), dict[str, Tensor]()

    def see(name: str, _module: nn.Module, _args: tuple, output: Tensor) -> None:
        output.retain_grad()
        outputs[name] = output

    def see_norm(name: str, _module: nn.Module, _args: tuple, output: Any) -> None:
        scales[name] = measure_rms(list_parts(output)[0].detach().flatten(0, -2))

    norms = {group.output_name: group.join.norm for group in groups if group.join.norm}
    watched = {group.output_name: group.mixture or group.consumer for group in groups}
    sums |= {name: context.to_solver(sums[name]) for name in watched if name in sums}
    with ExitStack() as stack:
        for name, module in watched.items():
            stack.callback(layer.get_submodule(module).register_forward_hook(partial(see, name)).remove)
        for name, module in norms.items():
            stack.callback(layer.get_submodule(module).register_forward_hook(partial(see_norm, name)).remove)
        for flow in flows:
            call = flow.calls[index]
            flow.run_backward(index, layer, context)
            for name in watched:
                output = outputs.pop(name)
                gradients = torch.zeros_like(output) if output.grad is None else output.grad
                del output
                gradients = gradients.flatten(0, -2)[: call.tokens.numel()]  # Llama 4's experts get all tokens
                if name in norms:
                    gradients = gradients * scales.pop(name)[:, None]
                for rows in join_rows(split_tokens(call), gradients.device):
                    gram = context.to_solver(multiply_by_itself(gradients[rows].float())).double()
                    sums[name] = sums[name].add_(gram) if name in sums else gram
    for name in watched:
        sums[name] = context.offload(sums[name], "fisher")
