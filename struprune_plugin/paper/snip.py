"""``snip``: first-order change of the loss by the removal of a unit, from gradients of the whole dense model."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.linalg.elimination import unit_columns
from struprune_plugin.model.layers import find_linear, freeze_weights
from struprune_plugin.model.surgery import sum_rows
from struprune_plugin.model.unit_kind import UnitGroup
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance, sum_columns
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.runtime.distributed import gather, sum_over_ranks


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

    def score(self, problem: GroupProblem, columns: Tensor) -> Tensor:
        return problem.module.context.to_solver(problem.sensitivity.saliency[problem.group.name])

    def measure(
        self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup]
    ) -> dict[str, Tensor]:
        """Return every unit's saliency, mean over tokens, of the next-token cross entropy."""
        sums, counted, embeddings = dict[tuple[str, str], Tensor](), 0, model.get_input_embeddings()
        with ExitStack() as stack, freeze_weights(model), torch.enable_grad():
            stack.callback(embeddings.register_forward_hook(lambda _m, _a, out: out.requires_grad_()).remove)
            for group in groups:
                for name in (group.consumer, *group.producers):
                    linear = find_linear(model.get_submodule(group.layer_name), name)
                    see = partial(_watch, sums, (group.name, name), name == group.consumer)
                    stack.callback(linear.register_forward_hook(see).remove)
            for batch in tqdm(loader, desc="snip gradients"):
                try:
                    loss, num_tokens = _find_loss(model, batch)
                    loss.backward()
                except torch.OutOfMemoryError as error:
                    raise ValueError(
                        "importance: snip must hold the whole model and its activations on the device, which is too small. Lower "
                        "batch_size, or set `importance: obs` or `wanda`, which hold one layer."
                    ) from error
                counted += num_tokens
        num_tokens, scores = max(sum(gather(counted)), 1), dict[str, Tensor]()
        for group in groups:
            linears = (group.consumer, *group.producers)
            of_columns, *of_rows = (sum_over_ranks(sums.pop((group.name, name))) / num_tokens for name in linears)
            units = torch.arange(group.num_units, device=of_columns.device)
            columns = unit_columns(units, group.columns_per_unit).view(group.num_units, -1)
            rows = [sum_rows(group, name, part) for name, part in zip(group.producers, of_rows, strict=True)]
            scores[group.name] = sum_columns(group.to_unit_order(of_columns), columns, rows).abs()
        return scores


def _watch(
    sums: dict[Any, Tensor], key: Any, is_consumer: bool, linear: nn.Linear, args: tuple, output: Tensor
) -> None:
    """Add the products of a consumer's inputs, or a producer's outputs, with their gradients, once these are there; as a hook."""
    watched = args[0] if is_consumer else output
    value, bias = watched.detach(), None if is_consumer or linear.bias is None else linear.bias.detach()

    def add(gradient: Tensor) -> None:
        by_weights = value if bias is None else value - bias  # a producer's bias does not count as a weight
        term = (by_weights.double() * gradient.double()).flatten(0, -2).sum(0)
        sums[key] = sums[key].add_(term) if key in sums else term

    watched.register_hook(add)


def _find_loss(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the next-token cross entropy, summed without padding, and the number of its tokens."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    labels = ids[:, 1:]
    if mask is not None:  # a token behind padding is predicted from none
        labels = labels.masked_fill(mask[:, 1:] * mask[:, :-1] == 0, -100)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    labels = labels.to(logits.device).flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")  # a mean is per batch
    return loss, int((labels != -100).sum())
