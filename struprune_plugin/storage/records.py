"""Typed parts of a manifest: decisions and measurements. This module imports nothing heavy."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_serializer, model_validator
from pydantic.dataclasses import dataclass

from struprune_plugin.storage.files import shorten_value
from struprune_plugin.storage.limit_record import LimitRecord

CLOSED = ConfigDict(extra="forbid")
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True, config=CLOSED)
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
    parameters_before: Count
    parameters_after: Count

    @model_validator(mode="after")
    def _check(self) -> ModelRecord:
        if not 1 <= self.parameters_before >= self.parameters_after:
            raise ValueError("parameters_before must be at least 1, and as many as parameters_after")
        return self


@dataclass(frozen=True, config=CLOSED)
class CalibrationRecord:
    """The calibration data of a run.

    :param num_tokens: padding left out
    :param sha256: of all token indices, batch by batch
    """

    num_sequences: Count
    num_tokens: Count
    sha256: str


@dataclass(frozen=True, config=CLOSED)
class RoundingRecord:
    """Modules whose kept widths were rounded.

    :param kind: of their units
    :param because: who asked for the multiple
    """

    kind: str
    width_multiple: Count
    because: list[str]
    modules: list[str]


@dataclass(frozen=True, config=CLOSED)
class BudgetRecord:
    """Asked and removed parameters of the decoder layers' linears.

    :param limits: every budget, where others than parameters were asked for; left out of the file else
    """

    prunable_parameters: Count
    asked_sparsity: float
    removed_parameters: Count
    met_sparsity: float
    rounding: list[RoundingRecord]
    limits: list[LimitRecord] = Field(default_factory=list, exclude_if=lambda limits: not limits)


@dataclass(frozen=True, config=CLOSED)
class AllocationRecord:
    """Allocation of a budget over the groups; fields that a rule does not use are None and omitted from the file.

    :param method: the rule
    :param as_printed: whether as the paper prints it
    :param temperature: the one taken
    :param searched: every temperature with its error
    :param importance: of every group
    :param retention: mean of Lemma 1's scores, by group
    :param error: sum of all error curves at the kept counts
    :param sensitivity: what errors were weighed by
    :param tried: KL divergence of every plan that was tried, in nats a token
    :param taken: the one of them that was taken
    :param experts: error of the best plan by how many whole experts of a layer stay
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
    experts: dict[str, float] | None = None

    @model_serializer(mode="wrap")
    def _leave_out_none(self, inner: Any) -> dict[str, Any]:
        return {name: value for name, value in inner(self).items() if value is not None}


@dataclass(frozen=True, config=CLOSED)
class StageEntry:
    """One stage of a run.

    :param peak_bytes: most bytes that the device held; None where nothing counts them
    """

    name: str
    seconds: float
    peak_bytes: Count | None


@dataclass(frozen=True, config=CLOSED)
class TuningRecord:
    """Tuning of one FFN.

    :param holdout: held-out error of every epoch, relative to the energy of the dense FFN's output, epoch 0 first
    :param best_epoch: whose parameters the FFN has
    """

    holdout: list[float]
    best_epoch: Count


@dataclass(frozen=True, config=CLOSED)
class ADMMRecord:
    """ADMM on one group.

    :param objective: at the start, then after every step
    :param error_after: of the closing solve on the true activations, relative to the target's energy
    """

    objective: list[float]
    error_after: float


@dataclass(frozen=True, config=CLOSED)
class SolveRecord:
    """Solve of the weights of one group.

    :param target_energy: ``tr(Y Y^T)``
    :param error_before: by deletion alone, relative to that energy
    :param error_after: once re-solved
    :param damping: of the closing solve
    :param admm: None where it did not run
    :param condition_number: of the closing solve's system; None where there was none
    :param scale: what the weights of an expert that saw too few tokens to be solved were multiplied by; None elsewhere
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
    """Kept units of one group.

    :param kind: of its units
    :param scores: extremes of the scores, of kept and of removed units; None where nothing had to be ranked
    :param keep: kept units, sorted, of the units that this run found; none where the whole sublayer is gone
    """

    name: str
    layer: Count
    kind: str
    num_units: Count
    num_blocks: Count
    unit_cost: Count
    kept: Count
    sparsity: float
    scores: dict[str, float | None] | None
    keep: list[Count]

    @property
    def removed_parameters(self) -> int:
        return (self.num_units - self.kept) * self.unit_cost

    @model_validator(mode="after")
    def _check(self) -> UnitsRecord:
        """Refuse kept units that no pruning leaves."""
        keep, units, blocks = self.keep, self.num_units, self.num_blocks
        if not 1 <= blocks <= units or units % blocks:
            raise ValueError(f"num_units must be a multiple of num_blocks, both at least 1, got {units} and {blocks}")
        ordered = all(first < second for first, second in pairwise(keep)) and (not keep or keep[-1] < units)
        held = blocks if len(keep) >= blocks else int(not keep)
        per_block, size = [0] * held, units // blocks  # no larger than what was read
        for unit in keep if ordered and per_block else ():
            per_block[unit // size] += 1
        if not ordered or len(set(per_block)) != 1 or self.kept != len(keep):
            raise ValueError(
                f"keep must be sorted, unique units from 0 to {units - 1}, the same number in each of {blocks} blocks and as "
                f"many as kept says, got {shorten_value(keep)} and kept {self.kept}"
            )
        return self


@dataclass(frozen=True, config=CLOSED)
class GroupRecord(SolveRecord, UnitsRecord):
    """Kept units of one group and the solve of their weights.

    :param rest: parameters that went beside the units, with the last of them: as queries, keys and norms
    """

    rest: Count = 0

    @property
    def removed_parameters(self) -> int:
        return super().removed_parameters + self.rest


@dataclass(frozen=True, config=CLOSED)
class ExpertsRecord:
    """Kept experts of one layer; ``groups`` renumbers them.

    :param name: of their list
    :param keep: experts that stay, sorted
    :param removed_parameters: of the others' linears
    """

    name: str
    layer: Count
    num_experts: Count
    keep: list[Count]
    removed_parameters: Count

    @model_validator(mode="after")
    def _check(self) -> ExpertsRecord:
        ordered = all(first < second for first, second in pairwise(self.keep))
        if not ordered or not self.keep or self.keep[-1] >= self.num_experts:
            raise ValueError(
                f"keep must be sorted, unique experts from 0 to {self.num_experts - 1}, got {shorten_value(self.keep)}"
            )
        return self


@dataclass(frozen=True, config=CLOSED)
class PerplexityRecord:
    """One perplexity of an output.

    :param sha256: of the text
    :param dense: the dense model's; None where it was not measured
    """

    text: str
    sha256: str
    window: Count
    stride: Count
    max_tokens: Count | None
    dtype: str
    tokens: Count
    value: float
    dense: float | None


@dataclass(frozen=True, config=CLOSED)
class TaskRecord:
    """One score of an output on a task of lm-eval.

    :param limit: of examples
    :param dense: the dense model's; None where it was not measured
    """

    task: str
    metric: str
    limit: Count | None
    value: float
    dense: float | None
    stderr: float | None
    dense_stderr: float | None


@dataclass(frozen=True, config=CLOSED)
class EvaluationRecord:
    """Measurements of an output."""

    perplexity: list[PerplexityRecord] = Field(default_factory=list)
    tasks: list[TaskRecord] = Field(default_factory=list)
