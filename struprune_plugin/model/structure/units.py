"""Units of a decoder layer, derived from the measured couplings of its linears."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from struprune_plugin.model.structure.couplings import Coupling, Measured
from struprune_plugin.model.structure.layout import AttentionLayout, FFNLayout, LayerLayout, Part, Rows
from struprune_plugin.model.structure.locate import list_linears

_ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu2", "tanh", "sigmoid")
_MOST = 0.6  # fraction of the columns
_WIDTH_NAMES = ("v_head_dim", "head_dim", "head_size", "attention_head_size")
Labels = dict[str, list[tuple[Part, int]]]  # by producer, what each row is, see _label_rows


def read_units(measured: Measured) -> LayerLayout:
    """Return the units of a layer, without the joins of its modules with the residual stream."""
    attentions, ffns, left = list[AttentionLayout](), list[FFNLayout](), dict[str, str]()
    for consumer in dict.fromkeys(second for _, second in measured.couplings):
        thin = _find_thin(measured, consumer)
        ffn = _read_ffn(measured, thin, consumer)
        values = None if ffn else _read_values(measured, thin, consumer)
        if ffn:
            ffns.append(ffn)
        elif values:
            attentions.append(values)
        elif thin:  # else it reads the residual stream, which keeps its width
            name, coupling = max(thin.items(), key=lambda item: float(item[1].reached.float().mean()))
            together, columns = int(coupling.reached.sum(1).max()), coupling.reached.shape[1]
            left[consumer] = f"a row of {name} reaches {together} of {columns} columns"
    attentions.sort(key=lambda attention: not attention.rotates)  # prefer attention to a state-space mixer
    left |= {other.output: "another module of the layer has values" for other in attentions[1:]}
    return LayerLayout(next(iter(attentions), None), tuple(ffns), left)


def _find_thin(measured: Measured, consumer: str) -> dict[str, Coupling]:
    """Return the linears with a row that reaches only a part of a consumer's columns; others reach it by the residual stream."""
    found = {first: coupling for (first, second), coupling in measured.couplings.items() if second == consumer}
    shares = {name: coupling.reached.float().mean(1) for name, coupling in found.items()}
    return {name: found[name] for name, share in shares.items() if share[share > 0].min() < _MOST}


# -- FFNs ---------------------------------------------------------------------------------------------------------


def _read_ffn(measured: Measured, thin: Mapping[str, Coupling], consumer: str) -> FFNLayout | None:
    """Return the FFN that ends in a linear: each column depends on its own one or two rows per producer, of the same token only."""
    columns = measured.inputs[consumer].shape[-1]
    producers: dict[str, tuple[Part, ...]] = {}
    alternates = False
    for name, coupling in thin.items():
        count, rest = divmod(len(coupling.reached), columns)
        if rest or not 1 <= count <= 2 or coupling.later.any():
            return None
        eye = torch.eye(columns, dtype=torch.bool)
        if not torch.equal(coupling.reached, eye.repeat(count, 1)):
            if not torch.equal(coupling.reached, eye.repeat_interleave(count, 0)):
                return None
            alternates = True
        producers[name] = tuple[Part, ...](["ffn"] * count)
    return _find_activation(measured, FFNLayout(producers, consumer, alternates=alternates)) if producers else None


def _find_activation(measured: Measured, ffn: FFNLayout) -> FFNLayout:
    """Return an FFN with its gate first and the name of its activation where transformers has the function."""
    parts = list[tuple[str, Tensor]]()
    for name, kinds in ffn.producers.items():
        rows, count = measured.outputs[name], len(kinds)
        split = rows.unflatten(-1, (-1, count)).unbind(-1) if ffn.alternates else rows.chunk(count, -1)
        parts += [(name, part) for part in split]
    wanted = measured.inputs[ffn.output]
    configs = [vars(module).get("config") for module in measured.layer.modules()]
    values = [value for config in configs if config is not None for value in vars(config).values()]
    named = [value for value in values if isinstance(value, str) and value in ACT2FN]
    for name in dict.fromkeys([*named, *_ACTIVATIONS]) if len(parts) <= 2 else ():
        for first, second in ((parts[0], parts[-1]), (parts[-1], parts[0])):
            given = ACT2FN[name](first[1]) * (second[1] if len(parts) == 2 else 1)
            if torch.allclose(given.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5):
                order = dict.fromkeys((first[0], second[0]))
                fused_wrong = len(order) == 1 and first is not parts[0]
                producers = {producer: ffn.producers[producer] for producer in order}
                return replace(ffn, producers=producers, activation="" if fused_wrong or ffn.alternates else name)
    return ffn


# -- attention ----------------------------------------------------------------------------------------------------


def _read_values(measured: Measured, thin: Mapping[str, Coupling], consumer: str) -> AttentionLayout | None:
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
                    module,
                    producers,
                    consumer,
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
        known = {own: value for own, value in values.items() if type(value) is int and value > 1}
        for own in dict.fromkeys([*_WIDTH_NAMES, *(own for own in known if "head" in own)]):
            if own in known:
                yield name, own, known[own]


def _find_shared(measured: Measured, consumer: str, labels: Labels, heads: int) -> Labels:
    """Return the labels of keys that all heads share, whose rows reach every column, and of a single head's queries; their linears
    lie in the module of the linear that produces the values, and are as wide as one head's queries."""
    beside = {name.rpartition(".")[0] for name, rows in labels.items() if rows[0][0] == "value"}
    parts = {part for rows in labels.values() for part, _ in rows}
    wide = {len(rows) // heads for rows in labels.values() if {part for part, _ in rows} == {"query"}}
    found: Labels = {}
    for (name, second), coupling in measured.couplings.items():
        part: Part = "key" if coupling.later.any() else "query"
        size = len(coupling.reached)
        is_beside = second == consumer and name.rpartition(".")[0] in beside and name not in labels
        if is_beside and part not in parts and (size in wide if wide else heads == 1):
            found[name] = [(part, -1)] * size
    return found if len({rows[0][0] for rows in found.values()}) == len(found) else {}


def _label_rows(coupling: Coupling, repeats: int, width: int) -> list[tuple[Part, int]]:
    """Return per row (part, place): the place among all value heads' channels or all heads' gates, -1 for queries and keys.

    A value row reaches its channel in all heads that share the value head, at later tokens too; a gate row one channel of one head,
    at its own token. The others couple channels: a query row changes only its own token, a key row later ones, too.
    """
    labels = list[tuple[Part, int]]()
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


def list_channel_rows(measured: Measured, attention: AttentionLayout, width: int) -> list[tuple[str, Part, Tensor]]:
    """Return (producer, part, indices of shape [heads or value heads, width]) of the rows that produce values or gates."""
    heads = measured.inputs[attention.output].shape[-1] // width
    couplings = {name: measured.couplings[name, attention.output] for name in attention.producers}
    for repeats in _list_divisors(heads):
        labels = {name: _label_rows(coupling, repeats, width) for name, coupling in couplings.items()}
        if _lay_out(labels, heads, repeats, width):
            break
    found: list[tuple[str, Part, Tensor]] = []
    for name, rows in labels.items():
        for part in ("value", "gate"):
            indices = [index for index, row in enumerate(rows) if row[0] == part]
            found += [(name, part, torch.tensor(indices).view(-1, width))] if indices else []  # type: ignore[list-item]
    return found


def _lay_out(
    labels: Labels, heads: int, repeats: int, width: int
) -> tuple[dict[str, tuple[Part, ...]], dict[str, Rows]] | None:
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


def _fit_rows(rows: list[tuple[Part, int]], blocks: int, heads: int) -> tuple[tuple[Part, ...], Rows] | None:
    """Return the parts of one producer in the order of its rows, and how they repeat; None where the rows have no known order."""
    for counted in ("value", "gate"):
        places = [place for part, place in rows if part == counted]
        if places != [*range(len(places))]:
            return None
    repeats: tuple[tuple[Rows, int], ...] = (("", 1), ("block", blocks), ("head", heads))
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
    given = (logits.masked_fill(unseen, -torch.inf).softmax(-1) @ states["value"]).transpose(0, 1)
    wanted = measured.inputs[attention.output]
    return torch.allclose(given.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)
