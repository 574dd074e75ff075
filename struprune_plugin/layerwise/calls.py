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
    """Hidden states that one path of a batch carries from a decoder layer to the next.

    :param hidden: hidden states, shape [batch, sequence, d]; classes with several streams have one more axis
    :param others: other values that layers pass to later ones: parts of their output by index, and entries of mappings that they
        fill (keys and values shared by layers, for instance) by (place of the argument, key)
    """

    hidden: Tensor
    others: Mapping[Any, Any] = field(default_factory=dict)

    def map(self, change: Callable[[Tensor], Tensor]) -> States:
        """Return the states with ``change`` applied to every tensor."""
        return States(change(self.hidden), map_tensors(change, dict(self.others)))

    def list_learning(self) -> list[Tensor]:
        """Return the tensors that gradients may flow through, the hidden states first; the order is the same for all layers."""
        return [part for part in [self.hidden, *list_tensors(dict(self.others))] if part.is_floating_point()]

    def watch(self) -> States:
        """Return the states as leaves of a new graph."""
        return self.map(lambda part: part.detach().requires_grad_() if part.is_floating_point() else part)


@dataclass
class LayerCall:
    """Call of a decoder layer, stored so that it can be repeated.

    :param hidden: hidden states, as in :class:`States`
    :param arguments: other arguments by place, positional first; equal tensors of successive layers and batches are stored once
    :param tokens: flat indices of the tokens that are not padding, shape [kept], on the host; None where no token is padding
    :param name: name of the argument that holds the hidden states; empty where they are the first positional one
    :param others: other values from earlier layers, as in :class:`States`
    :param wires: index of a part of the previous layer's output, by the place of the argument that receives it
    :param keeps: parts of this layer's output that the next layer receives
    :param shape: batch shape (sequences, tokens); None where it is that of the hidden states
    :param known: what modules of the layer return in its next run, by name, in the order of their calls
    """

    hidden: Tensor
    arguments: dict[Place, Any]
    tokens: Tensor | None
    device: torch.device
    name: str = ""
    others: Mapping[Any, Any] = field(default_factory=dict)
    wires: dict[Place, int] = field(default_factory=dict)
    keeps: tuple[int, ...] = ()
    shape: tuple[int, int] | None = None
    known: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Number of sequences, and of tokens per sequence, padding included."""
        return self.shape or (self.hidden.shape[0], self.hidden.shape[1])

    def mark_tokens(self) -> Tensor:
        """Return which tokens are not padding, shape [sequences * tokens], bool, on the host."""
        batch, length = self.batch_shape
        if self.tokens is None:
            return torch.ones(batch * length, dtype=torch.bool)
        return torch.zeros(batch * length, dtype=torch.bool).index_fill(0, self.tokens.cpu(), True)

    @property
    def states(self) -> States:
        """States that enter the layer."""
        return States(self.hidden, self.others)

    def run(self, layer: Callable[..., Any], context: DeviceContext, states: States | None = None) -> States:
        """Run the layer again, on the states of another path where given; return the states for the next layer, on the device.

        Entries of shared mappings that the layer does not change are returned as given.
        """

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
    """Return the parts of a layer's output, the hidden states first.

    :raises ValueError: the output is neither a tensor nor a tuple that begins with one
    """
    parts = [output] if isinstance(output, Tensor) else list(output) if isinstance(output, tuple | list) else []
    if not parts or not isinstance(parts[0], Tensor):
        raise ValueError(
            f"model: a decoder layer must return its hidden states, or a tuple that begins with them, got {type(output).__name__}. "
            "Choose another model."
        )
    return parts


def split_call(args: tuple, kwargs: dict[str, Any]) -> tuple[str, Tensor, dict[Place, Any]]:
    """Return the name of the argument that holds the hidden states, empty where it is the first positional one; the hidden
    states; all other arguments by place.

    :raises ValueError: no argument can hold the hidden states
    """
    if args:
        return "", args[0], dict[Place, Any](enumerate(args[1:])) | dict[Place, Any](kwargs)
    named = [key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point()]
    if not named:
        raise ValueError(
            f"model: a decoder layer must be called with hidden states, got {sorted(kwargs)}. Choose another model."
        )
    name = "hidden_states" if "hidden_states" in named else named[0]
    return name, kwargs[name], {key: value for key, value in kwargs.items() if key != name}


def store(value: Any, known: Any, context: DeviceContext, seen: dict[int, tuple[Tensor, Tensor]] | None = None) -> Any:
    """Return a tensor, or a tuple, list or mapping of tensors, parked; an equal stored tensor is reused.

    :param known: stored value that may hold equal tensors
    :param seen: (tensor, the parked one) by id, for tensors that were met before
    """
    if isinstance(value, tuple | list):
        others = known if isinstance(known, type(value)) and len(known) == len(value) else (None,) * len(value)
        held = [store(part, other, context, seen) for part, other in zip(value, others, strict=True)]
        return type(value)(*held) if hasattr(value, "_fields") else type(value)(held)
    if isinstance(value, MutableMapping):
        entries = known if isinstance(known, MutableMapping) else {}
        return _refill(value, {key: store(part, entries.get(key), context, seen) for key, part in value.items()})
    if not isinstance(value, Tensor):
        return value
    if seen is not None and id(value) in seen:
        return seen[id(value)][1]
    alike = isinstance(known, Tensor) and known.shape == value.shape and known.dtype == value.dtype
    is_known = alike and torch.equal(context.to_device(known, value.device), value)
    stored = known if is_known else context.park(value)
    if seen is not None:
        seen[id(value)] = value, stored
    return stored


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a tensor, or a tuple, list or mapping of tensors, with ``change`` applied; lists and mappings are new objects."""
    if isinstance(value, tuple | list):
        made = [map_tensors(change, part) for part in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, MutableMapping):
        return _refill(value, {key: map_tensors(change, part) for key, part in value.items()})
    return change(value) if isinstance(value, Tensor) else value


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors that :func:`map_tensors` changes, in its order."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def _refill(mapping: MutableMapping, entries: Mapping) -> MutableMapping:
    """Return a mapping of the same class with other entries."""
    made = copy.copy(mapping)
    made.clear()
    made.update(entries)
    return made


def find_tokens(mask: Tensor | None) -> Tensor | None:
    """Return the flat indices of a batch's tokens that are not padding.

    :param mask: attention mask, 0 at padding, shape [batch, sequence]; None where nothing is padded
    :return: shape [kept], int64, on the host; None where no token is padding
    """
    if mask is None or mask.bool().all():
        return None
    return mask.cpu().reshape(-1).nonzero().flatten()
