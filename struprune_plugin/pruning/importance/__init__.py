"""Importances: rankings of units, one file per method; importing this package registers them."""

from struprune_plugin.pruning.importance import magnitude, obs, wanda  # noqa: F401
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance

__all__ = ["IMPORTANCES", "Importance"]
