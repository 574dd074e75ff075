"""``obs``: backward elimination of units, each time the one whose removal the others compensate best."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from struprune_plugin.linalg.elimination import eliminate_units
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance, Order, Ranking


@IMPORTANCES.register
class OBS(Importance):
    """Exact increase of the re-solved error (method.md section 3)."""

    eliminates: ClassVar[bool] = True
    method: Literal["obs"] = "obs"

    def rank(self, ranking: Ranking, num_remove: int) -> Order:
        """Return the order of elimination and every unit's score; kept units have the score infinity."""
        group = ranking.group
        elimination = eliminate_units(ranking.damped, group.columns_per_unit, group.name, group.num_blocks, num_remove)
        scores = elimination.increase.new_full((group.num_units,), torch.inf)
        scores[elimination.order] = elimination.increase
        return elimination.order, scores
