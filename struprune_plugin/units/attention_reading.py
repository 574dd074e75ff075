"""Reading of attention: value channels and heads from the measured couplings of a layer's linears, and the proof of them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from struprune_plugin.model.structure.couplings import Coupling, Measured
from struprune_plugin.model.structure.layout import UnitLayout
from struprune_plugin.model.structure.locate import list_linears, read_padding
from struprune_plugin.model.structure.tiny import TinyRun
from struprune_plugin.model.structure.trial_removal import find_flaw, survives_mixing

_WIDTH_NAMES = ("v_head_dim", "head_dim", "head_size", "attention_head_size")
_SCALE = (
    64.0  # of values: above the bounds of classes that clip them (clip_qkv), which a random instance's do not reach
)
Labels = dict[str, list[tuple[str, int]]]  # by producer, what each row is, see _label_rows


@dataclass(frozen=True, kw_only=True)
class AttentionLayout(UnitLayout):
    """Value channels and heads of one attention module; names are relative to the decoder layer.

    :param repeated: ``head`` or ``block`` for producers whose rows are not part by part: head by head, or by value heads
    :param linears: all linears of the module, including those that lose nothing
    :param width_name: attribute of the module that stores the width of a head's values
    :param is_grouped: whether several query heads share one value head
    :param is_plain: whether attention is the softmax of scaled products of queries and keys, without position encodings
    :param has_heads: whether heads are coupled to no other heads, so that whole heads are units
    :param takes_fewer_heads: whether the module's own code runs on linears of fewer heads
    :param rotates: whether the values of a head may be rotated
    """

    module: str
    repeated: Mapping[str, str] = field(default_factory=dict)
    linears: Sequence[str] = ()
    width_name: str = "head_dim"
    is_grouped: bool = False
    is_plain: bool = False
    has_heads: bool = True
    takes_fewer_heads: bool = True
    rotates: bool = True

    @property
    def formula(self) -> str:
        return "softmax attention" if self.is_plain else ""

    def list_linears(self) -> list[str]:
        return [*super().list_linears(), *self.linears]


def read_values(measured: Measured, thin: Mapping[str, Coupling], consumer: str) -> AttentionLayout | None:
    """Return the attention that ends in a linear: value rows each reach, at later tokens, one column per head of a group."""
    columns = measured.inputs[consumer].shape[-1]
    for module, width_name, width in _list_widths(measured, [consumer, *thin]):
        heads, rest = divmod(columns, width)
        for repeats in _list_divisors(0 if rest else heads):
            labels = {name: _label_rows(coupling, repeats, width) for name, coupling in thin.items()}
            if heads == repeats:
                labels |= _find_shared(measured, consumer, labels, heads)
                labels = {name: labels[name] for name in measured.inputs if name in labels}
            if layout := _lay_out(labels, heads, repeats, width):
                producers, repeated = layout
                linears = [name for name in list_linears(measured.layer) if name in measured.inputs]
                groups = [c.reached.unflatten(1, (-1, repeats * width)).any(2).sum(1) for c in thin.values()]
                return AttentionLayout(
                    kind="value_channels",
                    module=module,
                    producers=producers,
                    output=consumer,
                    repeated=repeated,
                    linears=tuple(name for name in linears if name.startswith(f"{module}.")),
                    width_name=width_name,
                    is_grouped=repeats > 1,
                    has_heads=all(int(each.max()) <= 1 for each in groups) and set(thin) <= set(producers),
                    rotates=not any("gate" in parts for parts in producers.values()),
                )
    return None


def _list_divisors(count: int) -> list[int]:
    return [divisor for divisor in range(1, count + 1) if count % divisor == 0]


def _list_widths(measured: Measured, linears: list[str]) -> Iterator[tuple[str, str, int]]:
    """Yield (module, attribute, value) of the attributes of linears' modules that may be the width of a head's values."""
    for name in dict.fromkeys(linear.rpartition(".")[0] for linear in linears):
        values = vars(measured.layer.get_submodule(name))
        known = {attribute: value for attribute, value in values.items() if type(value) is int and value > 1}
        for attribute in dict.fromkeys([*_WIDTH_NAMES, *(attribute for attribute in known if "head" in attribute)]):
            if attribute in known:
                yield name, attribute, known[attribute]


def _find_shared(measured: Measured, consumer: str, labels: Labels, heads: int) -> Labels:
    """Return the labels of keys that all heads share, whose rows reach every column, and of a single head's queries; their linears
    lie in the module of the linear that produces the values, and are as wide as one head's queries."""
    beside = {name.rpartition(".")[0] for name, rows in labels.items() if rows[0][0] == "value"}
    parts = {part for rows in labels.values() for part, _ in rows}
    wide = {len(rows) // heads for rows in labels.values() if {part for part, _ in rows} == {"query"}}
    shared: Labels = {}
    for (name, second), coupling in measured.couplings.items():
        part: str = "key" if coupling.later.any() else "query"
        size = len(coupling.reached)
        is_beside = second == consumer and name.rpartition(".")[0] in beside and name not in labels
        if is_beside and part not in parts and (size in wide if wide else heads == 1):
            shared[name] = [(part, -1)] * size
    return shared if len({rows[0][0] for rows in shared.values()}) == len(shared) else {}


def _label_rows(coupling: Coupling, repeats: int, width: int) -> list[tuple[str, int]]:
    """Return per row (part, place): the place among all value heads' channels or all heads' gates, -1 for queries and keys.

    A value row reaches its channel in all heads that share the value head, at later tokens too; a gate row one channel of one head,
    at its own token. The others couple channels: a query row changes only its own token, a key row later ones, too.
    """
    labels = list[tuple[str, int]]()
    for reached, is_later in zip(coupling.reached, coupling.later.any(1).tolist(), strict=True):
        at = reached.nonzero().flatten().tolist()
        block, channel = (at[0] // (repeats * width), at[0] % width) if at else (0, 0)
        if is_later and at == [head * width + channel for head in range(block * repeats, (block + 1) * repeats)]:
            labels.append(("value", block * width + channel))
        elif len(at) == 1 and not is_later:
            labels.append(("gate", at[0]))
        else:
            labels.append(("key" if is_later else "query", -1))
    return labels


def list_channel_rows(measured: Measured, attention: AttentionLayout, width: int) -> list[tuple[str, str, Tensor]]:
    """Return (producer, part, indices of shape [heads or value heads, width]) of the rows that produce values or gates."""
    heads = measured.inputs[attention.output].shape[-1] // width
    couplings = {name: measured.couplings[name, attention.output] for name in attention.producers}
    for repeats in _list_divisors(heads):
        labels = {name: _label_rows(coupling, repeats, width) for name, coupling in couplings.items()}
        if _lay_out(labels, heads, repeats, width):
            break
    channels: list[tuple[str, str, Tensor]] = []
    for name, rows in labels.items():
        for part in ("value", "gate"):
            indices = [index for index, row in enumerate(rows) if row[0] == part]
            channels += [(name, part, torch.tensor(indices).view(-1, width))] if indices else []  # type: ignore[list-item]
    return channels


def _lay_out(
    labels: Labels, heads: int, repeats: int, width: int
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]] | None:
    """Return the parts of the producers and how their rows repeat; None where the value rows do not cover all channels."""
    blocks = heads // repeats
    values = sorted(place for rows in labels.values() for part, place in rows if part == "value")
    if values != [*range(blocks * width)]:
        return None
    fits = {name: _fit_rows(rows, blocks, heads) for name, rows in labels.items()}
    known = {name: fit for name, fit in fits.items() if fit}
    if len(known) < len(fits):
        return None
    return {name: fit[0] for name, fit in known.items()}, {name: fit[1] for name, fit in known.items() if fit[1]}


def _fit_rows(rows: list[tuple[str, int]], blocks: int, heads: int) -> tuple[tuple[str, ...], str] | None:
    """Return the parts of one producer in the order of its rows, and how they repeat; None where the rows have no known order."""
    for counted in ("value", "gate"):
        places = [place for part, place in rows if part == counted]
        if places != [*range(len(places))]:
            return None
    repeats: tuple[tuple[str, int], ...] = (("", 1), ("block", blocks), ("head", heads))
    kinds = [part for part, _ in rows]
    for repeat, runs in repeats:
        per_run = len(rows) // runs
        parts = tuple(part for part, _ in itertools.groupby(kinds[:per_run]))
        if kinds == kinds[:per_run] * runs and len({*parts}) == len(parts):
            return parts, repeat if runs > 1 else ""
    return None


@torch.no_grad()
def is_plain(measured: Measured, attention: AttentionLayout) -> bool:
    """Return whether the output projection's input is the softmax of scaled products of queries and keys, times values."""
    kinds = sorted(attention.producers.values())
    if attention.is_grouped or attention.repeated or kinds != [("key",), ("query",), ("value",)]:
        return False
    module: Any = measured.layer.get_submodule(attention.module)
    width = getattr(module, attention.width_name)
    states = {
        parts[0]: measured.outputs[name].reshape(-1, measured.outputs[name].shape[-1] // width, width).transpose(0, 1)
        for name, parts in attention.producers.items()
    }
    if len({state.shape for state in states.values()}) > 1:
        return False
    logits = states["query"] @ states["key"].mT * getattr(module, "scaling", width**-0.5)
    unseen = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    output = (logits.masked_fill(unseen, -torch.inf).softmax(-1) @ states["value"]).transpose(0, 1)
    wanted = measured.inputs[attention.output]
    return torch.allclose(output.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def prove_values(attention: AttentionLayout, measured: Measured, run: TinyRun) -> tuple[str, AttentionLayout]:
    """Return why channels of attention cannot be removed, empty where they can, and the layout with its proved properties."""
    layers, width = measured.layers, getattr(measured.layer.get_submodule(attention.module), attention.width_name)
    channels = torch.arange(measured.inputs[attention.output].shape[-1])
    if flaw := find_flaw(attention, measured, channels % width % 3 == 0, run, slices=False):
        return flaw, attention
    rows, eye = list_channel_rows(measured, attention, width), torch.eye(width)
    if not survives_mixing(layers, attention.output, rows, eye.roll(1, 0), run):
        return "the channels of a head cannot be exchanged", attention
    rotates = attention.rotates and all(
        survives_mixing(layers, attention.output, rows, eye - 2 / width, run, scale) for scale in (1.0, _SCALE)
    )
    blocks = next(len(heads) for _, part, heads in rows if part == "value")
    first = channels < len(channels) // blocks
    fits = attention.has_heads and (
        blocks == 1 or not find_flaw(attention, measured, first, run, (attention.module, blocks))
    )
    plain = is_plain(measured, attention)
    return "", replace(attention, rotates=rotates, takes_fewer_heads=fits, is_plain=plain)


def read_head_widths(attention: AttentionLayout, layer: nn.Module) -> tuple[int, int]:
    """Return the width of a head's values in the dense model, and the present width."""
    module: Any = layer.get_submodule(attention.module)
    wide = getattr(module, attention.width_name)
    form = read_padding(layer, attention.output).get("narrow")
    return wide, form["segments"][0][1] if form and not pads_heads(attention, layer) else wide


def pads_heads(attention: AttentionLayout, layer: nn.Module) -> bool:
    """Return whether a layer's attention module sees zeros in place of removed heads, because its code counts heads by itself."""
    form = read_padding(layer, attention.output).get("narrow")
    width = getattr(layer.get_submodule(attention.module), attention.width_name)
    return form is not None and form["segments"][0][2] != width
