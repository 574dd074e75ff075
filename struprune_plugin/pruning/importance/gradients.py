"""Importances from gradients of the whole dense model's loss at its linears, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.model.layers import can_fuse_attention, find_linear, freeze_weights
from struprune_plugin.model.surgery import sum_rows
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.importance.criterion import Importance, sum_columns
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.runtime.device_context import find_free_bytes
from struprune_plugin.runtime.distributed import gather, sum_over_ranks


@dataclass(frozen=True)
class LinearGradient:
    """Activations and gradient of one linear in one backward pass.

    :param group: group that the linear belongs to
    :param name: name in the layer
    :param inputs: shape [batch, sequence, n]; of an expert [tokens, n]
    :param outputs: shape [batch, sequence, rows]; of an expert [tokens, rows]
    :param gradient: gradient of the summed loss, at the inputs of a consumer if requested, else at the outputs
    """

    group: UnitGroup
    name: str
    linear: nn.Linear
    inputs: Tensor
    outputs: Tensor
    gradient: Tensor


class GradientImportance(Importance):
    """Importance that is measured before pruning: sums of every linear over all batches, aggregated by unit.

    :cvar at_consumer_inputs: whether the gradient is taken at the consumers' inputs instead of their outputs
    """

    gradients: ClassVar[bool] = True
    takes_offload: ClassVar[bool] = False
    at_consumer_inputs: ClassVar[bool] = False

    def score(self, problem: GroupProblem, dense: Tensor, columns: Tensor) -> Tensor:
        return problem.module.context.to_solver(problem.sensitivity.saliency[problem.group.name])

    def measure(
        self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup]
    ) -> dict[str, Tensor]:
        linears = {
            (group.name, name): find_linear(model.get_submodule(group.layer_name), name)
            for group in groups
            for name in (group.consumer, *group.producers)
        }
        batches = list(loader)
        check_gradient_memory(model, batches, self.method)
        sums: dict[tuple[str, str], Tensor] = {}
        counted = 0
        bar = f"{self.method} gradients"
        for num_tokens, parts in visit_gradients(model, batches, groups, bar, self.at_consumer_inputs):
            counted += num_tokens
            for part in parts:
                key = part.group.name, part.name
                for found in self.find_terms(part):
                    sums[key] = sums[key].add_(found) if key in sums else found
        num_tokens = max(sum(gather(counted)), 1)
        scores = {}
        for group in groups:
            weighed = {
                name: self.weigh(linears[group.name, name], sum_over_ranks(sums.pop((group.name, name)))) / num_tokens
                for name in (group.consumer, *group.producers)
            }
            scores[group.name] = self.finish(_sum_units(group, weighed))
        return scores

    def find_terms(self, part: LinearGradient) -> Iterable[Tensor]:
        """Return the terms that one batch adds to the sum of a linear."""
        raise NotImplementedError

    def weigh(self, linear: nn.Linear, total: Tensor) -> Tensor:
        """Return the saliency of a linear's weights, [rows, n], or of a consumer's columns, [n], and a producer's rows, [rows]."""
        return total

    def finish(self, scores: Tensor) -> Tensor:
        """Return the scores, from sums over all of a unit's rows and columns."""
        return scores


def _sum_units(group: UnitGroup, weighed: dict[str, Tensor]) -> Tensor:
    """Return the sum over all rows and columns of every unit, shape [units], float64.

    :param weighed: saliency of every linear of the group, by name, as :meth:`GradientImportance.weigh` returns it
    """
    consumer = weighed[group.consumer]
    consumer = group.to_unit_order(consumer if consumer.dim() == 1 else consumer.sum(0)).double()
    rows = {name: part if part.dim() == 1 else part.sum(1) for name, part in weighed.items() if name != group.consumer}
    columns = unit_columns(torch.arange(group.num_units, device=consumer.device), group.columns_per_unit)
    per_unit = [sum_rows(group, name, part) for name, part in rows.items()]
    return sum_columns(consumer, columns.view(group.num_units, -1), per_unit)


def check_gradient_memory(model: PreTrainedModel, batches: Iterable[dict[str, Tensor]], method: str) -> None:
    """Raise if a model and its activations exceed the free memory.

    Counts the weights once in the model's dtype and, in float32, about 34 hidden sizes of activations per layer and token plus
    the attention maps where they are not fused, and the logits three times.

    :param method: name of the method in the message
    :raises ValueError: the memory is too small; the message states the estimate and the free memory
    """
    batch, length = map(max, zip(*(part["input_ids"].shape for part in batches), strict=True))  # of any batch
    config = model.config.get_text_config(decoder=True)
    heads = 0 if can_fuse_attention(model) else config.num_attention_heads
    per_layer = batch * length * (34 * config.hidden_size + 3 * heads * length)
    activations = 4 * (config.num_hidden_layers * per_layer + 3 * batch * length * config.vocab_size)
    needed = activations + sum(p.numel() * p.element_size() for p in model.parameters())
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
    """Yield (number of predicted tokens, every linear's gradient) after a forward and backward pass on each batch.

    The loss is next-token cross entropy, summed, without padding. Only activations get gradients; weights do not.

    :param at_consumer_inputs: whether the gradient is taken at the consumers' inputs instead of their outputs
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
    """Return the summed next-token cross entropy and the number of its tokens."""
    mask = batch.get("attention_mask")
    labels = batch["input_ids"] if mask is None else batch["input_ids"].masked_fill(mask == 0, -100)
    labels = labels[:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).logits[:, :-1].float()
    labels = labels.to(logits.device).flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")  # a mean is per batch
    return loss, int((labels != -100).sum())
