"""``weight_update: admm``, Algorithm 4; ``importance: closed_form``, Lemma 1's score after the inner loop of Algorithm 1."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from loguru import logger
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.layerwise.module_view import ModuleView
from struprune_plugin.linalg.budget import MAX_SPARSITY
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.paper.admm_runs import make_run
from struprune_plugin.paper.admm_variables import ADMMSettings
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance, Ranking
from struprune_plugin.pruning.importance.wanda import score_wanda
from struprune_plugin.pruning.weight_update import WEIGHT_UPDATES, Refined, WeightUpdate
from struprune_plugin.runtime.distributed import check_one_process

_ON_ATTENTION = ("inner_steps", "learning_rate", "attention_method")


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

    keeps_budget: ClassVar[bool] = False
    aims: ClassVar[bool] = True
    takes_experts: ClassVar[bool] = False
    method: Literal["closed_form"] = "closed_form"
    max_sparsity: float = Field(default=MAX_SPARSITY, gt=0, lt=1)
    as_printed: bool = False

    def score(self, ranking: Ranking, dense: Tensor, columns: Tensor) -> Tensor:
        group = ranking.group
        first = score_wanda(ranking.moments, dense[:, :-1], columns)
        if self.as_printed:
            logger.warning(
                f"as_printed: {group.name} has no order at Algorithm 1's first step, where every score is 1 (R4); "
                "units go by index. Set as_printed: false to rank them."
            )
            return torch.ones_like(first)
        share = min(ranking.sparsity, self.max_sparsity)
        num_keep = max(round(group.num_units * (1 - share) / group.num_blocks), 1) * group.num_blocks
        return make_run(ranking.module, self, ranking.dampening_frac).score(first, num_keep)

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
