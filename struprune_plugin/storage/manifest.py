"""``struprune.json``: the manifest of a run's decisions per layer, for readers. This module imports nothing heavy."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from struprune_plugin.storage.files import shorten_value, write_whole
from struprune_plugin.storage.records import (
    CLOSED,
    AllocationRecord,
    BudgetRecord,
    CalibrationRecord,
    Count,
    EvaluationRecord,
    ExpertsRecord,
    GroupRecord,
    ModelRecord,
    StageEntry,
)

MANIFEST_NAME = "struprune.json"
FORMAT_VERSION = 1
DIGEST_KEY = "sha256"
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

    format_version: int = FORMAT_VERSION
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
    evaluation: EvaluationRecord = Field(
        default_factory=EvaluationRecord, exclude_if=lambda e: not (e.perplexity or e.tasks)
    )
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
    return {"struprune": _read_version("struprune-plugin"), "python": platform.python_version(), **installed}


def write_manifest(manifest: Manifest, folder: str | Path) -> None:
    """Write a manifest with the digest of its content into an output folder, whole or not at all."""
    content = manifest.model_dump()
    content[DIGEST_KEY] = digest_manifest(content)
    write_whole(Path(folder) / MANIFEST_NAME, json.dumps(content, indent=1) + "\n")


def read_manifest(path: str | Path) -> Manifest:
    """Read the manifest of an output folder, or a manifest file.

    :raises ValueError: there is none, it is not a manifest, it has another format version, or it was changed: kept units are
        not sorted, unique, in range and the same number in each block, or the content does not match its digest
    """
    if not isinstance(path, (str, Path)):
        raise ValueError(f"manifest: must be a pruned folder or a {MANIFEST_NAME}, got {path!r}. Give its path.")
    path = Path(path)
    file = path / MANIFEST_NAME if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path}: must be a pruned folder with a {MANIFEST_NAME}, or that file, got neither. Give the output of a run."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"a {type(content).__name__}")
        found = content["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{file}: must be a StruPrune manifest, got {shorten_value(error)}. Restore the file, or prune again."
        ) from None
    if found != FORMAT_VERSION:
        raise ValueError(
            f"{file}: format_version must be {FORMAT_VERSION}, got {shorten_value(found)}. Use the version of "
            "StruPrune that wrote it."
        )
    return parse_manifest(content, str(file))


def parse_manifest(content: Mapping[str, Any], where: str) -> Manifest:
    """Return the manifest of a file's content; raise if it has another form, or was changed since it was written.

    :param where: path of the file, for messages
    """
    try:
        fields = {name: value for name, value in content.items() if name != DIGEST_KEY}
        manifest = Manifest.model_validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        told = first["msg"].removeprefix("Value error, ")
        raise ValueError(
            f"{where}: {place or 'the manifest'} must be as it was written, got "
            f"{shorten_value(first['input'])}: {told}. "
            "Restore the file, or prune again."
        ) from None
    if content.get(DIGEST_KEY) != digest_manifest(content):
        raise ValueError(
            f"{where}: must be as it was written, but its content does not match its {DIGEST_KEY}. Restore the "
            "file, or prune again."
        )
    return manifest


def digest_manifest(content: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's content, without the digest's own entry and independent of the order of keys."""
    told = {name: value for name, value in content.items() if name != DIGEST_KEY}
    return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
