"""Drive the ADMM sub-steps over the calibration data, a micro-batch or a sequence on the device at a time (R12)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from struprune_plugin.device.room import Room
from struprune_plugin.layer.calls import Visit
from struprune_plugin.maths.admm_attention import (
    AttentionMoments,
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
from struprune_plugin.maths.admm_ffn import (
    FFNMoments,
    FFNVariables,
    accumulate_ffn_moments,
    initialize_ffn_variables,
    make_ffn_moments,
    measure_ffn_objective,
    solve_ffn_weights,
    update_ffn_variables,
)
from struprune_plugin.maths.elimination import expand_units, keep_last, order_units
from struprune_plugin.maths.importance import score_closed_form
from struprune_plugin.maths.statistics import append_bias, with_bias_index
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_weight
from struprune_plugin.model.units.group import UnitGroup

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
    group: UnitGroup,
    keep: Tensor,
    weight: Tensor,
    visits: Iterable[Visit],
    settings: ADMMSettings,
    room: Room,
) -> ADMMResult:
    """Run Algorithm 4 on the kept units of one group, from its least-squares solution.

    :param layer: the layer, not yet sliced
    :param keep: sorted kept units
    :param weight: the consumer's re-solved weight on them, bias last
    :param visits: what the module sees and should give, batch by batch
    """
    if group.unit.is_ffn:
        return _run_ffn(layer, group, keep, weight, visits, settings, room)
    return _run_attention(layer, group, keep, weight, visits, settings, room)


def score_by_admm(
    layer: nn.Module,
    group: UnitGroup,
    scores: Tensor,
    num_keep: int,
    visits: Iterable[Visit],
    settings: ADMMSettings,
    room: Room,
) -> Tensor:
    """Return Lemma 1's score of every unit after ``settings.steps`` outer steps of Algorithm 1 on one module.

    In each step the best ``num_keep`` units by the scores so far give the mask, the masked dense weights move the
    per-token variables, and regressing those on the inputs gives the current weights that Lemma 1 compares with the
    dense ones. Source: paper, Algorithm 1, the inner loop; Differs from the source: the first mask comes from
    ``scores`` (R4), and dense and current inputs of the module are the same, as its layer sees them now.

    :param scores: that make the first mask, shape [units]
    :param num_keep: units of the mask, a multiple of the group's blocks
    :return: shape [units], float64
    """
    everything = torch.arange(group.num_units)
    if group.unit.is_ffn:
        dense = _read_ffn_weights(layer, group, everything)
        cut = list(range(len(dense)))
    else:
        names = (*group.wiring.query_key, list(group.producers)[-1])
        dense = [_read_kept(layer, name, group, everything) for name in names]
        cut = [i for i, name in enumerate(names) if name in group.producers]
    output = append_bias(*read_weight(find_linear(layer, group.consumer))).float()
    current, gram = dense, torch.zeros(dense[0].shape[1], dense[0].shape[1], dtype=torch.float64, device=output.device)
    run = (
        _FFNSteps(layer, group, settings, room) if group.unit.is_ffn else _AttentionSteps(layer, group, settings, room)
    )
    for visit in visits:
        run.start(visit, dense, output)
        inputs = torch.nn.functional.pad(_pick_tokens(visit, room)[0], (0, 1), value=1.0).double()
        gram.addmm_(inputs.T, inputs)
    for _ in range(settings.steps - 1):
        keep = keep_last(order_units(scores, group.num_blocks), group.num_units, num_keep)
        masked = [_mask_rows(w, keep, group.num_units) if i in cut else w for i, w in enumerate(dense)]
        current = run.step(masked, _mask_columns(output, keep, group), current)
        old, new = (_stack_units([weights[i] for i in cut], group.num_units) for weights in (dense, current))
        scores = score_closed_form(old, new, gram, gram, gram, group.num_units)
    return scores if settings.steps > 1 else torch.ones_like(scores)


def _mask_rows(weight: Tensor, keep: Tensor, num_units: int) -> Tensor:
    rows = expand_units(keep, len(weight) // num_units)
    return torch.zeros_like(weight).index_copy(0, rows, weight[rows])


def _mask_columns(weight: Tensor, keep: Tensor, group: UnitGroup) -> Tensor:
    columns = with_bias_index(expand_units(keep, group.columns_per_unit), group.num_columns)
    return torch.zeros_like(weight).index_copy(1, columns, weight[:, columns])


def _stack_units(weights: list[Tensor], num_units: int) -> Tensor:
    """Put the rows that several producers give one unit together, unit after unit."""
    parts = [weight.view(num_units, -1, weight.shape[1]) for weight in weights]
    return torch.cat(parts, 1).reshape(-1, weights[0].shape[1])


def _pick_tokens(visit: Visit, room: Room) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets) of the tokens that are no padding, float32."""
    tokens = slice(None) if visit.call.tokens is None else room.to_device(visit.call.tokens, visit.source.device)
    return visit.source[tokens].float(), visit.target[tokens]


def _read_kept(layer: nn.Module, name: str, group: UnitGroup, keep: Tensor) -> Tensor:
    """Return a producer's kept rows, all where the group does not cut it, bias last, float32."""
    linear = find_linear(layer, name)
    weight = append_bias(*read_weight(linear)).float()
    if name not in group.producers:
        return weight
    return weight[group.find_kept_rows(name, keep).to(weight.device)]


def _read_ffn_weights(layer: nn.Module, group: UnitGroup, keep: Tensor) -> list[Tensor]:
    """Return W1, or gate and up whether they are fused or not, kept rows only, bias last, float32."""
    return [
        part
        for name, parts in group.producers.items()
        for part in _read_kept(layer, name, group, keep).chunk(len(parts))
    ]


def _join_ffn_weights(group: UnitGroup, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """Put the weights of :func:`_read_ffn_weights` together again, by linear."""
    left = iter(weights)
    return {name: torch.cat([next(left) for _ in parts]) for name, parts in group.producers.items()}


class _FFNSteps:
    """One FFN's per-token variables on the host, and the steps that move them."""

    def __init__(self, layer: nn.Module, group: UnitGroup, settings: ADMMSettings, room: Room):
        self.settings, self.where, self.room = settings, group.name, room
        self.has_bias = find_linear(layer, group.consumer).bias is not None
        self.data: list[tuple[Tensor, Tensor]] = []
        self.variables: list[FFNVariables] = []

    def start(self, visit: Visit, first: Sequence[Tensor], second: Tensor) -> None:
        """Take in a batch, at the variables that the weights give."""
        source, target = _pick_tokens(visit, self.room)
        self.variables.append(_to_ffn(initialize_ffn_variables(source, first), None, self.room))
        self.data.append((self.room.park(source), self.room.park(target)))

    def visit(self, first: Sequence[Tensor], second: Tensor, move: bool) -> FFNMoments:
        """Move all variables, unless told not to, and return the moments for the weight steps."""
        device = second.device
        width, inputs = second.shape[1] - 1, first[0].shape[1] - 1
        moments = make_ffn_moments(len(first), width, inputs, len(second), second)
        for index, (source, target) in enumerate(self.data):
            x, y = self.room.to_device(source, device), self.room.to_device(target, device)
            held = _to_ffn(self.variables[index], device, self.room)
            if move:
                held = update_ffn_variables(held, x, y, first, second, self.settings.alpha, self.settings.beta)
                self.variables[index] = _to_ffn(held, None, self.room)
            accumulate_ffn_moments(moments, held, x, y)
        return moments

    def step(self, first: Sequence[Tensor], second: Tensor, current: Sequence[Tensor]) -> list[Tensor]:
        """Move the variables with masked weights; return z regressed on the inputs, pulled towards ``current``."""
        moments = self.visit(first, second, move=True)
        solved, _ = solve_ffn_weights(moments, current, second, self.settings.damping, self.has_bias, self.where)
        return [weight.float() for weight in solved]


class _AttentionSteps:
    """One attention module's per-token variables on the host, and the steps that move them."""

    def __init__(
        self, layer: nn.Module, group: UnitGroup, settings: ADMMSettings, room: Room, num_units: int | None = None
    ):
        self.settings, self.where, self.room = settings, group.name, room
        self.heads = group.unit.count_heads(group, num_units or group.num_units)
        self.has_bias = find_linear(layer, group.consumer).bias is not None
        self.inner = AttentionSettings(
            settings.alpha, settings.beta, settings.inner_steps, settings.learning_rate, exact_maps=True
        )
        self.samples: list[AttentionSample] = []
        self.variables: list[AttentionVariables] = []

    def start(self, visit: Visit, first: Sequence[Tensor], second: Tensor) -> None:
        """Take in a batch, at the variables that the weights give."""
        device, weights = second.device, _join_weights(first, second, self.heads)
        for on_host in _split_sequences(visit, self.room):
            sample = _move(on_host, device, self.room)
            held = initialize_attention_variables(sample, weights, self.settings.method)
            self.samples.append(on_host)
            self.variables.append(_move(held, None, self.room))

    def visit(self, weights: AttentionWeights, move: bool) -> tuple[AttentionMoments, float]:
        """Move all variables, unless told not to; return the moments for the weight steps and the objective."""
        device, settings, total = weights.output.device, self.settings, 0.0
        moments = make_attention_moments(weights, device, torch.float32)
        for index, on_host in enumerate(self.samples):
            sample, held, maps = (
                _move(on_host, device, self.room),
                _move(self.variables[index], device, self.room),
                None,
            )
            if move:
                held, maps = update_attention_variables(sample, held, weights, self.inner)
                self.variables[index] = _move(held, None, self.room)
                accumulate_attention_moments(moments, sample, held, maps, weights, max(settings.damping, 1e-6))
            total += measure_attention_objective(sample, held, weights, settings.alpha, settings.beta, maps).total
        return moments, total

    def solve(self, moments: AttentionMoments, weights: AttentionWeights) -> AttentionWeights:
        return _to_float(solve_attention_weights(moments, weights, self.settings.damping, self.has_bias, self.where))

    def step(self, first: Sequence[Tensor], second: Tensor, current: Sequence[Tensor]) -> list[Tensor]:
        """Move the variables with masked weights; return them regressed on the inputs, pulled towards ``current``."""
        moments, _ = self.visit(_join_weights(first, second, self.heads), move=True)
        solved = self.solve(moments, _join_weights(current, second, self.heads))
        return [solved.query, solved.key, solved.value]


def _run_ffn(
    layer: nn.Module,
    group: UnitGroup,
    keep: Tensor,
    weight: Tensor,
    visits: Iterable[Visit],
    settings: ADMMSettings,
    room: Room,
) -> ADMMResult:
    first: Sequence[Tensor] = _read_ffn_weights(layer, group, keep)
    second = weight.float()
    run = _FFNSteps(layer, group, settings, room)
    for visit in visits:
        run.start(visit, first, second)
    objective: list[float] = []
    for step in tqdm(range(settings.steps + 1), desc=f"ADMM {group.name}"):
        moments = run.visit(first, second, move=step > 0)
        if step:
            solved = solve_ffn_weights(moments, first, second, settings.damping, run.has_bias, group.name)
            first, second = tuple(part.float() for part in solved[0]), solved[1].float()
        objective.append(measure_ffn_objective(moments, first, second, settings.alpha, settings.beta))
    return ADMMResult(_join_ffn_weights(group, first), second, objective)


def _run_attention(
    layer: nn.Module,
    group: UnitGroup,
    keep: Tensor,
    weight: Tensor,
    visits: Iterable[Visit],
    settings: ADMMSettings,
    room: Room,
) -> ADMMResult:
    names = (*group.wiring.query_key, list(group.producers)[-1])
    first = [_read_kept(layer, name, group, keep) for name in names]
    run = _AttentionSteps(layer, group, settings, room, len(keep))
    weights = _join_weights(first, weight.float(), run.heads)
    for visit in visits:
        run.start(visit, first, weights.output)
    objective: list[float] = []
    for step in tqdm(range(settings.steps + 1), desc=f"ADMM {group.name}"):
        moments, total = run.visit(weights, move=step > 0)
        objective.append(total)
        if step:
            weights = run.solve(moments, weights)
    producers = dict(zip(names, (weights.query, weights.key, weights.value), strict=True))
    return ADMMResult(producers, weights.output, objective)


def _send(tensor: Tensor, device: torch.device | None, room: Room) -> Tensor:
    return room.park(tensor) if device is None else room.to_device(tensor, device)


def _to_ffn(variables: FFNVariables, device: torch.device | None, room: Room) -> FFNVariables:
    moved = tuple(_send(part, device, room) for part in variables.preactivations)
    return FFNVariables(_send(variables.activations, device, room), moved)


def _split_sequences(visit: Visit, room: Room) -> Iterator[AttentionSample]:
    """Cut a batch into sequences on the host, each with its mask and the tokens that are no padding."""
    batch, length = visit.call.hidden.shape[:2]
    source = room.to_host(visit.source.float()).view(batch, length, -1)
    target = room.to_host(visit.target).view(batch, length, -1)
    mask = visit.call.kwargs.get("attention_mask")
    valid = torch.ones(batch * length, dtype=torch.bool)
    if visit.call.tokens is not None:
        valid = torch.zeros_like(valid).index_fill(0, visit.call.tokens.cpu(), True)
    causal = torch.full((length, length), float("-inf")).triu(1)
    for row in range(batch):
        own = causal if mask is None else mask[min(row, len(mask) - 1), 0, :length, :length].float()
        rows = valid.view(batch, length)[row].nonzero().flatten()
        kept = None if len(rows) == length else room.to_host(rows)
        yield AttentionSample(source[row], target[row], room.to_host(own), kept)


def _move(holder: _Movable, device: torch.device | None, room: Room) -> _Movable:
    """Return a dataclass with all its tensors on a device, or on the host where None."""
    parts: dict[str, Any] = {f.name: getattr(holder, f.name) for f in fields(holder)}
    moved = {name: _send(part, device, room) for name, part in parts.items() if isinstance(part, Tensor)}
    return replace(holder, **moved)  # type: ignore[arg-type]


def _join_weights(first: Sequence[Tensor], second: Tensor, heads: int) -> AttentionWeights:
    query, key, value = first
    return AttentionWeights(query, key, value, second, heads)


def _to_float(weights: AttentionWeights) -> AttentionWeights:
    parts = {name: getattr(weights, name).float() for name in ("query", "key", "value", "output")}
    return replace(weights, **parts)
