"""How much goes: the multiples that kept widths need, for later quantisers, too; the budget on a given model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from compressed_tensors.utils import is_match, match_targets
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.pruning.sparsegpt.sgpt_base import SparsityModifierBase
from llmcompressor.modifiers.quantization import QuantizationMixin
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.allocation.rounding import GroupSize, find_group_sparsity, split_budget
from struprune_plugin.allocation.rules import Budget
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters, count_weight_bytes
from struprune_plugin.model.unit_kind import ListEntries, UnitGroup
from struprune_plugin.modifiers.fields import BudgetConfig, StructuredModifier
from struprune_plugin.storage.manifest import LimitRecord, RoundingRecord

_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


@dataclass(frozen=True)
class Rounding:
    """Step of the kept units of one group, the same in input columns of the consuming linear, and what requires it."""

    step: int
    width: int
    because: tuple[str, ...]


def find_roundings(
    model: nn.Module, groups: Sequence[UnitGroup], later: Sequence[Modifier], width_multiple: int | Literal["auto"]
) -> dict[str, Rounding]:
    """Return, by group name, the multiple that suits every later modifier and the recipe's ``width_multiple``.

    A quantiser's groups and blocks, and the groups of N:M sparsity, must divide the inputs of the linears that consume pruned
    units. llm-compressor sees only the unpruned shapes before it starts, and fails late on the pruned ones.
    """
    roundings = {}
    for group in groups:
        asked = None if isinstance(width_multiple, str) else width_multiple
        # required multiple, width of one unit, reason for messages and the manifest
        wanted = [(multiple, 1, why) for multiple, why in group.unit.list_steps(group, asked)]
        for modifier in later:
            for inputs, _, why in _list_demands(modifier, model, f"{group.layer_name}.{group.consumer}"):
                wanted.append((inputs, group.columns_per_unit, why))
            for name in group.producers:
                for _, outputs, why in _list_demands(modifier, model, f"{group.layer_name}.{name}"):
                    wanted.append((outputs, group.count_rows(name), why))
        step = math.lcm(*(multiple // math.gcd(multiple, width) for multiple, width, _ in wanted))
        because = tuple(dict.fromkeys(why for multiple, _, why in wanted if why and multiple > 1))
        roundings[group.name] = Rounding(step, step * group.columns_per_unit, because)
    return roundings


def measure_groups(groups: Sequence[UnitGroup], roundings: Mapping[str, Rounding]) -> list[GroupSize]:
    """Return the sizes of the groups for the allocation; tied groups form one size."""
    tied: dict[str, list[UnitGroup]] = {}
    for group in groups:
        tied.setdefault(group.tie or group.name, []).append(group)
    sizes = []
    for tied_groups in tied.values():  # they keep the same number of units, or whole multiples of the narrowest group's
        first = min(tied_groups, key=lambda group: group.num_units)
        members = [(group, group.num_units // first.num_units) for group in tied_groups]
        cost = sum(group.unit_cost * factor for group, factor in members)
        steps = [(roundings[group.name].step, factor) for group, factor in members]
        step = math.lcm(*(step // math.gcd(step, factor) for step, factor in steps))
        names = tuple((group.name, factor) for group, factor in members)
        sizes.append(GroupSize(first.name, first.unit.pool, first.num_units, cost, step, names))
    return sizes


def check_widths(groups: Sequence[UnitGroup], num_keep: Mapping[str, int], roundings: Mapping[str, Rounding]) -> None:
    """Raise if a later modifier cannot divide a kept width, which nothing chose if all units stay, into its groups.

    :param num_keep: units to keep, by group name; all where a group has no entry
    """
    for group in groups:
        rounding, count = roundings[group.name], num_keep.get(group.name, group.num_units)
        width = count * group.columns_per_unit
        if rounding.because and count % rounding.step:
            raise ValueError(
                f"{group.name}: the kept width must be a multiple of {rounding.width} ({', '.join(rounding.because)}), got "
                f"{width} of {group.num_columns}. Choose a group size that divides it, or add this linear to that "
                "modifier's ignore list."
            )


def describe_roundings(groups: Sequence[UnitGroup], roundings: Mapping[str, Rounding]) -> list[RoundingRecord]:
    """Return the manifest's records of the multiples that widths were rounded to, one for equal modules and a layer's experts."""
    names: dict[tuple[str, Rounding], dict[str, None]] = {}
    for group in groups:
        if roundings[group.name].because:
            name = f"{group.output_name}.*.{group.consumer.rpartition('.')[2]}" if group.mixture else group.name
            names.setdefault((group.kind, roundings[group.name]), {})[name] = None
    return [RoundingRecord(kind, part.width, [*part.because], [*modules]) for (kind, part), modules in names.items()]


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
    for what, args in (("weights", weights), ("input activations", scheme.input_activations)):
        if args is not None and args.strategy in _GROUPED and (args.group_size or 0) > 1:
            yield args.group_size, 1, f"{who}: {what} in groups of {args.group_size}"


def _is_sparsified(modifier: SparsityModifierBase, model: nn.Module, name: str) -> bool:
    """Return whether a sparsity modifier prunes a linear: the linear, or a module that holds it, is a target."""
    parts = name.split(".")
    holders = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    targets = [modifier.targets] if isinstance(modifier.targets, str) else modifier.targets
    ignored = match_targets(f"{name}.", model.get_submodule(name), modifier.ignore)  # a dot, as llm-compressor compares
    return not ignored and any(match_targets(holder, model.get_submodule(holder), targets) for holder in holders)


def find_budget(
    modifier: StructuredModifier,
    model: PreTrainedModel,
    groups: Sequence[UnitGroup],
    roundings: Mapping[str, Rounding],
    entries: ListEntries | None,
) -> tuple[list[GroupSize], Budget]:
    """Return the sizes of the groups whose units may go, and the budget.

    :raises ValueError: a method does not support the budget; it cannot be met
    """
    sizes = measure_groups([group for group in groups if not group.unit.drops_entries], roundings)
    named = [kind.kind for kind in modifier.list_units()]
    num_prunable = count_prunable_parameters(model, modifier.prunes_mixtures, named)
    weighed = "none" if modifier.sensitivity is None else "fisher"
    removable = sum(one.max_removable for one in sizes) + (entries.max_removable if entries else 0)
    sparsity = modifier.sparsity or 0.0
    if modifier.budget is not None:
        sparsity = _count_to_remove(modifier.budget, model, removable) / num_prunable
    num_entries = 0
    if entries is None:
        share = find_group_sparsity(sizes, num_prunable, sparsity)
    else:
        num_keep, share = split_budget(entries, sizes, num_prunable, sparsity)
        num_entries = num_keep if num_keep < entries.counts[0] else 0
    most = getattr(modifier.allocation, "max_sparsity", 1.0)
    if share > most:
        raise ValueError(
            f"max_sparsity: must be at least {share:.4f}, the modules' mean, got {most}. Raise it, or remove less."
        )
    return sizes, Budget(sparsity, num_prunable, share, weighed, num_entries)


def _count_to_remove(budget: BudgetConfig, model: PreTrainedModel, removable: int) -> float:
    """Return the parameters to remove for a budget of parameters or bytes.

    :param removable: parameters that can go
    :raises ValueError: the budget cannot be met, or asks for nothing
    """
    dense, size = count_parameters(model), 1
    limit = budget.find_limit(dense)
    if budget.name == "bytes":
        dense, size = count_weight_bytes(model), model.dtype.itemsize
    least = dense - size * removable
    if limit < least:
        raise ValueError(
            f"budget.{budget.name}: must be at least {least:,}, what stays if all removable units go, got {limit:,}. Raise it, "
            "prune more kinds of units, or let rows of the vocabulary go first (`--vocabulary auto`)."
        )
    if limit >= dense:
        raise ValueError(
            f"budget.{budget.name}: must be below the {dense:,} of the model before units go, got {limit:,}. Lower it; "
            "if rows of the vocabulary alone meet it, use `struprune trim`."
        )
    return (dense - limit) / size


def fix_budgets(modifiers: Sequence[Modifier], num_parameters: int) -> None:
    """Set budgets that are shares of a model's parameters to numbers of them: rows of its vocabulary go before the run.

    :param num_parameters: parameters of the whole model
    """
    for modifier in modifiers:
        if isinstance(modifier, StructuredModifier) and modifier.budget is not None and modifier.budget.bytes is None:
            modifier.budget = BudgetConfig(parameters=modifier.budget.find_limit(num_parameters))


def describe_limit(modifier: StructuredModifier, whole: int, left: int, held: int) -> LimitRecord | None:
    """Return the manifest's record of a budget; None under ``sparsity``.

    :param whole: parameters of the model before pruning
    :param left: parameters of the pruned model
    :param held: bytes of its weights
    """
    budget = modifier.budget
    if budget is None:
        return None
    planned = left if budget.name == "parameters" else held
    return LimitRecord(budget.name, float(budget.find_limit(whole)), float(planned))
