"""Cache of the sensitivity and the error curves, shared by runs of one model and one text at any sparsity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from struprune_plugin.allocation.rules import GroupStatistics
from struprune_plugin.pruning.signals import Sensitivity
from struprune_plugin.runtime.payload import dump, load
from struprune_plugin.storage.resume_store import ResumeStore

_OWN = (  # fields of a recipe that neither sensitivity nor curves depend on
    *("sparsity", "budget", "width_multiple", "reconstruct", "output", "replay", "ffn_tuning"),
)
_OF_PLANS = (  # fields of an allocation rule that curves do not depend on
    *("max_sparsity", "temperature", "as_printed"),
)


class MeasurementCache:
    """Sensitivities and error curves of one model and one calibration text, on disk.

    :param store: store that holds them, opened for this model and text alone
    """

    def __init__(self, store: ResumeStore):
        self._store = store

    def share_signals(self, recipe: Mapping[str, Any], measure: Callable[[], Sensitivity]) -> Sensitivity:
        """Return the dense model's sensitivity for a recipe, from the store or from ``measure``.

        :param recipe: fields of the pruning stage
        """
        part = f"signals-{_digest(recipe, curves=False)}"
        held = self._store.read(part)
        if held is not None:
            return load(Sensitivity, *held)
        signals = measure()
        self._store.write(part, *dump(signals))
        return signals

    def take_curves(self, recipe: Mapping[str, Any]) -> dict[str, GroupStatistics] | None:
        """Return the group statistics that an allocation pass stored for a recipe; None if there are none."""
        held = self._store.read(f"curves-{_digest(recipe, curves=True)}")
        return None if held is None else load(dict[str, GroupStatistics], *held)

    def keep_curves(self, recipe: Mapping[str, Any], evidence: Mapping[str, GroupStatistics]) -> None:
        """Write the group statistics of an allocation pass to the store."""
        self._store.write(f"curves-{_digest(recipe, curves=True)}", *dump(evidence))


def _digest(recipe: Mapping[str, Any], curves: bool) -> str:
    """Return the digest of the fields of a recipe that a stored part depends on.

    :param curves: whether the fields of the allocation rule count, too
    """
    asked = {name: value for name, value in recipe.items() if name not in _OWN}
    rule = {name: value for name, value in recipe["allocation"].items() if name not in _OF_PLANS}
    asked["allocation"] = rule if curves else None
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]
