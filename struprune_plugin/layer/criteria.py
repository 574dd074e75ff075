"""How units are ranked: every importance is a function and its entry in the registry, which says what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from loguru import logger
from torch import Tensor, nn

from struprune_plugin.device.room import Room
from struprune_plugin.layer.admm import score_by_admm
from struprune_plugin.layer.gather import LayerObserver
from struprune_plugin.layer.signals import Signals
from struprune_plugin.maths.elimination import eliminate_units, expand_units, order_units
from struprune_plugin.maths.importance import score_fluctuation, score_l0, score_magnitude, score_wanda, score_wanda_l2
from struprune_plugin.maths.statistics import Moments
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.surgery import read_consumer, read_weight, sum_rows
from struprune_plugin.model.units.group import UnitGroup

if TYPE_CHECKING:
    from struprune_plugin.layer.methods import Methods


@dataclass(frozen=True)
class Ranking:
    """What a criterion may look at.

    :param layer: not yet sliced
    :param moments: of the group's consumer, inputs in unit order
    :param damped: the same, damped; weighed by the sensitivity for a criterion that eliminates
    :param observed: gives what the module sees and should give, batch by batch
    """

    layer: nn.Module
    group: UnitGroup
    moments: Moments
    damped: Moments
    observed: LayerObserver
    methods: Methods
    signals: Signals
    room: Room


Order = tuple[Tensor, Tensor]  # units, first removed first, at least those asked for; the score of every unit
Score = Callable[[Ranking, Tensor, Tensor], Tensor]  # from the dense weights, bias last, and the columns of every unit


@dataclass(frozen=True)
class Criterion:
    """An importance of units.

    :param rank: ranks a group's units, at least so many as go first
    :param eliminates: whether it removes units one by one on damped moments: the sensitivity then weighs them, values may be
        rotated, and kept units swapped for removed ones
    :param gradients: whether it needs :attr:`Signals.saliency`
    :param per_token: whether it moves ADMM's variables, which no two processes share
    :param keeps_budget: whether it works under a memory budget
    :param aims: whether scores depend on the sparsity that is asked for
    """

    rank: Callable[[Ranking, int], Order]
    eliminates: bool = False
    gradients: bool = False
    per_token: bool = False
    keeps_budget: bool = True
    aims: bool = False


def read_dense(layer: nn.Module, group: UnitGroup, room: Room) -> Tensor:
    """Return the consumer's weights as :func:`~struprune_plugin.model.surgery.read_consumer` does, where its system is solved."""
    dense = read_consumer(layer, group, room.fetch)
    room.release(layer)
    return dense


def _rank_by_elimination(ranking: Ranking, num_remove: int) -> Order:
    """Rank by ``obs``; units that stay get the score infinity."""
    group = ranking.group
    elimination = eliminate_units(ranking.damped, group.columns_per_unit, group.name, group.num_blocks, num_remove)
    scores = elimination.increase.new_full((group.num_units,), torch.inf)
    scores[elimination.order] = elimination.increase
    return elimination.order, scores


def _rank_by(score: Score) -> Callable[[Ranking, int], Order]:
    """Turn a score of every unit into a ranking, lowest first."""

    def rank(ranking: Ranking, _num_remove: int) -> Order:
        group = ranking.group
        dense = read_dense(ranking.layer, group, ranking.room)
        columns = expand_units(torch.arange(group.num_units, device=dense.device), group.columns_per_unit)
        scores = score(ranking, dense, columns.view(group.num_units, -1))
        return order_units(scores, group.num_blocks), scores

    return rank


def _score_wanda(ranking: Ranking, dense: Tensor, unit_columns: Tensor) -> Tensor:
    return score_wanda(ranking.moments, dense[:, :-1], unit_columns)


def _score_wanda_l2(ranking: Ranking, dense: Tensor, unit_columns: Tensor) -> Tensor:
    return score_wanda_l2(ranking.moments, dense[:, :-1], unit_columns)


def _score_fluctuation(ranking: Ranking, dense: Tensor, unit_columns: Tensor) -> Tensor:
    return score_fluctuation(ranking.moments, dense[:, :-1], unit_columns)


def _score_snip(ranking: Ranking, dense: Tensor, unit_columns: Tensor) -> Tensor:
    return ranking.room.place(ranking.signals.saliency[ranking.group.name], dense)


def _score_l0(ranking: Ranking, dense: Tensor, unit_columns: Tensor) -> Tensor:
    return score_l0(ranking.damped, dense, unit_columns, retention=1 - ranking.methods.sparsity)


def _score_magnitude(ranking: Ranking, dense: Tensor, unit_columns: Tensor) -> Tensor:
    group, layer = ranking.group, ranking.layer
    with ranking.room.on_host(False):
        rows = [
            sum_rows(group, name, read_weight(find_linear(layer, name))[0].abs().sum(1, dtype=torch.float64)).to(
                dense.device
            )
            for name in group.producers
        ]
    return score_magnitude(dense[:, :-1], unit_columns, rows)


def _score_closed_form(ranking: Ranking, dense: Tensor, unit_columns: Tensor) -> Tensor:
    """Return Lemma 1's scores after ``admm_steps`` steps of Algorithm 1; as printed, all are 1 (R4)."""
    group, methods = ranking.group, ranking.methods
    first = _score_wanda(ranking, dense, unit_columns)
    if methods.as_printed:
        logger.warning(
            f"as_printed: {group.name} has no order at Algorithm 1's first step, where every score is 1 (R4); "
            "units go by index. Set as_printed: false to rank them."
        )
        return torch.ones_like(first)
    share = min(methods.sparsity, methods.max_sparsity)
    num_keep = max(round(group.num_units * (1 - share) / group.num_blocks), 1) * group.num_blocks
    visits = ranking.observed.visit_batches(ranking.layer, group, f"{group.name} inputs")
    return score_by_admm(ranking.layer, group, first, num_keep, visits, methods.admm, ranking.room)


CRITERIA = {  # name in recipes (method.md section 3)
    "obs": Criterion(_rank_by_elimination, eliminates=True),
    "wanda": Criterion(_rank_by(_score_wanda)),
    "wanda_l2": Criterion(_rank_by(_score_wanda_l2)),
    "fluctuation": Criterion(_rank_by(_score_fluctuation)),
    "magnitude": Criterion(_rank_by(_score_magnitude)),
    "snip": Criterion(_rank_by(_score_snip), gradients=True, keeps_budget=False),
    "l0": Criterion(_rank_by(_score_l0), keeps_budget=False, aims=True),
    "closed_form": Criterion(_rank_by(_score_closed_form), per_token=True, keeps_budget=False, aims=True),
}
