"""``struprune.json``: the manifest of a run's decisions and measurements per layer, for readers. Imports nothing heavy."""

from __future__ import annotations

import functools
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer
from pydantic.dataclasses import dataclass

from struprune_plugin import __version__
from struprune_plugin.storage.files import shorten_value, write_whole

MANIFEST_NAME = "struprune.json"
_PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")
_read_version = functools.cache(version)  # each look-up searches all installed packages
CLOSED = ConfigDict(extra="forbid")
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True, config=CLOSED)
class ModelRecord:
    """Record of the model, before and after pruning.

    :param base: folder or hub name of the dense model
    :param type: ``model_type`` of the pruned model
    :param left_out: tensors of the dense checkpoint that its class does not load; omitted from the file if there are none
    """

    base: str
    type: str
    parameters_before: Count
    parameters_after: Count
    left_out: list[str] = Field(default_factory=list, exclude_if=lambda names: not names)


@dataclass(frozen=True, config=CLOSED)
class CalibrationRecord:
    """Record of a run's calibration data.

    :param num_tokens: tokens without padding
    :param sha256: digest of all token indices, batch by batch
    """

    num_sequences: Count
    num_tokens: Count
    sha256: str


@dataclass(frozen=True, config=CLOSED)
class RoundingRecord:
    """Record of modules whose kept widths were rounded.

    :param kind: kind of their units
    :param because: requirements that set the multiple
    """

    kind: str
    width_multiple: Count
    because: list[str]
    modules: list[str]


@dataclass(frozen=True, config=CLOSED)
class LimitRecord:
    """Record of a budget of bytes or time.

    :param name: ``bytes`` or ``speedup``
    :param asked: requested bytes, or dense seconds over pruned seconds
    :param planned: bytes of the pruned weights, or the speed-up by the cost table
    """

    name: str
    asked: float
    planned: float


@dataclass(frozen=True, config=CLOSED)
class BudgetRecord:
    """Record of the requested and removed parameters of the decoder layers' linears.

    :param limit: budget of bytes or time, if one is given; otherwise omitted from the file
    """

    prunable_parameters: Count
    asked_sparsity: float
    removed_parameters: Count
    met_sparsity: float
    rounding: list[RoundingRecord]
    limit: LimitRecord | None = Field(default=None, exclude_if=lambda limit: limit is None)


@dataclass(frozen=True, config=CLOSED)
class AllocationRecord:
    """Record of the allocation of a budget over the groups; fields that a rule does not use are None and not in the file.

    :param method: name of the rule
    :param as_printed: whether the rule is as the paper prints it
    :param temperature: temperature that was used
    :param searched: every temperature with its error
    :param importance: importance by group
    :param retention: mean of Lemma 1's scores, by group
    :param error: sum of all error curves at the kept counts
    :param sensitivity: weight of the errors
    :param tried: KL divergence of every plan that was tried, in nats per token
    :param taken: name of the plan that was used
    """

    method: str
    as_printed: bool | None = None
    temperature: float | None = None
    searched: list[dict[str, float]] | None = None
    importance: dict[str, float] | None = None
    retention: dict[str, float] | None = None
    error: float | None = None
    sensitivity: str | None = None
    tried: dict[str, float] | None = None
    taken: str | None = None

    @model_serializer(mode="wrap")
    def _leave_out_none(self, inner: Any) -> dict[str, Any]:
        return {name: value for name, value in inner(self).items() if value is not None}


@dataclass(frozen=True, config=CLOSED)
class StageEntry:
    """Record of one stage of a run.

    :param peak_bytes: peak bytes held on the device; None if not measured
    """

    name: str
    seconds: float
    peak_bytes: Count | None


@dataclass(frozen=True, config=CLOSED)
class ADMMRecord:
    """Record of ADMM on one group.

    :param objective: objective at the start, then after every step
    :param error_after: error of the closing solve on the true activations, relative to the target's energy
    """

    objective: list[float]
    error_after: float


@dataclass(frozen=True, config=CLOSED)
class SolveRecord:
    """Record of the solve of one group's weights.

    :param target_energy: ``tr(Y Y^T)``
    :param error_before: error of deletion alone, relative to that energy
    :param error_after: error after the solve, relative to that energy
    :param damping: dampening of the closing solve
    :param admm: record of ADMM; None if it did not run
    :param condition_number: condition number of the closing solve's system; None if there was no solve
    :param scale: factor on the weights of an expert that saw too few tokens to be solved; None elsewhere
    """

    target_energy: float
    error_before: float
    error_after: float
    damping: float
    admm: ADMMRecord | None
    condition_number: float | None
    scale: float | None = None


@dataclass(frozen=True, config=CLOSED)
class UnitsRecord:
    """Record of the kept units of one group.

    :param kind: kind of its units
    :param keep: kept units, sorted, as indices into the units before this run
    """

    name: str
    layer: Count
    kind: str
    num_units: Count
    num_blocks: Count
    unit_cost: Count
    kept: Count
    sparsity: float
    keep: list[Count]

    @property
    def removed_parameters(self) -> int:
        return (self.num_units - self.kept) * self.unit_cost


@dataclass(frozen=True, config=CLOSED)
class GroupRecord(SolveRecord, UnitsRecord):
    """Record of the kept units of one group and the solve of their weights."""


@dataclass(frozen=True, config=CLOSED)
class ExpertsRecord:
    """Record of the kept experts of one layer; ``groups`` uses their new numbers.

    :param name: full name of their list
    :param keep: kept experts, sorted
    :param removed_parameters: parameters of the removed experts' linears
    """

    name: str
    layer: Count
    num_experts: Count
    keep: list[Count]
    removed_parameters: Count


@dataclass(frozen=True, config=CLOSED)
class ResultRecord:
    """Record of one measurement of an output.

    :param name: what was measured, with the settings that its value depends on
    :param dense: value of the dense model; None if not measured
    :param stderr: standard error; None if it is not known
    """

    name: str
    value: float
    dense: float | None = None
    stderr: float | None = None
    dense_stderr: float | None = None


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


def describe_versions() -> dict[str, str]:
    """Return the versions that the bytes of an output depend on."""
    installed = {name: _read_version(name) for name in _PACKAGES}
    return {"struprune": __version__, "python": platform.python_version(), **installed}


def write_manifest(manifest: Manifest, folder: str | Path) -> None:
    """Write a manifest into an output folder, whole or not at all."""
    write_whole(Path(folder) / MANIFEST_NAME, json.dumps(manifest.model_dump(), indent=1) + "\n")


def read_manifest(path: str | Path) -> Manifest:
    """Read the manifest of an output folder, or a manifest file.

    :raises ValueError: there is none, it is not a manifest, or it is of another version
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
        raise ValueError(
            f"{file}: {place or 'the manifest'} must be as this version of StruPrune writes it, got "
            f"{shorten_value(first['input'])}: {first['msg']}. Restore the file, or prune again."
        ) from None


def carry_manifest(source: str | Path, folder: Path) -> None:
    """Copy the manifest of a pruned folder to the folder made from it, which has the same kept units.

    The evaluation is left out, because it does not apply to the new folder.
    """
    if source and (Path(source) / MANIFEST_NAME).is_file() and not (folder / MANIFEST_NAME).exists():
        write_manifest(read_manifest(source).model_copy(update={"evaluation": []}), folder)
