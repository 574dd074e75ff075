"""``snip``: first-order change of the loss by the removal of a unit, from gradients of the whole dense model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Literal

import psutil
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.model.layers import can_fuse_attention, find_linear, freeze_weights
from struprune_plugin.model.surgery import sum_rows
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance, sum_columns
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.runtime.device_context import find_free_bytes
from struprune_plugin.runtime.distributed import gather, sum_over_ranks

_Key = tuple[str, str]  # name of a group, and of one of its linears in the layer


@IMPORTANCES.register
class SNIP(Importance):
    """Absolute sum of weights times gradients: ``|sum w * dloss/dw|`` over all rows and columns of a unit.

    A column's weights give ``sum_o W_oi dloss/dW_oi = sum_t x_it dloss/dx_it``; a row's weights give the same for its output
    without bias. Activations and their gradients are thus sufficient. Source: paper, table "Other structured methods" (Lee et
    al. 2018).
    """

    gradients: ClassVar[bool] = True
    takes_offload: ClassVar[bool] = False
    method: Literal["snip"] = "snip"

    def score(self, problem: GroupProblem, dense: Tensor, columns: Tensor) -> Tensor:
        return problem.module.context.to_solver(problem.sensitivity.saliency[problem.group.name])

    def measure(
        self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup]
    ) -> dict[str, Tensor]:
        """Return every unit's saliency, mean over tokens; the sums do not depend on how sequences are batched, but for experts."""
        linears = {
            (group.name, name): find_linear(model.get_submodule(group.layer_name), name)
            for group in groups
            for name in (group.consumer, *group.producers)
        }
        consumers, experts = {(group.name, group.consumer) for group in groups}, {g.name for g in groups if g.experts}
        batches, sums, counted = list(loader), dict[_Key, Tensor](), 0
        check_gradient_memory(model, batches)
        for num_tokens, found in _find_gradients(model, batches, linears, consumers):
            counted += num_tokens
            for key, (value, gradient) in found.items():
                if key not in consumers and linears[key].bias is not None:
                    value = value - linears[key].bias.detach()  # a producer's bias does not count as a weight
                products = value.double() * gradient.double()
                if key[0] in experts:  # may have seen no token
                    terms = products.sum(0, keepdim=True)
                else:  # per sequence
                    terms = products.view(len(value), -1, value.shape[-1]).sum(1)
                for term in terms:
                    sums[key] = sums[key].add_(term) if key in sums else term
        num_tokens, scores = max(sum(gather(counted)), 1), dict[str, Tensor]()
        for group in groups:
            of_columns, *of_rows = (
                sum_over_ranks(sums.pop((group.name, name))) / num_tokens for name in (group.consumer, *group.producers)
            )
            units = torch.arange(group.num_units, device=of_columns.device)
            columns = unit_columns(units, group.columns_per_unit).view(group.num_units, -1)
            rows = [sum_rows(group, name, part) for name, part in zip(group.producers, of_rows, strict=True)]
            scores[group.name] = sum_columns(group.to_unit_order(of_columns), columns, rows).abs()
        return scores


def check_gradient_memory(model: PreTrainedModel, batches: Iterable[dict[str, Tensor]]) -> None:
    """Raise if a model and its activations exceed the free memory.

    Counts the weights once in the model's dtype and, in float32, about 34 hidden sizes of activations per layer and token plus
    the attention maps where they are not fused, and the logits three times.

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
            f"importance: snip must hold the whole model and its activations, about {needed / 1e9:.1f} GB, got "
            f"{free / 1e9:.1f} GB free. Lower batch_size, or use a layer-wise importance: obs or wanda."
        )


def _find_gradients(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    linears: Mapping[_Key, nn.Linear],
    consumers: set[_Key],
) -> Iterator[tuple[int, dict[_Key, tuple[Tensor, Tensor]]]]:
    """Yield (number of predicted tokens, inputs of consumers and outputs of producers with their gradients) of each batch.

    The loss is next-token cross entropy, summed, without padding. Only activations get gradients; weights do not.
    """
    seen: dict[_Key, Tensor] = {}

    def watch(key: _Key) -> Any:
        return lambda _module, args, output: seen.update({key: args[0] if key in consumers else output})

    embeddings: Any = model.get_input_embeddings()
    with ExitStack() as stack, freeze_weights(model):
        for key, linear in linears.items():
            stack.callback(linear.register_forward_hook(watch(key)).remove)
        stack.callback(embeddings.register_forward_hook(lambda _m, _a, out: out.requires_grad_()).remove)
        for batch in tqdm(batches, desc="snip gradients"):
            with torch.enable_grad():
                loss, num_tokens = _find_loss(model, batch)
                gradients = torch.autograd.grad(loss, [seen[key] for key in linears])
            yield num_tokens, {k: (seen[k].detach(), part) for k, part in zip(linears, gradients, strict=True)}
            seen.clear()


def _find_loss(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the summed next-token cross entropy and the number of its tokens."""
    mask = batch.get("attention_mask")
    labels = batch["input_ids"] if mask is None else batch["input_ids"].masked_fill(mask == 0, -100)
    labels = labels[:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False).logits[:, :-1].float()
    labels = labels.to(logits.device).flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")  # a mean is per batch
    return loss, int((labels != -100).sum())
