"""Split the channels of one gated FFN into experts, and fit a router to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP

SCALE = 2.0  # routed_scaling_factor: a router that says 0 gives its expert the weight 1
SPREAD = 0.1  # standard deviation of a new router's logits
DAMPING = 1e-2  # of the mean of a moment's diagonal
ROUNDS = 5  # of each kind of clustering


@dataclass(frozen=True)
class Sizes:
    """How an FFN is split: ``width`` channels an expert; the shared expert is as wide as ``shared`` of them."""

    experts: int
    active: int
    shared: int
    width: int


class SplitFFN(nn.Module):
    """A gated FFN whose channels, in the order shared, expert 0, expert 1, ..., are weighed by a router.

    All channels are computed and those of experts that are not chosen weighed by zero: what the stock class computes.
    """

    bias: Tensor  # added to scores where experts are chosen, and nowhere else
    load: Tensor  # tokens that every expert has seen

    def __init__(self, ffn: LlamaMLP, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = ffn.gate_proj, ffn.up_proj
        self.down_proj, self.act_fn = ffn.down_proj, ffn.act_fn
        self.sizes = sizes
        self.router = nn.Parameter(torch.zeros(sizes.experts, ffn.gate_proj.in_features))
        self.register_buffer("bias", torch.zeros(sizes.experts))
        self.register_buffer("load", torch.zeros(sizes.experts))
        self.oracle = False  # choose by the experts' energies themselves

    def reorder(self, order: Tensor) -> None:
        """Put the channels into another order."""
        self.gate_proj.weight.data = self.gate_proj.weight.data[order]
        self.up_proj.weight.data = self.up_proj.weight.data[order]
        self.down_proj.weight.data = self.down_proj.weight.data[:, order].contiguous()

    def fire(self, x: Tensor) -> Tensor:
        """Return the channels' activations, shape [..., channels]."""
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)

    def weigh(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return the experts' weights, zero for those that are not chosen, shape [..., experts], float32."""
        with torch.autocast("cpu", enabled=False):
            scores = functional.linear(x.float(), self.router).sigmoid()
        choice = scores.detach() + self.bias
        if self.oracle:
            choice = sum_energies(self, hidden.float()).unflatten(-1, (-1, self.sizes.width)).sum(-1)
            choice, scores = choice[..., self.sizes.shared :], torch.full_like(scores, 1 / SCALE)
        chosen = choose(choice, self.sizes.active)
        self.load += chosen.flatten(0, -2).sum(0)
        return SCALE * scores * chosen

    def route(self, x: Tensor) -> Tensor:
        """Return the activations times their expert's weight, shape [..., channels]."""
        hidden = self.fire(x)
        weights = self.weigh(x, hidden).repeat_interleave(self.sizes.width, -1)
        return hidden * functional.pad(weights, (self.sizes.shared * self.sizes.width, 0), value=1.0).to(hidden.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.route(x))


def sum_energies(ffn: SplitFFN, hidden: Tensor) -> Tensor:
    """Return the squared norm of what every channel adds to the output, shape [..., channels]."""
    return hidden.square() * ffn.down_proj.weight.float().square().sum(0)


def assign_evenly(gain: Tensor) -> Tensor:
    """Give every channel one expert, equally many each, for the greatest sum of gains, shape [channels]."""
    slots = gain.shape[0] // gain.shape[1]
    columns = linear_sum_assignment(gain.double().repeat_interleave(slots, 1).numpy(), maximize=True)[1]
    return torch.from_numpy(columns) // slots


def regress(x: Tensor, targets: Tensor) -> Tensor:
    """Return ridge regression's weights without intercepts, shape [targets, d]."""
    moment = (x.T @ x).double()
    moment.diagonal().add_(DAMPING * moment.diagonal().mean())
    return torch.linalg.solve(moment, (x.T @ targets).double()).T.float()


def choose(scores: Tensor, active: int) -> Tensor:
    """Return 1 where an expert is among the ``active`` of greatest score, else 0; the shape of ``scores``."""
    return torch.zeros_like(scores).scatter(-1, scores.topk(active).indices, 1.0)


def cluster(x: Tensor, energies: Tensor, sizes: Sizes) -> Tensor:
    """Return every routed channel's expert, shape [channels].

    First k-means over the channels' energies. Then, in turns, a router is fitted to the experts' energies and every
    channel goes where it has most of its energy while its expert is chosen.

    :param x: FFN inputs, shape [tokens, d]
    :param energies: of the routed channels, shape [tokens, channels]
    """
    firing = functional.normalize(energies.sqrt() - energies.sqrt().mean(0), dim=0)
    experts = assign_evenly(firing.T @ firing[:, torch.randperm(firing.shape[1])[: sizes.experts]])
    for turn in range(2 * ROUNDS):
        members = functional.one_hot(experts, sizes.experts).float()
        if turn < ROUNDS:
            experts = assign_evenly(firing.T @ functional.normalize(firing @ members, dim=0))
            continue
        predicted = x @ regress(x, (energies @ members).sqrt()).T
        predicted = (predicted - predicted.mean(0)) / predicted.std(0)  # or few would be hot, the others cold
        experts = assign_evenly(energies.T @ choose(predicted, sizes.active))
    return experts


@torch.no_grad()
def split_ffn(ffn: LlamaMLP, x: Tensor, sizes: Sizes) -> SplitFFN:
    """Split an FFN into experts and fit its router.

    The shared expert takes the channels of most energy. Channels left over, of least energy, go.

    :param x: its inputs, shape [tokens, d]
    """
    split = SplitFFN(ffn, sizes)
    energies = sum_energies(split, split.fire(x))
    order = energies.mean(0).argsort(descending=True)[: (sizes.shared + sizes.experts) * sizes.width]
    shared, routed = order.tensor_split([sizes.shared * sizes.width])
    experts = cluster(x, energies[:, routed], sizes)
    split.reorder(torch.cat([shared, routed[experts.argsort(stable=True)]]))
    summed = (energies[:, routed] @ functional.one_hot(experts, sizes.experts).float()).sqrt()
    chosen = summed.topk(sizes.active).values.mean()  # so that the weights of those chosen are near 1
    split.router.data = regress(x, (summed - chosen) * SPREAD / summed.std())
    return split
