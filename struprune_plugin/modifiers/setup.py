"""Setup and checks of a run before any calibration, from the recipe, the model and the data, and its manifest at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from llmcompressor.modifiers import Modifier
from torch import nn
from torch.utils.data import RandomSampler
from transformers import PreTrainedModel

from struprune_plugin.allocation.rules import Budget
from struprune_plugin.allocation.rules.uniform import allocate_uniformly
from struprune_plugin.allocation.whole_experts import Mixture
from struprune_plugin.export.rehearsal import rehearse, rehearse_with_experts
from struprune_plugin.export.stock_config import can_hold_heads
from struprune_plugin.linalg.budget import meet_budget
from struprune_plugin.linalg.rounding import GroupSize, find_group_sparsity
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters, count_weight_bytes
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.surgery import check_sliceable
from struprune_plugin.model.units import sort_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.checks import (
    check_cache_quantisation,
    check_calibration,
    check_effects,
    check_layers,
    check_order,
    check_targets,
    check_uniform,
    check_weights,
    list_modifiers,
)
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.mixtures import describe_experts, find_mixture, find_whole, split_budget
from struprune_plugin.modifiers.targets import Target, check_bytes, describe_target, find_target
from struprune_plugin.modifiers.widths import Rounding, check_widths, describe_roundings, find_roundings, measure_groups
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.pruning.importance import Sensitivity
from struprune_plugin.pruning.resume import describe_run, digest_tokens
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.distributed import check_one_process
from struprune_plugin.storage.manifest import Manifest, describe_versions
from struprune_plugin.storage.records import (
    AllocationRecord,
    BudgetRecord,
    CalibrationRecord,
    GroupRecord,
    ModelRecord,
    StageEntry,
)
from struprune_plugin.storage.resume_store import ResumeStore


@dataclass(frozen=True)
class RunSetup:
    """Facts about a run that are known before it starts.

    :param groups: groups to prune, in the order in which the model computes them
    :param roundings: rounding of kept counts, by group name
    :param sizes: sizes of the groups for the budget, beside whole experts
    :param num_prunable: parameters that ``sparsity`` is a share of
    :param share: mean sparsity that the groups need
    :param calibration: record of the calibration data
    :param num_parameters: parameters of the model
    :param mixture: whole experts that may be removed; None if none may
    :param target: the budget
    :param whole: groups that keep all units and are re-solved
    :param early: plan, if it needs no calibration data
    """

    groups: Sequence[UnitGroup]
    roundings: dict[str, Rounding]
    sizes: Sequence[GroupSize]
    num_prunable: int
    share: float
    calibration: CalibrationRecord
    num_parameters: int
    target: Target
    mixture: Mixture | None = None
    whole: Sequence[UnitGroup] = ()
    early: UnitAllocation | None = None

    @property
    def all_groups(self) -> list[UnitGroup]:
        """Groups that are re-solved, in the order in which the model computes them."""
        return sort_groups([*self.groups, *self.whole])

    def make_budget(self, modifier: StructuredModifier) -> Budget:
        """Return the budget that an allocation must meet."""
        weighed = "none" if modifier.sensitivity is None else "fisher"
        return Budget(self.target.sparsity, self.num_prunable, self.share, weighed, self.target.limit)

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
                prunable_parameters=self.num_prunable,
                asked_sparsity=self.target.sparsity,
                removed_parameters=removed,
                met_sparsity=removed / self.num_prunable,
                rounding=describe_roundings(plan.list_left(self.groups), self.roundings),
                limit=describe_target(recipe, self.target, count_weight_bytes(model), self.sizes, plan.kept),
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


def rehearse_units(modifier: StructuredModifier, model: PreTrainedModel) -> None:
    """Rehearse the pruning of a recipe's units; if that of experts fails, ``modifier.experts`` is set to None.

    :raises ValueError: as :func:`check_layers` and :func:`~struprune_plugin.export.rehearsal.rehearse`
    """
    check_layers(model)
    units = modifier.attention_unit, modifier.prune_ffn
    if modifier.experts is None or modifier.experts.drops:
        rehearse(model, *units, prune_experts=modifier.experts is not None)
    elif not rehearse_with_experts(model, *units):
        modifier.experts = None


def prepare_run(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    loader: Any,
    stages: tuple[Sequence[Modifier], Sequence[Modifier]],
    uniform: bool,
) -> RunSetup:
    """Find the groups of the model as it is now, check recipe, model and calibration data, and return the setup of the run.

    :param loader: calibration data; None if none was given
    :param stages: modifiers before this one in the recipe, and those behind it
    :param uniform: whether all layers must have one size, for stock classes
    :raises ValueError: the run cannot succeed
    """
    before, later = stages
    rehearse_units(modifier, model)
    if modifier.sparsity is None and modifier.budget is None:
        raise ValueError(
            "StruPruneModifier: the recipe gives neither sparsity nor budget, and no SparsityAllocatorModifier stage comes before. "
            "Add sparsity to the recipe."
        )
    groups = modifier.find_groups(model)
    if uniform:
        check_uniform(modifier, model, groups, later)
    whole = find_whole(modifier, model, groups)
    check_order(modifier, before)
    check_weights(model)
    check_targets(model, later)
    _check_methods(modifier, model, later)
    check_offload(modifier)
    check_bytes(modifier, later)
    check_effects(modifier, groups)
    roundings = find_roundings(model, groups, later, modifier.width_multiple)
    _check_groups(model, groups, roundings)
    mixture = find_mixture(modifier, model, groups, [*before, *later])
    num_prunable = count_prunable_parameters(model, modifier.experts is not None)
    sizes, target, share = find_budget(modifier, model, groups, roundings, num_prunable, mixture)
    most = modifier.allocation.most
    if most is not None and share > most:
        raise ValueError(
            f"max_sparsity: must be at least {share:.4f}, the mean over the modules to prune at sparsity={target.sparsity:g}, "
            f"got {most}. Lower sparsity, raise max_sparsity, or prune more kinds of units."
        )
    widest = max((*groups, *whole), key=lambda group: group.num_columns)
    solves = modifier.importance.eliminates or modifier.weight_update.solves
    needed = widest.num_columns + 1 if solves else 1
    sequences, tokens = check_calibration(model, loader, needed, widest.name)
    calibration = CalibrationRecord(sequences, tokens, digest_tokens(batch["input_ids"] for batch in loader))
    setup = RunSetup(
        groups,
        roundings,
        sizes,
        num_prunable,
        share,
        calibration,
        count_parameters(model),
        target,
        mixture,
        whole,
    )
    return replace(setup, early=plan_early(modifier, setup, model, uniform))


def plan_early(
    recipe: StructuredModifier, setup: RunSetup, model: PreTrainedModel, uniform: bool
) -> UnitAllocation | None:
    """Return the kept counts if they need no calibration data, else None.

    :param uniform: whether all layers must have one size
    :raises ValueError: the budget cannot be met
    """
    rule = recipe.allocation
    if not setup.sizes:  # whole experts alone
        return UnitAllocation({}, AllocationRecord(rule.rule))
    if rule.measures and rule.sequences is None:
        return None
    if rule.measures or uniform:

        def allowed(kind: str, count: int) -> bool:
            return kind != "attention" or can_hold_heads(model, count)

        plan = allocate_uniformly(setup.sizes, setup.share, allowed if uniform else None, setup.target.limit)
    else:
        plan = rule.decide(setup.sizes, {}, setup.make_budget(recipe))
    check_widths(setup.groups, plan.kept, setup.roundings)  # if uniform counts do not fit, no others do
    return None if rule.measures else plan


def find_budget(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    groups: Sequence[UnitGroup],
    roundings: dict[str, Rounding],
    num_prunable: int,
    mixture: Mixture | None,
) -> tuple[list[GroupSize], Target, float]:
    """Return the sizes of the groups besides whole experts, the budget, and the mean sparsity of these groups that it needs.

    :raises ValueError: the budget cannot be met
    """
    sizes = measure_groups([group for group in groups if mixture is None or not group.experts], roundings)
    target = find_target(modifier, model, groups, sizes, num_prunable)
    if target.limit is not None:
        kept = meet_budget(sizes, [0.0] * len(sizes), 0.0, target.limit)
        left = sum(count * size.unit_cost for count, size in zip(kept, sizes, strict=True))
        return sizes, target, 1 - left / sum(size.num_parameters for size in sizes)
    if mixture is None:
        return sizes, target, find_group_sparsity(sizes, num_prunable, target.sparsity)
    left, share = split_budget(mixture, sizes, target.sparsity * num_prunable)
    return sizes, replace(target, num_experts=left if left < mixture.counts[0] else None), share


def _check_methods(modifier: StructuredModifier, model: PreTrainedModel, later: Sequence[Modifier]) -> None:
    """Raise if a method is not defined for the model or for another method.

    :raises ValueError: in that case
    """
    check_cache_quantisation(model.config, later, modifier.attention_unit == "head")
    modifier.importance.check(model, modifier.attention_unit, modifier.prune_ffn)
    if modifier.experts is not None and not modifier.importance.takes_experts and find_structure(model).has_experts:
        raise ValueError(
            f"`importance: {modifier.importance.method}` is not defined for the experts of a mixture. Set `experts: none`, or "
            "another importance."
        )
    modifier.weight_update.check(model, modifier.attention_unit, modifier.prune_ffn)
    modifier.allocation.check(modifier.importance.method)


def _check_groups(model: nn.Module, groups: Sequence[UnitGroup], roundings: dict[str, Rounding]) -> None:
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


def open_store(store: ResumeStore, model: PreTrainedModel, loader: Any) -> None:
    """Begin or resume the run that a recipe describes.

    :raises ValueError: the store belongs to another run; the sampler shuffles; there are several processes
    """
    check_one_process("checkpoint_dir", "Remove it, or run one process.")
    if isinstance(getattr(loader, "sampler", None), RandomSampler):
        raise ValueError(
            "checkpoint_dir: calibration samples must come in the same order in every run, got a sampler that shuffles them. "
            "Pass shuffle_calibration_samples=False."
        )
    recipe = [{type(m).__name__: m.model_dump(exclude=set(Modifier.model_fields))} for m in list_modifiers()]
    store.open(describe_run(recipe, describe_versions(), model, loader))


def check_offload(modifier: StructuredModifier) -> None:
    """Raise if a method computes on the device what ``offload`` keeps on the host.

    :raises ValueError: in that case
    """
    unable = {
        f"weight_update: {modifier.weight_update.method}": modifier.weight_update.refines,
        f"importance: {modifier.importance.method}": not modifier.importance.takes_offload,
    }
    for name, is_unable in unable.items():
        if modifier.offload and is_unable:
            raise ValueError(f"offload: must be false with `{name}`, which runs on the device. Remove one of the two.")
