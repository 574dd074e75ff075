"""Drive the ADMM sub-steps over the calibration data, a micro-batch or a sequence on the device at a time (R12)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from struprune_plugin.admm import (
    FFNVariables,
    accumulate_ffn_moments,
    initialize_ffn_variables,
    make_ffn_moments,
    measure_ffn_objective,
    solve_ffn_weights,
    update_ffn_variables,
)
from struprune_plugin.admm_attention import (
    AttentionSample,
    AttentionSettings,
    AttentionVariables,
    AttentionWeights,
    accumulate_attention_moments,
    initialize_attention_variables,
    make_attention_moments,
    measure_attention_objective,
    solve_attention_weights,
    update_attention_variables,
)
from struprune_plugin.modifiers.capture import Visit
from struprune_plugin.solve import expand_units
from struprune_plugin.statistics import append_bias
from struprune_plugin.surgery import read_weight
from struprune_plugin.topology import UnitGroup, find_linear

_Movable = TypeVar("_Movable", AttentionSample, AttentionVariables)


@dataclass(frozen=True)
class ADMMSettings:
    """Fields of the recipe, see :class:`~struprune_plugin.modifiers.pruning.StruPruneModifier`."""

    alpha: float
    beta: float
    steps: int
    inner_steps: int
    learning_rate: float
    method: Literal[1, 2]
    damping: float


@dataclass(frozen=True)
class ADMMResult:
    """What ADMM leaves of one group.

    :param producers: new weights by linear, kept rows only, shape [rows, d + 1], bias last
    :param consumer: new weight of the consumer, shape [d_out, kept columns + 1]
    :param objective: at the start, then after every step (attention: after its variables, before its weights)
    """

    producers: dict[str, Tensor]
    consumer: Tensor
    objective: list[float]


def run_admm(
    layer: nn.Module,
    query_key: tuple[str, str],
    group: UnitGroup,
    keep: Tensor,
    weight: Tensor,
    visits: Iterable[Visit],
    settings: ADMMSettings,
) -> ADMMResult:
    """Run Algorithm 4 on the kept units of one group, from its least-squares solution.

    :param layer: the layer, not yet sliced
    :param query_key: names of W_Q and W_K in the layer
    :param keep: sorted kept units
    :param weight: the consumer's re-solved weight on them, bias last
    :param visits: what the module sees and should give, batch by batch
    """
    if group.kind == "ffn":
        return _run_ffn(layer, group, keep, weight, visits, settings)
    return _run_attention(layer, query_key, group, keep, weight, visits, settings)


def _read_kept(layer: nn.Module, name: str, group: UnitGroup, keep: Tensor) -> Tensor:
    """Return a producer's kept rows, all where the group does not cut it, bias last, float32."""
    linear = find_linear(layer, name)
    weight = append_bias(*read_weight(linear)).float()
    if name not in group.producers:
        return weight
    return weight[expand_units(keep.to(weight.device), linear.out_features // group.num_units)]


def _run_ffn(
    layer: nn.Module, group: UnitGroup, keep: Tensor, weight: Tensor, visits: Iterable[Visit], settings: ADMMSettings
) -> ADMMResult:
    first = tuple(_read_kept(layer, name, group, keep) for name in group.producers)
    second, device = weight.float(), weight.device
    has_bias = find_linear(layer, group.consumer).bias is not None
    data: list[tuple[Tensor, Tensor]] = []
    variables: list[FFNVariables] = []
    for visit in visits:
        tokens = slice(None) if visit.call.tokens is None else visit.call.tokens.to(device)
        source, target = visit.source[tokens].float(), visit.target[tokens]
        variables.append(_to_ffn(initialize_ffn_variables(source, first), "cpu"))
        data.append((source.cpu(), target.cpu()))
    objective: list[float] = []
    for step in tqdm(range(settings.steps + 1), desc=f"ADMM {group.name}"):
        moments = make_ffn_moments(len(first), len(keep), first[0].shape[1] - 1, len(second), second)
        for index, (source, target) in enumerate(data):
            x, y, held = source.to(device), target.to(device), _to_ffn(variables[index], device)
            if step:
                held = update_ffn_variables(held, x, y, first, second, settings.alpha, settings.beta)
                variables[index] = _to_ffn(held, "cpu")
            accumulate_ffn_moments(moments, held, x, y)
        if step:
            solved_first, solved = solve_ffn_weights(moments, first, second, settings.damping, has_bias, group.name)
            first, second = tuple(part.float() for part in solved_first), solved.float()
        objective.append(measure_ffn_objective(moments, first, second, settings.alpha, settings.beta))
    return ADMMResult(dict(zip(group.producers, first, strict=True)), second, objective)


def _to_ffn(variables: FFNVariables, device: torch.device | str) -> FFNVariables:
    moved = tuple(part.to(device) for part in variables.preactivations)
    return FFNVariables(variables.activations.to(device), moved)


def _run_attention(
    layer: nn.Module,
    query_key: tuple[str, str],
    group: UnitGroup,
    keep: Tensor,
    weight: Tensor,
    visits: Iterable[Visit],
    settings: ADMMSettings,
) -> ADMMResult:
    device = weight.device
    names = (*query_key, group.producers[-1])
    query, key, value = (_read_kept(layer, name, group, keep) for name in names)
    heads = len(keep) if group.kind == "head" else group.num_blocks
    weights = AttentionWeights(query, key, value, weight.float(), heads)
    has_bias = find_linear(layer, group.consumer).bias is not None
    inner = AttentionSettings(settings.alpha, settings.beta, settings.inner_steps, settings.learning_rate)
    samples = [sample for visit in visits for sample in _split_sequences(visit)]
    variables: list[AttentionVariables] = []
    objective: list[float] = []
    for step in tqdm(range(settings.steps + 1), desc=f"ADMM {group.name}"):
        moments = make_attention_moments(weights, device, torch.float32)
        total = 0.0
        for index, on_host in enumerate(samples):
            sample = _move(on_host, device)
            maps = None
            if step == 0:
                held = initialize_attention_variables(sample, weights, settings.method)
                variables.append(_move(held, "cpu"))
            else:
                held, maps = update_attention_variables(sample, _move(variables[index], device), weights, inner)
                variables[index] = _move(held, "cpu")
                accumulate_attention_moments(moments, sample, held, maps, weights, max(settings.damping, 1e-6))
            total += measure_attention_objective(sample, held, weights, settings.alpha, settings.beta, maps).total
        objective.append(total)
        if step:
            weights = _to_float(solve_attention_weights(moments, weights, settings.damping, has_bias, group.name))
    producers = dict(zip(names, (weights.query, weights.key, weights.value), strict=True))
    return ADMMResult(producers, weights.output, objective)


def _split_sequences(visit: Visit) -> Iterator[AttentionSample]:
    """Cut a batch into sequences on the host, each with its mask and the tokens that are no padding."""
    batch, length = visit.call.hidden.shape[:2]
    source = visit.source.float().cpu().view(batch, length, -1)
    target = visit.target.cpu().view(batch, length, -1)
    mask = visit.call.kwargs.get("attention_mask")
    valid = torch.ones(batch * length, dtype=torch.bool)
    if visit.call.tokens is not None:
        valid = torch.zeros_like(valid).index_fill(0, visit.call.tokens.cpu(), True)
    causal = torch.full((length, length), float("-inf")).triu(1)
    for row in range(batch):
        own = causal if mask is None else mask[min(row, len(mask) - 1), 0, :length, :length].float()
        rows = valid.view(batch, length)[row].nonzero().flatten()
        yield AttentionSample(source[row], target[row], own, None if len(rows) == length else rows)


def _move(holder: _Movable, device: torch.device | str) -> _Movable:
    """Return a dataclass with all its tensors on a device."""
    parts: dict[str, Any] = {f.name: getattr(holder, f.name) for f in fields(holder)}
    return replace(holder, **{name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)})


def _to_float(weights: AttentionWeights) -> AttentionWeights:
    parts = {name: getattr(weights, name).float() for name in ("query", "key", "value", "output")}
    return replace(weights, **parts)
