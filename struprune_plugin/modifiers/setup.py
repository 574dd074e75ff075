"""Setup and checks of a run before any calibration, from the recipe, the model and the data, and its manifest at the end."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llmcompressor.modifiers import Modifier
from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.allocation.rounding import GroupSize
from struprune_plugin.allocation.rules import Budget, allocate_uniformly
from struprune_plugin.export.outputs import OUTPUTS
from struprune_plugin.export.rehearsal import rehearse
from struprune_plugin.layerwise.calls import move_padding
from struprune_plugin.model.groups import list_groups
from struprune_plugin.model.layers import count_parameters, count_weight_bytes
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.surgery import check_sliceable
from struprune_plugin.model.unit_kind import ListEntries, UnitGroup, list_kinds
from struprune_plugin.modifiers import budgets, checks
from struprune_plugin.modifiers.allocator import complete_recipe
from struprune_plugin.modifiers.fields import PruningFields, StructuredModifier
from struprune_plugin.pruning.config import UnitAllocation
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.storage import manifest

_READ = "input_ids", "attention_mask"


@dataclass(frozen=True)
class Setup:
    """What a recipe comes to on a model, known from its shapes: neither weights nor data are read."""

    recipe: PruningFields  # as it runs: completed by an allocator's, without kinds that failed the rehearsal
    groups: Sequence[UnitGroup]  # to prune, in the order in which the model computes them
    resolve_only: Sequence[UnitGroup]  # they keep all units
    roundings: dict[str, budgets.Rounding]  # of kept counts, by group name
    sizes: Sequence[GroupSize]  # of the groups whose units may go
    budget: Budget
    entries: ListEntries | None  # of lists of modules, some of which go
    early: UnitAllocation | None  # of a rule that needs no calibration data

    def count_removed(self, allocation: UnitAllocation | None = None) -> int:
        """Return the parameters that go by an allocation, or about as many before the calibration data decide on it."""
        num_keep = (allocation or self.early or allocate_uniformly(self.sizes, self.budget)).num_keep
        removed = 0 if self.entries is None else self.entries.count_removed(self.budget.num_entries)
        for group in self.groups:
            removed += (group.num_units - num_keep.get(group.name, group.num_units)) * group.unit_cost
        return removed


@dataclass(frozen=True)
class RunSetup(Setup):
    """Setup of a run, with its data."""

    batches: list[dict[str, Tensor]]
    calibration: manifest.CalibrationRecord
    num_parameters: int

    def finish(
        self,
        allocation: UnitAllocation,
        groups: list[manifest.GroupRecord],
        context: DeviceContext,
        model: PreTrainedModel,
    ) -> manifest.Manifest:
        """Give the pruned model its configuration and class; return the manifest of the run."""
        for kind in self.recipe.list_units():
            kind.update_config(model, [group for group in self.groups if group.unit == kind])
        OUTPUTS[self.recipe.output].adopt(model)
        entries = [] if self.entries is None else _describe_entries(self.entries, allocation.entries)
        removed = sum(record.removed_parameters for record in groups) + sum(e.removed_parameters for e in entries)
        return manifest.Manifest(
            model=manifest.ModelRecord(
                base=os.path.abspath(source) if os.path.isdir(source := model.config._name_or_path) else source,
                type=model.config.model_type,
                parameters_before=self.num_parameters,
                parameters_after=(left := count_parameters(model)),
                removed_share=1 - left / self.num_parameters,
                left_out=getattr(model, "left_out", []),
            ),
            settings=self.recipe.dump_fields(),
            seed=torch.initial_seed(),
            calibration=self.calibration,
            budget=manifest.BudgetRecord(
                prunable_parameters=self.budget.num_prunable,
                asked_sparsity=self.budget.sparsity,
                removed_parameters=removed,
                met_sparsity=removed / self.budget.num_prunable,
                rounding=budgets.describe_roundings(allocation.list_left(self.groups), self.roundings),
                limit=budgets.describe_limit(self.recipe, self.num_parameters, left, count_weight_bytes(model)),
            ),
            allocation=allocation.record,
            computed_in=context.computed_in,
            memory_measure=context.measure,
            stages=[manifest.StageEntry(name, round(s.seconds, 3), s.peak_bytes) for name, s in context.stages.items()],
            groups=groups,
            experts=entries,
        )


def set_up(pruning: PruningFields, model: PreTrainedModel, stages: checks.Stages) -> Setup:
    """Find the groups of the model as it is now, and how many of their units may stay.

    Mixtures whose units fail the rehearsal are not pruned, and where entries of lists cannot go, their units do, as the log says.

    :param stages: modifiers before the pruning stage in the recipe, and those behind it
    :raises ValueError: recipe and model do not go together, or the budget cannot be met
    """
    recipe = _rehearse(complete_recipe(pruning, stages[0]).add_units(model), model)
    recipe, groups, entries = _find_entries(recipe, model, [*stages[0], *stages[1]])
    checks.refuse(recipe, model, groups, stages)
    roundings = budgets.find_roundings(model, groups, stages[1], recipe.width_multiple)
    for group in groups:
        check_sliceable(model.get_submodule(group.layer_name), group)
        if (rounding := roundings[group.name]).step > group.num_units:
            raise ValueError(
                f"{group.name}: kept widths must be multiples of {rounding.width} ({', '.join(rounding.because)}), more than the "
                f"width {group.num_columns}. Choose a smaller multiple or group size."
            )
    sizes, budget = budgets.find_budget(recipe, model, groups, roundings, entries)
    early = _allocate_early(recipe, model, sizes, budget)
    known = groups if early is not None else [group for group in groups if group.unit.drops_entries]
    budgets.check_widths(known, {} if early is None else early.num_keep, roundings)
    resolve_only, dropped = _list_resolve_only(recipe, model, groups), entries if budget.num_entries else None
    return Setup(recipe, groups, resolve_only, roundings, sizes, budget, dropped, early)


def prepare_run(pruning: PruningFields, model: PreTrainedModel, loader: Any, stages: checks.Stages) -> RunSetup:
    """Set a run up, and check its weights and calibration data, too.

    :param stages: as of :func:`set_up`
    """
    setup = set_up(pruning, model, stages)
    checks.check_weights(model)
    batches = checks.read_batches(loader)
    widest = max((*setup.groups, *setup.resolve_only), key=lambda group: group.num_columns)
    solves = setup.recipe.importance.eliminates or setup.recipe.weight_update.solves
    needed = widest.num_columns + 1 if solves else 1  # tokens: one per input, and one for the bias
    calibration = checks.check_calibration(model, batches, widest.name, needed)
    # what else batches hold, say texts or labels, no pass reads
    batches = [{name: batch[name] for name in _READ if batch.get(name) is not None} for batch in batches]
    batches = [move_padding(batch) for batch in batches]
    return RunSetup(**vars(setup), batches=batches, calibration=calibration, num_parameters=count_parameters(model))


def _rehearse(recipe: PruningFields, model: PreTrainedModel) -> PruningFields:
    """Return the recipe without units of mixtures whose removal fails in the rehearsal, as the log says."""
    kinds = recipe.list_units()
    try:
        rehearse(model, kinds)
    except ValueError as error:
        if not find_structure(model).has_mixtures:
            raise
        others = [kind for kind in kinds if not kind.of_mixture]
        rehearse(model, others)
        logger.warning(f"the experts of the mixture are not pruned: {error}")
        return recipe.take_units(others)
    return recipe


def _find_entries(
    recipe: PruningFields, model: PreTrainedModel, others: Sequence[Modifier]
) -> tuple[PruningFields, list[UnitGroup], ListEntries | None]:
    """Return the recipe, its groups, and entries of lists that may go; without these, where they cannot, as the log says."""
    kinds, groups = recipe.list_units(), recipe.prepare_groups(model)
    for kind in kinds:
        try:
            if kind.drops_entries:
                return recipe, groups, kind.find_entries(model, [g for g in groups if g.unit == kind], others)
        except ValueError as reason:
            logger.warning(str(reason))
            recipe = recipe.take_units([other.take_units() if other is kind else other for other in kinds])
            return recipe, recipe.prepare_groups(model), None
    return recipe, groups, None


def _allocate_early(
    recipe: PruningFields, model: PreTrainedModel, sizes: Sequence[GroupSize], budget: Budget
) -> UnitAllocation | None:
    """Return the allocation if it needs no calibration data; else None.

    :raises ValueError: the multiples of the widths are too coarse for the budget
    """
    rule = recipe.allocation
    if not sizes:  # only entries of lists go
        return UnitAllocation({}, manifest.AllocationRecord(rule.rule))
    if (can_keep := OUTPUTS[recipe.output].allocate(model)) is not None:
        return allocate_uniformly(sizes, budget, can_keep)
    if not rule.measures:
        return rule.decide(sizes, {}, budget)
    if hasattr(rule, "samples"):
        allocate_uniformly(sizes, budget)
    return None


def _list_resolve_only(
    recipe: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup]
) -> list[UnitGroup]:
    """Return the modules beside a mixture that keep all units, and are re-solved after the mixture's."""
    update, blocks = recipe.weight_update, {(g.layer_name, g.join.block) for g in groups if g.mixture and g.join.block}
    if not blocks or not update.solves or update.refines:
        return []
    kinds, chosen = recipe.list_units(), {group.name for group in groups}
    named = {kind.kind for kind in kinds}
    kinds += [kind for kind in list_kinds() if not (kind.is_mixer or kind.of_mixture or kind.kind in named)]
    beside = [g for g in list_groups(model, kinds, recipe.targets, recipe.ignore) if not g.mixture]
    return [g for g in beside if g.name not in chosen and (g.layer_name, g.join.block) in blocks]


def _describe_entries(entries: ListEntries, keep: Mapping[str, Sequence[int]]) -> list[manifest.EntriesRecord]:
    """Return the manifest's records of the kept entries."""
    lists = [(name, groups[0].layer_index, len(groups), [*keep[name]]) for name, groups in entries.lists.items()]
    costs = [(count - len(kept)) * cost for (*_, count, kept), cost in zip(lists, entries.costs, strict=True)]
    return [manifest.EntriesRecord(*one, cost, entries.label) for one, cost in zip(lists, costs, strict=True)]
