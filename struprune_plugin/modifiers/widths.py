"""Requirements of later quantisers and sparsity modifiers on the kept widths."""

from __future__ import annotations

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

from struprune_plugin.export.any_class import build_dense, replace_conv1d
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.model.structure.locate import find_stock, is_pruned, make_dense_config
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.storage.manifest import RoundingRecord

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

    :param later: modifiers that follow in the recipe
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
    return [_measure_tied(members, roundings) for members in tied.values()]


def _measure_tied(groups: Sequence[UnitGroup], roundings: Mapping[str, Rounding]) -> GroupSize:
    """Return the joint size of groups that keep the same number of units, or whole multiples of the narrowest group's."""
    first = min(groups, key=lambda group: group.num_units)
    factors = [group.num_units // first.num_units for group in groups]
    steps = [roundings[group.name].step for group in groups]
    return GroupSize(
        first.name,
        first.module_kind,
        first.num_units,
        sum(group.unit_cost * factor for group, factor in zip(groups, factors, strict=True)),
        math.lcm(*(step // math.gcd(step, factor) for step, factor in zip(steps, factors, strict=True))),
        tuple((group.name, factor) for group, factor in zip(groups, factors, strict=True)),
    )


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
