"""``struprune.json``: the manifest of a run's decisions per layer, for readers. This module imports nothing heavy."""

from __future__ import annotations

import functools
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from struprune_plugin import __version__
from struprune_plugin.storage.files import shorten_value, write_whole
from struprune_plugin.storage.records import (
    CLOSED,
    AllocationRecord,
    BudgetRecord,
    CalibrationRecord,
    Count,
    ExpertsRecord,
    GroupRecord,
    ModelRecord,
    ResultRecord,
    StageEntry,
)

MANIFEST_NAME = "struprune.json"
_PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")
_read_version = functools.cache(version)  # each look-up searches all installed packages


class RecoveryRecord(BaseModel):
    """Record of a recovery after pruning; additional fields are stored unchanged.

    :param settings: all fields of the recipe's stage
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    settings: dict[str, Any]
    steps: Count
    tokens_seen: Count
    seconds: float


class Manifest(BaseModel):
    """Manifest of a pruning run.

    :param settings: fields of the recipe's pruning stage
    :param seed: seed of torch, at the end
    :param memory_measure: what ``peak_bytes`` of the stages counts
    :param sensitivity: mean diagonal of the Fisher information of each module's output, by group; empty if not measured
    :param experts: kept whole experts, by layer; omitted from the file if none was removed
    :param evaluation: omitted from the file if nothing was measured yet
    :param recovery: None, and omitted from the file, if there was none
    """

    model_config = CLOSED | ConfigDict(frozen=True)

    format_version: Literal[2] = 2
    versions: dict[str, str] = Field(default_factory=lambda: describe_versions())
    model: ModelRecord
    settings: dict[str, Any]
    seed: int
    calibration: CalibrationRecord
    budget: BudgetRecord
    allocation: AllocationRecord
    memory_measure: str
    stages: list[StageEntry]
    sensitivity: dict[str, float]
    groups: list[GroupRecord]
    experts: list[ExpertsRecord] = Field(default_factory=list, exclude_if=lambda experts: not experts)
    evaluation: list[ResultRecord] = Field(default_factory=list, exclude_if=lambda results: not results)
    recovery: RecoveryRecord | None = Field(default=None, exclude_if=lambda recovery: recovery is None)

    @model_validator(mode="after")
    def _check_names(self) -> Manifest:
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ValueError("groups must have different names, got one name twice")
        return self


def describe_versions() -> dict[str, str]:
    """Return the versions that the bytes of an output depend on."""
    installed = {name: _read_version(name) for name in _PACKAGES}
    return {"struprune": __version__, "python": platform.python_version(), **installed}


def write_manifest(manifest: Manifest, folder: str | Path) -> None:
    """Write a manifest into an output folder, whole or not at all."""
    write_whole(Path(folder) / MANIFEST_NAME, json.dumps(manifest.model_dump(), indent=1) + "\n")


def read_manifest(path: str | Path) -> Manifest:
    """Read the manifest of an output folder, or a manifest file.

    :raises ValueError: there is none, it is not a manifest, or it is of another version; kept units are not sorted, unique, in
        range and the same number in each block
    """
    path = Path(path)
    file = path / MANIFEST_NAME if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path}: must be a pruned folder with a {MANIFEST_NAME}, or that file, got neither. Give the output of a run."
        )
    try:
        return Manifest.model_validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        told = first["msg"].removeprefix("Value error, ")
        raise ValueError(
            f"{file}: {place or 'the manifest'} must be as this version of StruPrune writes it, got "
            f"{shorten_value(first['input'])}: {told}. Restore the file, or prune again."
        ) from None


def carry_manifest(source: str | Path, folder: Path) -> None:
    """Copy the manifest of a pruned folder to the folder made from it, which has the same kept units.

    The evaluation is left out, because it does not apply to the new folder.
    """
    if source and (Path(source) / MANIFEST_NAME).is_file() and not (folder / MANIFEST_NAME).exists():
        write_manifest(read_manifest(source).model_copy(update={"evaluation": []}), folder)
