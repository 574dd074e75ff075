"""``SparsityAllocatorModifier``: an allocation pass as a stage of its own."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from llmcompressor.core import Event, State
from pydantic import PrivateAttr, model_validator
from torch import nn

from struprune_plugin.device.placement import WHOLE, Placement
from struprune_plugin.device.room import StageRecord
from struprune_plugin.layer.criteria import CRITERIA
from struprune_plugin.layer.methods import Plan
from struprune_plugin.layer.signals import Signals
from struprune_plugin.modifiers.checks import check_alone, list_modifiers
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.job import Job, open_journal, place_run, prepare_job
from struprune_plugin.modifiers.session import PassDriver, enter_room
from struprune_plugin.passes.allocation import AllocationPass
from struprune_plugin.passes.resume import keep_allocation, take_allocation
from struprune_plugin.passes.rules import RULES
from struprune_plugin.passes.signals import measure_signals


@dataclass(frozen=True)
class Allocated:
    """What an allocator stage leaves for the pruning stage.

    :param signals: what was measured on the way, not to be measured again
    :param measured: seconds and peak bytes of its calibration pass
    """

    plan: Plan
    signals: Signals
    measured: StageRecord


class SparsityAllocatorModifier(StructuredModifier):
    """
    Allocates sparsity to the modules of all layers in one calibration pass over the dense model, and leaves the plan
    for a :class:`StruPruneModifier` in a later stage. Source: paper, Algorithms 2 and 3, steps 1, 2 and 5.

    One decoder layer is on the device at a time; of each module only its importance and its error curve are kept.
    Fields as in :class:`StructuredModifier`; ``sparsity`` must be given.

    :param allocation: ``softmax`` (Algorithm 2), ``block_influence`` (the same rule over ShortGPT's one minus the cosine of a
        layer's input and output), ``softmax_inverse`` (Algorithm 3), ``global_threshold`` (Algorithm 1, with
        ``importance: closed_form``) or ``error_curve`` (the least sum of all modules' errors, see
        :func:`~struprune_plugin.maths.allocation.allocate_error_curves`)

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
    allocation: Literal[tuple(RULES)] = "softmax"  # type: ignore[valid-type]

    _job: Job | None = PrivateAttr(default=None)
    _placement: Placement = PrivateAttr(default=WHOLE)
    _spans: ExitStack = PrivateAttr(default_factory=ExitStack)
    _driver: PassDriver | None = PrivateAttr(default=None)
    _pass: AllocationPass | None = PrivateAttr(default=None)
    _signals: Signals = PrivateAttr(default_factory=Signals)
    _peaks: list[int] = PrivateAttr(default_factory=list)
    _started: float = PrivateAttr(default=0.0)
    _allocated: Allocated | None = PrivateAttr(default=None)

    @property
    def allocated(self) -> Allocated | None:
        """What this stage found, once its calibration pass is over."""
        return self._allocated

    @model_validator(mode="after")
    def _check_required(self) -> SparsityAllocatorModifier:
        if self.sparsity is None:
            raise ValueError("sparsity must be given: the allocator spreads it over the layers.")
        if self.search == "full":
            raise ValueError(
                "search must be moments in an allocator stage, got full, which prunes and so needs the pruning stage's fields. "
                "Give StruPruneModifier the allocation and search: full, without an allocator stage."
            )
        return self

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        groups = self.find_groups(state.model)
        self._job = prepare_job(self, state.model, groups, state.data.calib)
        self._placement = place_run(self, state.model, groups, state.data.calib, together=True)
        self._check_stages()
        if self._journal is not None:
            open_journal(self._journal, state.model, state.data.calib)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        job = self._job
        assert job is not None
        if done := take_allocation(self._journal, "allocator"):
            plan, signals = done
            assert plan is not None
            self._allocated = Allocated(plan, signals, StageRecord())
            return
        self._started = time.perf_counter()
        room = self._spans.enter_context(enter_room(state.model, self._placement, self.measure_memory))
        self._peaks = self._spans.enter_context(room.watch())
        gradients = CRITERIA[self.importance].gradients
        self._signals = measure_signals(
            state.model, state.data.calib, job.groups, room, gradients, self.sensitivity_samples
        )
        settings = self.make_allocation_settings(job.num_prunable)
        self._pass = AllocationPass(job.groups, job.sizes, settings, self.make_methods(), self._signals, room)
        self._driver = PassDriver(self._pass, self, room)
        self._driver.start(state.model, state.data.calib)

    def on_sequential_epoch_end(self, state: State, event: Event, modules: list[nn.Module], **kwargs: Any) -> None:
        if self._allocated is not None:
            return  # by an earlier process: the host runs its pass all the same
        assert self._driver is not None
        self._driver.end_step(state.model, modules)

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        if self._allocated is not None:
            return
        assert self._driver is not None
        assert self._pass is not None
        self._driver.finish()
        assert self._pass.plan is not None
        seconds = time.perf_counter() - self._started
        self._spans.close()
        measured = StageRecord(seconds, self._peaks[0] if self._peaks else None)
        self._allocated = Allocated(self._pass.plan, self._signals, measured)
        self._pass = self._driver = None
        if self._journal is not None:
            keep_allocation(self._journal, "allocator", self._allocated.plan, self._allocated.signals)

    def update_event(self, state: State, event: Event, **kwargs: Any) -> None:
        """Handle an event of the host; leave no hooks behind if it fails."""
        try:
            super().update_event(state, event, **kwargs)
        except BaseException:
            self.clean_up()
            raise

    def clean_up(self) -> None:
        """Forget a run that was aborted: its hooks, its account and what it observed."""
        if self._driver is not None:
            self._driver.abort()
        self.remove_hooks()
        self._spans.close()
        self._pass = self._driver = None

    def _check_stages(self) -> None:
        """Refuse a plan that nobody follows, or two plans.

        :raises ValueError: the same
        """
        names = [type(modifier).__name__ for modifier in list_modifiers()]
        ours, theirs = "SparsityAllocatorModifier", "StruPruneModifier"
        if names.count(ours) != 1 or theirs not in names[names.index(ours) :]:
            raise ValueError(
                f"recipe: one {ours} stage must come before the {theirs} stage that follows its plan, got {names}. "
                "Add or reorder the stages."
            )
