"""``weight_update: admm``, Algorithm 4 on the kept units of one module; ``importance: closed_form``, Algorithm 1's inner loop.

The variables of every token are on the host; each step updates those of one micro-batch or sequence on the device (R12).
Weights are lists, one per regression, those of the producers, then the consumer's, bias last.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from loguru import logger
from pydantic import Field
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.allocation.budget import MAX_SPARSITY
from struprune_plugin.layerwise.capture import ConsumerBatch
from struprune_plugin.layerwise.statistics import Stack
from struprune_plugin.linalg.elimination import keep_last, order_units, unit_columns
from struprune_plugin.linalg.second_moments import append_bias, make_moments, measure_error, with_bias_index
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.surgery import read_weight
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup, UnitKind
from struprune_plugin.paper import admm_attention, admm_ffn
from struprune_plugin.paper.admm_attention import AttentionSample
from struprune_plugin.paper.admm_ffn import ADMMSettings, Sample, Variables
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance
from struprune_plugin.pruning.importance.wanda import score_wanda
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.pruning.weight_update import WEIGHT_UPDATES, Refined, WeightUpdate
from struprune_plugin.runtime.distributed import check_one_process

Parts = Sequence[Tensor]


class ADMMRun:
    """ADMM on so many units of one FFN or attention module, which is not yet sliced.

    :param dampening_frac: pull of every weight step towards the current weights
    """

    def __init__(self, module: Stack, settings: ADMMSettings, dampening_frac: float, num_units: int):
        self.module, self.settings, self.dampening_frac = module, settings, dampening_frac
        self.group, self.context = module.group, module.context
        self.states: list[tuple[Parts, Variables]] = []  # samples and their variables, on the host
        # producers, each with the number of equal parts of its rows that are regressed apart
        self.counts = {name: len(parts) for name, parts in self.group.producers.items()}
        if self.group.unit.is_mixer:
            query, key, value = *self.group.extra_linears, list(self.group.producers)[-1]
            num_heads = self.group.num_blocks if self.group.unit.splits_blocks else num_units
            self.counts = {query: 1, key: 1, value: num_heads}

    def refine(self, keep: Tensor, weight: Tensor) -> Refined:
        """Run Algorithm 4 on the sorted kept units, from the consumer's least-squares solution on them."""
        weights = self._split(self._read_producers(keep), weight.float())
        for visit in self.module.visit_batches():
            self._start(visit, weights)
        objective: list[float] = []
        for step in tqdm(range(self.settings.steps + 1), desc=f"ADMM {self.group.name}"):
            weights, total = self._step(weights, weights, move=step > 0)
            objective.append(total)
        return Refined(self._join(weights), weights[-1], objective)

    def score(self, scores: Tensor, num_keep: int) -> Tensor:
        """Return Lemma 1's score of every unit after ``steps`` outer steps of Algorithm 1, shape [units], float64.

        In each step, the ``num_keep`` units of highest score so far form the mask, the masked dense weights update the
        per-token variables, and a regression of those on the inputs gives the current weights that Lemma 1 compares with the
        dense ones. Source: paper, Algorithm 1, the inner loop. Differs from the source: the first mask comes from ``scores``
        (R4), and dense and current inputs of the module are the same, as its layer receives them now.
        """
        group, num_units = self.group, self.group.num_units
        output = append_bias(*read_weight(find_linear(self.module.layer, group.consumer))).float()
        dense = current = self._read_producers(torch.arange(num_units))
        gram = torch.zeros((), dtype=torch.float64, device=output.device)
        for visit in self.module.visit_batches():
            self._start(visit, self._split(dense, output))
            inputs = torch.nn.functional.pad(self._pick_tokens(visit).inputs, (0, 1), value=1.0).double()
            gram = torch.addmm(gram, inputs.T, inputs)
        for _ in range(self.settings.steps - 1):
            keep = keep_last(order_units(scores, group.num_blocks), num_units, num_keep)
            masked = dict(dense)
            for name in group.producers:
                rows = group.find_kept_rows(name, keep).to(output.device)
                masked[name] = torch.zeros_like(dense[name]).index_copy_(0, rows, dense[name][rows])
            columns = with_bias_index(unit_columns(keep, group.columns_per_unit), group.num_columns)
            masked_output = torch.zeros_like(output).index_copy_(1, columns, output[:, columns])
            solved, _ = self._step(self._split(masked, masked_output), self._split(current, output))
            current = self._join(solved)
            scores = score_closed_form(self._list_unit_rows(dense), self._list_unit_rows(current), gram)
        return scores if self.settings.steps > 1 else torch.ones_like(scores)

    def _read_producers(self, keep: Tensor) -> dict[str, Tensor]:
        """Return the weights of the producers, bias last, float32: kept rows, or all where the group does not cut one."""
        weights = {}
        for name in self.counts:
            weights[name] = append_bias(*read_weight(find_linear(self.module.layer, name))).float()
            if name in self.group.producers:
                weights[name] = weights[name][self.group.find_kept_rows(name, keep).to(weights[name].device)]
        return weights

    def _split(self, producers: Mapping[str, Tensor], consumer: Tensor) -> list[Tensor]:
        """Return one weight per regression."""
        return [*(part for name, count in self.counts.items() for part in producers[name].chunk(count)), consumer]

    def _join(self, weights: Parts) -> dict[str, Tensor]:
        """Return the weights of the producers."""
        left = iter(weights)
        return {name: torch.cat([next(left) for _ in range(count)]) for name, count in self.counts.items()}

    def _list_unit_rows(self, producers: Mapping[str, Tensor]) -> Tensor:
        """Return the producers' rows of every unit, shape [units, rows per unit, d + 1]."""
        cut = [part for name, parts in self.group.producers.items() for part in producers[name].chunk(len(parts))]
        return torch.cat([part.view(self.group.num_units, -1, part.shape[1]) for part in cut], 1)

    def _start(self, visit: ConsumerBatch, weights: Parts) -> None:
        """Add a batch, with variables computed from the weights."""
        for sample in self._list_samples(visit):
            if isinstance(sample, Sample):
                variables = admm_ffn.initialize_ffn_variables(sample.inputs, weights)
            else:
                here = AttentionSample(*(self.context.to_device(part, sample.inputs.device) for part in sample))
                method = self.settings.attention_method
                variables = admm_attention.initialize_attention_variables(here, weights, method)
            self.states.append((self._offload(sample), self._offload(variables)))

    def _offload(self, tensors: Parts) -> tuple[Tensor, ...]:
        return tuple(self.context.offload(tensor, "variables") for tensor in tensors)

    def _pick_tokens(self, visit: ConsumerBatch) -> Sample:
        """Return the tokens without padding, in float32."""
        tokens = visit.call.tokens.flatten().to(visit.source.device)
        return Sample(visit.source[tokens].float(), visit.target[tokens])

    def _list_samples(self, visit: ConsumerBatch) -> Iterator[Sample | AttentionSample]:
        """Yield a batch's tokens, for attention sequence by sequence."""
        if not self.group.unit.is_mixer:
            yield self._pick_tokens(visit)
            return
        batch, length = visit.call.tokens.shape
        source, target = visit.source.float().view(batch, length, -1), visit.target.view(batch, length, -1)
        lowest = torch.finfo(source.dtype).min
        valid = visit.call.tokens[:, :, None]
        mask = visit.call.arguments.get("attention_mask")
        causal = torch.full((length, length), lowest).triu(1)  # on the host, where sequences without padding share it
        for row in range(batch):
            added = causal
            if mask is not None:  # true where a token is read, or a number that is added
                added = self.context.to_host(mask[min(row, len(mask) - 1), 0, :length, :length]).float()
                added = lowest * (1 - added) if mask.dtype is torch.bool else added
            if not valid[row].all():
                added = added.masked_fill(~valid[row], lowest)
            yield AttentionSample(source[row], target[row], added)

    def _step(self, weights: Parts, pull: Parts, move: bool = True) -> tuple[list[Tensor], float]:
        """Update all variables, regress the weights on them, pulled towards ``pull``; return these and the objective.

        :param move: False only measures the objective
        """
        settings, total, device = self.settings, 0.0, weights[-1].device
        moments = [make_moments(weight) for weight in weights]
        for index, waiting in enumerate(self.states):
            sample, variables = (tuple(self.context.to_device(part, device) for part in parts) for parts in waiting)
            if not self.group.unit.is_mixer:
                tokens = Sample(*sample)
                if move:
                    variables = admm_ffn.update_ffn_variables(variables, tokens, weights, settings)
                total += settings.beta * admm_ffn.accumulate_ffn_moments(moments, variables, tokens)
            else:
                sequence, maps = AttentionSample(*sample), None
                if move:
                    variables, maps = admm_attention.update_attention_variables(sequence, variables, weights, settings)
                total += admm_attention.accumulate_attention_moments(
                    moments, sequence, variables, maps, weights, settings, max(self.dampening_frac, 1e-6)
                )
            if move:
                self.states[index] = waiting[0], self._offload(variables)
        used = weights
        if move:
            names = [*(name for name, count in self.counts.items() for _ in range(count)), self.group.consumer]
            names = [f"{self.group.layer_name}.{name}" for name in names]
            solved = admm_ffn.solve_ridge(moments, pull, self.dampening_frac, self.module.has_bias, names)
            weights = [weight.float() for weight in solved]
        # the term of z, of the weights before the step, is that of queries and keys, which come first
        has_z = self.group.unit.is_mixer and settings.attention_method == 1
        measured = used if has_z else weights
        errors = [float(measure_error(part, weight.double())) for part, weight in zip(moments, measured, strict=True)]
        return list(weights), total + settings.alpha * sum(errors[2 * has_z :])


@WEIGHT_UPDATES.register
class ADMMUpdate(ADMMSettings, WeightUpdate):
    """ADMM over producers and consumer (paper, Algorithm 4); least squares for rotary attention."""

    refines: ClassVar[bool] = True
    method: Literal["admm"] = "admm"

    def can_refine(self, group: UnitGroup) -> bool:
        return bool(group.extra_linears) or not (group.unit.is_mixer or group.mixture)

    def refine(self, module: Stack, keep: Tensor, weight: Tensor, dampening_frac: float) -> Refined:
        return ADMMRun(module, self, dampening_frac, len(keep)).refine(keep, weight)

    def check(self, model: PreTrainedModel, kinds: Sequence[UnitKind]) -> None:
        if not _check_model(model, "weight_update: admm", kinds) and any(kind.is_mixer for kind in kinds):
            for name in ("inner_steps", "learning_rate", "attention_method"):
                if getattr(self, name) != ADMMSettings.model_fields[name].default:
                    raise ValueError(
                        f"`weight_update.{name}={getattr(self, name)!r}` has no effect with rotary positions, where attention is "
                        "re-solved by least squares. Remove it."
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
    revisits: ClassVar[bool] = True
    takes_experts: ClassVar[bool] = False
    method: Literal["closed_form"] = "closed_form"
    max_sparsity: float = Field(default=MAX_SPARSITY, gt=0, lt=1)
    as_printed: bool = False

    def score(self, problem: GroupProblem, columns: Tensor) -> Tensor:
        group = problem.group
        first = score_wanda(problem.moments, problem.weight[:, :-1], columns)
        if self.as_printed:
            logger.warning(
                f"as_printed: {group.name} has no order at Algorithm 1's first step, where every score is 1 (R4); "
                "units go by index. Set as_printed: false to rank them."
            )
            return torch.ones_like(first)
        share = min(problem.sparsity, self.max_sparsity)
        num_keep = max(round(group.num_units * (1 - share) / group.num_blocks), 1) * group.num_blocks
        return ADMMRun(problem.module, self, problem.dampening_frac, group.num_units).score(first, num_keep)

    def check(self, model: PreTrainedModel, kinds: Sequence[UnitKind]) -> None:
        if not _check_model(model, "importance: closed_form", kinds) and any(kind.is_mixer for kind in kinds):
            raise ValueError(
                "importance: closed_form must have attention without rotary positions, got "
                f"{model.config.model_type!r}. Set `attention_unit: none`, or `importance: obs`."
            )


def _check_model(model: PreTrainedModel, what: str, asked: Sequence[UnitKind]) -> bool:
    """Return whether no layer encodes positions between queries and keys.

    :raises ValueError: an FFN to prune is neither ReLU nor SiLU-gated; several processes
    """
    check_one_process(what, "Its variables are per token. Set `weight_update: least_squares` and `importance: obs`.")
    units = [unit for unit in find_structure(model).list_units() if not unit.of_mixture]
    mixers = [unit for unit in units if UNIT_KINDS[unit.kind].order == 0]
    for unit in units:
        is_asked = unit not in mixers and unit.kind in {kind.kind for kind in asked}
        if is_asked and unit.formula not in ("relu", "gated silu"):
            _, gated, activation = unit.formula.rpartition("gated ")
            raise ValueError(
                f"{what} must have a ReLU or a SiLU-gated FFN, got {gated}{activation or 'another'!r}. "
                "Set `weight_update: least_squares` and `importance: obs`."
            )
    return all(unit.formula == "softmax attention" for unit in mixers)


def score_closed_form(dense: Tensor, current: Tensor, gram: Tensor) -> Tensor:
    """Return Lemma 1's score of every unit: the least-squares optimal scalar gate of its rows.

    ``s_u = sum (c b + d z_pre) / sum (c^2 + d^2)`` over tokens and the unit's rows, with ``b = W a`` (current weights) and
    ``c = d = z_pre = W^ a`` (dense weights, whose inputs are the same here). It is exactly 1 where nothing has changed yet (R4).
    Source: paper, Lemma 1 and Algorithm 1; d and z_pre of the same layer (R2), sums over tokens in numerator and
    denominator (R3).

    :param dense: W^, shape [units, rows per unit, n + 1], bias last; ``current`` has W
    :param gram: ``sum a a^T`` over tokens, bias row included, shape [n + 1, n + 1], float64
    :return: shape [units], float64
    """
    dense, current = dense.double(), current.double()
    energy, product = ((dense @ gram * weight).sum((1, 2)) for weight in (dense, current))
    return (product + energy) / (energy + energy).clamp(min=1e-300)
