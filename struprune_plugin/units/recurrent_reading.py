"""Reading of recurrent mixers: heads from the couplings of a module alone, while its norms couple no channels."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from struprune_plugin.model.structure.couplings import Measured, measure, watch
from struprune_plugin.model.structure.layout import Part, Producers
from struprune_plugin.model.structure.locate import list_linears, read_numbers
from struprune_plugin.units.shrinking_modules import ShrinkingLayout

COLUMN, ENTRY, KEY, SHARED = "channel", "entry", "key", "shared"
Segments = list[tuple[Part, int]]  # (part, rows) of a linear, in order
_NEARLY = 0.75  # of a block: other columns may change too little
_MOST_EPS, _HUGE_EPS = 1e-3, 1e12
_NOT_SIZES = ("hidden", "head", "state", "kernel", "chunk", "layer")


@dataclass(frozen=True, kw_only=True)
class RecurrentLayout(ShrinkingLayout):
    """Heads of one recurrent mixer; names are relative to the decoder layer.

    A head with its own queries and keys is a unit; heads that share them are one unit, but where the module calls them a group:
    its heads are units, of which every group keeps the same number. Rows that all units share stay.

    :param counter: attribute that stores the number of units
    :param blocks: attribute that stores the number of groups; empty where there are none
    :param entries: heads per unit
    :param mixed: linears whose rows are unit by unit; those of others are part by part
    :param scaled: attributes that are proportional to the number of units, by name
    :param rows: attributes that store the number of a tensor's rows: the tensor by attribute
    :param norms: names of eps of norms over several units: the norm's weight by eps
    :param buffers: of the tensors, those that the class computes by itself: the module reads a part of them
    """

    counter: str
    blocks: str = ""
    entries: int
    mixed: Sequence[str] = ()
    scaled: Sequence[str] = ()
    rows: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=dict)
    buffers: Sequence[str] = ()


def read_recurrent(measured: Measured, consumer: str) -> RecurrentLayout | None:
    """Return the heads of the recurrent mixer that ends in a linear, which has a convolution over tokens; None where it is none.

    They are read from the module alone, while the eps of its norms are so large that a norm couples no channels.
    """
    owner = consumer.rpartition(".")[0]
    module = measured.layer.get_submodule(owner)
    if not owner or not any(isinstance(part, nn.Conv1d) for part in module.modules()):
        return None
    with watch(measured.layer, [owner]) as calls:
        measured.call.run(measured.layer)
    try:
        with _raise_eps(module):
            inner = measure([module], calls[0], len(measured.inputs[consumer]), asks_later=False)
    except Exception:  # a module that cannot be called alone
        return None
    return _read_heads(measured, inner, owner, consumer)


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
    last, module = consumer.removeprefix(f"{owner}."), measured.layer.get_submodule(owner)
    reached = {first: each.reached.clone() for (first, second), each in inner.couplings.items() if second == last}
    columns = measured.inputs[consumer].shape[-1]
    sizes = _find_blocks(reached, columns)
    later = [coupling.later.any() for (_, second), coupling in measured.couplings.items() if second == consumer]
    if not sizes or not any(later):
        return None
    groups, heads = columns // max(sizes), columns // min(sizes)
    for count in dict.fromkeys((groups, heads)):
        numbers = {name: value for name, value in read_numbers(module).items() if type(value) is int}
        counters = [name for name in numbers if numbers[name] == count and {"head", "heads"} & {*name.split("_")}]
        counters = [name for name in counters if not {"dim", "size"} & {*name.split("_")}]
        splits = {name: _split_rows(each, count, heads) for name, each in reached.items()}
        if not counters or not all(parts for parts, _ in splits.values()):
            continue
        segments = {name: parts for name, (parts, _) in splits.items() if {part for part, _ in parts} != {SHARED}}
        every = [segment for parts in segments.values() for segment in parts]
        tensors, buffers = _find_tensors(module, every, {COLUMN: columns, ENTRY: heads})
        blocks = next((name for name, value in numbers.items() if value == groups and "groups" in name.split("_")), "")
        if (ENTRY,) not in tensors.values() or (count != groups and not blocks):
            continue
        scaled, rows = _find_numbers(module, every, tensors, columns, count, heads)
        norms, widths = dict[str, str](), list[str]()
        if _is_coupled(measured, {f"{owner}.{name}" for name in segments}, consumer, count):
            for part, eps, _ in _list_eps(module):
                name = next(name for name, each in module.named_modules() if each is part)
                if tensors.get(f"{name}.weight") == (COLUMN,):
                    norms[f"{owner}.{name}.{eps}"] = f"{owner}.{name}.weight"
                    known = read_numbers(part).items()
                    widths += [f"{name}.{own_size}" for own_size, value in known if value == columns // groups]
        return RecurrentLayout(
            kind="recurrent_heads",
            producers=_place(owner, {name: tuple(part for part, _ in parts) for name, parts in segments.items()}),
            output=consumer,
            tensors=_place(owner, tensors),
            counter=f"{owner}.{counters[0]}",
            blocks=f"{owner}.{blocks}" if count != groups else "",
            entries=heads // count,
            mixed=[f"{owner}.{name}" for name in segments if splits[name][1]],
            scaled=[f"{owner}.{name}" for name in dict.fromkeys((*counters, *scaled, *widths))],
            rows={f"{owner}.{name}": f"{owner}.{tensor}" for name, tensor in rows.items()},
            norms=norms,
            buffers=[f"{owner}.{name}" for name in buffers],
        )
    return None


def _place(owner: str, names: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{owner}.{name}": value for name, value in names.items()}


def _find_blocks(reached: Mapping[str, Tensor], columns: int) -> set[int]:
    """Return the sizes of the blocks of columns that rows reach together, at most two; empty where they are no equal blocks.

    Rows that reach nearly all of a block, or of all columns, are written down as reaching all of it.
    """
    rows = [row for each in reached.values() for row in each if 1 < int(row.sum()) < columns]
    sizes, others = set[int](), list[Tensor]()
    for row in rows:
        at = row.nonzero().flatten()
        size, first = len(at), int(at[0])
        is_block = not columns % size and not first % size and int(at[-1]) - first == size - 1
        sizes |= {size} if is_block else set()
        others += [] if is_block else [row]
    for row in others:
        first, last = row.nonzero().flatten()[[0, -1]].tolist()
        size = next((size for size in sorted(sizes) if first // size == last // size), columns)
        if int(row.sum()) < _NEARLY * size:
            return set()
        row[first // size * size : (first // size + 1) * size] = True
    return sizes if 1 <= len(sizes) <= 2 else set()


def _split_rows(reached: Tensor, count: int, heads: int) -> tuple[Segments, bool]:
    """Return the segments of a producer, and whether they repeat unit by unit; none where they do not hold all units in order."""
    units = reached.view(len(reached), count, -1).any(2)
    owners = [int(row.nonzero()[0]) if int(row.sum()) == 1 else -1 for row in units]
    is_alone = (reached.sum(1) == 1).tolist()
    parts = _split_parts(owners, is_alone, count, heads, reached.shape[1])
    if parts and parts != [(KEY, 2 * heads)]:
        return parts, False
    width, rest = divmod(len(owners), count)
    if rest or owners != [unit for unit in range(count) for _ in range(width)] or is_alone != is_alone[:width] * count:
        return [], False
    coupled, columns = is_alone[:width].count(False), reached.shape[1] // count
    repeats, rest = divmod(width - coupled, columns)
    if rest or not coupled or coupled % 2 or any(is_alone[:coupled]):
        return [], False
    part = ENTRY if coupled == 2 * heads // count else KEY  # of two kinds each: queries and keys, or decays and steps
    return [(part, coupled * count // 2)] * 2 + [(COLUMN, columns * count)] * repeats, True


def _split_parts(owners: list[int], is_alone: list[bool], count: int, heads: int, columns: int) -> Segments:
    """Return the segments of a producer whose rows are part by part; empty where they are not."""
    segments, start = Segments(), 0
    while start < len(owners):
        end = start
        if owners[start] < 0:
            while end < len(owners) and owners[end] < 0:
                end += 1
            segments.append((SHARED, end - start))
        else:
            while end < len(owners) and owners[end] == 0 and is_alone[end] == is_alone[start]:
                end += 1
            width = end - start
            end = start + width * count
            if not width or owners[start:end] != [unit for unit in range(count) for _ in range(width)]:
                return []
            part = COLUMN if is_alone[start] else ENTRY if width == heads // count else KEY
            if part == COLUMN and width != columns // count:
                return []
            segments.append((part, end - start))
        start = end
    free = {part for part, _ in segments if part in (KEY, SHARED)}
    return segments if len(free) <= 1 else []


def _find_tensors(
    module: nn.Module, segments: Segments, sizes: Mapping[Part, int]
) -> tuple[dict[str, tuple[Part, ...]], list[str]]:
    """Return the parts of tensors with as many rows as heads, as columns, or as a run of segments, and the buffers among them."""
    linears, tensors, buffers = list_linears(module), dict[str, tuple[Part, ...]](), list[str]()
    runs: dict[int, tuple[Part, ...]] = {}
    for start in range(len(segments)):
        for end in range(start + 2, len(segments) + 1):
            parts = tuple(part for part, _ in segments[start:end])
            if COLUMN in parts:  # what a convolution reads
                runs.setdefault(sum(rows for _, rows in segments[start:end]), parts)
    known = runs | {rows: (part,) for part, rows in sizes.items()}
    saved = module.state_dict()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        length = next((size for size in tensor.shape if size > 1), 1)
        if name.rpartition(".")[0] not in linears and length in known:
            tensors[name] = known[length]
            buffers += [] if name in saved else [name]
    return tensors, buffers


def _find_numbers(
    module: nn.Module, segments: Segments, tensors: Producers, columns: int, count: int, heads: int
) -> tuple[list[str], dict[str, str]]:
    """Return the attributes that are proportional to the number of units, and those that count a tensor's rows."""
    scaled, rows = list[str](), dict[str, str]()
    widths = {columns, *(rows for part, rows in segments if part == KEY)}
    for prefix, part in module.named_modules():
        numbers = read_numbers(part)
        sizes = {name: value for name, value in numbers.items() if not any(word in name for word in _NOT_SIZES)}
        dot = f"{prefix}." if prefix else ""
        if isinstance(part, (nn.Linear, nn.Conv1d)):
            continue
        counts = [name for name, value in numbers.items() if value in (count, heads) and "heads" in name.split("_")]
        scaled += [f"{dot}{name}" for name in (*counts, *(name for name, value in sizes.items() if value in widths))]
    totals = {name: max(tensor.shape) for name, tensor in module.named_parameters() if len(tensors.get(name, ())) > 1}
    for tensor, total in totals.items():
        for owner in dict.fromkeys(("", tensor.rpartition(".")[0])):
            values, dot = read_numbers(module.get_submodule(owner)), f"{owner}." if owner else ""
            named = [name for name in values if owner or not any(word in name for word in _NOT_SIZES)]
            rows |= {f"{dot}{name}": tensor for name in named if values[name] == total}
    return scaled, rows


def _is_coupled(measured: Measured, producers: set[str], consumer: str, count: int) -> bool:
    """Return whether a row of one unit reaches another unit's columns in the module as it is."""
    for name in producers:
        if coupling := measured.couplings.get((name, consumer)):
            reached = coupling.reached.view(len(coupling.reached), count, -1)
            if not (reached.any(2).sum(1) <= 1).any():
                return True
    return False
