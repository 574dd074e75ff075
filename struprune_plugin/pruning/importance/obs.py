"""``obs``: backward elimination of units, each time a panel of those whose removal the others compensate best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

from struprune_plugin.linalg.elimination import RankedUnits, eliminate_units
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance
from struprune_plugin.pruning.problem import GroupProblem, weigh_problems


@IMPORTANCES.register
class OBS(Importance):
    """Increase of the re-solved error at each removal (method.md section 3)."""

    eliminates: ClassVar[bool] = True
    method: Literal["obs"] = "obs"

    def rank(self, problems: Sequence[GroupProblem], num_remove: int) -> list[RankedUnits]:
        """Return the order of elimination and every unit's score, by group; kept units have the score infinity."""
        group, names = problems[0].group, [problem.group.name for problem in problems]
        weighed = weigh_problems(problems)
        elimination = eliminate_units(weighed, group.columns_per_unit, names, group.num_blocks, num_remove)
        scores = elimination.increase.new_full((len(problems), group.num_units), torch.inf)
        scores.scatter_(1, elimination.order, elimination.increase)
        return [RankedUnits(*own) for own in zip(elimination.order, scores, strict=True)]
