"""``struprune.json``: the manifest of a run's decisions and measurements per layer, for readers. Imports nothing heavy."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from struprune_plugin import __version__
from struprune_plugin.settings.registry import shorten_value
from struprune_plugin.storage.files import write_whole

MANIFEST_NAME = "struprune.json"
_PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")
_CLOSED = ConfigDict(extra="forbid")
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


def _optional(**default: Any) -> Any:
    """Return a field that is not in the file where it is None or an empty list."""
    return Field(exclude_if=lambda value: value is None or value == [], **default)


@dataclass(frozen=True, config=_CLOSED)
class ModelRecord:
    """Record of the model, before and after pruning."""

    base: str  # folder or hub name of the dense model
    type: str  # ``model_type`` of the pruned model
    parameters_before: Count
    parameters_after: Count
    removed_share: float | None = _optional(default=None)  # of all parameters; ``met_sparsity`` is of the linears
    left_out: list[str] = _optional(default_factory=list)  # tensors of the checkpoint that its class does not load


@dataclass(frozen=True, config=_CLOSED)
class CalibrationRecord:
    """Record of a run's calibration data."""

    num_sequences: Count
    num_tokens: Count  # without padding
    sha256: str  # digest of all token indices, batch by batch


@dataclass(frozen=True, config=_CLOSED)
class RoundingRecord:
    """Record of modules whose kept widths were rounded."""

    kind: str  # of their units
    width_multiple: Count
    because: list[str]  # requirements that set the multiple
    modules: list[str]


@dataclass(frozen=True, config=_CLOSED)
class LimitRecord:
    """Record of a budget."""

    name: str  # ``bytes`` or ``parameters``
    asked: float
    planned: float  # bytes of the pruned weights, or their number


@dataclass(frozen=True, config=_CLOSED)
class BudgetRecord:
    """Record of the requested and removed parameters of the linears of modules that hold units."""

    prunable_parameters: Count
    asked_sparsity: float
    removed_parameters: Count
    met_sparsity: float
    rounding: list[RoundingRecord]
    limit: LimitRecord | None = _optional(default=None)


@dataclass(frozen=True, config=_CLOSED)
class AllocationRecord:
    """Record of the allocation of a budget over the groups; fields that a rule does not use are None."""

    method: str  # name of the rule
    as_printed: bool | None = _optional(default=None)  # whether the rule is as the paper prints it
    temperature: float | None = _optional(default=None)  # that was used
    searched: list[dict[str, float]] | None = _optional(default=None)  # every temperature with its error
    importance: dict[str, float] | None = _optional(default=None)  # by group
    retention: dict[str, float] | None = _optional(default=None)  # mean of Lemma 1's scores, by group
    error: float | None = _optional(default=None)  # sum of all error curves at the rule's allocation
    sensitivity: str | None = _optional(default=None)  # weight of the errors
    tried: dict[str, float] | None = _optional(default=None)  # KL divergence of every candidate, in nats per token
    taken: str | None = _optional(default=None)  # name of the candidate that was used
    doubt: str | None = _optional(default=None)  # why the rule's allocation is in doubt


@dataclass(frozen=True, config=_CLOSED)
class StageEntry:
    """Record of one stage of a run."""

    name: str
    seconds: float
    peak_bytes: Count | None  # held on the device; None if not measured


@dataclass(frozen=True, config=_CLOSED)
class SolveRecord:
    """Record of the solve of one group's weights."""

    target_energy: float  # ``tr(Y Y^T)``
    error_before: float  # of deletion alone, relative to that energy
    error_after: float  # after the solve, relative to that energy
    damping: float  # dampening of the closing solve
    admm: list[float] | None  # its objective at the start, then after every step
    condition_number: float | None  # of the closing solve's system; None if there was no solve
    scale: float | None = None  # factor on the weights of an expert that saw too few tokens to be solved


@dataclass(frozen=True, config=_CLOSED)
class UnitsRecord:
    """Record of the kept units of one group."""

    name: str
    layer: Count
    kind: str  # of its units
    num_units: Count
    num_blocks: Count
    unit_cost: Count
    kept: Count
    sparsity: float
    keep: list[Count]  # sorted indices into the units before this run

    @property
    def removed_parameters(self) -> int:
        return (self.num_units - self.kept) * self.unit_cost


@dataclass(frozen=True, config=_CLOSED)
class GroupRecord(SolveRecord, UnitsRecord):
    """Record of the kept units of one group and the solve of their weights."""

    units: str = ""  # words for its units, by the label of their kind; empty in folders of older versions


@dataclass(frozen=True, config=_CLOSED)
class EntriesRecord:
    """Record of the kept entries of a list of modules, such as the experts of one layer; ``groups`` uses their new numbers."""

    name: str  # full name of their list
    layer: Count
    num_experts: Count
    keep: list[Count]  # sorted
    removed_parameters: Count
    label: str = Field(default="experts", exclude_if=lambda label: label == "experts")


@dataclass(frozen=True, config=_CLOSED)
class ResultRecord:
    """Record of one measurement of an output, and of the dense model where that was measured."""

    name: str  # what was measured, with the settings that its value depends on
    value: float | None  # None where it is not finite
    dense: float | None = None
    stderr: float | None = None
    dense_stderr: float | None = None
    text: str = ""  # digest of the text that was scored; empty for tasks


class RecoveryRecord(BaseModel):
    """Record of a recovery after pruning; additional fields are stored unchanged."""

    model_config = ConfigDict(extra="allow", frozen=True)

    settings: dict[str, Any]  # all fields of the recipe's stage
    steps: Count
    tokens_seen: Count
    seconds: float


def describe_versions() -> dict[str, str]:
    """Return the versions that the bytes of an output depend on."""
    installed = {name: version(name) for name in _PACKAGES}
    return {"struprune": __version__, "python": platform.python_version(), **installed}


class Manifest(BaseModel):
    """Manifest of a pruning run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[2] = 2
    versions: dict[str, str] = Field(default_factory=describe_versions)
    model: ModelRecord
    settings: dict[str, Any]  # fields of the recipe's pruning stage
    seed: int  # of torch, at the end
    calibration: CalibrationRecord
    budget: BudgetRecord
    allocation: AllocationRecord
    computed_in: str = ""  # dtype of the layers while they ran and, where it is not the model's, why
    memory_measure: str  # what ``peak_bytes`` of the stages counts
    stages: list[StageEntry]
    groups: list[GroupRecord]
    experts: list[EntriesRecord] = _optional(default_factory=list)  # entries of lists that stay, by layer
    evaluation: list[ResultRecord] = _optional(default_factory=list)
    recovery: RecoveryRecord | None = _optional(default=None)

    @property
    def entries(self) -> dict[str, list[EntriesRecord]]:
        """The lists of modules that lost entries, by the entries' label."""
        labels = dict.fromkeys(record.label for record in self.experts)
        return {label: [record for record in self.experts if record.label == label] for label in labels}


def write_manifest(manifest: Manifest, folder: str | Path) -> None:
    """Write a manifest into an output folder, whole or not at all."""
    write_whole(Path(folder) / MANIFEST_NAME, manifest.model_dump_json(indent=1) + "\n")


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
    """Copy a pruned folder's manifest to the folder made from it, with the same kept units but no evaluation."""
    if source and (Path(source) / MANIFEST_NAME).is_file() and not (folder / MANIFEST_NAME).exists():
        write_manifest(read_manifest(source).model_copy(update={"evaluation": []}), folder)
