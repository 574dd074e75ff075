"""What a run tells of its decisions, typed; the manifest holds these records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from struprune_plugin.model.units.group import UnitGroup


@dataclass(frozen=True)
class CalibrationRecord:
    """The calibration data of a run.

    :param num_tokens: padding left out
    :param sha256: of all token indices, batch by batch
    """

    num_sequences: int
    num_tokens: int
    sha256: str


@dataclass(frozen=True)
class AllocationRecord:
    """How a budget was spread over the groups; what a rule has no use for is None.

    :param method: the rule
    :param as_printed: whether as the paper prints it
    :param search: how temperatures were compared
    :param temperature: the one taken
    :param searched: every temperature with its error
    :param importance: of every group
    :param retention: mean of Lemma 1's scores, by group
    :param error: sum of all error curves at the kept counts
    :param sensitivity: what errors were weighed by
    :param tried: KL divergence of every plan that was tried, in nats a token
    :param taken: the one of them that was taken
    """

    method: str
    as_printed: bool | None = None
    search: str | None = None
    temperature: float | None = None
    searched: list[dict[str, float]] | None = None
    importance: dict[str, float] | None = None
    retention: dict[str, float] | None = None
    error: float | None = None
    sensitivity: str | None = None
    tried: dict[str, float] | None = None
    taken: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the record as the manifest has it, without what is None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, held: dict[str, Any]) -> AllocationRecord:
        """Read what :meth:`to_dict` gave."""
        return cls(**{name: value for name, value in held.items() if name in cls.__annotations__})


@dataclass(frozen=True)
class ADMMRecord:
    """What ADMM did to one group.

    :param objective: at the start, then after every step
    :param error_after: of the closing solve on the true activations, relative to the target's energy
    """

    objective: list[float]
    error_after: float


@dataclass(frozen=True)
class SolveRecord:
    """How the weights of one group were restored.

    :param target_energy: ``tr(Y Y^T)``
    :param error_before: by deletion alone, relative to that energy
    :param error_after: once re-solved
    :param swaps: exchanges made after the elimination
    :param damping: of the closing solve
    :param admm: None where it did not run
    :param condition_number: of the closing solve's system; None where there was none
    """

    target_energy: float
    error_before: float
    error_after: float
    swaps: int
    damping: float
    admm: ADMMRecord | None
    condition_number: float | None


@dataclass(frozen=True)
class GroupRecord:
    """What was decided of one group.

    :param kind: of its units
    :param scores: extremes of the scores, of kept and of removed units; None where nothing had to be ranked
    :param keep: kept units, sorted, of the units that this run found
    """

    name: str
    layer: int
    kind: str
    num_units: int
    num_blocks: int
    unit_cost: int
    scores: dict[str, float | None] | None
    solve: SolveRecord
    keep: list[int]

    @classmethod
    def describe(cls, group: UnitGroup, keep: Tensor, scores: Tensor | None, solve: SolveRecord) -> GroupRecord:
        """Return the record of a group's decision."""
        return cls(
            name=group.name,
            layer=group.layer_index,
            kind=group.kind,
            num_units=group.num_units,
            num_blocks=group.num_blocks,
            unit_cost=group.unit_cost,
            scores=summarize_scores(scores, keep),
            solve=solve,
            keep=keep.tolist(),
        )

    @property
    def kept(self) -> int:
        return len(self.keep)

    @property
    def removed_parameters(self) -> int:
        return (self.num_units - self.kept) * self.unit_cost

    def to_dict(self) -> dict[str, Any]:
        """Return the record as the manifest has it: flat."""
        solve = asdict(self.solve)
        first = {
            name: getattr(self, name) for name in ("name", "layer", "kind", "num_units", "num_blocks", "unit_cost")
        }
        counts = {"kept": self.kept, "sparsity": 1 - self.kept / self.num_units}
        return {**first, **counts, "scores": self.scores, **solve, "keep": self.keep}

    @classmethod
    def from_dict(cls, flat: dict[str, Any]) -> GroupRecord:
        """Read what :meth:`to_dict` gave."""
        admm = flat["admm"] and ADMMRecord(**flat["admm"])
        solve = SolveRecord(**{name: flat[name] for name in SolveRecord.__annotations__} | {"admm": admm})
        own = {name: flat[name] for name in cls.__annotations__ if name != "solve"}
        return cls(**own, solve=solve)


def summarize_scores(scores: Tensor | None, keep: Tensor) -> dict[str, float | None] | None:
    """Return the extremes of a group's scores and where the cut lies; ``obs`` scores only what it removed."""
    if scores is None:
        return None
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept[keep] = True
    known = scores.isfinite()
    parts = {"kept": scores[known & kept], "removed": scores[known & ~kept]}
    return {
        f"{extreme}_{name}": float(getattr(part, extreme)()) if len(part) else None
        for name, part in parts.items()
        for extreme in ("min", "mean", "max")
    }
