"""Heads of recurrent mixers: gated delta nets, Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.structure.couplings import Coupling, Measured, measure, watch
from struprune_plugin.model.structure.layout import Part, Producers, UnitLayout
from struprune_plugin.model.structure.locate import list_linears, read_numbers
from struprune_plugin.model.surgery import scale_tensor
from struprune_plugin.model.unit_kind import UNIT_KINDS, UnitGroup
from struprune_plugin.units.shrinking_modules import ShrinkingLayout, ShrinkingUnits

_COLUMN, _ENTRY, _KEY, _SHARED = "channel", "entry", "key", "shared"
_MOST_EPS, _HUGE_EPS = 1e-3, 1e12
_NOT_SIZES = ("hidden", "head", "state", "kernel", "chunk", "layer")


@dataclass(frozen=True, kw_only=True)
class RecurrentLayout(ShrinkingLayout):
    """Heads of one recurrent mixer; names are relative to the decoder layer.

    A head with its own queries and keys is a unit; heads that share them are one unit. Rows that all units share stay.

    :param counter: attribute that stores the number of units
    :param entries: heads per unit
    :param scaled: attributes that are proportional to the number of units, by name
    :param rows: attributes that store the number of a tensor's rows: the tensor by attribute
    :param norms: names of eps of norms over all units: the norm's weight by eps
    """

    counter: str
    entries: int
    scaled: Sequence[str] = ()
    rows: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=dict)


@UNIT_KINDS.register
class RecurrentHeads(ShrinkingUnits):
    """A head: its rows of all linears before the recurrence, its filters and decays, and its columns behind it."""

    label: ClassVar[str] = "recurrent heads"
    pool: ClassVar[str] = "recurrent"
    parts: ClassVar[tuple[str, ...]] = (_COLUMN, _ENTRY, _KEY)
    kind: Literal["recurrent_heads"] = "recurrent_heads"

    def read(self, measured: Measured, thin: Mapping[str, Coupling], consumer: str) -> UnitLayout | None:
        owner = consumer.rpartition(".")[0]
        if not owner or not _list_vectors(measured.layer.get_submodule(owner)):
            return None
        inner = _measure_alone(measured, owner, consumer)
        return None if inner is None else _read_heads(measured, inner, owner, consumer)

    def describe_group(self, unit: UnitLayout, layer: nn.Module) -> UnitGroup:
        assert isinstance(unit, RecurrentLayout)
        count, columns = int(_read(layer, unit.counter)), find_linear(layer, unit.output).in_features
        rows = {_COLUMN: columns // count, _ENTRY: unit.entries}
        for name, parts in unit.producers.items():  # what is left is of the parts whose size nothing else states
            known = sum(rows[part] * count for part in parts if part in (_COLUMN, _ENTRY))
            left, free = find_linear(layer, name).out_features - known, [p for p in parts if p in (_KEY, _SHARED)]
            if free:
                rows[free[0]] = left // len(free) // (count if free[0] == _KEY else 1)
        return UnitGroup(
            self,
            unit.producers,
            unit.output,
            unit.join,
            count,
            rows,
            columns_per_unit=columns // count,
            tensors=unit.tensors,
            is_coupled=bool(unit.norms),
            facts=(unit,),
        )

    def describe_unit(self, unit: UnitLayout, layer: nn.Module) -> str:
        group = self.describe_group(unit, layer)
        return f"{unit.output}: {group.num_units} {self.label} of {group.columns_per_unit} channels"

    def resize_module(self, layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
        unit = next(fact for fact in group.facts if isinstance(fact, RecurrentLayout))
        for name in unit.scaled:
            _write(layer, name, _read(layer, name) * num_keep // group.num_units)
        for name, tensor in unit.rows.items():
            owner, _, last = tensor.rpartition(".")
            _write(layer, name, len(layer.get_submodule(owner)._parameters[last]))  # type: ignore[arg-type]
        for eps, weight in unit.norms.items():  # the same function of fewer channels: zeros no longer count in the mean
            _write(layer, eps, _read(layer, eps) * group.num_units / num_keep)
            scale_tensor(layer, weight, math.sqrt(group.num_units / num_keep))


def _read(layer: nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(layer.get_submodule(owner), last)


def _write(layer: nn.Module, name: str, value: float) -> None:
    owner, _, last = name.rpartition(".")
    setattr(layer.get_submodule(owner), last, value)


def _list_vectors(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters with one entry per head, or so it may be."""
    return [name for name, vector in module.named_parameters(recurse=False) if vector.dim() == 1 and len(vector) > 1]


def _measure_alone(measured: Measured, owner: str, consumer: str) -> Measured | None:
    """Return the measurements of a module alone while the eps of its norms are so large that a norm couples no channels."""
    module = measured.layer.get_submodule(owner)
    with watch(measured.layer, [owner]) as calls:
        measured.call.run(measured.layer)
    with suppress(Exception), _raise_eps(module):  # a module that cannot be called alone
        return measure([module], calls[0], len(measured.inputs[consumer]))
    return None


@contextmanager
def _raise_eps(module: nn.Module) -> Iterator[None]:
    before = _list_eps(module)
    weights = [part._parameters["weight"] for part, *_ in before if part._parameters.get("weight") is not None]
    held = [weight.detach().clone() for weight in weights if weight is not None]
    try:
        for part, name, _ in before:
            setattr(part, name, _HUGE_EPS)
        for weight in weights:
            weight.data.mul_(_HUGE_EPS**0.5)  # type: ignore[union-attr]  # so that outputs keep their scale
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)
        for weight, old in zip(weights, held, strict=True):
            weight.data.copy_(old)  # type: ignore[union-attr]


def _list_eps(module: nn.Module) -> list[tuple[nn.Module, str, float]]:
    numbers = [(part, *pair) for part in module.modules() for pair in read_numbers(part).items()]
    return [(part, name, value) for part, name, value in numbers if type(value) is float and 0 < value < _MOST_EPS]


def _read_heads(measured: Measured, inner: Measured, owner: str, consumer: str) -> RecurrentLayout | None:
    last = consumer.removeprefix(f"{owner}.")
    couplings = {first: coupling for (first, second), coupling in inner.couplings.items() if second == last}
    columns = measured.inputs[consumer].shape[-1]
    blocks = _find_blocks([coupling.reached for coupling in couplings.values()], columns)
    if not blocks or not any(coupling.later.any() for coupling in couplings.values()):
        return None
    count, heads = columns // max(blocks), columns // min(blocks)
    segments = {name: _split_rows(coupling.reached, count, heads) for name, coupling in couplings.items()}
    if not all(segments.values()):
        return None
    module = measured.layer.get_submodule(owner)
    sizes = {_COLUMN: columns, _ENTRY: heads}
    every = [segment for several in segments.values() for segment in several]
    tensors = _find_tensors(module, every, sizes)
    if ("entry",) not in tensors.values():
        return None
    counts, rows = _find_numbers(module, every, tensors, columns, count, heads)
    if not counts:
        return None

    def place(names: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{owner}.{name}": value for name, value in names.items()}

    norms: dict[str, str] = {}
    if _is_coupled(measured, {f"{owner}.{name}" for name in segments}, consumer, count):
        for part, eps, _ in _list_eps(module):
            name = next(name for name, each in module.named_modules() if each is part)
            if tensors.get(f"{name}.weight") == (_COLUMN,):
                norms[f"{owner}.{name}.{eps}"] = f"{owner}.{name}.weight"
    return RecurrentLayout(
        kind="recurrent_heads",
        producers=place({name: tuple(part for part, _ in several) for name, several in segments.items()}),
        output=consumer,
        tensors=place(tensors),
        counter=f"{owner}.{counts[0]}",
        entries=heads // count,
        scaled=[f"{owner}.{name}" for name in counts],
        rows={f"{owner}.{name}": f"{owner}.{tensor}" for name, tensor in rows.items()},
        norms=norms,
    )


def _find_blocks(reached: Sequence[Tensor], columns: int) -> set[int]:
    """Return the sizes of the blocks of columns that rows reach together, at most two; empty where they are no equal blocks."""
    sizes = set[int]()
    for row in (row for each in reached for row in each):
        at = row.nonzero().flatten().tolist()
        if 1 < len(at) < columns:
            size = len(at)
            if columns % size or at[0] % size or at != [*range(at[0], at[0] + size)]:
                return set()
            sizes.add(size)
    return sizes if 1 <= len(sizes) <= 2 else set()


def _split_rows(reached: Tensor, count: int, heads: int) -> list[tuple[Part, int]]:
    """Return (part, rows) of a producer's segments, in order; empty where a segment does not hold all units in order."""
    rows, columns = reached.shape
    blocks = reached.view(rows, count, -1).any(2)
    owners = [int(row.nonzero()[0]) if int(row.sum()) == 1 else -1 for row in blocks]
    is_alone = (reached.sum(1) == 1).tolist()
    segments, start = list[tuple[Part, int]](), 0
    while start < rows:
        end = start
        if owners[start] < 0:
            while end < rows and owners[end] < 0:
                end += 1
            segments.append((_SHARED, end - start))
        else:
            while end < rows and owners[end] == 0 and is_alone[end] == is_alone[start]:
                end += 1
            width = end - start
            end = start + width * count
            if not width or owners[start:end] != [unit for unit in range(count) for _ in range(width)]:
                return []
            part = _COLUMN if is_alone[start] else _ENTRY if width == heads // count else _KEY
            if part == _COLUMN:
                repeats, rest = divmod(width, columns // count)
                if rest or repeats > 1:
                    return []
            segments.append((part, end - start))
        start = end
    free = {part for part, _ in segments if part in (_KEY, _SHARED)}
    return segments if len(free) <= 1 else []


def _find_tensors(
    module: nn.Module, segments: Sequence[tuple[Part, int]], sizes: Mapping[Part, int]
) -> dict[str, tuple[Part, ...]]:
    """Return the parts of tensors with as many rows as heads, as columns, or as a run of segments."""
    linears, tensors = list_linears(module), dict[str, tuple[Part, ...]]()
    runs: dict[int, tuple[Part, ...]] = {}
    for start in range(len(segments)):
        for end in range(start + 2, len(segments) + 1):
            parts = tuple(part for part, _ in segments[start:end])
            if _COLUMN in parts:  # what a convolution reads
                runs.setdefault(sum(rows for _, rows in segments[start:end]), parts)
    known = runs | {rows: (part,) for part, rows in sizes.items()}
    for name, tensor in module.named_parameters():
        if name.rpartition(".")[0] not in linears and len(tensor) in known:
            tensors[name] = known[len(tensor)]
    return tensors


def _find_numbers(
    module: nn.Module,
    segments: Sequence[tuple[Part, int]],
    tensors: Producers,
    columns: int,
    count: int,
    heads: int,
) -> tuple[list[str], dict[str, str]]:
    """Return the attributes that are proportional to the number of units, its own first, and those that count a tensor's rows."""
    integers = {name: value for name, value in read_numbers(module).items() if type(value) is int}
    counts = [
        n
        for n, v in integers.items()
        if v == count and ("head" in n or "group" in n) and not {"dim", "size"} & {*n.split("_")}
    ]
    more = [n for n, v in integers.items() if v == heads != count and "head" in n and "dim" not in n]
    widths = {columns, *(rows for part, rows in segments if part == _KEY)}
    sizes = {name: value for name, value in integers.items() if not any(word in name for word in _NOT_SIZES)}
    more += [name for name, value in sizes.items() if value in widths and name not in (*counts, *more)]
    rows: dict[str, str] = {}
    for tensor, parts in tensors.items():
        if len(parts) > 1:
            owner, total = tensor.rpartition(".")[0], len(module.get_parameter(tensor))
            rows |= {name: tensor for name, value in sizes.items() if value == total}
            numbers = read_numbers(module.get_submodule(owner)) if owner else {}
            rows |= {f"{owner}.{name}": tensor for name, value in numbers.items() if value == total}
    return ([*counts, *more] if counts else []), rows


def _is_coupled(measured: Measured, producers: set[str], consumer: str, count: int) -> bool:
    """Return whether a row of one unit reaches another unit's columns in the module as it is."""
    for name in producers:
        if coupling := measured.couplings.get((name, consumer)):
            reached = coupling.reached.view(len(coupling.reached), count, -1)
            if not (reached.any(2).sum(1) <= 1).any():
                return True
    return False
