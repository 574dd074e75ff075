"""``StruPruneModifier``: prune every decoder layer physically, one layer on the device at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
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
    describe_versions,
    make_uniform_config,
    read_manifest,
    wrap_save,
    write_manifest,
)
from struprune_plugin.layer.criteria import CRITERIA
from struprune_plugin.layer.methods import Methods, Plan
from struprune_plugin.layer.records import AllocationRecord, CalibrationRecord
from struprune_plugin.layer.signals import Signals
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
from struprune_plugin.modifiers.checks import check_alone, list_modifiers
from struprune_plugin.modifiers.fields import GROUP_FIELDS, PLAN_FIELDS, StructuredModifier
from struprune_plugin.modifiers.job import Job, place_run, prepare_job
from struprune_plugin.modifiers.session import PassDriver, enter_room, run_pass
from struprune_plugin.modifiers.widths import check_widths, describe_roundings
from struprune_plugin.passes.allocation import AllocationPass, make_uniform_plan, take_batches
from struprune_plugin.passes.pruning import PruningPass
from struprune_plugin.passes.rules import RULES
from struprune_plugin.passes.search import search_fully
from struprune_plugin.passes.signals import measure_signals
from struprune_plugin.passes.tokens import TokenDigest

SEARCHED = tuple(name for name, rule in RULES.items() if rule.searches)  # allocations with a temperature


@dataclass(frozen=True)
class Replayed:
    """The manifest that a run repeats.

    :param path: where it lies
    :param plan: its kept units
    :param calibration: its record of the calibration data
    """

    path: str
    plan: Plan
    calibration: dict[str, Any]


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
    :param max_swaps: after the elimination, exchange at most so many kept units of a module for removed ones, while the
        re-solved error falls; with ``obs``, for units of one column that were not rotated
    :param tuning_epochs: passes over the calibration data in which every layer, once pruned, is tuned towards the dense
        one's output, see :func:`~struprune_plugin.layer.tuning.tune_layer`; 0 leaves it as solved
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
    max_swaps: int = Field(default=100, ge=0)
    tuning_epochs: int = Field(default=0, ge=0)
    tuning_learning_rate: float = Field(default=0.02, gt=0, allow_inf_nan=False)

    _pipeline_options: dict[str, Any] = PrivateAttr(default_factory=dict)
    _stage_before: SparsityAllocatorModifier | None = PrivateAttr(default=None)
    _job: Job | None = PrivateAttr(default=None)
    _placement: Placement = PrivateAttr(default=WHOLE)
    _weights_digest: str = PrivateAttr(default="")
    _replayed: Replayed | None = PrivateAttr(default=None)
    _plan: Plan | None = PrivateAttr(default=None)
    _spans: ExitStack = PrivateAttr(default_factory=ExitStack)  # closes the room
    _room: Room = PrivateAttr(default_factory=Room)
    _peaks: list[int] = PrivateAttr(default_factory=list)  # of the whole pass, once it is over
    _started: float = PrivateAttr(default=0.0)
    _calibration: CalibrationRecord | None = PrivateAttr(default=None)
    _driver: PassDriver | None = PrivateAttr(default=None)
    _pass: PruningPass | None = PrivateAttr(default=None)
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
    def _check_tuning(self) -> StruPruneModifier:
        if self.tuning_epochs and self.target == "local":
            raise ValueError(
                f"tuning_epochs must be 0 where target is local, got {self.tuning_epochs}: no dense path is run to learn "
                "from. Set target: residual."
            )
        return self

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
        groups = self._find_own_groups(model)
        self._check_stages()
        if self.output == "uniform":
            self._check_uniform(model, groups)
        self._job = prepare_job(self, model, groups, state.data.calib)
        self._placement = place_run(self, model, groups, state.data.calib, hold_out=self.damping == "auto")
        self._weights_digest = describe_weights(model)
        self._pipeline_options = {"sequential_targets": kwargs.get("sequential_targets"), **self._pipeline_options}
        self._plan = self._make_early_plan(model, self._job)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        job = self._job
        assert job is not None
        self._room = room = self._spans.enter_context(enter_room(state.model, self._placement, self.measure_memory))
        self._peaks = self._spans.enter_context(room.watch())
        self._started = time.perf_counter()
        signals, methods = self._measure_signals(state, job), self._make_own_methods()
        if self._plan is None:
            self._plan = self._make_late_plan(state, job, methods, signals)
            check_widths(job.groups, self._plan.kept, job.roundings)
        adopt_attention(state.model)
        tokens = TokenDigest(self._take_digest)
        self._pass = PruningPass(job.groups, self._plan, methods, signals, room, tokens=tokens)
        self._driver = PassDriver(self._pass, self)
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

    # -- the other stages -----------------------------------------------------------------------------------------

    def _find_allocator(self) -> SparsityAllocatorModifier | None:
        """Return the allocator stage that comes before this modifier in the recipe."""
        found = None
        for modifier in list_modifiers():
            if modifier is self:
                return found
            if isinstance(modifier, SparsityAllocatorModifier):
                found = modifier
        return found

    def _find_own_groups(self, model: PreTrainedModel) -> list[UnitGroup]:
        """Return the groups to prune, once an allocator stage has been agreed with.

        :raises ValueError: the stages contradict each other; no sparsity anywhere
        """
        self._stage_before = stage = self._find_allocator()
        if stage is not None:
            self._agree_on_budget(stage)
        if self.sparsity is None:
            raise ValueError(
                "StruPruneModifier: sparsity must be given where no SparsityAllocatorModifier stage comes before, "
                "got none. Add sparsity to the recipe."
            )
        groups = self.find_groups(model)
        if stage is not None:
            self._agree_on_curves(stage, groups)
        return groups

    def _agree_on_budget(self, stage: SparsityAllocatorModifier) -> None:
        """Take over what an allocator stage decides.

        :raises ValueError: other units or another budget; a field of the allocation that the stage would overrule
        """
        for name in ("sparsity", *GROUP_FIELDS):
            if name == "sparsity" and self.sparsity is None:
                self.sparsity = stage.sparsity
            self._check_same(stage, name, "Give both stages the same value.")
        if self.search == "full":
            raise ValueError(
                "StruPruneModifier: search must be moments where a SparsityAllocatorModifier stage makes the plan, got full. "
                "Leave that stage out."
            )
        for name in PLAN_FIELDS:
            if name in self.model_fields_set:
                self._check_same(stage, name, "The stage decides it: leave it out here.")
            setattr(self, name, getattr(stage, name))

    def _agree_on_curves(self, stage: SparsityAllocatorModifier, groups: Sequence[UnitGroup]) -> None:
        """Refuse units that are ranked or restored otherwise than an allocator stage's error curves say.

        :raises ValueError: the same
        """
        self._check_same(stage, "importance", "Give both stages the same value.")
        ours, theirs = self.make_methods(), stage.make_methods()
        if ours.restoration.solves != theirs.restoration.solves:  # ADMM starts from and closes with least squares
            self._check_same(stage, "restoration", "Give both stages the same value.")
        if any(ours.rotates(group) != theirs.rotates(group) for group in groups):
            self._check_same(stage, "rotate_values", "Give both stages the same value.")

    def _check_same(self, stage: SparsityAllocatorModifier, name: str, remedy: str) -> None:
        ours, theirs = getattr(self, name), getattr(stage, name)
        if ours != theirs:
            raise ValueError(
                f"StruPruneModifier: {name} must be {theirs!r} as in the SparsityAllocatorModifier stage, got {ours!r}. "
                f"{remedy}"
            )

    def _check_stages(self) -> None:
        """Refuse a second pruning stage: groups are measured before any stage has run.

        :raises ValueError: the same
        """
        names = [type(modifier).__name__ for modifier in list_modifiers()]
        if names.count("StruPruneModifier") > 1:
            raise ValueError(
                f"recipe: must hold one StruPruneModifier, got {names}. Prune the saved output again in a run of its own."
            )

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

    # -- plan -----------------------------------------------------------------------------------------------------

    def _make_own_methods(self) -> Methods:
        tuning = TuningSettings(self.tuning_epochs, self.tuning_learning_rate) if self.tuning_epochs else None
        return self.make_methods(self.target, self.max_swaps, tuning)

    def _measure_signals(self, state: State, job: Job) -> Signals:
        """Measure what the methods ask of the dense model, unless an allocator stage has."""
        allocated = self._stage_before.allocated if self._stage_before is not None else None
        return measure_signals(
            state.model,
            state.data.calib,
            job.groups,
            self._room,
            CRITERIA[self.importance].gradients,
            self.sensitivity_samples,
            allocated.signals if allocated is not None else None,
        )

    def _make_early_plan(self, model: PreTrainedModel, job: Job) -> Plan | None:
        """Return the kept counts where they need no calibration data: replayed, or uniform."""
        if self.replay:
            self._replayed = self._read_replay(self.replay, job)
            self.replay = None
            check_widths(job.groups, self._replayed.plan.kept, job.roundings)
            return self._replayed.plan
        rule = RULES.get(self.allocation)
        if self._stage_before is not None or (rule is not None and not rule.few_samples):
            return None

        def allowed(kind: str, count: int) -> bool:
            return kind == "ffn" or can_hold_heads(model, count)

        plan = make_uniform_plan(job.sizes, job.share, allowed if self.output == "uniform" else None)
        check_widths(job.groups, plan.kept, job.roundings)  # what uniform counts cannot meet, no curves mend
        return plan if rule is None else None

    def _make_late_plan(self, state: State, job: Job, methods: Methods, signals: Signals) -> Plan:
        """Return the kept counts that an allocator stage left, or those of an allocation pass of our own."""
        if self._stage_before is not None:
            allocated = self._stage_before.allocated
            assert allocated is not None
            self._room.stages["allocate"] = allocated.measured
            return allocated.plan
        logger.info(f"allocation pass ({self.allocation}) over the dense model")
        with self._room.stage("allocate"):
            plan = self._allocate(state, job, signals)
        if self.search == "moments":
            return plan
        with self._room.stage("search"):
            return search_fully(plan, lambda candidate: self._rehearse(state, job, methods, signals, candidate))

    def _allocate(self, state: State, job: Job, signals: Signals) -> Plan:
        """Make the plan in an allocation pass over the dense model."""
        few = RULES[self.allocation].few_samples
        loader = take_batches(state.data.calib, job.groups, self.allocation_samples) if few else state.data.calib
        room = self._room.replace(place_run(self, state.model, job.groups, loader, together=True))
        settings = self.make_allocation_settings(job.num_prunable)
        allocation = AllocationPass(job.groups, job.sizes, settings, self.make_methods(), signals, room)
        run_pass(state, allocation, self._pipeline_options, propagate_error=False, calibration=loader)
        assert allocation.plan is not None
        return allocation.plan

    def _rehearse(self, state: State, job: Job, methods: Methods, signals: Signals, plan: Plan) -> float:
        """Prune after a plan, a layer at a time, giving each layer its weights back once the next has seen its outputs;
        return the squared error summed over groups."""
        adopt_attention(state.model)
        methods = replace(methods, tuning=None)  # a search by the solves' errors
        rehearsal = PruningPass(job.groups, plan, methods, signals, self._room.replace(self._placement), keeps=False)
        run_pass(state, rehearsal, self._pipeline_options, propagate_error=True)
        return sum(record.solve.error_after * record.solve.target_energy for record in rehearsal.records)

    def _read_replay(self, path: str, job: Job) -> Replayed:
        """Take the kept units of a manifest.

        :raises ValueError: it was made from another model
        """
        manifest = read_manifest(path)
        sizes = {entry["name"]: entry["num_units"] for entry in manifest["groups"]}
        if sizes != {group.name: group.num_units for group in job.groups} or (
            manifest["model"]["weights_sha256"] != self._weights_digest
        ):
            raise ValueError(
                f"replay: the model must be the one that {path} was made from, got other modules, sizes, weights or dtype. "
                "Replay it on that dense model."
            )
        _warn_of_changes(path, manifest)
        units = {entry["name"]: entry["keep"] for entry in manifest["groups"]}
        record = AllocationRecord.from_dict(manifest["allocation"])
        plan = Plan({name: len(keep) for name, keep in units.items()}, record, units=units)
        return Replayed(path, plan, manifest["calibration"])

    def _take_digest(self, sha256: str) -> None:
        """Take down which calibration data flowed through; refuse, at the first layer, to replay on others.

        :raises ValueError: the same
        """
        assert self._job is not None
        self._calibration = CalibrationRecord(self._job.num_sequences, self._job.num_tokens, sha256)
        if self._replayed and asdict(self._calibration) != self._replayed.calibration:
            raise ValueError(
                f"replay: the calibration batches must be those of {self._replayed.path}, "
                f"{self._replayed.calibration}, got {asdict(self._calibration)}. Pass the same text, number, length, order "
                "(shuffle_calibration_samples=False) and batch size of samples, and as many processes."
            )

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
        )


def _warn_of_changes(path: str, manifest: dict[str, Any]) -> None:
    """Say what differs between the run that a manifest tells of and this one, which may change its bytes."""
    now = {**describe_versions(), "seed": torch.initial_seed()}
    then = {**manifest.get("versions", {}), "seed": manifest.get("seed")}
    changes = [f"{name} {then.get(name)} -> {now.get(name)}" for name in now if then.get(name) != now.get(name)]
    if changes:
        logger.warning(
            f"replay: this run differs from the one of {path} in {', '.join(changes)}: the same units are kept, their weights may "
            "differ in the last bits. Replay with the versions and the seed that the manifest names for the same bytes."
        )
