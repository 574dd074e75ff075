"""Recipe field ``effort``: presets that trade time for quality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from struprune_plugin.storage.registry import Config

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Effort:
    """Preset values for the fields that the recipe leaves out.

    :param sensitivity_samples: ``samples`` of ``sensitivity``
    :param samples: ``samples`` of ``allocation: error_curve``
    :param trial_samples: ``trial_samples`` of the same rule
    :param rotate_values: value of ``rotate_values``
    """

    sensitivity_samples: int
    samples: int
    trial_samples: int
    rotate_values: bool = True


EFFORTS: dict[str, Effort | None] = {
    "fast": Effort(sensitivity_samples=8, samples=8, trial_samples=0, rotate_values=False),
    "default": None,  # each field's own default
    "best": Effort(sensitivity_samples=64, samples=64, trial_samples=16),
}


def complete(given: C, **values: object) -> C:
    """Return a copy of settings with ``values`` in the fields that were not set."""
    return given.model_copy(
        update={name: value for name, value in values.items() if name not in given.model_fields_set}
    )
