"""What runs of one model and one text share, whatever their sparsity: the sensitivity and the error curves, measured once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from struprune_plugin.layer.signals import Signals
from struprune_plugin.passes.journal import Journal
from struprune_plugin.passes.rules import Evidence

_OWN = (  # fields of a recipe that neither sensitivity nor curves depend on
    *("sparsity", "max_sparsity", "temperature", "search", "as_printed", "channel_multiple"),
    *("target", "output", "replay", "max_swaps", "tuning_epochs", "tuning_learning_rate", "measure_memory"),
)
_NO_CURVES = ("allocation", "rho", "gamma", "trial_samples")  # what the sensitivity does not depend on, besides


class EvidenceStore:
    """Sensitivities and error curves of one model and one calibration text, on the disk.

    :param journal: where they are kept, open for this model and text alone
    """

    def __init__(self, journal: Journal):
        self._journal = journal

    def share_signals(self, recipe: Mapping[str, Any], measure: Callable[[], Signals]) -> Signals:
        """Return what is measured of the dense model for a recipe, now or before.

        :param recipe: fields of the pruning stage
        """
        part = f"signals-{_digest(recipe, (*_OWN, *_NO_CURVES))}"
        held = self._journal.read(part)
        if held is not None:
            parts: dict[str, dict[str, Tensor]] = {field.name: {} for field in fields(Signals)}
            for name, tensor in held[1].items():
                kind, _, group = name.partition("/")
                parts[kind][group] = tensor
            return Signals(**parts)
        signals = measure()
        kinds = {field.name: getattr(signals, field.name) for field in fields(Signals)}
        self._journal.write(
            part, {}, {f"{kind}/{group}": t for kind, held in kinds.items() for group, t in held.items()}
        )
        return signals

    def take_curves(self, recipe: Mapping[str, Any]) -> dict[str, Evidence] | None:
        """Return what an allocation pass measured of every group for a recipe; None where none has."""
        held = self._journal.read(f"curves-{_digest(recipe, _OWN)}")
        if held is None:
            return None
        record, tensors = held
        values: dict[str, dict[str, Any]] = {group: dict(told) for group, told in record["groups"].items()}
        for name, tensor in tensors.items():
            group, _, field = name.rpartition("/")
            values[group][field] = tensor
        return {group: Evidence(**told) for group, told in values.items()}

    def keep_curves(self, recipe: Mapping[str, Any], evidence: Mapping[str, Evidence]) -> None:
        """Keep what an allocation pass measured."""
        record: dict[str, dict[str, Any]] = {}
        tensors: dict[str, Tensor] = {}
        for group, measured in evidence.items():
            values = {field.name: getattr(measured, field.name) for field in fields(Evidence)}
            record[group] = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
            tensors |= {f"{group}/{name}": value for name, value in values.items() if isinstance(value, Tensor)}
        self._journal.write(f"curves-{_digest(recipe, _OWN)}", {"groups": record}, tensors)


def _digest(recipe: Mapping[str, Any], left_out: tuple[str, ...]) -> str:
    """Return what names the part that a recipe asks for."""
    asked = {name: value for name, value in recipe.items() if name not in left_out}
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]
