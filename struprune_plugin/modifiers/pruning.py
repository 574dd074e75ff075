"""``StruPruneModifier``: prune every decoder layer physically, one layer on the device at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from llmcompressor.core import Event, State
from loguru import logger
from pydantic import Field, PrivateAttr, model_validator
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.device.placement import WHOLE, Placement
from struprune_plugin.device.ranks import check_one_process
from struprune_plugin.device.room import Room, StageRecord
from struprune_plugin.export import (
    BudgetRecord,
    Manifest,
    ModelRecord,
    adopt_attention,
    adopt_config,
    adopt_stock,
    can_hold_heads,
    make_uniform_config,
    read_manifest,
    wrap_save,
    write_manifest,
)
from struprune_plugin.layer.methods import Methods, Plan
from struprune_plugin.layer.records import CalibrationRecord
from struprune_plugin.layer.targets import TARGETS
from struprune_plugin.layer.tuning import TuningSettings
from struprune_plugin.model.families import find_family
from struprune_plugin.model.layers import (
    count_parameters,
    describe_weights,
    find_decoder_layers,
    has_uniform_layers,
    measure_layer,
)
from struprune_plugin.model.units import UnitGroup, find_groups
from struprune_plugin.modifiers.allocator import SparsityAllocatorModifier
from struprune_plugin.modifiers.checks import check_alone
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.job import Job, open_journal, place_run, prepare_job
from struprune_plugin.modifiers.planning import Planner, plan_early
from struprune_plugin.modifiers.replay import Replay, read_replay
from struprune_plugin.modifiers.session import PassDriver, enter_room
from struprune_plugin.modifiers.stages import agree_on_budget, check_curves, check_single_stage, find_allocator
from struprune_plugin.modifiers.unused import list_given
from struprune_plugin.modifiers.widths import check_widths, describe_roundings
from struprune_plugin.passes.pruning import PruningPass
from struprune_plugin.passes.resume import LayerLog
from struprune_plugin.passes.rules import RULES
from struprune_plugin.passes.tokens import TokenDigest

SEARCHED = tuple(name for name, rule in RULES.items() if rule.searches)  # allocations with a temperature


class StruPruneModifier(StructuredModifier):
    """
    Removes coupled units (FFN channels; attention heads or value channels) from every decoder layer and re-solves the
    linears that consumed them, so that the model is physically smaller.

    For a linear with inputs P (kept ones P_S), target Y and dense weights W, the new weights minimise
    ``||Y - W_S P_S||^2 + lambda ||W_S - W||^2``. Layers are pruned in order; each sees inputs from the layers pruned
    before it. The dense hidden states travel beside the pruned ones, on the host.

    Fields as in :class:`StructuredModifier`, and:

    :param sparsity: required, unless a :class:`SparsityAllocatorModifier` stage comes before; its plan rules then
    :param allocation: ``uniform``, or a rule of :class:`SparsityAllocatorModifier`, in an allocation pass of our own;
        ``error_curve`` takes ``allocation_samples`` for it
    :param target: what a solve should reproduce (method.md section 2): ``residual`` (the dense residual stream minus
        the pruned one before the module, which repairs inherited error), ``block`` (the dense module's output) or
        ``local`` (the module's own output on the pruned path's inputs)
    :param output: ``per_layer`` (every layer its own size; our modelling file travels with the checkpoint) or ``uniform``
        (all layers the same size, so that allocation is uniform; stock classes load it)
    :param trial_samples: calibration sequences, the last of them, on which ``error_curve``'s plan is tried against plans nearer to
        uniform allocation, by the KL divergence of the model's own output; the best is taken. At most a quarter; 0 takes the
        curves' plan as it is
    :param max_swaps: after the elimination, exchange at most so many kept units of a module for removed ones, while the
        re-solved error falls; with ``obs``, for units of one column that were not rotated
    :param tuning_epochs: passes over the calibration data in which every FFN that has lost channels is tuned towards what the
        dense one gives on the same inputs, see :func:`~struprune_plugin.layer.tuning.tune_ffn`; its consumer is then solved once
        more. 0 leaves it as solved
    :param tuning_learning_rate: of Adam, relative to the root mean square of every parameter
    :param replay: a ``struprune.json`` whose kept units and settings to repeat on the same calibration data

    Example recipe::

        pruning_stage:
          pruning_modifiers:
            StruPruneModifier:
              sparsity: 0.2
    """

    allocation: Literal[("uniform", *RULES)] = "error_curve"  # type: ignore[valid-type]
    target: Literal[tuple(TARGETS)] = "residual"  # type: ignore[valid-type]
    output: Literal["per_layer", "uniform"] = "per_layer"
    replay: str | None = None
    trial_samples: int = Field(default=4, ge=0)
    max_swaps: int = Field(default=100, ge=0)
    tuning_epochs: int = Field(default=0, ge=0)
    tuning_learning_rate: float = Field(default=0.01, gt=0, allow_inf_nan=False)

    _pipeline_options: dict[str, Any] = PrivateAttr(default_factory=dict)
    _stage_before: SparsityAllocatorModifier | None = PrivateAttr(default=None)
    _job: Job | None = PrivateAttr(default=None)
    _placement: Placement = PrivateAttr(default=WHOLE)
    _weights_digest: str = PrivateAttr(default="")
    _replayed: Replay | None = PrivateAttr(default=None)
    _plan: Plan | None = PrivateAttr(default=None)
    _spans: ExitStack = PrivateAttr(default_factory=ExitStack)  # closes the room
    _room: Room = PrivateAttr(default_factory=Room)
    _peaks: list[int] = PrivateAttr(default_factory=list)  # of the whole pass, once it is over
    _started: float = PrivateAttr(default=0.0)
    _calibration: CalibrationRecord | None = PrivateAttr(default=None)
    _driver: PassDriver | None = PrivateAttr(default=None)
    _pass: PruningPass | None = PrivateAttr(default=None)
    _sensitivity: dict[str, float] = PrivateAttr(default_factory=dict)
    _is_whole: bool = PrivateAttr(default=False)  # every layer is pruned

    @model_validator(mode="before")
    @classmethod
    def _fill_from_replay(cls, values: Any) -> Any:
        """Take all settings from the manifest that is to be replayed; what the recipe says besides must agree."""
        if not isinstance(values, dict) or not values.get("replay"):
            return values
        settings = {name: v for name, v in read_manifest(values["replay"])["settings"].items() if name != "replay"}
        for name in settings.keys() & values.keys():
            if values[name] != settings[name]:
                raise ValueError(
                    f"replay: {name} must be {settings[name]!r} as in {values['replay']}, got {values[name]!r}. Leave it out."
                )
        return {**settings, **values}

    @model_validator(mode="after")
    def _default_to_uniform(self) -> StruPruneModifier:
        if self.output == "uniform" and "allocation" not in self.model_fields_set:
            self.allocation = "uniform"
        return self

    @model_validator(mode="after")
    def _check_search(self) -> StruPruneModifier:
        if self.search == "full" and self.allocation not in SEARCHED:
            raise ValueError(
                f"search must be moments for allocation: {self.allocation}, which has no temperature, got full. "
                "Set allocation: softmax or softmax_inverse, or leave search out."
            )
        return self

    # -- lifecycle ------------------------------------------------------------------------------------------------

    def take_pipeline_options(self, options: dict[str, Any]) -> None:
        """Take in the caller's options of the host's pipeline, for passes inside this one; the host tells only some."""
        self._pipeline_options = options

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        model = state.model
        if self.tuning_epochs:
            check_one_process("tuning_epochs above 0", "Leave it at 0, or tune in a run of one process.")
        if self.trial_samples and "trial_samples" in list_given(self):
            check_one_process("trial_samples above 0", "Leave it out: several processes take the plan untried.")
        groups = self._find_own_groups(model)
        check_single_stage()
        if self.output == "uniform":
            self._check_uniform(model, groups)
        self._job = prepare_job(self, model, groups, state.data.calib)
        self._placement = place_run(self, model, groups, state.data.calib, hold_out=self.damping == "auto")
        self._weights_digest = describe_weights(model)
        self._pipeline_options = {"sequential_targets": kwargs.get("sequential_targets"), **self._pipeline_options}
        if self._journal is not None:
            open_journal(self._journal, model, state.data.calib)
        self._plan = self._plan_early(model, self._job)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        job = self._job
        assert job is not None
        self._room = room = self._spans.enter_context(enter_room(state.model, self._placement, self.measure_memory))
        self._peaks = self._spans.enter_context(room.watch())
        self._started = time.perf_counter()
        methods = self._make_own_methods(state.model)
        options = self._pipeline_options
        planner = Planner(self, job, methods, state, room, options, self.trial_samples, self._evidence)
        allocated = self._stage_before.allocated if self._stage_before is not None else None
        self._plan, signals = planner.decide(self._plan, allocated, self._journal)
        self._sensitivity = signals.summarize_roots()
        adopt_attention(state.model)
        tokens = TokenDigest(self._take_digest)
        log = None if self._journal is None else LayerLog(self._journal)
        self._pass = PruningPass(job.groups, self._plan, methods, signals, room, tokens=tokens, log=log)
        self._driver = PassDriver(self._pass, self, room)
        self._driver.start(state.model, state.data.calib)

    def on_sequential_epoch_end(self, state: State, event: Event, modules: list[nn.Module], **kwargs: Any) -> None:
        assert self._driver is not None
        self._driver.end_step(state.model, modules)

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        assert self._driver is not None
        seconds = time.perf_counter() - self._started
        self._driver.finish()
        self._spans.close()
        self._room.stages["whole pass"] = StageRecord(seconds, self._peaks[0] if self._peaks else None)
        self._is_whole = True

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        if not self._is_whole:
            self.clean_up()
            return True  # an aborted run that the host winds down: nothing to export
        if self.output == "uniform":
            family = find_family(state.model)
            sizes = [measure_layer(family, layer) for _, layer in find_decoder_layers(state.model)]
            width = max(size.width for size in sizes) if self.prune_ffn else 0
            adopt_stock(state.model, make_uniform_config(state.model, sizes[0].num_key_value_heads, width))
        else:
            adopt_config(state.model)
        manifest = self._make_manifest(state.model)
        self._driver = self._pass = None
        wrap_save(state.model, lambda folder: write_manifest(manifest.to_dict(), folder))
        budget = manifest.budget
        logger.info(
            f"removed {budget.removed_parameters:,} of {budget.prunable_parameters:,} parameters of the decoder "
            f"layers ({budget.met_sparsity:.4%}, asked {budget.asked_sparsity:.4%})"
        )
        return True

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
        self._driver = self._pass = None

    # -- before the pass ------------------------------------------------------------------------------------------

    def _find_own_groups(self, model: PreTrainedModel) -> list[UnitGroup]:
        """Return the groups to prune, once an allocator stage has been agreed with.

        :raises ValueError: the stages contradict each other; no sparsity anywhere
        """
        self._stage_before = stage = find_allocator(self)
        if stage is not None:
            for name, value in agree_on_budget(self, stage).items():
                setattr(self, name, value)
        if self.sparsity is None:
            raise ValueError(
                "StruPruneModifier: sparsity must be given where no SparsityAllocatorModifier stage comes before, "
                "got none. Add sparsity to the recipe."
            )
        groups = self.find_groups(model)
        if stage is not None:
            check_curves(self, stage, groups)
        return groups

    def _check_uniform(self, model: PreTrainedModel, groups: Sequence[UnitGroup]) -> None:
        """Refuse what no stock class could load.

        :raises ValueError: the same
        """
        family = find_family(model)
        problem = ""
        if self.allocation != "uniform" or self._stage_before is not None:
            problem = "uniform allocation, got one that gives layers different sizes. Set allocation: uniform"
        elif self.attention_unit == "vo":
            problem = (
                "values as wide as queries and keys, which stock classes demand, got attention_unit: vo. "
                "Set attention_unit: head or none"
            )
        elif self.attention_unit == "head" and not family.attention.free_heads:
            problem = (
                f"all heads for {model.config.model_type}, whose stock class takes the head size for hidden_size / heads, got "
                "attention_unit: head. Set attention_unit: none"
            )
        elif not has_uniform_layers(model):
            problem = (
                "a dense model, or one whose layers are all the same, got layers of different sizes or values narrower than "
                "queries. Convert it first (struprune convert --to uniform-padded)"
            )
        elif len(groups) != len(find_groups(model, self.attention_unit, self.prune_ffn)):
            problem = "all layers, got targets or ignore that leave some out. Leave them at their defaults"
        if problem:
            raise ValueError(f"output: uniform must have {problem}.")

    def _make_own_methods(self, model: PreTrainedModel) -> Methods:
        tuning = None
        if self.tuning_epochs:
            activation = getattr(model.config, find_family(model).ffn.activation_key)
            tuning = TuningSettings(self.tuning_epochs, self.tuning_learning_rate, activation)
        return self.make_methods(self.target, self.max_swaps, tuning)

    def _plan_early(self, model: PreTrainedModel, job: Job) -> Plan | None:
        """Return the kept counts where they need no calibration data: replayed, or uniform."""
        if self.replay:
            self._replayed = read_replay(self.replay, job, self._weights_digest)
            self.replay = None  # the saved recipe needs no such file
            check_widths(job.groups, self._replayed.plan.kept, job.roundings)
            return self._replayed.plan
        if self._stage_before is not None:
            return None

        def allowed(kind: str, count: int) -> bool:
            return kind == "ffn" or can_hold_heads(model, count)

        return plan_early(self, job, allowed if self.output == "uniform" else None)

    def _take_digest(self, sha256: str) -> None:
        """Take down which calibration data flowed through; refuse, at the first layer, to replay on others."""
        assert self._job is not None
        self._calibration = CalibrationRecord(self._job.num_sequences, self._job.num_tokens, sha256)
        if self._replayed is not None:
            self._replayed.check(self._calibration)

    # -- manifest -------------------------------------------------------------------------------------------------

    def _make_manifest(self, model: PreTrainedModel) -> Manifest:
        job, records = self._job, self._pass.records if self._pass is not None else []
        assert job is not None
        assert self._pass is not None
        assert self._plan is not None
        assert self._calibration is not None
        after = count_parameters(model)
        removed = sum(record.removed_parameters for record in records)
        return Manifest(
            model=ModelRecord(
                base=model.config._name_or_path,
                type=model.config.model_type,
                weights_sha256=self._weights_digest,
                parameters_before=after + removed,
                parameters_after=after,
            ),
            settings=self.dump_fields(),
            seed=torch.initial_seed(),
            calibration=self._calibration,
            budget=BudgetRecord(
                prunable_parameters=job.num_prunable,
                asked_sparsity=self.sparsity or 0.0,
                removed_parameters=removed,
                met_sparsity=removed / job.num_prunable,
                rounding=describe_roundings(job.groups, job.roundings),
            ),
            allocation=self._plan.record,
            memory_measure=self._room.measure,
            stages=self._room.stages,
            tuning=self._pass.tuning,
            groups=records,
            sensitivity=self._sensitivity,
        )
