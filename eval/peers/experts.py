"""Criteria of other methods for the channels of a mixture's experts: alone, and as importances of our pass.

A channel of an expert is a row of its ``gate_proj`` and ``up_proj`` and the column of its ``down_proj`` that reads them;
HEAPr calls it an atomic expert, CAMERA a micro-expert. All criteria are measured once, on the whole dense model. As an
importance, a criterion chooses the same channels in our pass, which then solves the down projections again. HEAPr and
CAMERA rank channels of different experts against each other; here every expert keeps the same number, as ours does.

Legend, of one expert, over the tokens t that its router sends there:
    a [tokens, n]  its intermediate activation, what ``down_proj`` reads
    g [tokens]     the router's weight, which its output is multiplied by
    W [d, n]       ``down_proj``
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from eval.peers import PeerResult
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.layerwise.expert_streams import capture_experts
from struprune_plugin.linalg.elimination import keep_last
from struprune_plugin.linalg.second_moments import with_bias_index
from struprune_plugin.linalg.ties import order_scores
from struprune_plugin.model.experts import take_apart
from struprune_plugin.model.layers import count_prunable_parameters, find_decoder_layers, find_linear, freeze_weights
from struprune_plugin.model.surgery import read_consumer, slice_group
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup, select_groups
from struprune_plugin.pruning.importance import Importance, Ranking

_BATCH = 8  # windows
_STEP = 8  # channels


@dataclass
class ChannelSums:
    """What one expert's channels gave, all but the first of shape [n], float64.

    :param num_tokens: that the router sent there
    :param absolute: sum of ``|a|``
    :param squares: sum of ``a^2``
    :param weighted: sum of ``(g a)^2``
    :param largest: the largest ``(g a)^2``
    :param gradients: sum of the squared gradient of the loss at ``a``
    """

    num_tokens: int
    absolute: Tensor
    squares: Tensor
    weighted: Tensor
    largest: Tensor
    gradients: Tensor

    @classmethod
    def make(cls, num_channels: int) -> ChannelSums:
        return cls(0, *(torch.zeros(num_channels, dtype=torch.float64) for _ in range(5)))

    def add(self, activation: Tensor, weights: Tensor) -> None:
        """Count the tokens of one batch."""
        activation = activation.detach().double()
        weighted = (activation * weights[:, None].double()).square()
        self.num_tokens += len(activation)
        self.absolute += activation.abs().sum(0).cpu()
        self.squares += activation.square().sum(0).cpu()
        self.weighted += weighted.sum(0).cpu()
        if len(weighted):
            self.largest = torch.maximum(self.largest, weighted.amax(0).cpu())


class ExpertImportance(Importance):
    """A criterion that is read off :class:`ChannelSums` of the dense model."""

    gradients: ClassVar[bool] = True  # scores are measured before the pass, all at once
    keeps_budget: ClassVar[bool] = False
    runs_backward: ClassVar[bool] = False

    def score(self, ranking: Ranking, dense: Tensor, columns: Tensor) -> Tensor:
        return ranking.module.context.place(ranking.sensitivity.saliency[ranking.group.name], dense)

    def measure(
        self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup]
    ) -> dict[str, Tensor]:
        sums = sum_channels(model, loader, groups, self.runs_backward)
        layers = dict(find_decoder_layers(model))
        weights = {g.name: find_linear(layers[g.layer_name], g.consumer).weight.detach().cpu() for g in groups}
        return {name: self.rate(found, weights[name].double()) for name, found in sums.items()}

    def rate(self, sums: ChannelSums, weight: Tensor) -> Tensor:
        """Return the score of every channel, shape [n], float64.

        :param weight: W
        """
        raise NotImplementedError


class ActivationMean(ExpertImportance):
    """``mean_t |a_tj|``: Minitron's criterion of FFN channels (Muralidharan et al. 2024), here in every expert by itself."""

    method: Literal["activation_mean"] = "activation_mean"

    def rate(self, sums: ChannelSums, weight: Tensor) -> Tensor:
        return sums.absolute / max(sums.num_tokens, 1)


class ActivationL2(ExpertImportance):
    """``sqrt(sum_t a_tj^2)``: the same with the other of Minitron's ways to aggregate over tokens."""

    method: Literal["activation_l2"] = "activation_l2"

    def rate(self, sums: ChannelSums, weight: Tensor) -> Tensor:
        return sums.squares.sqrt()


class Camera(ExpertImportance):
    """``((1 - alpha) sum_t (g a_tj)^2 + alpha max_t (g a_tj)^2) ||W_:j||^2``: CAMERA's energy of a micro-expert.

    Source: Xu et al. 2025 (arXiv 2508.02322), which ranks micro-experts by the energy of their outputs: the squared norm of the
    router's weight times the activation over tokens, mixed with its largest value, times the squared norm of the down column.
    The mixture and its weight 0.9 are those of the authors' published settings; their pruning rate is a layer's, ours an expert's.

    :param alpha: weight of the largest value
    """

    method: Literal["camera"] = "camera"
    alpha: float = Field(default=0.9, ge=0, le=1)

    def rate(self, sums: ChannelSums, weight: Tensor) -> Tensor:
        return ((1 - self.alpha) * sums.weighted + self.alpha * sums.largest) * weight.square().sum(0)


class Heapr(ExpertImportance):
    """``mean_t a_tj^2 W_:j^T G W_:j / 2``, G the covariance of the loss's gradients at the expert's output: HEAPr.

    Source: Li et al. 2025 (arXiv 2509.22299), whose abstract says that second-order information of parameters becomes that of
    atomic experts' outputs, found by two forward passes and one backward pass. Decided here: G is of one expert, the mean
    over its tokens, of the gradient of the next token's cross entropy at its output before the router's weight, which the
    gradient thereby holds. No matrix is needed: ``W_:j^T G W_:j`` is the mean of the squared gradient at ``a_j``, so that one
    forward pass suffices.
    """

    method: Literal["heapr"] = "heapr"
    runs_backward: ClassVar[bool] = True

    def rate(self, sums: ChannelSums, weight: Tensor) -> Tensor:
        return sums.squares * sums.gradients / (2 * max(sums.num_tokens, 1) ** 2)


def slice_by_mean_activation(folder: str, windows: Tensor, share: float) -> PeerResult:
    """Slice every expert by :class:`ActivationMean`."""
    return _slice_experts(folder, windows, share, ActivationMean())


def slice_by_l2_activation(folder: str, windows: Tensor, share: float) -> PeerResult:
    """Slice every expert by :class:`ActivationL2`."""
    return _slice_experts(folder, windows, share, ActivationL2())


def slice_by_camera(folder: str, windows: Tensor, share: float) -> PeerResult:
    """Slice every expert by :class:`Camera`."""
    return _slice_experts(folder, windows, share, Camera())


def slice_by_heapr(folder: str, windows: Tensor, share: float) -> PeerResult:
    """Slice every expert by :class:`Heapr`."""
    return _slice_experts(folder, windows, share, Heapr())


@torch.no_grad()
def _slice_experts(folder: str, windows: Tensor, share: float, criterion: ExpertImportance) -> PeerResult:
    """Remove the channels of every expert that a criterion rates least; nothing else changes.

    :param windows: calibration tokens, shape [windows, length], int64
    :param share: of the routed experts' parameters; widths are rounded to whole multiples of 8, as ours are
    """
    model, _ = load_checkpoint(folder, "auto")
    start = time.perf_counter()
    take_apart(model)
    groups, layers = find_groups(model, "none", False, prune_experts=True), dict(find_decoder_layers(model))
    dense, before = count_prunable_parameters(model), count_prunable_parameters(model, experts=True)
    scores = criterion.measure(model, [{"input_ids": part} for part in windows.split(_BATCH)], groups)
    for group in groups:
        kept = max(round((1 - share) * group.num_units / _STEP), 1) * _STEP
        keep = keep_last(order_scores(scores[group.name]), group.num_units, kept)
        weight = read_consumer(layers[group.layer_name], group)
        slice_group(layers[group.layer_name], group, keep, weight[:, with_bias_index(keep, group.num_units)])
    after = count_prunable_parameters(model, experts=True)
    return PeerResult(model, (before - after) / (before - dense), time.perf_counter() - start)


def sum_channels(
    model: PreTrainedModel, loader: Iterable[dict[str, Tensor]], groups: Sequence[UnitGroup], backward: bool = False
) -> dict[str, ChannelSums]:
    """Run the whole dense model on every batch; return what the channels of the experts gave, by group.

    :param groups: of experts that are taken apart
    :param backward: whether gradients are wanted
    """
    sums = {group.name: ChannelSums.make(group.num_units) for group in groups}
    layers = [(layer, select_groups(groups, name)) for name, layer in find_decoder_layers(model)]

    def see_gradient(found: ChannelSums) -> Callable[[nn.Module, tuple], None]:
        def count(gradient: Tensor) -> None:  # tokens that do not count have none
            found.gradients += gradient.double().square().flatten(0, -2).sum(0).cpu()

        def watch(_module: nn.Module, args: tuple) -> None:
            if args[0].requires_grad:
                args[0].register_hook(count)

        return watch

    with ExitStack() as stack:
        takes = [stack.enter_context(capture_experts(layer, members)) for layer, members in layers if members]
        if backward:
            stack.enter_context(freeze_weights(model))
            embeddings: Any = model.get_input_embeddings()
            stack.callback(embeddings.register_forward_hook(lambda _m, _a, out: out.requires_grad_()).remove)
            for layer, members in layers:
                for group in members:
                    consumer = find_linear(layer, group.consumer)
                    stack.callback(consumer.register_forward_pre_hook(see_gradient(sums[group.name])).remove)
        for batch in loader:
            with torch.set_grad_enabled(backward):
                loss = _find_loss(model, batch["input_ids"].to(model.device))
                call: Any = LayerCall  # nobody asks for it
                for take in takes:
                    for group, visit in take(call, None):
                        assert visit.weights is not None
                        sums[group.name].add(visit.inputs, visit.weights)
                if backward:
                    loss.backward()  # type: ignore[no-untyped-call]
    return sums


def _find_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the summed cross entropy of the next token."""
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
