"""Sizes of a recipe's result, counted from shapes: parameters, bytes and cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from llmcompressor.modifiers import Modifier
from transformers import PretrainedConfig, PreTrainedModel

from struprune_plugin.allocation.curves import can_keep_moments, count_moment_bytes
from struprune_plugin.allocation.rules.uniform import allocate_uniformly
from struprune_plugin.linalg.rounding import find_group_sparsity
from struprune_plugin.model.layers import (
    count_parameters,
    count_prunable_parameters,
)
from struprune_plugin.model.structure.finder import find_structure_of
from struprune_plugin.model.structure.tiny import find_class
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers import StruPruneModifier
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.mixtures import drop_evenly
from struprune_plugin.modifiers.targets import describe_targets, find_targets
from struprune_plugin.modifiers.weight_bytes import (
    count_cache_bytes,
    count_weight_bytes,
    measure_group_bytes,
    measure_group_cache,
)
from struprune_plugin.modifiers.widths import describe_roundings, find_roundings, measure_groups
from struprune_plugin.reporting.tables import measure_weight_bytes
from struprune_plugin.storage.checkpoint import check_whole, find_checkpoint, is_packed, read_config
from struprune_plugin.storage.limit_record import LimitRecord
from struprune_plugin.storage.records import RoundingRecord


@dataclass(frozen=True)
class Shapes:
    """Model without its weights.

    :param dtype: dtype of the loaded weights
    :param weight_bytes: bytes of its weight files; 0 if they are not on this machine
    """

    name: str
    config: PretrainedConfig
    model: PreTrainedModel
    dtype: torch.dtype
    weight_bytes: int


@dataclass(frozen=True)
class Footprint:
    """Parameters, bytes and cache of a model.

    :param bytes: bytes of its weights on the disk
    :param cache: bytes of keys and values per token
    """

    parameters: int
    bytes: int
    cache: int


@dataclass(frozen=True)
class Outline:
    """Sizes before and after a recipe, with the same cut in all modules of a kind.

    :param rounding: as in the manifest
    :param experts: text that says how many whole experts are kept; empty if none may be removed
    :param limits: as in the manifest, if budgets other than parameters are given
    """

    sparsity: float
    before: Footprint
    after: Footprint
    rounding: list[RoundingRecord]
    experts: str = ""
    limits: list[LimitRecord] = field(default_factory=list)


def read_shapes(model: str, dtype: str = "auto") -> Shapes:
    """Return a model's shapes from its configuration, after checking that its files, if on this machine, are complete.

    :raises ValueError: no configuration, an unsupported architecture, quantised or broken weights
    """
    config = read_config(model)
    find_structure_of(config)
    if getattr(config, "quantization_config", None) is not None and not is_packed(config):
        raise ValueError(
            f"model: {model!r} must not be quantised yet, its config has a quantization_config. "
            "Plan for the full-precision checkpoint."
        )
    folder = find_checkpoint(model)
    held = measure_weight_bytes(folder) if folder else 0
    if held:
        check_whole(model, config)
    kind, part = find_class(config)
    with torch.device("meta"):
        shapes = kind._from_config(copy.deepcopy(part))
    chosen = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if not isinstance(
        chosen, torch.dtype
    ):  # not in the configuration: bfloat16 for unpacked weights, else by the size of the files
        narrow = is_packed(config) or 0 < held < 3 * count_parameters(shapes)
        chosen = torch.bfloat16 if narrow else torch.float32
    return Shapes(model, config, shapes.to(chosen), chosen, held)


def outline_run(shapes: Shapes, modifiers: Sequence[Modifier], sparsity: float | None = None) -> Outline:
    """Return the sizes of a model before and after a recipe.

    The spread of a budget over layers needs calibration data, its sum does not. So all modules are assumed to lose the same share.

    :param sparsity: replaces the budgets of the recipe's pruning stage, or of an allocator stage before it
    :raises ValueError: the recipe prunes nothing; a budget is not given, or cannot be met
    """
    position, modifier = find_pruning(modifiers)
    stages = [m for m in modifiers if isinstance(m, StructuredModifier) and (m.sparsity is not None or m.budget)]
    if sparsity is None and not stages:
        raise ValueError("recipe: must give a sparsity or a budget for a plan, got neither. Pass --sparsity.")
    model, later = shapes.model, list(modifiers[position + 1 :])
    groups = modifier.find_groups(model)
    roundings = find_roundings(model, groups, later, modifier.width_multiple)
    prunable, limits, whole = count_prunable_parameters(model, modifier.experts is not None), list[LimitRecord](), None
    after = shapes
    if sparsity is None and stages[-1].budget:
        sizes = measure_groups(groups, roundings)
        targets = find_targets(stages[-1], model, groups, sizes, later, shapes.dtype)
        kept = dict(allocate_uniformly(sizes, 0.0, limits=[target.limit for target in targets]).kept)
        limits = describe_targets(targets, sizes, kept, {})
        sparsity = sum((group.num_units - kept[group.name]) * group.unit_cost for group in groups) / prunable
    else:
        sparsity = (stages[-1].sparsity or 0.0) if sparsity is None else sparsity
        whole = drop_evenly(modifier, model, groups, roundings, sparsity * prunable) if sparsity else None
        if whole is None:
            sizes = measure_groups(groups, roundings)
            share = find_group_sparsity(sizes, prunable, sparsity)
        else:
            sizes, share, groups = whole.sizes, whole.share, whole.groups
            after = replace(shapes, model=whole.model, weight_bytes=0)
        kept = dict(allocate_uniformly(sizes, share).kept) if sparsity and sizes else {}
    left = [(group, kept[group.name]) for group in groups if group.name in kept]
    return Outline(
        sparsity=sparsity,
        before=_measure(shapes, [], ()),
        after=_measure(after, left if sparsity else [], later),
        rounding=describe_roundings(groups, roundings),
        experts="" if whole is None else whole.told,
        limits=limits,
    )


def find_pruning(modifiers: Sequence[Modifier]) -> tuple[int, StruPruneModifier]:
    """Return (position, pruning stage) of a recipe; of several rounds the last one, whose sparsity counts from the dense model.

    :raises ValueError: there is none
    """
    for position, modifier in reversed(list(enumerate(modifiers))):
        if isinstance(modifier, StruPruneModifier):
            return position, modifier
    raise ValueError(
        f"recipe: must have a StruPruneModifier for a plan, got {[type(m).__name__ for m in modifiers]}. Name another recipe."
    )


def count_kept_moments(modifier: StruPruneModifier, groups: Sequence[UnitGroup], hidden_size: int) -> int:
    """Return the bytes of moments that trials keep on the host between their passes; 0 where they keep none."""
    tries = getattr(modifier.allocation, "trial_samples", 0) > 0
    if not tries or (modifier.experts is not None and modifier.experts.drops):
        return 0
    return count_moment_bytes(groups, hidden_size) if can_keep_moments(groups, hidden_size) else 0


def _measure(shapes: Shapes, left: Sequence[tuple[UnitGroup, int]], later: Sequence[Modifier]) -> Footprint:
    """Return the footprint of a model whose groups keep the given units and which later modifiers quantise."""
    model, item = shapes.model, shapes.dtype.itemsize
    parameters = count_parameters(model) - sum((group.num_units - units) * group.unit_cost for group, units in left)
    held, cache = float(count_weight_bytes(model, item, later)), float(count_cache_bytes(model, item, later))
    if not left and shapes.weight_bytes and not later:
        held = shapes.weight_bytes
    for group, units in left:
        own, cached = (measure(model, group, item, later) for measure in (measure_group_bytes, measure_group_cache))
        held -= float(own[-1] - own[units])
        cache -= float(cached[-1] - cached[units])
    return Footprint(parameters, round(held), round(cache))
