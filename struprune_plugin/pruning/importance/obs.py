"""``obs``: backward elimination of units, each time a panel of those whose removal the others compensate best."""

from typing import ClassVar, Literal

from struprune_plugin.linalg.elimination import RankedUnits, eliminate_units
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance
from struprune_plugin.pruning.problem import GroupProblem


@IMPORTANCES.register
class OBS(Importance):
    """Increase of the re-solved error at each removal (method.md section 3)."""

    eliminates: ClassVar[bool] = True
    method: Literal["obs"] = "obs"

    def rank(self, problem: GroupProblem, num_remove: int) -> RankedUnits:
        """Return the order of elimination and every unit's score; kept units have the score infinity."""
        group, names = problem.group, problem.module.names
        return eliminate_units(problem.weighed, group.columns_per_unit, names, group.num_blocks, num_remove)
