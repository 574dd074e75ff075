"""How much goes: the multiples that kept widths need, for later quantisers, too; the budget on a given model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from compressed_tensors.utils import is_match, match_targets
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.pruning.sparsegpt.sgpt_base import SparsityModifierBase
from llmcompressor.modifiers.quantization import QuantizationMixin
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.allocation.cost_table import CostTable, read_table
from struprune_plugin.allocation.rules import Budget
from struprune_plugin.allocation.whole_experts import Mixture
from struprune_plugin.export.any_class import build_dense, replace_conv1d
from struprune_plugin.linalg.budget import Limit, meet_budget
from struprune_plugin.linalg.rounding import GroupSize, find_group_sparsity
from struprune_plugin.model.experts import list_experts
from struprune_plugin.model.layers import count_prunable_parameters, count_weight_bytes, find_decoder_layers
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.locate import find_stock, is_pruned, make_dense_config
from struprune_plugin.model.structure.routing import find_routing, list_counts
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.runtime.distributed import check_one_process
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.manifest import LimitRecord, RoundingRecord

_ALIGNED = 8  # numbers of bfloat16 in 16 bytes: kernels of matrix units need rows that are multiples of it
_FINE = 64  # steps of that size that an FFN's width must have for ``auto`` to round it
_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


@dataclass(frozen=True)
class Rounding:
    """Rounding step of the kept units of one group.

    :param step: kept units are whole multiples of this; 1 if nothing requires more
    :param width: the same step, in input columns of the consuming linear
    :param because: requirements that set the step, in the order of the recipe
    """

    step: int = 1
    width: int = 1
    because: tuple[str, ...] = ()


def find_roundings(
    model: nn.Module, groups: Sequence[UnitGroup], later: Sequence[Modifier], width_multiple: int | Literal["auto"]
) -> dict[str, Rounding]:
    """Return, by group name, the multiple that suits every later modifier and the recipe's ``width_multiple``.

    A quantiser's groups and blocks, and the groups of N:M sparsity, must divide the inputs of the linears that consume pruned
    units. llm-compressor sees only the unpruned shapes before it starts, and fails late on the pruned ones.

    :param width_multiple: multiple of FFN widths that the recipe sets; ``auto`` as in its field
    """
    before = _measure_dense_ffns(model) if is_pruned(type(model)) and width_multiple == "auto" else {}
    return {
        group.name: _round_group(model, group, later, width_multiple, before.get(group.name, group.num_units))
        for group in groups
    }


def _measure_dense_ffns(model: nn.Module) -> dict[str, int]:
    """Return the widths that the FFNs of a pruned model had in the dense one."""
    dense = build_dense(find_stock(type(model)), make_dense_config(model.config))  # type: ignore[arg-type]
    replace_conv1d(dense)
    has_ffns = any(kind.ffns for kind in find_structure(dense).kinds)
    return {group.name: group.num_units for group in find_groups(dense, "none")} if has_ffns else {}


def measure_groups(groups: Sequence[UnitGroup], roundings: Mapping[str, Rounding]) -> list[GroupSize]:
    """Return the sizes of the groups for the allocation; tied groups form one size."""
    tied: dict[str, list[UnitGroup]] = {}
    for group in groups:
        tied.setdefault(group.tie or group.name, []).append(group)
    sizes = []
    for alike in tied.values():  # they keep the same number of units, or whole multiples of the narrowest group's
        first = min(alike, key=lambda group: group.num_units)
        members = [(group, group.num_units // first.num_units) for group in alike]
        cost = sum(group.unit_cost * factor for group, factor in members)
        steps = [(roundings[group.name].step, factor) for group, factor in members]
        step = math.lcm(*(step // math.gcd(step, factor) for step, factor in steps))
        names = tuple((group.name, factor) for group, factor in members)
        sizes.append(GroupSize(first.name, first.module_kind, first.num_units, cost, step, names))
    return sizes


def check_widths(groups: Sequence[UnitGroup], kept: Mapping[str, int], roundings: Mapping[str, Rounding]) -> None:
    """Raise if a later modifier cannot divide a kept width into its groups.

    Plans are rounded, so this finds widths that the plan did not choose: those of all units kept.

    :param kept: units to keep, by group name; all where a group has no entry
    :raises ValueError: a width is not a multiple of the required step
    """
    for group in groups:
        rounding, count = roundings[group.name], kept.get(group.name, group.num_units)
        width = count * group.columns_per_unit
        if rounding.because and count % rounding.step:
            raise ValueError(
                f"{group.name}: the kept width must be a multiple of {rounding.width} ({', '.join(rounding.because)}), got "
                f"{width} of {group.num_columns}. Choose a group size that divides it, or add this linear to that "
                "modifier's ignore list."
            )


def describe_roundings(groups: Sequence[UnitGroup], roundings: Mapping[str, Rounding]) -> list[RoundingRecord]:
    """Return the manifest's records of the multiples that widths were rounded to, and why: one record for equal modules, in
    which a layer's experts count as one module."""
    names: dict[tuple[str, Rounding], dict[str, None]] = {}
    for group in groups:
        if roundings[group.name].because:
            name = f"{group.output_name}.*.{group.consumer.rpartition('.')[2]}" if group.experts else group.name
            names.setdefault((group.kind, roundings[group.name]), {})[name] = None
    return [RoundingRecord(kind, part.width, [*part.because], [*modules]) for (kind, part), modules in names.items()]


def _round_group(
    model: nn.Module,
    group: UnitGroup,
    later: Sequence[Modifier],
    width_multiple: int | Literal["auto"],
    dense_units: int,
) -> Rounding:
    # required multiple of the width, width of one unit, reason for messages and the manifest
    wanted = [(group.num_blocks, 1, "")]
    aligned = math.gcd(_ALIGNED, dense_units)
    if group.experts:
        wanted.append((aligned, 1, "grouped kernels: 16 bytes of bfloat16"))
    if group.unit.is_ffn and width_multiple != "auto":
        wanted.append((width_multiple, 1, f"width_multiple: {width_multiple}"))
    elif group.unit.is_ffn and dense_units >= _FINE * _ALIGNED:
        wanted.append((aligned, 1, "width_multiple: auto"))
    for modifier in later:
        for inputs, _, why in _list_demands(modifier, model, f"{group.layer_name}.{group.consumer}"):
            wanted.append((inputs, group.columns_per_unit, why))
        for name in group.producers:
            rows = group.count_rows(name)
            for _, outputs, why in _list_demands(modifier, model, f"{group.layer_name}.{name}"):
                wanted.append((outputs, rows, why))
    step = math.lcm(*(multiple // math.gcd(multiple, width) for multiple, width, _ in wanted))
    because = tuple(dict.fromkeys(why for multiple, _, why in wanted if why and multiple > 1))
    return Rounding(step, step * group.columns_per_unit, because)


def _list_demands(modifier: Modifier, model: nn.Module, name: str) -> Iterator[tuple[int, int, str]]:
    """Yield (multiple of the input columns, multiple of the output rows, reason) that a modifier of llm-compressor requires of
    the linear with the full name ``name``."""
    linear = model.get_submodule(name)
    who = type(modifier).__name__
    if isinstance(modifier, QuantizationMixin):
        for scheme in modifier.resolved_config.config_groups.values():
            if is_match(name, linear, scheme.targets, modifier.ignore):
                yield from _list_scheme_demands(scheme, who)
    elif isinstance(modifier, SparsityModifierBase):
        multiple = modifier._prune_m or 1
        if multiple > 1 and _is_sparsified(modifier, model, name):
            yield multiple, 1, f"{who}: {modifier.mask_structure} sparsity"


def _list_scheme_demands(scheme: QuantizationScheme, who: str) -> Iterator[tuple[int, int, str]]:
    weights = scheme.weights
    if weights is not None and weights.strategy == QuantizationStrategy.BLOCK and weights.block_structure:
        rows, columns = weights.block_structure
        yield columns, rows, f"{who}: weights in blocks of {rows} x {columns}"
    inputs, outputs = scheme.input_activations, scheme.output_activations
    for what, args in {"weights": weights, "input activations": inputs, "output activations": outputs}.items():
        size = args.group_size if args is not None and args.strategy in _GROUPED else None
        if size is not None and size > 1:
            why = f"{who}: {what} in groups of {size}"
            yield (1, size, why) if args is outputs else (size, 1, why)


def _is_sparsified(modifier: SparsityModifierBase, model: nn.Module, name: str) -> bool:
    """Return whether a sparsity modifier prunes a linear: the linear, or a module that holds it, is a target.

    llm-compressor compares ``ignore`` with the target's name, a dot and the rest, as here.
    """
    parts = name.split(".")
    targets = [modifier.targets] if isinstance(modifier.targets, str) else modifier.targets
    for end in range(1, len(parts) + 1):
        holder, rest = ".".join(parts[:end]), ".".join(parts[end:])
        if match_targets(holder, model.get_submodule(holder), targets) and not match_targets(
            f"{holder}.{rest}", model.get_submodule(name), modifier.ignore
        ):
            return True
    return False


# -- budget ----------------------------------------------------------------------------------------------------------


def find_budget(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    groups: Sequence[UnitGroup],
    roundings: Mapping[str, Rounding],
    mixture: Mixture | None,
    later: Sequence[Modifier],
) -> tuple[list[GroupSize], Budget]:
    """Return the sizes of the groups besides whole experts, and the budget.

    :param roundings: rounding of kept counts, by group name
    :param mixture: whole experts that may be removed; None if none may
    :raises ValueError: a method does not support the budget; it cannot be met; a bad cost table; a quantiser behind a budget of
        bytes, which are those of unquantised weights
    """
    sizes = measure_groups([group for group in groups if mixture is None or not group.experts], roundings)
    asked, sparsity = modifier.budget, modifier.sparsity or 0.0
    num_prunable = count_prunable_parameters(model, modifier.experts is not None)
    weighed = "none" if modifier.sensitivity is None else "fisher"
    if asked is not None and modifier.importance.aims:
        raise ValueError(
            f"budget: `importance: {modifier.importance.method}` needs sparsity, on which its scores depend. Give sparsity "
            "instead, or choose another importance."
        )
    if asked is not None and asked.speedup is not None:
        table = read_table(str(asked.costs), model)
        limit = _find_limit(modifier, model, groups, sizes, table)
        kept = meet_budget(sizes, [0.0] * len(sizes), 0.0, limit)
        left = sum(count * size.unit_cost for count, size in zip(kept, sizes, strict=True))
        share = 1 - left / sum(size.num_parameters for size in sizes)
        return sizes, Budget(0.0, num_prunable, share, weighed, limit, table)
    if asked is not None and asked.bytes is not None:
        if any(isinstance(other, QuantizationMixin) for other in later):
            raise ValueError(
                "budget: bytes are counted before quantisation, got a quantiser behind. Give sparsity instead."
            )
        held, item = count_weight_bytes(model), model.dtype.itemsize
        least = held - item * sum(size.max_removable for size in sizes)
        if asked.bytes < least:
            raise ValueError(
                f"budget: bytes must be at least {format_bytes(least)}, the size with the fewest units that may stay, got "
                f"{format_bytes(asked.bytes)}. Relax the budget, or prune more kinds of units."
            )
        sparsity = max(held - asked.bytes, 0) / item / num_prunable
    if mixture is None:
        return sizes, Budget(sparsity, num_prunable, find_group_sparsity(sizes, num_prunable, sparsity), weighed)
    num_left, share = mixture.split_budget(sizes, sparsity * num_prunable)
    num_experts = num_left if num_left < mixture.counts[0] else None
    return sizes, Budget(sparsity, num_prunable, share, weighed, num_experts=num_experts)


def _find_limit(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    groups: Sequence[UnitGroup],
    sizes: Sequence[GroupSize],
    table: CostTable,
) -> Limit:
    """Return the seconds of all groups that a speed-up leaves, in the order of the sizes.

    :raises ValueError: the allocation or whole experts cannot meet one
    """
    name = remedy = ""
    if modifier.experts is not None and modifier.experts.drops:
        name, remedy = "experts: whole", "experts: channels"
    elif modifier.allocation.measures and not modifier.allocation.weighs_errors:
        name, remedy = f"allocation: {modifier.allocation.rule}", "allocation: error_curve"
    if name:
        raise ValueError(f"budget: `{name}` cannot meet a speedup. Give sparsity instead, or set `{remedy}`.")
    by_name, costs = {group.name: group for group in groups}, []
    for size in sizes:
        members = [(by_name[name], factor) for name, factor in size.members or ((size.name, 1),)]
        costs.append(torch.stack([table.list_costs(model, group)[::factor] for group, factor in members]).sum(0))
    assert modifier.budget is not None
    return Limit(costs, table.dense / (modifier.budget.speedup or 1.0) - table.rest)


def describe_limit(
    modifier: StructuredModifier, budget: Budget, held: int, sizes: Sequence[GroupSize], kept: Mapping[str, int]
) -> LimitRecord | None:
    """Return the manifest's record of a budget of bytes or time; None under one of parameters.

    :param held: bytes of the pruned weights
    :param kept: kept units by group name
    """
    asked, table = modifier.budget, budget.table
    if asked is None:
        return None
    if table is None or budget.limit is None:
        return LimitRecord("bytes", float(asked.bytes or 0), float(held))
    seconds = table.rest + budget.limit.add_up([kept[size.name] for size in sizes])
    return LimitRecord("speedup", asked.speedup or 1.0, table.dense / seconds)


def find_mixture(
    recipe: StructuredModifier, model: PreTrainedModel, groups: Sequence[UnitGroup], others: Sequence[Modifier] = ()
) -> Mixture | None:
    """Return the whole experts that a recipe may remove; None if it removes none.

    :raises ValueError: no expert can be removed, or not the same number from every layer; another setting conflicts
    """
    if recipe.experts is None or not recipe.experts.drops:
        return None
    lists: dict[str, list[UnitGroup]] = {}
    for group in groups:
        if group.experts:
            lists.setdefault(group.output_name, []).append(group)
    there = {
        f"{name}.{own}": members.num_experts
        for name, layer in find_decoder_layers(model)
        for own, members in list_experts(layer)
    }
    problem = ""
    if not lists:
        problem = "needs a mixture whose experts can be removed, and the model has none. Remove it"
    elif {name: len(members) for name, members in lists.items()} != there:
        problem = (
            "must cover the experts of all layers, and targets or ignore leave some out. Remove targets and ignore"
        )
    elif len({len(members) for members in lists.values()}) > 1:
        problem = "needs the same number of experts in every layer, and the model has different numbers. Set `experts: channels`"
    elif any(isinstance(other, REAPPruningModifier) for other in others):
        problem = "cannot be combined with REAPPruningModifier, which removes experts, too. Remove one of the two"
    if problem:
        raise ValueError(f"`experts: whole` {problem}.")
    check_one_process("experts: whole", "Set `experts: channels`, or run one process.")
    firsts = [members[0] for members in lists.values()]
    counts, num_groups = list_counts(model.config.get_text_config(decoder=True), len(lists[firsts[0].output_name]))
    experts = [model.get_submodule(f"{first.output_name}.{first.expert_index}") for first in firsts]
    cost = sum(parameter.numel() for expert in experts for parameter in expert.parameters())
    return Mixture(find_routing(model), lists, list(counts), num_groups, cost)
