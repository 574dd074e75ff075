"""Units of a decoder layer, derived from the measured couplings of its linears."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from struprune_plugin.model.structure.couplings import Coupling, list_linears
from struprune_plugin.model.structure.layout import AttentionLayout, FFNLayout, LayerLayout, Part, Rows

_ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu2", "tanh", "sigmoid")
_MOST = 0.6  # fraction of the columns
_WIDTH_NAMES = ("v_head_dim", "head_dim", "head_size", "attention_head_size")


@dataclass(frozen=True)
class Measured:
    """Measurements of one run of a tiny layer.

    :param layer: the layer
    :param inputs: inputs of the linears that are called once, in order, by name
    :param outputs: outputs of the same linears
    :param couplings: couplings by (producer, consumer)
    """

    layer: nn.Module
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    couplings: Mapping[tuple[str, str], Coupling]

    @property
    def layer_linears(self) -> list[str]:
        """Names of the linears that see every token once, in the order of the layer's modules."""
        return [name for name in list_linears(self.layer) if name in self.inputs]

    def reach(self, consumer: str) -> dict[str, Coupling]:
        """Return the linears that have a row which reaches only a part of a consumer's columns.

        Others reach it through the residual stream or a norm, and so all columns but those that an activation holds at zero.
        """
        found = {first: coupling for (first, second), coupling in self.couplings.items() if second == consumer}
        shares = {name: coupling.reached.float().mean(1) for name, coupling in found.items()}
        return {name: found[name] for name, share in shares.items() if share[share > 0].min() < _MOST}


def read_units(measured: Measured) -> LayerLayout:
    """Return the units of a layer, without the joins of its modules with the residual stream."""
    attentions, ffns, left = list[AttentionLayout](), list[FFNLayout](), dict[str, str]()
    for consumer in dict.fromkeys(second for _, second in measured.couplings):
        ffn = _read_ffn(measured, consumer)
        values = None if ffn else _read_values(measured, consumer)
        if ffn:
            ffns.append(ffn)
        elif values:
            attentions.append(values)
        elif reason := _explain(measured, consumer):
            left[consumer] = reason
    attentions.sort(key=lambda attention: not attention.rotates)  # prefer attention to a state-space mixer
    left |= {other.output: "another module of the layer has values" for other in attentions[1:]}
    return LayerLayout(next(iter(attentions), None), tuple(ffns), left)


def _explain(measured: Measured, consumer: str) -> str:
    """Return the reason why no units were found; empty where the consumer reads the residual stream, which keeps its width."""
    thin = measured.reach(consumer)
    if not thin:
        return ""
    name, coupling = max(thin.items(), key=lambda item: float(item[1].reached.float().mean()))
    together = int(coupling.reached.sum(1).max())
    return f"a row of {name} reaches {together} of {coupling.reached.shape[1]} columns"


# -- FFNs ---------------------------------------------------------------------------------------------------------


def _read_ffn(measured: Measured, consumer: str) -> FFNLayout | None:
    """Return the FFN that ends in a linear: each column depends on its own one or two rows per producer, of the same token only."""
    thin = measured.reach(consumer)
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
    if not producers:
        return None
    return _find_activation(measured, FFNLayout(producers, consumer, alternates=alternates))


def _find_activation(measured: Measured, ffn: FFNLayout) -> FFNLayout:
    """Return an FFN with its gate first and the name of its activation where transformers has the function."""
    parts = [
        (name, part)
        for name, kinds in ffn.producers.items()
        for part in _split(measured.outputs[name], len(kinds), ffn.alternates)
    ]
    wanted = measured.inputs[ffn.output]
    for name in _list_activations(measured.layer):
        act = ACT2FN[name]
        for first, second in ((parts[0], parts[-1]), (parts[-1], parts[0])):
            given = act(first[1]) * (second[1] if len(parts) == 2 else 1)
            if len(parts) > 2 or not torch.allclose(given.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5):
                continue
            order = dict.fromkeys((first[0], second[0]))
            fused_wrong = len(order) == 1 and first is not parts[0]
            producers = {producer: ffn.producers[producer] for producer in order}
            return replace(ffn, producers=producers, activation="" if fused_wrong or ffn.alternates else name)
    return ffn


def _split(rows: Tensor, count: int, alternates: bool) -> tuple[Tensor, ...]:
    return rows.unflatten(-1, (-1, count)).unbind(-1) if alternates else rows.chunk(count, -1)


def _list_activations(layer: nn.Module) -> list[str]:
    """Return the names of activations in the layer's configuration, and the usual ones."""
    configs = [vars(module).get("config") for module in layer.modules()]
    values = [value for config in configs if config is not None for value in vars(config).values()]
    named = [value for value in values if isinstance(value, str) and value in ACT2FN]
    return list(dict.fromkeys([*named, *_ACTIVATIONS]))


# -- attention ----------------------------------------------------------------------------------------------------


def _read_values(measured: Measured, consumer: str) -> AttentionLayout | None:
    """Return the attention that ends in a linear: value rows each reach, at later tokens, one column per head of a group."""
    thin, columns = measured.reach(consumer), measured.inputs[consumer].shape[-1]
    owners = dict.fromkeys(name.rpartition(".")[0] for name in (consumer, *thin))
    for module_name, width_name, width in (
        (name, *width) for name in owners for width in _list_widths(measured.layer.get_submodule(name))
    ):
        heads, rest = divmod(columns, width)
        if rest:
            continue
        for repeats in (count for count in range(1, heads + 1) if heads % count == 0):
            labels = {name: _label_rows(c, repeats, width) for name, c in thin.items()}
            if heads == repeats:
                labels |= _find_shared(measured, consumer, labels, heads)
                labels = {name: labels[name] for name in measured.inputs if name in labels}
            layout = _lay_out(labels, heads, repeats, width)
            if layout is not None:
                producers, repeated = layout
                gated = any("gate" in parts for parts in producers.values())
                heads_apart = _are_heads_apart(thin, repeats * width)
                return AttentionLayout(
                    module_name,
                    producers,
                    consumer,
                    repeated=repeated,
                    linears=tuple(name for name in measured.layer_linears if name.startswith(f"{module_name}.")),
                    width_name=width_name,
                    is_grouped=repeats > 1,
                    has_heads=heads_apart and set(thin) <= set(producers),
                    rotates=not gated,
                )
    return None


def _find_shared(
    measured: Measured, consumer: str, labels: Mapping[str, list[tuple[str, int, int]]], heads: int
) -> dict[str, list[tuple[str, int, int]]]:
    """Return the labels of keys that all heads share, whose rows reach every column, and of a single head's queries; their linears
    lie in the module of the linear that produces the values, and are as wide as one head's queries."""
    beside = {name.rpartition(".")[0] for name, rows in labels.items() if rows[0][0] == "value"}
    parts = {label for rows in labels.values() for label, *_ in rows}
    wide = {len(rows) // heads for rows in labels.values() if {label for label, *_ in rows} == {"query"}}
    found: dict[str, list[tuple[str, int, int]]] = {}
    for (name, second), coupling in measured.couplings.items():
        part, size = "key" if coupling.later.any() else "query", len(coupling.reached)
        fits = size in wide if wide else heads == 1
        if (
            second == consumer
            and name.rpartition(".")[0] in beside
            and name not in labels
            and part not in parts
            and fits
        ):
            found[name] = [(part, -1, -1)] * size
    return found if len({rows[0][0] for rows in found.values()}) == len(found) else {}


def _list_widths(module: Any) -> list[tuple[str, int]]:
    """Return (name, value) of an attention module's attributes that may be the width of a head's values."""
    known = {name: value for name, value in vars(module).items() if type(value) is int and value > 1}
    names = [*(name for name in _WIDTH_NAMES if name in known), *(name for name in known if "head" in name)]
    return [(name, known[name]) for name in dict.fromkeys(names)]


def _label_rows(coupling: Coupling, repeats: int, width: int) -> list[tuple[str, int, int]]:
    """Return (part, value head or head, channel) per row; rows of queries and keys, which couple channels, have only the part.

    A query row changes only its own token; a key row changes later tokens, too.
    """
    labels = []
    for reached, later in zip(coupling.reached, coupling.later, strict=True):
        at = reached.nonzero().flatten()
        head, channel = at // width, at % width
        one = len(at) > 0 and bool((channel == channel[0]).all())
        block = int(head[0]) // repeats if len(at) else -1
        whole = one and head.tolist() == list(range(block * repeats, (block + 1) * repeats))
        if whole and later.any():
            labels.append(("value", block, int(channel[0])))
        elif one and len(at) == 1 and not later.any():
            labels.append(("gate", int(head[0]), int(channel[0])))
        else:
            labels.append(("key" if later.any() else "query", -1, -1))
    return labels


def list_channel_rows(measured: Measured, attention: AttentionLayout, width: int) -> list[tuple[str, Part, Tensor]]:
    """Return the rows of every producer that produce values or gates, channel by channel.

    :param width: width of a head's values
    :return: (producer, part, indices of shape [heads or value heads, width])
    """
    found: list[tuple[str, Part, Tensor]] = []
    heads = measured.inputs[attention.output].shape[-1] // width
    for repeats in (count for count in range(1, heads + 1) if heads % count == 0):
        labels = {n: _label_rows(measured.couplings[n, attention.output], repeats, width) for n in attention.producers}
        if _lay_out(labels, heads, repeats, width) is not None:
            break
    for name, rows in labels.items():
        for part in ("value", "gate"):
            indices = [index for index, row in enumerate(rows) if row[0] == part]
            found += [(name, part, torch.tensor(indices).view(-1, width))] if indices else []
    return found


def _lay_out(
    labels: Mapping[str, list[tuple[str, int, int]]], heads: int, repeats: int, width: int
) -> tuple[dict[str, tuple[Part, ...]], dict[str, Rows]] | None:
    """Return the parts of the producers and how their rows repeat; None where the value rows do not cover all channels."""
    blocks = heads // repeats
    values = [label for rows in labels.values() for label in rows if label[0] == "value"]
    if sorted(label[1:] for label in values) != [(b, c) for b in range(blocks) for c in range(width)]:
        return None
    producers: dict[str, tuple[Part, ...]] = {}
    repeated: dict[str, Rows] = {}
    for name, rows in labels.items():
        fit = _fit_rows(rows, heads, repeats, width)
        if fit is None:
            return None
        producers[name], repeated[name] = fit
    return producers, {name: rows for name, rows in repeated.items() if rows}


def _fit_rows(
    rows: list[tuple[str, int, int]], heads: int, repeats: int, width: int
) -> tuple[tuple[Part, ...], Rows] | None:
    """Return the parts of one producer in the order of its rows, and how they repeat; None where the rows have no known order."""
    blocks = heads // repeats
    for repeat, runs in (("", 1), ("block", blocks), ("head", heads)):
        if len(rows) % runs:
            continue
        per_run = len(rows) // runs
        first = _find_segments(rows[:per_run])
        parts = tuple(label for label, _ in first)
        if len(set(parts)) < len(parts) or not _count_up(rows, width):
            continue
        if all(_find_segments(rows[run * per_run :][:per_run]) == first for run in range(runs)):
            return parts, repeat if runs > 1 else ""  # type: ignore[return-value]
    return None


def _find_segments(rows: list[tuple[str, int, int]]) -> list[tuple[str, int]]:
    """Return (part, length) of the runs of rows with the same part."""
    return [(label, len(list(group))) for label, group in itertools.groupby(label for label, *_ in rows)]


def _count_up(rows: list[tuple[str, int, int]], width: int) -> bool:
    """Return whether the channels of every part are in order."""
    for part in ("value", "gate"):
        places = [head * width + channel for label, head, channel in rows if label == part]
        if places != list(range(len(places))):
            return False
    return True


def _are_heads_apart(thin: Mapping[str, Coupling], columns: int) -> bool:
    """Return whether every row reaches columns of one group of heads only."""
    for coupling in thin.values():
        groups = coupling.reached.unflatten(1, (-1, columns)).any(2).sum(1)
        if (groups > 1).any():
            return False
    return True


@torch.no_grad()
def is_plain(measured: Measured, attention: AttentionLayout) -> bool:
    """Return whether attention is plain: the softmax of scaled products of queries and keys, without position encodings.

    The output projection's input then equals that formula, applied to the outputs of the producers.
    """
    if (
        attention.is_grouped
        or attention.repeated
        or sorted(attention.producers.values()) != [("key",), ("query",), ("value",)]
    ):
        return False
    module: Any = measured.layer.get_submodule(attention.module)
    width = getattr(module, attention.width_name)
    states = {
        parts[0]: measured.outputs[name].reshape(-1, measured.outputs[name].shape[-1] // width, width).transpose(0, 1)
        for name, parts in attention.producers.items()
    }
    if len({state.shape for state in states.values()}) > 1:
        return False
    given = _attend(states["query"], states["key"], states["value"], getattr(module, "scaling", width**-0.5))
    wanted = measured.inputs[attention.output]
    return torch.allclose(given.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    logits = query @ key.mT * scaling
    unseen = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return (logits.masked_fill(unseen, -torch.inf).softmax(-1) @ value).transpose(0, 1)
