"""``struprune.json``: what was decided, layer by layer, and what a replay needs."""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from struprune_plugin.contents import write_whole
from struprune_plugin.device.room import StageRecord
from struprune_plugin.layer.records import AllocationRecord, CalibrationRecord, GroupRecord
from struprune_plugin.layer.tuning import TuningRecord
from struprune_plugin.manifest import DIGEST_KEY, FORMAT_VERSION, MANIFEST_NAME, digest_manifest, read_manifest

__all__ = [
    "MANIFEST_NAME",
    "BudgetRecord",
    "Manifest",
    "ModelRecord",
    "describe_versions",
    "read_manifest",
    "write_manifest",
]

_PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")


@dataclass(frozen=True)
class ModelRecord:
    """The model, before and after.

    :param base: folder or hub name of the dense model
    :param type: ``model_type`` of the pruned one
    :param weights_sha256: tells one dense model from another, see
        :func:`~struprune_plugin.model.layers.describe_weights`
    """

    base: str
    type: str
    weights_sha256: str
    parameters_before: int
    parameters_after: int


@dataclass(frozen=True)
class BudgetRecord:
    """What was asked and what went, in parameters of the decoder layers' linears.

    :param rounding: multiples that widths were rounded to, and why
    """

    prunable_parameters: int
    asked_sparsity: float
    removed_parameters: int
    met_sparsity: float
    rounding: list[dict[str, Any]]


@dataclass(frozen=True)
class Manifest:
    """What a pruning run tells of itself.

    :param settings: all fields of the recipe's pruning stage
    :param seed: of torch, at the end
    :param memory_measure: what ``peak_bytes`` of the stages counts
    :param stages: by name
    :param tuning: by layer
    :param sensitivity: of the model's output to a module's, by group: mean diagonal of the Fisher information; or empty
    """

    model: ModelRecord
    settings: dict[str, Any]
    seed: int
    calibration: CalibrationRecord
    budget: BudgetRecord
    allocation: AllocationRecord
    memory_measure: str
    stages: Mapping[str, StageRecord]
    tuning: Mapping[str, TuningRecord]
    groups: Sequence[GroupRecord]
    sensitivity: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as JSON has it."""
        return {
            "model": asdict(self.model),
            "settings": self.settings,
            "seed": self.seed,
            "calibration": asdict(self.calibration),
            "budget": asdict(self.budget),
            "allocation": self.allocation.to_dict(),
            "memory_measure": self.memory_measure,
            "stages": [
                {"name": name, "seconds": round(stage.seconds, 3), "peak_bytes": stage.peak_bytes}
                for name, stage in self.stages.items()
            ],
            "sensitivity": dict(self.sensitivity),
            "tuning": {name: asdict(record) for name, record in self.tuning.items()},
            "groups": [record.to_dict() for record in self.groups],
        }


def describe_versions() -> dict[str, str]:
    """Return the versions that a bit-identical replay depends on."""
    return dict(_read_versions())


@functools.cache  # every look-up searches all that is installed
def _read_versions() -> tuple[tuple[str, str], ...]:
    installed = ((name, version(name)) for name in _PACKAGES)
    return (("struprune", version("struprune-plugin")), ("python", platform.python_version()), *installed)


def write_manifest(manifest: dict[str, Any], folder: str | Path) -> Path:
    """Write the manifest into an output folder, whole or not at all, with the digest of what it says."""
    path = Path(folder) / MANIFEST_NAME
    content = {"format_version": FORMAT_VERSION, "versions": describe_versions(), **manifest}
    content[DIGEST_KEY] = digest_manifest(content)
    write_whole(path, json.dumps(content, indent=1) + "\n")
    return path
