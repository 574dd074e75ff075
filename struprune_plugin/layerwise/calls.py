"""Repeatable call of a decoder layer, and the states that a batch carries from layer to layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from struprune_plugin.runtime.device_context import DeviceContext

Place = int | str  # place of an argument: its index among the positional ones after the hidden states, or its name


@dataclass(frozen=True)
class States:
    """States that one path of a batch carries from a decoder layer to the next.

    :param hidden: shape [batch, sequence, d]; classes with several streams have one more axis
    :param others: other values that layers pass to later ones: parts of their output by index, and entries of mappings that they
        fill (shared keys and values, for instance) by (place of the argument, key)
    """

    hidden: Tensor
    others: Mapping[Any, Any] = field(default_factory=dict)

    def map(self, change: Callable[[Tensor], Tensor]) -> States:
        """Return the states with ``change`` applied to every tensor."""
        return States(change(self.hidden), map_tensors(change, dict(self.others)))

    def list_learning(self) -> list[Tensor]:
        """Return the tensors that gradients may flow through, the hidden states first; the order is the same for all layers."""
        return [part for part in [self.hidden, *list_tensors(dict(self.others))] if part.is_floating_point()]


@dataclass
class LayerCall:
    """Call of a decoder layer, stored so that it can be repeated.

    :param hidden: as in :class:`States`, like ``others``
    :param arguments: other arguments by place, positional first; equal tensors of successive layers and batches are stored once
    :param tokens: mask of the tokens that are not padding, which is behind them, shape [sequences, tokens], bool, on the host
    :param name: name of the argument that holds the hidden states; empty where they are the first positional one
    :param wires: index of a part of the previous layer's output, by the place of the argument that receives it
    :param keeps: parts of this layer's output that the next layer receives
    :param known: what modules of the layer return in its next run, by name, in the order of their calls
    """

    hidden: Tensor
    arguments: dict[Place, Any]
    tokens: Tensor
    device: torch.device
    name: str = ""
    others: Mapping[Any, Any] = field(default_factory=dict)
    wires: dict[Place, int] = field(default_factory=dict)
    keeps: tuple[int, ...] = ()
    known: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def states(self) -> States:
        """States that enter the layer."""
        return States(self.hidden, self.others)

    def run(self, layer: Callable[..., Any], context: DeviceContext, states: States | None = None) -> States:
        """Run the layer again, on the states of another path where given; return the states for the next layer, on the device."""

        def send(part: Tensor) -> Tensor:
            return context.to_device(part, self.device)

        states = states or self.states
        wired = {place: states.others[part] for place, part in self.wires.items()}
        arguments = map_tensors(send, self.arguments | wired)
        others = {key: value for key, value in states.others.items() if isinstance(key, tuple)}
        for (place, key), value in others.items():
            if isinstance(arguments.get(place), MutableMapping):
                arguments[place][key] = map_tensors(send, value)
        before = {place: dict(value) for place, value in arguments.items() if isinstance(value, MutableMapping)}
        positional = [value for place, value in arguments.items() if isinstance(place, int)]
        named = {place: value for place, value in arguments.items() if isinstance(place, str)}
        hidden = send(states.hidden)
        parts = list_parts(layer(**{self.name: hidden}, **named) if self.name else layer(hidden, *positional, **named))
        for place, entries in before.items():
            changed = {key: value for key, value in arguments[place].items() if entries.get(key) is not value}
            others |= {(place, key): value for key, value in changed.items()}
        return States(parts[0], others | {part: parts[part] for part in self.keeps})


def list_parts(output: Any) -> list[Any]:
    """Return the parts of a layer's output, the hidden states first."""
    parts = [output] if isinstance(output, Tensor) else list(output) if isinstance(output, tuple | list) else []
    if not parts or not isinstance(parts[0], Tensor):
        raise ValueError(
            f"model: a decoder layer must return its hidden states, or a tuple that begins with them, got {type(output).__name__}. "
            "Choose another model."
        )
    return parts


def split_call(args: tuple, kwargs: dict[str, Any]) -> tuple[str, Tensor, dict[Place, Any]]:
    """Return the name of the argument that holds the hidden states, empty where it is the first positional one; the hidden
    states; all other arguments by place."""
    if args:
        return "", args[0], dict[Place, Any](enumerate(args[1:])) | dict[Place, Any](kwargs)
    named = [key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point()]
    if not named:
        raise ValueError(
            f"model: a decoder layer must be called with hidden states, got {sorted(kwargs)}. Choose another model."
        )
    name = "hidden_states" if "hidden_states" in named else named[0]
    return name, kwargs[name], {key: value for key, value in kwargs.items() if key != name}


def store(value: Any, known: Any, context: DeviceContext, seen: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """Return a tensor, or a tuple, list or mapping of tensors, offloaded; equal tensors of ``known`` are reused.

    :param known: stored value of the same form, or another
    :param seen: (tensor, the offloaded one) by id, for tensors that were met before
    """
    others = iter(list_tensors(known))

    def offload(tensor: Tensor) -> Tensor:
        other = next(others, tensor.new_empty(0))
        if id(tensor) not in seen:
            fits = other.shape == tensor.shape and other.dtype == tensor.dtype
            is_known = fits and torch.equal(context.to_device(other, tensor.device), tensor)
            seen[id(tensor)] = tensor, other if is_known else context.offload(tensor)
        return seen[id(tensor)][1]

    return map_tensors(offload, value)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a tensor, or a tuple, list or mapping of tensors, with ``change`` applied; lists and mappings are new objects."""
    if isinstance(value, tuple | list):
        parts = [map_tensors(change, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MutableMapping):
        changed: Any = copy.copy(value)
        changed.update({key: map_tensors(change, part) for key, part in value.items()})
        return changed
    return change(value) if isinstance(value, Tensor) else value


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors that :func:`map_tensors` changes, in its order."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, value)
    return tensors


def mark_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mask of a batch's tokens that are not padding, shape [batch, sequence], bool."""
    mask = batch.get("attention_mask")
    return (torch.ones_like(batch["input_ids"]) if mask is None else mask).bool()


def move_padding(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch whose padding is behind the tokens of every sequence: before them, it would shift the positions that some
    classes count, and reach the states of recurrences."""
    mask = mark_tokens(batch)
    if bool((mask[:, :-1] >= mask[:, 1:]).all()):
        return batch
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    return {**batch, **{name: batch[name].gather(1, order) for name in ("input_ids", "attention_mask")}}
