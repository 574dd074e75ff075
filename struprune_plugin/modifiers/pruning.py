"""``StruPruneModifier``: the modifier that prunes every decoder layer physically, one layer on the device at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from loguru import logger
from pydantic import Field, PrivateAttr, model_validator
from transformers import PreTrainedModel

from struprune_plugin.allocation.rules import RULES
from struprune_plugin.export.convert import adopt_attention, wrap_save
from struprune_plugin.export.finish import finish_model
from struprune_plugin.export.stock_config import are_layers_alike, can_hold_heads, select_configurable
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.model.layers import count_parameters, count_weight_bytes
from struprune_plugin.model.units import sort_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.checks import check_alone, split_modifiers
from struprune_plugin.modifiers.fields import AllocationField, StructuredModifier
from struprune_plugin.modifiers.host_pipeline import calibrating, enter_device_context
from struprune_plugin.modifiers.mixtures import describe_experts, find_whole, tell_lost_experts
from struprune_plugin.modifiers.planning import Planner, plan_early
from struprune_plugin.modifiers.setup import RunSetup, open_store, prepare_run, rehearse_units
from struprune_plugin.modifiers.stage_modifier import StageModifier
from struprune_plugin.modifiers.targets import describe_target
from struprune_plugin.modifiers.uniform_output import check_uniform
from struprune_plugin.modifiers.widths import describe_roundings
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.prune_layer import Pruner
from struprune_plugin.pruning.resume import LayerLog, digest_tokens
from struprune_plugin.reporting.tables import tell_budget
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.storage.manifest import Manifest, write_manifest
from struprune_plugin.storage.records import BudgetRecord, CalibrationRecord, GroupRecord, ModelRecord, StageEntry


class StruPruneModifier(StructuredModifier):
    """
    Modifier that removes coupled units (FFN channels; attention heads or value channels) from every decoder layer and
    re-solves the linears that consumed them, so that the model is physically smaller.

    For a linear with inputs P (kept ones P_S), target Y and dense weights W, the new weights minimise
    ``||Y - W_S P_S||^2 + lambda ||W_S - W||^2``. Layers are pruned in order; each sees inputs from the layers pruned
    before it, whatever the value of ``propagate_error``. The dense hidden states are kept beside the pruned ones, on
    the host.

    Lifecycle, by llm-compressor's events:
        - on_initialize: find the groups, check recipe, model and data
        - on_calibration_start: measure, allocate, prune layer by layer
        - on_finalize: update the configuration for the pruned model, and make the manifest that is saved with it

    Fields as in :class:`StructuredModifier`, and:

    :param sparsity: required unless there is a ``budget`` or an earlier :class:`SparsityAllocatorModifier` stage, which
        sets it
    :param allocation: ``uniform``, or a rule that takes an allocation pass of the stage's own
    :param reconstruct: target of a solve (method.md section 2)
    :param output: ``per_layer``: each layer has its own size, and our modelling file travels with the checkpoint;
        ``uniform``: all layers have the same size, the allocation is uniform, and stock classes load the output

    Example recipe::

        pruning_stage:
          pruning_modifiers:
            StruPruneModifier:
              sparsity: 0.2
    """

    allocation: AllocationField = Field(default="error_curve", validate_default=True)  # type: ignore[arg-type]
    reconstruct: Literal[tuple(TARGETS)] = "half_residual"  # type: ignore[valid-type]
    output: Literal["per_layer", "uniform"] = "per_layer"

    _before: Sequence[Modifier] = PrivateAttr(default=())  # in the recipe
    _behind: Sequence[Modifier] = PrivateAttr(default=())
    _setup: RunSetup | None = PrivateAttr(default=None)
    _plan: UnitAllocation | None = PrivateAttr(default=None)
    _context: DeviceContext = PrivateAttr(default_factory=DeviceContext)
    _calibration: CalibrationRecord | None = PrivateAttr(default=None)
    _pruned: list[GroupRecord] | None = PrivateAttr(default=None)
    _num_before: int = PrivateAttr(default=0)
    _fisher_means: dict[str, float] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _complete_fields(self) -> StruPruneModifier:
        if self.output == "uniform" and "allocation" not in self.model_fields_set:
            self.allocation = RULES.parse("uniform")
        return self

    # -- lifecycle: llm-compressor's events ------------------------------------------------------------------------

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        self._before, self._behind = split_modifiers(self)
        self._prepare(state)
        if self._store is not None:
            open_store(self._store, state.model, state.data.calib)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        check_alone(self)
        if any(not isinstance(other, StageModifier) for other in self._before):
            self._prepare(state)  # a modifier of llm-compressor (REAP) has changed the model
        model, setup = state.model, self._setup
        assert setup is not None
        batches, self._num_before = list(state.data.calib), count_parameters(model)
        tokens = setup.num_sequences, setup.num_tokens
        self._calibration = CalibrationRecord(*tokens, digest_tokens(batch["input_ids"] for batch in batches))
        with enter_device_context(model, setup.placement) as context, context.stage("whole pass"):
            self._plan, measured = Planner(self, setup, model, batches, context).decide(self._plan, self._store)
            adopt_attention(model, setup.groups)
            log = None if self._store is None else LayerLog(self._store)
            plan = replace(
                self._plan, kept={**self._plan.kept, **{group.name: group.num_units for group in setup.whole}}
            )
            pruner = Pruner(self.make_config(self.reconstruct), plan, measured, context)
            with calibrating(model):
                self._pruned = pruner.prune_model(model, batches, sort_groups([*setup.groups, *setup.whole]), log)
        context.stages["whole pass"] = context.stages.pop("whole pass")  # after its parts
        self._context, self._fisher_means = context, measured.summarize_fisher()

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        if self._pruned is None:
            return True  # llm-compressor finalises an aborted run: nothing to export
        tell_lost_experts(state.model, self._setup.groups if self._setup else [])
        finish_model(state.model, self.output == "uniform")
        manifest = self._make_manifest(state.model)
        logger.info(tell_budget(manifest.budget))
        wrap_save(state.model, lambda path: write_manifest(manifest, path))
        return True

    def find_groups(self, model: PreTrainedModel) -> list[UnitGroup]:
        """Return the groups that the recipe selects; with ``output: uniform``, only those that stock classes can shrink."""
        groups = super().find_groups(model)
        if self.output != "uniform" or not are_layers_alike(model):
            return groups
        keep_width = self.experts is not None and self.experts.units == "whole"
        cut = [group for group in groups if not (group.experts and keep_width)]
        chosen = {group.name: group for group in (select_configurable(model, cut) if cut else cut)}
        return [chosen.get(group.name, group) for group in groups if group.name in chosen or group not in cut]

    # -- before the pass ------------------------------------------------------------------------------------------

    def _prepare(self, state: State) -> None:
        """Find the groups of the model as it is now, check recipe, model and data, and make the plan if it needs no measurement.

        :raises ValueError: the run cannot succeed
        """
        model = state.model
        rehearse_units(self, model)
        if self.sparsity is None and not self.budget:
            raise ValueError(
                "StruPruneModifier: the recipe gives neither sparsity nor budget, and no SparsityAllocatorModifier stage comes "
                "before. Add sparsity to the recipe."
            )
        groups = self.find_groups(model)
        if self.output == "uniform":
            check_uniform(self, model, groups, self._behind)
        stages, whole = (self._before, self._behind), find_whole(self, model, groups)
        self._setup = prepare_run(self, model, groups, state.data.calib, stages, whole)
        allowed = (
            (lambda kind, count: kind != "attention" or can_hold_heads(model, count))
            if self.output == "uniform"
            else None
        )
        self._plan = plan_early(self, self._setup, allowed)

    def _make_manifest(self, model: PreTrainedModel) -> Manifest:
        setup, pruned = self._setup, self._pruned
        assert setup is not None
        assert pruned is not None
        assert self._plan is not None
        assert self._calibration is not None
        after, experts = count_parameters(model), describe_experts(setup.mixture, self._plan.experts)
        removed = sum(r.removed_parameters for r in pruned) + sum(r.removed_parameters for r in experts)
        return Manifest(
            model=ModelRecord(
                base=model.config._name_or_path,
                type=model.config.model_type,
                parameters_before=self._num_before,
                parameters_after=after,
            ),
            settings=self.dump_fields(),
            seed=torch.initial_seed(),
            calibration=self._calibration,
            budget=BudgetRecord(
                prunable_parameters=setup.num_prunable,
                asked_sparsity=setup.target.sparsity,
                removed_parameters=removed,
                met_sparsity=removed / setup.num_prunable,
                rounding=describe_roundings(self._plan.list_left(setup.groups), setup.roundings),
                limit=describe_target(self, setup.target, count_weight_bytes(model), setup.sizes, self._plan.kept),
            ),
            allocation=self._plan.record,
            memory_measure=self._context.measure,
            stages=[
                StageEntry(name=name, seconds=round(stage.seconds, 3), peak_bytes=stage.peak_bytes)
                for name, stage in self._context.stages.items()
            ],
            groups=pruned,
            experts=experts,
            sensitivity=self._fisher_means,
        )
