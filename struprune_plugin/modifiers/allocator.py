"""``SparsityAllocatorModifier``: the modifier that runs an allocation pass in a separate stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llmcompressor.core import Event, State
from pydantic import Field, PrivateAttr, model_validator

from struprune_plugin.allocation.curves import CurveMeasurer
from struprune_plugin.allocation.measurements import measure_sensitivity
from struprune_plugin.allocation.rules.rule import tie_statistics
from struprune_plugin.modifiers.checks import check_alone, list_modifiers
from struprune_plugin.modifiers.fields import AllocationField, StructuredModifier
from struprune_plugin.modifiers.host_pipeline import calibrating, enter_device_context
from struprune_plugin.modifiers.setup import RunSetup, drop_lost_experts, prepare_run, rehearse_units
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.resume import keep_allocation, take_allocation
from struprune_plugin.pruning.signals import Sensitivity
from struprune_plugin.runtime.device_context import StageRecord


@dataclass(frozen=True)
class Allocated:
    """Result of an allocator stage, for the pruning stage.

    :param sensitivity: sensitivity measured by the stage, which the pruning stage reuses
    :param measured: seconds and peak bytes of the stage's calibration pass
    """

    plan: UnitAllocation
    sensitivity: Sensitivity
    measured: StageRecord


class SparsityAllocatorModifier(StructuredModifier):
    """
    Modifier that allocates sparsity to the modules of all layers in one calibration pass over the dense model, and
    leaves the plan for a :class:`StruPruneModifier` in a later stage. Source: paper, Algorithms 2 and 3, steps 1, 2
    and 5.

    One decoder layer is on the device at a time; only the importance and the error curve of each module are stored.
    Fields as in :class:`StructuredModifier`; ``sparsity`` or a ``budget`` must be given.

    :param allocation: by default Algorithm 2

    Example recipe::

        allocation_stage:
          allocation_modifiers:
            SparsityAllocatorModifier:
              sparsity: 0.3
              allocation: softmax
        pruning_stage:
          pruning_modifiers:
            StruPruneModifier: {importance: obs}
    """

    only_plans: ClassVar[bool] = True
    allocation: AllocationField = Field(default="softmax", validate_default=True)  # type: ignore[arg-type]

    _setup: RunSetup | None = PrivateAttr(default=None)
    _allocated: Allocated | None = PrivateAttr(default=None)

    @property
    def allocated(self) -> Allocated | None:
        """Result of this stage; None before its calibration pass."""
        return self._allocated

    @model_validator(mode="after")
    def _check_required(self) -> SparsityAllocatorModifier:
        if self.sparsity is None and not self.budget:
            raise ValueError(
                "must have sparsity or budget, which it distributes over the decoder layers, got neither. Add sparsity."
            )
        if not self.allocation.measures:
            raise ValueError(
                f"`allocation: {self.allocation.rule}` measures nothing, so that it needs no stage of its own. Remove the stage, "
                f"and set `allocation: {self.allocation.rule}` in StruPruneModifier."
            )
        return self

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        rehearse_units(self, state.model)
        groups = self.find_groups(state.model)
        self._setup = prepare_run(self, state.model, groups, state.data.calib)
        self._check_stages()
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        assert self._setup is not None
        setup = self._setup = drop_lost_experts(self._setup, self, state.model)
        if done := take_allocation(self._store, "allocator"):
            plan, sensitivity = done
            self._allocated = Allocated(plan, sensitivity, StageRecord())
            return
        model, batches = state.model, list(state.data.calib)
        with enter_device_context(model, setup.placement) as context, context.stage("allocate"):
            sensitivity = measure_sensitivity(model, batches, setup.groups, context, self.asked)
            measurer = CurveMeasurer(self.allocation, self.make_config(), sensitivity, context)
            with calibrating(model):
                measured = measurer.measure(model, batches, setup.groups)
        tied = tie_statistics(setup.sizes, measured)
        budget = setup.make_budget(self)
        plan = self.allocation.decide(setup.sizes, tied, budget)
        self._allocated = Allocated(plan, sensitivity, context.stages["allocate"])
        if self._store is not None:
            keep_allocation(self._store, "allocator", plan, sensitivity)

    def _check_stages(self) -> None:
        """Raise unless the recipe has exactly one allocator stage and a pruning stage after it.

        :raises ValueError: otherwise
        """
        names = [type(modifier).__name__ for modifier in list_modifiers()]
        ours, theirs = "SparsityAllocatorModifier", "StruPruneModifier"
        if names.count(ours) != 1 or theirs not in names[names.index(ours) :]:
            raise ValueError(
                f"recipe: exactly one {ours} must come before the {theirs} that uses its allocation, got {names}. "
                "Add or reorder the stages."
            )
