"""``weight_update: admm``, Algorithm 4 on the kept units of one module; ``importance: closed_form``, Algorithm 1's inner loop.

The variables of every token are on the host; each step updates those of one micro-batch or sequence on the device (R12).
Weights are passed in lists: those of the producers, then the consumer's, bias last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import compress
from typing import Any, ClassVar, Literal, TypeVar

import torch
from loguru import logger
from pydantic import Field
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.layerwise.capture import Visit
from struprune_plugin.layerwise.statistics import ModuleView
from struprune_plugin.linalg.budget import MAX_SPARSITY
from struprune_plugin.linalg.elimination import keep_last, order_units
from struprune_plugin.linalg.second_moments import SecondMoments, append_bias
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.surgery import read_weight
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.model.units.kinds import VALUE
from struprune_plugin.paper.admm_attention import (
    AttentionSample,
    AttentionWeights,
    accumulate_attention_moments,
    initialize_attention_variables,
    measure_attention_objective,
    solve_attention_weights,
    update_attention_variables,
)
from struprune_plugin.paper.admm_ffn import (
    ADMMSettings,
    Sample,
    Variables,
    accumulate_ffn_moments,
    initialize_ffn_variables,
    make_ridge_moments,
    measure_ffn_objective,
    solve_ridge,
    update_ffn_variables,
)
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance
from struprune_plugin.pruning.importance.wanda import score_wanda
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.pruning.weight_update import WEIGHT_UPDATES, Refined, WeightUpdate
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import check_one_process

_ON_ATTENTION = ("inner_steps", "learning_rate", "attention_method")
_Movable = TypeVar("_Movable", bound=Sample | Variables)
Weights = Sequence[Tensor]


class ADMMRun:
    """ADMM on one module; a subclass has the sub-steps of its kind.

    :param module: not yet sliced
    :param damping: pull of every weight step towards the current weights
    :param parts: producers, each with the number of weights that it holds
    """

    def __init__(self, module: ModuleView, settings: ADMMSettings, damping: float, parts: Mapping[str, int]):
        self.module, self.settings, self.damping, self.parts = module, settings, damping, parts
        self.group, self.context = module.group, module.context
        self.states: list[tuple[Any, Variables]] = []  # samples and their variables, on the host

    def refine(self, keep: Tensor, weight: Tensor) -> Refined:
        """Run Algorithm 4 on the kept units, from their least-squares solution.

        :param keep: sorted kept units
        :param weight: the consumer's re-solved weight on them, bias last
        """
        weights = [*self._read_producers(keep), weight.float()]
        for visit in self.module.visit_batches():
            self._start(visit, weights)
        objective: list[float] = []
        for step in tqdm(range(self.settings.steps + 1), desc=f"ADMM {self.group.name}"):
            weights, total = self._step(weights, weights, move=step > 0)
            objective.append(total)
        left = iter(weights)
        producers = {name: torch.cat([next(left) for _ in range(count)]) for name, count in self.parts.items()}
        return Refined(producers, next(left), objective)

    def score(self, scores: Tensor, num_keep: int) -> Tensor:
        """Return Lemma 1's score of every unit after ``steps`` outer steps of Algorithm 1.

        In each step, the ``num_keep`` units of highest score so far form the mask, the masked dense weights update the
        per-token variables, and a regression of those on the inputs gives the current weights that Lemma 1 compares with the
        dense ones. Source: paper, Algorithm 1, the inner loop. Differs from the source: the first mask comes from ``scores``
        (R4), and dense and current inputs of the module are the same, as its layer receives them now.

        :param scores: scores that form the first mask, shape [units]
        :param num_keep: units of the mask, a multiple of the group's blocks
        :return: shape [units], float64
        """
        group, num_units = self.group, self.group.num_units
        output = append_bias(*read_weight(find_linear(self.module.layer, group.consumer))).float()
        dense = self._read_producers(torch.arange(num_units))
        cut = [name in group.producers for name, count in self.parts.items() for _ in range(count)]
        current, size = dense, dense[0].shape[1]
        gram = torch.zeros(size, size, dtype=torch.float64, device=output.device)
        for visit in self.module.visit_batches():
            self._start(visit, [*dense, output])
            inputs = torch.nn.functional.pad(pick_tokens(visit, self.context).inputs, (0, 1), value=1.0).double()
            gram.addmm_(inputs.T, inputs)
        for _ in range(self.settings.steps - 1):
            keep = keep_last(order_units(scores, group.num_blocks), num_units, num_keep)
            kept = torch.zeros(num_units, dtype=torch.bool, device=output.device).index_fill(0, keep, True)
            masked = [
                torch.where(kept.repeat_interleave(len(weight) // num_units)[:, None], weight, 0) if is_cut else weight
                for weight, is_cut in zip(dense, cut, strict=True)
            ]
            columns = torch.cat([kept.repeat_interleave(group.columns_per_unit), kept.new_ones(1)])
            solved, _ = self._step([*masked, torch.where(columns, output, 0)], [*current, output])
            current = solved[:-1]
            old, new = (
                torch.cat([weight.view(num_units, -1, size) for weight in compress(weights, cut)], 1)
                for weights in (dense, current)
            )
            scores = score_closed_form(old, new, gram)
        return scores if self.settings.steps > 1 else torch.ones_like(scores)

    def _read_producers(self, keep: Tensor) -> list[Tensor]:
        """Return the producers' kept rows, or all if the group does not cut them, bias last, float32; a fused gate and up split."""
        weights: list[Tensor] = []
        for name, count in self.parts.items():
            weight = append_bias(*read_weight(find_linear(self.module.layer, name))).float()
            if name in self.group.producers:
                weight = weight[self.group.find_kept_rows(name, keep).to(weight.device)]
            weights += weight.chunk(count)
        return weights

    def _start(self, visit: Visit, weights: Weights) -> None:
        """Add a batch, with variables computed from the weights."""
        for sample, variables in self.begin(visit, weights):
            self.states.append((_move(sample, None, self.context), _move(variables, None, self.context)))

    def _step(self, weights: Weights, pull: Weights, move: bool = True) -> tuple[list[Tensor], float]:
        """Update all variables, then regress the weights on them, pulled towards ``pull``; return weights and objective.

        :param move: False only measures the objective
        """
        device, total = weights[-1].device, 0.0
        moments = make_ridge_moments(self.list_regressed(weights))
        for index, (parked, before) in enumerate(self.states):
            sample = _move(parked, device, self.context)
            variables, value = self.visit(sample, _move(before, device, self.context), weights, moments, move)
            total += value
            if move:
                self.states[index] = parked, _move(variables, None, self.context)
        solved = [weight.float() for weight in self.solve(moments, pull)] if move else list(weights)
        return solved, self.measure(moments, solved, total)

    def solve(self, moments: list[SecondMoments], pull: Weights) -> Weights:
        """Return the weights of the regressions on the variables."""
        return solve_ridge(moments, pull, self.damping, self.module.has_bias, [self.group.name] * len(pull))

    def list_regressed(self, weights: Weights) -> Weights:
        """Return one weight per regression."""
        return weights

    def measure(self, moments: list[SecondMoments], weights: Weights, total: float) -> float:
        """Return the objective from the sum of the samples' parts."""
        return total

    def begin(self, visit: Visit, weights: Weights) -> Iterator[tuple[Any, Variables]]:
        """Yield a batch's samples, each with the variables computed from the weights."""
        raise NotImplementedError

    def visit(
        self, sample: Any, variables: Variables, weights: Weights, moments: list[SecondMoments], move: bool
    ) -> tuple[Variables, float]:
        """Update one sample's variables and add them to the moments; return them and the sample's part of the objective."""
        raise NotImplementedError


class FFNRun(ADMMRun):
    """ADMM on one FFN."""

    def __init__(self, module: ModuleView, settings: ADMMSettings, damping: float):
        super().__init__(module, settings, damping, {n: len(parts) for n, parts in module.group.producers.items()})

    def begin(self, visit: Visit, weights: Weights) -> Iterator[tuple[Sample, Variables]]:
        sample = pick_tokens(visit, self.context)
        yield sample, initialize_ffn_variables(sample.inputs, weights[:-1])

    def visit(
        self, sample: Sample, variables: Variables, weights: Weights, moments: list[SecondMoments], move: bool
    ) -> tuple[Variables, float]:
        if move:
            variables = update_ffn_variables(variables, sample, weights, self.settings.alpha, self.settings.beta)
        return variables, accumulate_ffn_moments(moments, variables, sample)

    def measure(self, moments: list[SecondMoments], weights: Weights, total: float) -> float:
        return measure_ffn_objective(moments, weights, total, self.settings.alpha, self.settings.beta)


class AttentionRun(ADMMRun):
    """ADMM on one attention module; its objective is measured before the weights are solved."""

    def __init__(self, module: ModuleView, settings: ADMMSettings, damping: float):
        names = (*module.group.query_key, list(module.group.producers)[-1])
        super().__init__(module, settings, damping, dict.fromkeys(names, 1))

    def begin(self, visit: Visit, weights: Weights) -> Iterator[tuple[AttentionSample, Variables]]:
        batch, length = visit.call.batch_shape
        source = self.context.to_host(visit.source.float()).view(batch, length, -1)
        target = self.context.to_host(visit.target).view(batch, length, -1)
        mask = visit.call.arguments.get("attention_mask")
        valid = visit.call.mark_tokens().view(batch, length)
        causal = torch.full((length, length), float("-inf")).triu(1)
        for row in range(batch):
            own = causal
            if mask is not None:  # true where a token is read, or a number that is added
                own = mask[min(row, len(mask) - 1), 0, :length, :length].to(source)
                own = torch.finfo(own.dtype).min * (1 - own) if mask.dtype is torch.bool else own
            on_host = AttentionSample(source[row], target[row], own, valid[row])
            sample = _move(on_host, weights[-1].device, self.context)
            yield on_host, initialize_attention_variables(sample, self._join(weights), self.settings.attention_method)

    def visit(
        self, sample: AttentionSample, variables: Variables, weights: Weights, moments: list[SecondMoments], move: bool
    ) -> tuple[Variables, float]:
        joined, settings, maps = self._join(weights), self.settings, None
        if move:
            variables, maps = update_attention_variables(sample, variables, joined, settings)
            accumulate_attention_moments(moments, sample, variables, maps, joined, max(self.damping, 1e-6))
        terms = measure_attention_objective(sample, variables, joined, settings.alpha, settings.beta, maps)
        return variables, sum(terms.values())

    def list_regressed(self, weights: Weights) -> Weights:
        return self._join(weights).list_regressed()

    def solve(self, moments: list[SecondMoments], pull: Weights) -> Weights:
        solved = solve_attention_weights(moments, self._join(pull), self.damping, self.module.has_bias, self.group.name)
        return [solved.query, solved.key, solved.value, solved.output]

    def _join(self, weights: Weights) -> AttentionWeights:
        query, key, value, output = weights
        group = self.group
        num_heads = group.num_blocks if group.kind == VALUE.name else (output.shape[1] - 1) // group.columns_per_unit
        return AttentionWeights(query, key, value, output, num_heads)


def make_run(module: ModuleView, settings: ADMMSettings, damping: float) -> ADMMRun:
    """Return the ADMM run of an FFN or attention module; parameters as in :class:`ADMMRun`."""
    return (FFNRun if module.group.unit.is_ffn else AttentionRun)(module, settings, damping)


@WEIGHT_UPDATES.register
class ADMMUpdate(ADMMSettings, WeightUpdate):
    """ADMM over producers and consumer (paper, Algorithm 4); least squares for rotary attention."""

    refines: ClassVar[bool] = True
    method: Literal["admm"] = "admm"

    def can_refine(self, group: UnitGroup) -> bool:
        return (group.unit.is_ffn and not group.experts) or bool(group.query_key)

    def refine(self, module: ModuleView, keep: Tensor, weight: Tensor, dampening_frac: float) -> Refined:
        return make_run(module, self, dampening_frac).refine(keep, weight)

    def check(self, model: PreTrainedModel, attention_unit: str, prune_ffn: bool) -> None:
        _check_ffn(model, "weight_update: admm", prune_ffn)
        if attention_unit == "none" or _has_plain_attention(model):
            return
        for name in _ON_ATTENTION:
            if (value := getattr(self, name)) != ADMMSettings.model_fields[name].default:
                raise ValueError(
                    f"`weight_update.{name}={value!r}` has no effect with rotary positions, where attention is re-solved by least "
                    "squares. Remove it."
                )
        logger.info("rotary attention is re-solved by least squares, the FFN by ADMM")


@IMPORTANCES.register
class ClosedForm(ADMMSettings, Importance):
    """Score of Lemma 1 after ``steps`` steps of Algorithm 1.

    :param max_sparsity: upper bound on a module's sparsity in the masks
    :param as_printed: keep the first step, where all scores are 1 (R4): units are removed by index
    """

    takes_offload: ClassVar[bool] = False
    aims: ClassVar[bool] = True
    takes_experts: ClassVar[bool] = False
    method: Literal["closed_form"] = "closed_form"
    max_sparsity: float = Field(default=MAX_SPARSITY, gt=0, lt=1)
    as_printed: bool = False

    def score(self, problem: GroupProblem, dense: Tensor, columns: Tensor) -> Tensor:
        group = problem.group
        first = score_wanda(problem.moments, dense[:, :-1], columns)
        if self.as_printed:
            logger.warning(
                f"as_printed: {group.name} has no order at Algorithm 1's first step, where every score is 1 (R4); "
                "units go by index. Set as_printed: false to rank them."
            )
            return torch.ones_like(first)
        share = min(problem.sparsity, self.max_sparsity)
        num_keep = max(round(group.num_units * (1 - share) / group.num_blocks), 1) * group.num_blocks
        return make_run(problem.module, self, problem.dampening_frac).score(first, num_keep)

    def check(self, model: PreTrainedModel, attention_unit: str, prune_ffn: bool) -> None:
        _check_ffn(model, "importance: closed_form", prune_ffn)
        if attention_unit != "none" and not _has_plain_attention(model):
            raise ValueError(
                "importance: closed_form must have attention without rotary positions, got "
                f"{model.config.model_type!r}. Set `attention_unit: none`, or `importance: obs`."
            )


def _check_ffn(model: PreTrainedModel, what: str, prune_ffn: bool) -> None:
    """Raise for an FFN without derived sub-steps, and for several processes.

    :param what: the setting that asks for ADMM
    :raises ValueError: the FFN is neither ReLU nor SiLU-gated; several processes
    """
    check_one_process(what, "Its variables are per token. Set `weight_update: least_squares` and `importance: obs`.")
    ffns = [ffn for kind in find_structure(model).kinds for ffn in kind.ffns] if prune_ffn else []
    for ffn in ffns:
        if ffn.activation != ("silu" if ffn.gated else "relu"):
            raise ValueError(
                "weight_update: admm and importance: closed_form must have a ReLU or a SiLU-gated FFN, got "
                f"{'gated ' if ffn.gated else ''}{ffn.activation or 'another'!r}. Set `weight_update: least_squares` and "
                "`importance: obs`."
            )


def _has_plain_attention(model: PreTrainedModel) -> bool:
    """Return whether no layer encodes positions between queries and keys."""
    kinds = find_structure(model).kinds
    return all(kind.attention.is_plain for kind in kinds if kind.attention)


def pick_tokens(visit: Visit, context: DeviceContext) -> Sample:
    """Return the tokens without padding, inputs in float32."""
    tokens = slice(None) if visit.call.tokens is None else context.to_device(visit.call.tokens, visit.source.device)
    return Sample(visit.source[tokens].float(), visit.target[tokens])


def _move(holder: _Movable, device: torch.device | None, context: DeviceContext) -> _Movable:
    """Return a dataclass with all its tensors on a device, or on the host where None."""

    def send(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(send, part))
        if not isinstance(part, Tensor):
            return part
        return context.park(part, "variables") if device is None else context.to_device(part, device)

    return replace(holder, **{f.name: send(getattr(holder, f.name)) for f in fields(holder)})


def score_closed_form(dense: Tensor, current: Tensor, gram: Tensor) -> Tensor:
    """Return Lemma 1's score of every unit: the least-squares optimal scalar gate of its rows.

    ``s_u = sum (c b + d z_pre) / sum (c^2 + d^2)`` over tokens and the unit's rows, with ``b = W a`` (current weights) and
    ``c = d = z_pre = W^ a`` (dense weights).
    Source: paper, Lemma 1 and Algorithm 1; d and z_pre of the same layer (R2), sums over tokens in numerator and
    denominator (R3). Dense and current inputs a are the same here, see :meth:`ADMMRun.score`.

    :param dense: W^, shape [units, rows per unit, n + 1], bias last
    :param current: W, the same shape
    :param gram: ``sum a a^T`` over tokens, bias row included, shape [n + 1, n + 1], float64
    :return: shape [units], float64; exactly 1 where nothing has changed yet (R4)
    """
    dense, current = dense.double(), current.double()
    projected = dense @ gram.double()
    own, other = ((projected * weight).sum(2).sum(1) for weight in (dense, current))
    return (other + own) / (own + own).clamp(min=1e-300)
