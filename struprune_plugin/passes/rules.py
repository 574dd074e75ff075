"""How a budget is spread over the groups: every allocation rule is a function and its entry in the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from loguru import logger
from torch import Tensor, nn

from struprune_plugin.layer.methods import Plan
from struprune_plugin.layer.records import AllocationRecord
from struprune_plugin.maths.allocation import (
    allocate_error_curves,
    allocate_global_threshold,
    allocate_softmax,
    allocate_softmax_inverse,
    search_temperature,
)
from struprune_plugin.maths.importance import measure_attention_importance, measure_mlp_importance
from struprune_plugin.maths.rounding import GroupSize, check_budget, round_kept_counts
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_weight
from struprune_plugin.model.units import list_head_weights
from struprune_plugin.model.units.group import UnitGroup


@dataclass(frozen=True)
class AllocationSettings:
    """The recipe's choices for an allocation pass.

    :param name: of the rule
    :param sparsity: asked, of all prunable parameters
    :param num_prunable: how many these are
    :param temperatures: to search among
    :param gamma: decay of importance with depth (Algorithm 3)
    :param rho: attention's factor (Algorithm 3)
    :param max_sparsity: clip of a module's sparsity
    :param as_printed: allocate exactly as the paper prints
    :param sensitivity: what errors are weighed by, for the record
    """

    name: str
    sparsity: float
    num_prunable: int
    temperatures: Sequence[float]
    gamma: float
    rho: float
    max_sparsity: float
    as_printed: bool
    sensitivity: str


@dataclass(frozen=True)
class Evidence:
    """What the pass has measured of one group.

    :param importance: as the rule weighs it
    :param curve: error with k = 0 ... num_units units kept, on the host
    :param scores: of every unit, on the host
    :param order: in which units go, the first to go first, on the host, shape [num_units], int64
    :param basis: that heads' units are rotated to first, on the host; None where they are not
    """

    importance: float
    curve: Tensor
    scores: Tensor
    order: Tensor
    basis: Tensor | None = None


@dataclass(frozen=True)
class Subject:
    """What a rule may look at to weigh one group.

    :param scores: of every unit
    :param influence: one minus the mean cosine of the layer's inputs and outputs, where the rule compares them
    """

    model: nn.Module
    layer: nn.Module
    group: UnitGroup
    scores: Tensor
    influence: float | None


Sizes = Sequence[GroupSize]
Decide = Callable[[Sizes, Mapping[str, Evidence], float, AllocationSettings], Plan]
Propose = Callable[[Sizes, Plan, float], Mapping[str, Sequence[int]]]
Weigh = Callable[[Subject, AllocationSettings], float]


def _sum_scores(subject: Subject, settings: AllocationSettings) -> float:
    return float(subject.scores.sum())


@dataclass(frozen=True)
class Rule:
    """An allocation rule.

    :param decide: the plan, from the groups' sizes, what was measured of them and the mean sparsity that they need
    :param weigh: the importance of a group
    :param criterion: the one importance of units that it is defined for; empty for any
    :param clips: whether it keeps modules under ``max_sparsity``
    :param searches: whether it has a temperature to search for
    :param few_samples: whether ``allocation_samples`` sequences are enough for it
    :param weighs_errors: whether it compares errors of different modules, so that a sensitivity is needed
    :param compares_layers: whether it asks for :attr:`Subject.influence`
    :param propose: kept units of plans to try beside the rule's own, by what they are called; None where it is taken untried
    """

    decide: Decide
    weigh: Weigh = _sum_scores
    criterion: str = ""
    clips: bool = False
    searches: bool = False
    few_samples: bool = False
    weighs_errors: bool = False
    compares_layers: bool = False
    propose: Propose | None = None


def _decide_by_curves(
    sizes: Sizes, evidence: Mapping[str, Evidence], share: float, settings: AllocationSettings
) -> Plan:
    """Minimise the sum of all modules' errors."""
    curves = [evidence[size.name].curve for size in sizes]
    budget = (1 - share) * sum(size.num_parameters for size in sizes)
    kept = allocate_error_curves(sizes, curves, budget, settings.max_sparsity)
    check_budget(sizes, kept, share)
    loss = sum(float(curve[count]) for curve, count in zip(curves, kept, strict=True))
    record = AllocationRecord(settings.name, error=loss, sensitivity=settings.sensitivity)
    return Plan({size.name: count for size, count in zip(sizes, kept, strict=True)}, record)


def _propose_towards_uniform(sizes: Sizes, plan: Plan, share: float) -> dict[str, list[int]]:
    """Return plans on the way from a rule's own to uniform allocation, and that.

    Curves believe errors of any size; where they are wrong, they are so where a module is to lose much more than others.
    """
    own = [1 - plan.kept[size.name] / size.num_units for size in sizes]
    return {
        name: round_kept_counts(sizes, [(1 - part) * sparsity + part * share for sparsity in own])
        for name, part in (("a quarter uniform", 0.25), ("half uniform", 0.5), ("uniform", 1.0))
    }


def _decide_by_threshold(
    sizes: Sizes, evidence: Mapping[str, Evidence], share: float, settings: AllocationSettings
) -> Plan:
    """Keep the units of highest score over all groups (Algorithm 1)."""
    scores = [evidence[size.name].scores for size in sizes]
    kept = round_kept_counts(sizes, allocate_global_threshold(sizes, scores, share))
    check_budget(sizes, kept, share)
    retention = {s.name: min(max(float(part.mean()), 0.0), 1.0) for s, part in zip(sizes, scores, strict=True)}
    record = AllocationRecord(settings.name, as_printed=settings.as_printed, retention=retention)
    return Plan({size.name: count for size, count in zip(sizes, kept, strict=True)}, record)


def _decide_by_softmax(
    allocate: Callable[..., Tensor],
    sizes: Sizes,
    evidence: Mapping[str, Evidence],
    share: float,
    settings: AllocationSettings,
) -> Plan:
    """Weigh groups by importance, at the temperature of least error (Algorithms 2 and 3)."""
    importance = {size.name: evidence[size.name].importance for size in sizes}
    best, candidates = search_temperature(
        sizes,
        list(importance.values()),
        [evidence[size.name].curve for size in sizes],
        share,
        settings.temperatures,
        allocate,
        settings.max_sparsity,
        settings.as_printed,
    )
    if not settings.as_printed:
        check_budget(sizes, best.kept, share)
    else:
        removed = sum((s.num_units - kept) * s.unit_cost for s, kept in zip(sizes, best.kept, strict=True))
        logger.warning(
            f"as_printed: the paper's formula removes {removed / settings.num_prunable:.4f} of the parameters, "
            f"asked were {settings.sparsity} (R6). Set as_printed: false to meet the budget."
        )
    logger.info(f"allocated by {settings.name} at temperature {best.temperature:g}, error {best.loss:.6g}")
    record = AllocationRecord(
        settings.name,
        as_printed=settings.as_printed,
        search="moments",
        temperature=best.temperature,
        searched=[{"temperature": c.temperature, "error": c.loss} for c in candidates],
        importance=importance,
    )
    kept = {size.name: count for size, count in zip(sizes, best.kept, strict=True)}
    return Plan(kept, record, tuple(candidates))


def _weigh_by_norms(subject: Subject, settings: AllocationSettings) -> float:
    """Return Algorithm 3's importance of a module, decayed with depth."""
    group, layer = subject.group, subject.layer
    decay = settings.gamma**group.layer_index
    if group.unit.is_ffn:
        linears = [read_weight(find_linear(layer, name))[0] for name in (*group.producers, group.consumer)]
        return decay * measure_mlp_importance(linears)
    return decay * settings.rho * measure_attention_importance(list_head_weights(subject.model, layer))


def _weigh_by_influence(subject: Subject, settings: AllocationSettings) -> float:
    """Return how much a whole layer changes the hidden states (ShortGPT)."""
    assert subject.influence is not None
    return subject.influence


RULES = {  # name in recipes (method.md section 5)
    "error_curve": Rule(
        _decide_by_curves, clips=True, few_samples=True, weighs_errors=True, propose=_propose_towards_uniform
    ),
    "softmax": Rule(partial(_decide_by_softmax, allocate_softmax), clips=True, searches=True),
    "softmax_inverse": Rule(
        partial(_decide_by_softmax, allocate_softmax_inverse), _weigh_by_norms, clips=True, searches=True
    ),
    "block_influence": Rule(
        partial(_decide_by_softmax, allocate_softmax),
        _weigh_by_influence,
        clips=True,
        searches=True,
        compares_layers=True,
    ),
    "global_threshold": Rule(_decide_by_threshold, criterion="closed_form"),
}
