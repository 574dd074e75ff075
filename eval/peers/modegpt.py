"""MoDeGPT (Lin et al. 2025): a decomposition for each pair of linears of a decoder layer, layers by their Block Influence.

Source: "MoDeGPT: Modular Decomposition for Large Language Model Compression" (ICLR), reimplemented from the paper. The FFN keeps
the channels of the largest ridge leverage scores and gets the down projection that Nyström's approximation gives (type I);
queries and keys keep the channels of the largest norms, a CR decomposition (type II); values and outputs of a head get the
factors of the singular value decomposition of their product, weighed by their inputs (type III). Layers lose
``L sparsity softmax(-s / T)``, the solution of an allocation by Block Influence s that is regularised by its entropy.

Legend, of one decoder layer; weights are those of ``nn.Linear``, with the bias as a last column:
    C [n, n]          second moment ``sum X^T X`` of what enters a pair of linears, of the FFN's down projection's inputs
    Q, K, V [w, d+1]  rows of one head; O [d, w] the columns of the output projection that read it
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eval.groups import find_groups
from eval.peers import PeerResult
from eval.peers.calibration import record_calls, run_again
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.layerwise.capture import record
from struprune_plugin.linalg.second_moments import append_bias
from struprune_plugin.linalg.solve import sqrt_psd
from struprune_plugin.model.layers import count_prunable_parameters, find_decoder_layers, find_linear
from struprune_plugin.model.surgery import read_consumer, read_weight, set_consumer, set_weight, slice_group
from struprune_plugin.model.unit_kind import UnitGroup, select_groups

FAMILIES = (
    "llama",
    "mistral",
    "opt",
    "qwen2",
)  # separate q_proj, k_proj and v_proj, and nothing but positions behind them
TEMPERATURE = 0.1  # T
MOST = 0.9  # of a layer that may go
RIDGE = 1.0  # of the leverage scores, relative to the mean diagonal of C
_NOTE = "heads' rows and columns kept as zeros; in a deployment rotary tables differ from head to head"


def prune_modegpt(folder: str, windows: Tensor, sparsity: float) -> PeerResult:
    """Prune an OPT, LLaMA, Mistral or Qwen2 checkpoint with MoDeGPT, on the activations of the dense model.

    Under rotary embeddings the two channels that rotate into each other go together, and count by the norms of both, which no
    rotation changes. Under grouped-query attention queries of all heads on a key head count together, and O has their columns
    side by side. The ridge of the leverage scores is the mean diagonal of C, where the paper adds the identity, so that it does not
    depend on the number of tokens; T is 0.1 for every model and sparsity. At most 0.9 of a layer goes; what the allocation asks
    beyond that falls to the others, in its shares. Channels of a head are whole numbers; the FFN makes up the rest. A bias of the
    values takes part as the weight of an input of ones.

    :param windows: calibration tokens, shape [windows, length], int64
    :param sparsity: of the parameters of all decoder linears, in [0, 1)
    :raises ValueError: the contract of ``sparsity``, or another family
    """
    return _prune(folder, windows, sparsity, query_key=True, follows=False, dampening=0.0)


def prune_without_query_key(folder: str, windows: Tensor, sparsity: float) -> PeerResult:
    """Prune as :func:`prune_modegpt`, with queries and keys left whole: the FFN, values and outputs give more.

    Two further changes that serve it: activations are those of the layers as pruned so far, and the FFN's solve is damped
    towards its dense weights, with 0.01 of the mean diagonal of C.
    """
    return _prune(folder, windows, sparsity, query_key=False, follows=True, dampening=0.01)


@torch.no_grad()
def _prune(
    folder: str, windows: Tensor, sparsity: float, query_key: bool, follows: bool, dampening: float
) -> PeerResult:
    model, _ = load_checkpoint(folder, "auto")
    if model.config.model_type not in FAMILIES:
        raise ValueError(
            f"modegpt: model must be one of {', '.join(FAMILIES)}, got {model.config.model_type}. Choose another model."
        )
    start = time.perf_counter()
    groups, total = find_groups(model, "value_channels"), count_prunable_parameters(model)
    calls, layers = record_calls(model, windows), find_decoder_layers(model)
    rotary = "position_embeddings" in calls[0].arguments
    shapes = [LayerShape.read(layer, select_groups(groups, name), query_key, rotary) for name, layer in layers]
    budgets = allocate(measure_influence([layer for _, layer in layers], calls), sparsity * total, shapes)
    hidden, owed, removed = [call.hidden for call in calls], 0.0, 0
    for (name, layer), shape, budget in zip(layers, shapes, budgets, strict=True):
        attention, ffn = _pick(select_groups(groups, name))
        (inputs, inner), dense = run_layer(layer, [attention, ffn], calls, hidden)
        owed += budget
        pairs, rank, channels, gone = shape.split(owed)
        owed, removed = owed - gone, removed + gone
        if pairs < shape.pairs:
            _cut_query_key(layer, attention, inputs, pairs, shape.step)
        if rank < shape.width:
            _cut_values(layer, attention, inputs, rank)
        if channels < shape.channels:
            if follows:
                (inner,), _ = run_layer(layer, [ffn], calls, hidden)
            keep, weight = decompose_ffn(inner, read_consumer(layer, ffn), channels, dampening)
            slice_group(layer, ffn, keep, weight)
        hidden = run_layer(layer, [], calls, hidden)[1] if follows else dense
    return PeerResult(model, removed / total, time.perf_counter() - start, _NOTE)


def _pick(groups: Sequence[UnitGroup]) -> tuple[UnitGroup, UnitGroup]:
    """Return a layer's attention and its FFN."""
    attention, ffn = (next(g for g in groups if g.unit.pool == kind) for kind in ("attention", "ffn"))
    return attention, ffn


def _find_query_key(layer: nn.Module, attention: UnitGroup) -> list[nn.Linear]:
    (values,) = attention.producers
    return [find_linear(layer, f"{values.rpartition('.')[0]}.{name}") for name in ("q_proj", "k_proj")]


# -- how much goes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerShape:
    """What one decoder layer can lose, in units, and the parameters of each.

    :param pairs: channels of a key head that go together, pairs under rotary embeddings; 0 where they stay
    :param step: channels in each, 1 or 2
    :param width: value channels of a head
    :param channels: of the FFN
    :param costs: parameters of a pair in all heads, of a value channel in all heads, of an FFN channel
    """

    pairs: int
    step: int
    width: int
    channels: int
    costs: tuple[int, int, int]

    @classmethod
    def read(cls, layer: nn.Module, groups: Sequence[UnitGroup], query_key: bool, rotary: bool) -> LayerShape:
        attention, ffn = _pick(groups)
        width, step = attention.num_units // attention.num_blocks, 2 if rotary else 1
        both = sum(p.numel() for linear in _find_query_key(layer, attention) for p in linear.parameters())
        pairs = width // step if query_key else 0
        costs = (both * step // width, attention.num_blocks * attention.unit_cost, ffn.unit_cost)
        return cls(pairs, step, width, ffn.num_units, costs)

    @property
    def size(self) -> int:
        """Parameters of all that can go."""
        return sum(n * cost for n, cost in zip((self.pairs, self.width, self.channels), self.costs, strict=True))

    def split(self, budget: float) -> tuple[int, int, int, int]:
        """Return the pairs, value channels and FFN channels that stay, and the parameters that go, for a budget of those."""
        share = min(budget / self.size, MOST)
        pairs, width = (max(round((1 - share) * n), 1) if n else 0 for n in (self.pairs, self.width))
        gone = (self.pairs - pairs) * self.costs[0] + (self.width - width) * self.costs[1]
        channels = min(max(self.channels - round((budget - gone) / self.costs[2]), 1), self.channels)
        return pairs, width, channels, gone + (self.channels - channels) * self.costs[2]


def measure_influence(layers: Sequence[nn.Module], calls: Sequence[LayerCall]) -> Tensor:
    """Return every layer's Block Influence ``1 - mean cos(x, layer(x))`` over all tokens, shape [layers], float64."""
    hidden, scores = [call.hidden for call in calls], []
    for layer in layers:
        after = run_layer(layer, [], calls, hidden)[1]
        cosines = [torch.cosine_similarity(x.double(), y.double(), dim=-1) for x, y in zip(hidden, after, strict=True)]
        scores.append(1 - torch.cat([cosine.flatten() for cosine in cosines]).mean())
        hidden = after
    return torch.stack(scores)


def allocate(influence: Tensor, budget: float, shapes: Sequence[LayerShape]) -> list[float]:
    """Return the parameters that every layer loses: by ``softmax(-s / T)``, at most :data:`MOST` of what it has.

    :param influence: s, shape [layers], float64
    :param budget: parameters that go in all
    :raises ValueError: so much cannot go
    """
    most = torch.tensor([MOST * shape.size for shape in shapes], dtype=torch.float64)
    if not 0 <= budget <= most.sum():
        raise ValueError(
            f"modegpt: sparsity must leave a tenth of what is pruned, got {budget:,.0f} parameters. Lower it."
        )
    shares, found = torch.softmax(-influence / TEMPERATURE, 0), torch.zeros(len(most), dtype=torch.float64)
    for _ in shapes:  # each turn fills a layer, or ends
        free = found < most
        if float(budget - found.sum()) <= 0 or not free.any():
            break
        found += (budget - found.sum()) * shares * free / (shares * free).sum()
        found = found.minimum(most)
    return found.tolist()


def run_layer(
    layer: nn.Module, groups: Sequence[UnitGroup], calls: Sequence[LayerCall], hidden: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a layer as it now is; return C of every group, float64, and what leaves the layer.

    C is of attention's own inputs and a one behind them, or of the FFN's channels.
    """
    moments: list[Tensor] = []
    after = []
    with record(layer, groups) as seen:
        for call, stream in zip(calls, hidden, strict=True):
            after.append(run_again(call, layer, stream).cpu())
            products = []
            for group in groups:
                is_ffn = group.kind == "ffn"
                inputs = (seen.inputs[group.consumer] if is_ffn else append_one(seen.find_source(group))).float()
                products.append((inputs.T @ inputs).double())
            moments = [total + own for total, own in zip(moments, products, strict=True)] if moments else products
    return moments, after


def append_one(inputs: Tensor) -> Tensor:
    """Return inputs with a one behind them, which carries the bias, shape [tokens, d + 1]."""
    return torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1)


# -- decompositions --------------------------------------------------------------------------------------------------


def decompose_ffn(gram: Tensor, weight: Tensor, num_keep: int, dampening: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return (channels that stay, sorted; weights of the down projection on them, bias last, float64): type I.

    Channels are ranked by ``[C (C + r I)^-1]_ii``; with S those that stay, the new weights are ``W C_:S (C_SS)^-1``.

    :param gram: C, shape [n, n], float64
    :param weight: of the down projection, shape [d, n + 1], float64, bias last
    :param dampening: added to the diagonal of C first, relative to its mean: pulls the new weights towards the old ones
    """
    mean, eye = gram.diagonal().mean(), torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    leverage = torch.linalg.solve(gram + RIDGE * mean * eye, gram).diagonal()
    keep = leverage.topk(num_keep).indices.sort().values
    damped = gram + dampening * mean * eye
    inner, cross = damped[keep][:, keep], weight[:, :-1] @ damped[:, keep]
    new = (
        torch.linalg.lstsq(inner, cross.T, driver="gelsd").solution.T
        if dampening == 0
        else torch.linalg.solve(inner, cross.T).T
    )
    return keep, torch.cat([new, weight[:, -1:]], 1)


def select_query_key(gram: Tensor, queries: Tensor, keys: Tensor, num_keep: int, step: int) -> Tensor:
    """Return the channels of one key head that stay, sorted: type II, those of the largest ``||X Q^T|| ||X K^T||``.

    :param queries: Q of all heads that read these keys, shape [heads, w, d + 1], float64
    :param keys: K, shape [w, d + 1], float64
    :param num_keep: sets of channels that stay
    :param step: 2 where channels i and i + w / 2 rotate into each other and count as one set, else 1
    """
    energies = [torch.einsum("...wi,ij,...wj->...w", rows, gram, rows) for rows in (queries, keys)]
    query, key = (energy.reshape(-1, step, len(keys) // step).sum((0, 1)) for energy in energies)
    chosen = (query * key).topk(num_keep).indices
    return torch.cat([chosen + part * (len(keys) // step) for part in range(step)]).sort().values


def decompose_values(gram: Tensor, values: Tensor, outputs: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return (V', O') of a rank: type III, the factors with the least ``||X V^T O^T - X V'^T O'^T||``.

    With R the first right singular vectors of ``C^(1/2) V^T O^T``, ``V' = (O^T R)^T V`` and ``O' = R``.

    :param gram: C, shape [d + 1, d + 1], float64
    :param values: V, shape [w, d + 1], float64
    :param outputs: O of all heads that read these values, shape [heads, d, w], float64
    :return: shapes [rank, d + 1] and [heads, d, rank]
    """
    joint = outputs.transpose(1, 2).transpose(0, 1).flatten(1)  # O^T side by side, shape [w, heads * d]
    basis = torch.linalg.svd(sqrt_psd(values @ gram @ values.T) @ joint, full_matrices=False).Vh[:rank]
    return basis @ joint.T @ values, basis.view(rank, len(outputs), -1).permute(1, 2, 0)


def _cut_query_key(layer: nn.Module, group: UnitGroup, gram: Tensor, num_keep: int, step: int) -> None:
    """Set the rows of queries and keys that go to zero."""
    linears = _find_query_key(layer, group)
    weights = [append_bias(*read_weight(linear)) for linear in linears]
    width = len(weights[1]) // group.num_blocks
    queries, keys = (weight.view(group.num_blocks, -1, width, weight.shape[1]) for weight in weights)
    for own_queries, own_keys in zip(queries, keys, strict=True):
        keep = select_query_key(gram, own_queries, own_keys[0], num_keep, step)
        gone = torch.ones(width, dtype=torch.bool, device=gram.device).index_fill(0, keep, False)
        own_queries[:, gone], own_keys[:, gone] = 0, 0
    for linear, weight in zip(linears, weights, strict=True):
        set_weight(linear, weight)


def _cut_values(layer: nn.Module, group: UnitGroup, gram: Tensor, rank: int) -> None:
    """Replace values and outputs of every head by those of a rank, with zeros where channels are gone."""
    (name,) = group.producers
    width = group.num_units // group.num_blocks
    values, consumer = append_bias(*read_weight(find_linear(layer, name))), read_consumer(layer, group)
    rows = values.view(group.num_blocks, width, -1)
    columns = consumer[:, :-1].view(len(consumer), group.num_blocks, width, group.repeats)
    for block in range(group.num_blocks):
        new, outputs = decompose_values(gram, rows[block], columns[:, block].permute(2, 0, 1), rank)
        rows[block], columns[:, block] = 0, 0
        rows[block, :rank], columns[:, block, :rank] = new, outputs.permute(1, 2, 0)
    set_weight(find_linear(layer, name), values)
    set_consumer(layer, group, consumer)
