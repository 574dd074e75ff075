"""Recipe fields that both modifiers share, and what they say to the rooms below."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from llmcompressor.modifiers import Modifier
from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator
from torch import nn

from struprune_plugin.layer.admm import ADMMSettings
from struprune_plugin.layer.criteria import CRITERIA
from struprune_plugin.layer.methods import RESTORATIONS, Methods
from struprune_plugin.layer.targets import TARGETS
from struprune_plugin.layer.tuning import TuningSettings
from struprune_plugin.maths.allocation import MAX_SPARSITY
from struprune_plugin.maths.solve import DAMPING
from struprune_plugin.model.units import UnitGroup, find_groups
from struprune_plugin.modifiers.patterns import check_patterns
from struprune_plugin.passes.evidence import EvidenceStore
from struprune_plugin.passes.journal import Journal
from struprune_plugin.passes.rules import RULES, AllocationSettings

GROUP_FIELDS = ("targets", "ignore", "attention_unit", "prune_ffn", "channel_multiple")
PLAN_FIELDS = (  # that an allocator stage rules
    *("allocation", "temperature", "gamma", "rho", "max_sparsity", "as_printed", "sensitivity", "allocation_samples"),
)


class StructuredModifier(Modifier):
    """Fields that choose the units, score them and spread a budget over layers.

    :param sparsity: fraction of the parameters of all linears in the decoder layers to remove, in [0, 1)
    :param targets: consuming linears (``fc2``, ``out_proj``) of the modules to prune, exact names or ``re:<pattern>``
    :param ignore: the same, for modules to leave alone
    :param attention_unit: ``head``; ``vo`` (value channels, the same number from every head); ``none``
    :param prune_ffn: whether to prune FFN channels
    :param channel_multiple: kept FFN widths are whole multiples of this, and of what later quantisers and sparsity
        modifiers ask
    :param importance: how units are ranked: ``obs`` (exact increase of the re-solved error), ``wanda``, ``wanda_l2``,
        ``fluctuation`` (FLAP's weighted variance of the inputs), ``magnitude``, ``snip``, ``l0`` or ``closed_form``
    :param restoration: ``least_squares`` re-solves the consumers, ``admm`` then the producers too, ``none`` deletes only
    :param damping: weight of the dense weights in every solve, relative to the mean diagonal of the Gram matrix; ``auto``
        takes 0.01, and for the least-squares solve that gives a module's weights what does best on every fourth sequence,
        held out
    :param temperature: of the softmax rules, relative to std(I) (R8); a list is searched by error (R9)
    :param search: how a temperature's error is found: ``moments`` reads it off every module's error curve on the dense path,
        ``full`` reruns the whole pruning at every temperature and gives the weights back (R9)
    :param rho: attention's factor in Algorithm 3; cancels under a relative temperature, kept for completeness
    :param gamma: decay of importance with depth in Algorithm 3
    :param sensitivity: ``fisher`` weighs errors of a module's output by the Fisher information there, in ``obs`` and in
        error curves, see :func:`~struprune_plugin.passes.sensitivity.measure_fisher`
    :param allocation_samples: calibration sequences for the sensitivity, and, in a pruning stage's own pass, for the
        curves of ``error_curve``; for these at least four tokens an input of the widest module
    :param rotate_values: rotate every head's values first, so that few channels carry what matters; for ``vo`` with
        ``obs`` and a restoration
    :param max_sparsity: the most that a module may lose, to within one step: the clip of Algorithms 2 and 3, and as binding in
        ``error_curve``
    :param as_printed: allocate exactly as the paper prints, and miss the budget where it does (R6, R7)
    :param measure_memory: count on a CPU, too, what an accelerator would hold, see
        :mod:`~struprune_plugin.device.account`; on an accelerator its own counters always tell
    :param memory_budget: bytes that the device may hold; moments and solves go to the host, and are made in pieces, where
        they do not fit. None takes what an accelerator has free
    :param alpha: weight of ADMM's linear terms, above 0 (paper, Algorithm 4; method.md section 7)
    :param beta: weight of its activation terms, above 0
    :param admm_steps: outer steps K
    :param admm_inner_steps: Adam steps of attention's sub-steps
    :param admm_learning_rate: theirs, relative to the size of what is updated
    :param attention_method: 2 (z_Q and z_K apart) or 1 (one z for the logits), R13
    """

    requires_calibration_data: bool = True
    only_plans: ClassVar[bool] = False  # an allocator stage, which prunes nothing itself

    sparsity: float | None = None
    targets: list[str] = Field(default_factory=lambda: ["re:.*"], min_length=1)
    ignore: list[str] = Field(default_factory=list)
    attention_unit: Literal["head", "vo", "none"] = "vo"
    prune_ffn: bool = True
    channel_multiple: int = Field(default=1, ge=1)
    importance: Literal[tuple(CRITERIA)] = "obs"  # type: ignore[valid-type]
    restoration: Literal[tuple(RESTORATIONS)] = "least_squares"  # type: ignore[valid-type]
    damping: float | Literal["auto"] = "auto"
    temperature: float | list[float] = Field(default_factory=lambda: [0.5, 1.0, 2.0, 4.0, 8.0, 16.0])
    search: Literal["moments", "full"] = "moments"
    rho: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    gamma: float = Field(default=0.9, gt=0, le=1)
    max_sparsity: float = Field(default=MAX_SPARSITY, gt=0, lt=1)
    as_printed: bool = False
    alpha: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    beta: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    admm_steps: int = Field(default=4, ge=1)
    admm_inner_steps: int = Field(default=8, ge=1)
    admm_learning_rate: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    attention_method: Literal[1, 2] = 2
    allocation: str = "uniform"
    sensitivity: Literal["fisher", "none"] = "fisher"
    allocation_samples: int = Field(default=16, ge=1)
    rotate_values: bool = True
    measure_memory: bool = False
    memory_budget: int | None = Field(default=None, ge=1)

    @field_validator("targets", "ignore")
    @classmethod
    def _check_targets(cls, value: list[str], info: ValidationInfo) -> list[str]:
        check_patterns(str(info.field_name), value)
        return value

    @field_validator("sparsity")
    @classmethod
    def _check_sparsity(cls, value: float | None) -> float | None:
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"sparsity must be in [0, 1), got {value}. It is the fraction of parameters removed.")
        return value

    @field_validator("damping")
    @classmethod
    def _check_damping(cls, value: float | str) -> float | str:
        if not isinstance(value, str) and not (value >= 0 and math.isfinite(value)):
            raise ValueError(
                f"damping must be auto, or finite and at least 0, got {value}. Leave it out, or take 0.01."
            )
        return value

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float | list[float]) -> float | list[float]:
        grid = value if isinstance(value, list) else [value]
        if not grid or not all(t > 0 and math.isfinite(t) for t in grid):
            raise ValueError(f"temperature must be above 0, one value or a list of at least one, got {value}.")
        return value

    @model_validator(mode="after")
    def _check_stageless(self) -> StructuredModifier:
        if self.start is not None or self.end is not None:
            raise ValueError(
                "start and end must be left out: structured pruning happens once, in one calibration pass."
            )
        return self

    _journal: Journal | None = PrivateAttr(default=None)
    _evidence: EvidenceStore | None = PrivateAttr(default=None)

    def take_journal(self, journal: Journal) -> None:
        """Take in where finished parts are kept, so that a killed run goes on there."""
        self._journal = journal

    def take_evidence(self, store: EvidenceStore) -> None:
        """Take in where runs of other sparsities keep what they measure of the dense model."""
        self._evidence = store

    def find_groups(self, model: nn.Module) -> list[UnitGroup]:
        """Return the groups that the recipe chooses."""
        return find_groups(model, self.attention_unit, self.prune_ffn, self.targets, self.ignore)

    def make_methods(self, target: str = "local", max_swaps: int = 0, tuning: TuningSettings | None = None) -> Methods:
        """Return the choices that a layer's work depends on; ``sparsity`` must be known."""
        assert self.sparsity is not None
        damping = DAMPING if isinstance(self.damping, str) else self.damping
        return Methods(
            criterion=CRITERIA[self.importance],
            restoration=RESTORATIONS[self.restoration],
            target=TARGETS[target],
            damping=damping,
            chooses_damping=self.damping == "auto",
            rotate_values=self.rotate_values,
            max_swaps=max_swaps,
            admm=ADMMSettings(
                self.alpha,
                self.beta,
                self.admm_steps,
                self.admm_inner_steps,
                self.admm_learning_rate,
                self.attention_method,
                damping,
            ),
            tuning=tuning,
            sparsity=self.sparsity,
            max_sparsity=self.max_sparsity,
            as_printed=self.as_printed,
        )

    def make_allocation_settings(self, num_prunable: int) -> AllocationSettings:
        """Return the choices that an allocation pass depends on; ``sparsity`` must be known."""
        assert self.sparsity is not None
        return AllocationSettings(
            name=self.allocation,
            sparsity=self.sparsity,
            num_prunable=num_prunable,
            temperatures=self.temperature if isinstance(self.temperature, list) else [self.temperature],
            gamma=self.gamma,
            rho=self.rho,
            max_sparsity=self.max_sparsity,
            as_printed=self.as_printed,
            sensitivity=self.sensitivity,
        )

    @property
    def sensitivity_samples(self) -> int | None:
        """Sequences for the Fisher information; None where nothing would be weighed by it."""
        rule = RULES.get(self.allocation)
        weighs = CRITERIA[self.importance].eliminates or (rule is not None and rule.weighs_errors)
        return self.allocation_samples if self.sensitivity == "fisher" and weighs else None

    def dump_fields(self) -> dict[str, Any]:
        """Return the recipe fields, without the host's bookkeeping."""
        hosts = set(Modifier.model_fields)
        return {name: value for name, value in self.model_dump().items() if name not in hosts}
