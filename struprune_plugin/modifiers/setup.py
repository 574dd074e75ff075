"""Setup and checks of a run before any calibration, from the recipe, the model and the data, and its manifest at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llmcompressor.core import State
from llmcompressor.modifiers import Modifier
from torch.utils.data import RandomSampler
from transformers import PreTrainedModel

from struprune_plugin.allocation.rules.uniform import allocate_uniformly
from struprune_plugin.allocation.whole_experts import Mixture
from struprune_plugin.export.rehearsal import rehearse, rehearse_with_experts
from struprune_plugin.export.stock_config import can_hold_heads
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.model.layers import count_parameters, count_weight_bytes
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.surgery import check_sliceable
from struprune_plugin.model.units import sort_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.budgets import ModelBudget, describe_limit, find_budget
from struprune_plugin.modifiers.checks import (
    check_cache_quantisation,
    check_calibration,
    check_layers,
    check_stage,
    check_uniform,
    list_modifiers,
)
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.mixtures import describe_experts, find_mixture, find_whole
from struprune_plugin.modifiers.widths import Rounding, check_widths, describe_roundings, find_roundings
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.problem import Sensitivity
from struprune_plugin.pruning.resume import describe_run, digest_tokens
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import check_one_process
from struprune_plugin.storage.manifest import (
    AllocationRecord,
    BudgetRecord,
    CalibrationRecord,
    GroupRecord,
    Manifest,
    ModelRecord,
    StageEntry,
    describe_versions,
)
from struprune_plugin.storage.resume_store import ResumeStore


@dataclass(frozen=True)
class RunSetup:
    """Facts about a run that are known before it starts.

    :param groups: groups to prune, in the order in which the model computes them
    :param whole: groups that keep all units and are re-solved
    :param roundings: rounding of kept counts, by group name
    :param sizes: sizes of the groups for the budget, beside whole experts
    :param budget: the budget on this model
    :param mixture: whole experts that may be removed; None if none may
    :param calibration: record of the calibration data
    :param num_parameters: parameters of the model
    :param early: plan, if it needs no calibration data
    """

    groups: Sequence[UnitGroup]
    whole: Sequence[UnitGroup]
    roundings: dict[str, Rounding]
    sizes: Sequence[GroupSize]
    budget: ModelBudget
    mixture: Mixture | None
    calibration: CalibrationRecord
    num_parameters: int
    early: UnitAllocation | None

    @property
    def all_groups(self) -> list[UnitGroup]:
        """Groups that are re-solved, in the order in which the model computes them."""
        return sort_groups([*self.groups, *self.whole])

    def make_manifest(
        self,
        recipe: StructuredModifier,
        plan: UnitAllocation,
        groups: list[GroupRecord],
        sensitivity: Sensitivity,
        context: DeviceContext,
        model: PreTrainedModel,
    ) -> Manifest:
        """Return the manifest of a run.

        :param groups: records of all groups
        :param sensitivity: measurements of the dense model
        :param context: context of the run, which has counted its seconds and bytes
        :param model: the pruned model
        """
        experts = describe_experts(self.mixture, plan.experts)
        removed = sum(r.removed_parameters for r in groups) + sum(r.removed_parameters for r in experts)
        return Manifest(
            model=ModelRecord(
                base=model.config._name_or_path,
                type=model.config.model_type,
                parameters_before=self.num_parameters,
                parameters_after=count_parameters(model),
                left_out=getattr(model, "left_out", []),
            ),
            settings=recipe.dump_fields(),
            seed=torch.initial_seed(),
            calibration=self.calibration,
            budget=BudgetRecord(
                prunable_parameters=self.budget.num_prunable,
                asked_sparsity=self.budget.sparsity,
                removed_parameters=removed,
                met_sparsity=removed / self.budget.num_prunable,
                rounding=describe_roundings(plan.list_left(self.groups), self.roundings),
                limit=describe_limit(recipe, self.budget, count_weight_bytes(model), self.sizes, plan.kept),
            ),
            allocation=plan.record,
            memory_measure=context.measure,
            stages=[
                StageEntry(name=name, seconds=round(stage.seconds, 3), peak_bytes=stage.peak_bytes)
                for name, stage in context.stages.items()
            ],
            groups=groups,
            experts=experts,
            sensitivity=sensitivity.summarize_fisher(),
        )


def prepare_run(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    loader: Any,
    stages: tuple[Sequence[Modifier], Sequence[Modifier]],
    uniform: bool,
) -> RunSetup:
    """Find the groups of the model as it is now, check recipe, model and calibration data, and return the setup of the run.

    Experts whose removal fails in the rehearsal stay whole: ``modifier.experts`` is then set to None.

    :param loader: calibration data; None if none was given
    :param stages: modifiers before this one in the recipe, and those behind it
    :param uniform: whether all layers must have one size, for stock classes
    :raises ValueError: the run cannot succeed
    """
    before, later = stages
    check_layers(model)
    units = modifier.attention_unit, modifier.prune_ffn
    if modifier.experts is None or modifier.experts.drops:
        rehearse(model, *units, prune_experts=modifier.experts is not None)
    elif not rehearse_with_experts(model, *units):
        modifier.experts = None
    if modifier.sparsity is None and modifier.budget is None:
        raise ValueError(
            "StruPruneModifier: the recipe gives neither sparsity nor budget, and no SparsityAllocatorModifier stage comes before. "
            "Add sparsity to the recipe."
        )
    groups = modifier.find_groups(model)
    if uniform:
        check_uniform(modifier, model, groups, later)
    whole = find_whole(modifier, model, groups)
    check_stage(modifier, model, before, later)
    _check_methods(modifier, model, groups, later)
    roundings = find_roundings(model, groups, later, modifier.width_multiple)
    _check_groups(model, groups, roundings)
    mixture = find_mixture(modifier, model, groups, [*before, *later])
    sizes, budget = find_budget(modifier, model, groups, roundings, mixture, later)
    most = modifier.allocation.most
    if most is not None and budget.share > most:
        raise ValueError(
            f"max_sparsity: must be at least {budget.share:.4f}, the mean over the modules to prune at "
            f"sparsity={budget.sparsity:g}, got {most}. Lower sparsity, raise max_sparsity, or prune more kinds of units."
        )
    where, needed = find_widest_solve(modifier, [*groups, *whole])
    sequences, tokens = check_calibration(model, loader, needed, where)
    ids = [batch["input_ids"] for batch in loader]
    if not ids:
        raise ValueError(
            "dataset: a loader must give its batches in every pass, got none in the second. Pass a list of them, or a Dataset."
        )
    calibration = CalibrationRecord(sequences, tokens, digest_tokens(ids))
    early = _plan_early(modifier, model, sizes, budget, uniform)
    if early is not None:
        check_widths(groups, early.kept, roundings)  # if uniform counts do not fit, no others do
    is_plan = not sizes or not modifier.allocation.measures
    count = count_parameters(model)
    return RunSetup(groups, whole, roundings, sizes, budget, mixture, calibration, count, early if is_plan else None)


def find_widest_solve(modifier: StructuredModifier, groups: Sequence[UnitGroup]) -> tuple[str, int]:
    """Return the name of the widest module, and the tokens that its solve needs: one per input and one for the bias."""
    widest = max(groups, key=lambda group: group.num_columns)
    solves = modifier.importance.eliminates or modifier.weight_update.solves
    return widest.name, widest.num_columns + 1 if solves else 1


def _plan_early(
    recipe: StructuredModifier, model: PreTrainedModel, sizes: Sequence[GroupSize], budget: ModelBudget, uniform: bool
) -> UnitAllocation | None:
    """Return the plan of a rule that needs no calibration data; of one that does, uniform counts, which must fit, too.

    :raises ValueError: the budget cannot be met
    """
    rule = recipe.allocation
    if not sizes:  # whole experts alone
        return UnitAllocation({}, AllocationRecord(rule.rule))
    if uniform:
        return allocate_uniformly(
            sizes, budget.share, lambda kind, count: kind != "attention" or can_hold_heads(model, count), budget.limit
        )
    if not rule.measures:
        return rule.decide(sizes, {}, budget)
    return None if rule.sequences is None else allocate_uniformly(sizes, budget.share, None, budget.limit)


def _check_methods(
    modifier: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup], later: Sequence[Modifier]
) -> None:
    """Raise if a method is not defined for the model, the chosen modules, or another field.

    :raises ValueError: in that case
    """
    importance, update, experts = modifier.importance, modifier.weight_update, modifier.experts
    asked = f"importance: {importance.method}", f"weight_update: {update.method}"
    check_cache_quantisation(model.config, later, modifier.attention_unit == "head")
    importance.check(model, modifier.attention_unit, modifier.prune_ffn)
    if experts is not None and not importance.takes_experts and find_structure(model).has_experts:
        raise ValueError(
            f"`{asked[0]}` is not defined for the experts of a mixture. Set `experts: none`, or another importance."
        )
    update.check(model, modifier.attention_unit, modifier.prune_ffn)
    modifier.allocation.check(importance.method)
    for name, is_on_device in zip(asked, (not importance.takes_offload, update.refines), strict=True):
        if modifier.offload and is_on_device:
            raise ValueError(f"offload: must be false with `{name}`, which runs on the device. Remove one of the two.")
    unused = ""
    if modifier.width_multiple not in ("auto", 1) and not any(group.unit.is_ffn for group in groups):
        unused = f"width_multiple: {modifier.width_multiple}"
    elif update.refines and not any(map(update.can_refine, groups)):
        unused = asked[1]
    if unused:
        raise ValueError(
            f"`{unused}` has no effect on the chosen modules, none of which it covers. Remove it, or prune other modules."
        )


def _check_groups(model: PreTrainedModel, groups: Sequence[UnitGroup], roundings: dict[str, Rounding]) -> None:
    """Raise if a linear cannot be sliced, or if a multiple exceeds a group's width.

    :raises ValueError: in these cases
    """
    for group in groups:
        check_sliceable(model.get_submodule(group.layer_name), group)
        rounding = roundings[group.name]
        if rounding.step > group.num_units:
            raise ValueError(
                f"{group.name}: kept widths must be multiples of {rounding.width} ({', '.join(rounding.because)}), more than the "
                f"width {group.num_columns}. Choose a smaller multiple or group size."
            )


def open_store(store: ResumeStore | None, state: State) -> None:
    """Begin or resume the run that a recipe describes; do nothing without a store.

    :raises ValueError: the store belongs to another run; the sampler shuffles; there are several processes
    """
    if store is None:
        return
    loader = state.data.calib
    check_one_process("checkpoint_dir", "Remove it, or run one process.")
    if isinstance(getattr(loader, "sampler", None), RandomSampler):
        raise ValueError(
            "checkpoint_dir: calibration samples must come in the same order in every run, got a sampler that shuffles them. "
            "Pass shuffle_calibration_samples=False."
        )
    recipe = [{type(m).__name__: m.model_dump(exclude=set(Modifier.model_fields))} for m in list_modifiers()]
    store.open(describe_run(recipe, describe_versions(), state.model, loader))
