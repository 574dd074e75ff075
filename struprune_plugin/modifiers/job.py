"""What a modifier finds out, and refuses, before any calibration: a pure reading of the recipe, the model and the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llmcompressor.modifiers import Modifier
from loguru import logger
from torch import nn
from torch.utils.data import RandomSampler
from transformers import PreTrainedModel

from struprune_plugin.device.placement import WHOLE, Demands, Placement, place_parts
from struprune_plugin.device.ranks import check_one_process
from struprune_plugin.device.room import find_free_bytes
from struprune_plugin.export import describe_versions
from struprune_plugin.layer.criteria import CRITERIA
from struprune_plugin.layer.methods import RESTORATIONS
from struprune_plugin.maths.rounding import GroupSize, find_group_sparsity
from struprune_plugin.model.families import Family, find_family
from struprune_plugin.model.footprint import read_sizes
from struprune_plugin.model.layers import count_prunable_parameters
from struprune_plugin.model.surgery import check_sliceable
from struprune_plugin.model.units import UnitGroup
from struprune_plugin.modifiers.checks import (
    check_cache_quantisation,
    check_calibration,
    check_order,
    check_targets,
    check_vocabulary,
    check_weights,
    list_later_modifiers,
    list_modifiers,
)
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.unused import check_used, check_used_without_attention
from struprune_plugin.modifiers.widths import Rounding, find_roundings, measure_groups
from struprune_plugin.passes.journal import Journal
from struprune_plugin.passes.resume import describe_run
from struprune_plugin.passes.rules import RULES


@dataclass(frozen=True)
class Job:
    """What is known of a run before it starts.

    :param groups: to prune, in the order in which the model computes them
    :param roundings: what kept counts are rounded to, by group name
    :param sizes: of the groups, for the budget
    :param num_prunable: parameters that sparsity is a share of
    :param share: the sparsity that the groups need on average
    :param num_sequences: of calibration data
    :param num_tokens: padding left out
    """

    groups: Sequence[UnitGroup]
    roundings: dict[str, Rounding]
    sizes: Sequence[GroupSize]
    num_prunable: int
    share: float
    num_sequences: int
    num_tokens: int


def prepare_job(
    modifier: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup], loader: Iterable | None
) -> Job:
    """Read what a recipe asks of a model and of calibration data; ``sparsity`` must be known.

    :param groups: that the recipe chooses
    :raises ValueError: what cannot succeed
    """
    assert modifier.sparsity is not None
    check_used(list_modifiers())
    check_order(modifier)
    check_weights(model)
    later = list_later_modifiers(modifier)
    check_targets(model, later)
    _check_methods(modifier, model, later)
    roundings = find_roundings(model, groups, later, modifier.channel_multiple)
    _check_groups(model, groups, roundings)
    sizes, num_prunable = measure_groups(groups, roundings), count_prunable_parameters(model)
    share = find_group_sparsity(sizes, num_prunable, modifier.sparsity)
    rule = RULES.get(modifier.allocation)
    if rule is not None and rule.clips and share > modifier.max_sparsity:
        raise ValueError(
            f"max_sparsity: must be at least {share:.4f}, the mean over the modules to prune for sparsity={modifier.sparsity}, "
            f"got {modifier.max_sparsity}. Lower sparsity, raise max_sparsity or prune more kinds of units."
        )
    sequences, tokens = _count_calibration(modifier, model, loader, groups)
    return Job(groups, roundings, sizes, num_prunable, share, sequences, tokens)


def _check_methods(modifier: StructuredModifier, model: PreTrainedModel, later: Sequence[Modifier]) -> None:
    """Refuse methods that are not defined for the model, or for each other.

    :raises ValueError: the same
    """
    per_token = CRITERIA[modifier.importance].per_token
    refines = RESTORATIONS[modifier.restoration].refines
    if refines or per_token:
        what = f"restoration: {modifier.restoration}" if refines else f"importance: {modifier.importance}"
        check_one_process(what, "Its variables are per token. Use least_squares and obs.")
    check_cache_quantisation(model.config, later, modifier.attention_unit == "head")
    if refines or per_token:
        _check_admm(modifier, model, find_family(model))
    rule = RULES.get(modifier.allocation)
    if rule is not None and rule.criterion and rule.criterion != modifier.importance:
        raise ValueError(
            f"importance: must be {rule.criterion} for allocation: {modifier.allocation} (Algorithm 1), got "
            f"{modifier.importance!r}."
        )


def _check_admm(modifier: StructuredModifier, model: nn.Module, family: Family) -> None:
    """Refuse what Algorithm 4's sub-steps are not derived for.

    :raises ValueError: another FFN than ReLU's or SiLU's gated one; rotary attention without a way round it
    """
    config: Any = model.config
    gated, activation = family.ffn.gated, getattr(config, family.ffn.activation_key)
    if modifier.prune_ffn and activation != ("silu" if gated else "relu"):
        raise ValueError(
            "restoration: admm and closed_form must have a ReLU or a SiLU-gated FFN, got "
            f"{'gated ' if gated else ''}{activation!r}. Use least_squares and obs."
        )
    if not family.attention.rotary or modifier.attention_unit == "none":
        return
    if CRITERIA[modifier.importance].per_token:
        raise ValueError(
            f"importance: {modifier.importance} must have attention without rotary positions, got "
            f"{getattr(config, 'model_type', '')!r}. Set attention_unit: none, or use obs."
        )
    check_used_without_attention(modifier)
    logger.info("rotary attention is re-solved by least squares, the FFN by ADMM")


def _check_groups(model: nn.Module, groups: Sequence[UnitGroup], roundings: dict[str, Rounding]) -> None:
    """Refuse linears that cannot be sliced, and multiples that leave nothing.

    :raises ValueError: the same
    """
    for group in groups:
        check_sliceable(model.get_submodule(group.layer_name), group)
        rounding = roundings[group.name]
        if rounding.step > group.num_units:
            raise ValueError(
                f"{group.name}: the multiple of kept widths must be at most the width {group.num_columns}, got "
                f"{rounding.width} ({', '.join(rounding.because)}). Choose a smaller multiple or group size."
            )


def _count_calibration(
    modifier: StructuredModifier, model: PreTrainedModel, loader: Iterable | None, groups: Sequence[UnitGroup]
) -> tuple[int, int]:
    """Return (sequences, tokens) of the calibration data, checked against the largest solve.

    :raises ValueError: as :func:`~struprune_plugin.modifiers.checks.check_calibration`
    """
    widest = max(groups, key=lambda group: group.num_columns)
    solves = CRITERIA[modifier.importance].eliminates or RESTORATIONS[modifier.restoration].solves
    needed = widest.num_columns + 1 if solves else 1
    counts = check_calibration(loader, needed, widest.name, getattr(model.config, "max_position_embeddings", None))
    check_vocabulary(model, counts.largest_token)
    return counts.num_sequences, counts.num_tokens


def open_journal(journal: Journal, model: PreTrainedModel, loader: Any) -> None:
    """Begin, or go on with, the run that a recipe describes.

    :raises ValueError: the journal is another run's; samples come in another order every time; several processes
    """
    check_one_process("checkpoint_dir", "Leave it out.")
    if isinstance(getattr(loader, "sampler", None), RandomSampler):
        raise ValueError(
            "checkpoint_dir: calibration samples must come in the same order every time, got a sampler that shuffles them. Pass "
            "shuffle_calibration_samples=False."
        )
    hosts = set(Modifier.model_fields)
    recipe = [
        {type(m).__name__: {name: value for name, value in m.model_dump().items() if name not in hosts}}
        for m in list_modifiers()
    ]
    journal.open(describe_run(recipe, describe_versions(), model, loader))


def place_run(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    groups: Sequence[UnitGroup],
    loader: Any,
    together: bool = False,
    hold_out: bool = False,
) -> Placement:
    """Choose what goes to the host under the budget; without one, under what the accelerator has free.

    :param together: moments of all modules of a layer are gathered in one pass
    :param hold_out: those of sequences held out, too
    :raises ValueError: the budget is too small, or a method asked for does not keep one
    """
    strict = modifier.memory_budget is not None
    budget = modifier.memory_budget or find_free_bytes()
    if budget is None:
        return WHOLE
    unable = {
        "restoration": RESTORATIONS[modifier.restoration].refines,
        "importance": not CRITERIA[modifier.importance].keeps_budget,
        "tuning_epochs": bool(getattr(modifier, "tuning_epochs", 0)),
    }
    for name, is_unable in unable.items():
        if is_unable and not strict:
            return WHOLE
        if is_unable:
            raise ValueError(
                f"memory_budget: must be left out for {name}: {getattr(modifier, name)}, which keeps none. Leave one out."
            )
    sizes = read_sizes(model, groups, next(iter(loader))["input_ids"].shape)
    demands = Demands(together, hold_out, modifier.sensitivity_samples is not None)
    placement = place_parts(budget, sizes, demands, strict)
    if placement.gather_on_host or placement.solve_on_host:
        logger.info(f"{budget:,} bytes for the device: {placement}")
    return placement
