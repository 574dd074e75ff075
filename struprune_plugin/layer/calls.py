"""What flows through one decoder layer in a forward pass: calls that can be repeated, and streams seen by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor, nn

from struprune_plugin.device.room import Room
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.units.group import UnitGroup


@dataclass
class Stream:
    """The last forward pass of one group's module, tokens flattened, padding included.

    :param residual: residual stream that the output is added to, shape [tokens, d]
    :param source: inputs of the producing linears, shape [tokens, d]
    :param inputs: inputs of the consuming linear, shape [tokens, n]
    :param output: its outputs, shape [tokens, d]; None where the pass stopped before it
    """

    residual: Tensor
    source: Tensor
    inputs: Tensor
    output: Tensor | None


class Stopped(Exception):
    """No error: ends a forward pass that has shown all that was asked."""


@contextmanager
def capture_streams(
    layer: nn.Module, groups: Sequence[UnitGroup], stop: bool = False
) -> Iterator[Callable[[UnitGroup], Stream]]:
    """Watch a decoder layer's forward passes; the function given returns, once, what the last one showed of a group.

    :param stop: end a pass with an exception once a consumer is reached
    """
    seen: dict[tuple[str, str], Tensor] = {}
    handles = []
    for group in groups:

        def see(part: str, name: str = group.name) -> Callable[[nn.Module, tuple, dict], None]:
            def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
                seen[name, part] = _flatten(_first(args, kwargs))

            return hook

        def see_inputs(_module: nn.Module, args: tuple, name: str = group.name) -> None:
            seen[name, "inputs"] = _flatten(args[0])
            if stop:
                raise Stopped

        def see_output(_module: nn.Module, _args: tuple, output: Tensor, name: str = group.name) -> None:
            seen[name, "output"] = _flatten(output)

        def see_parallel(_module: nn.Module, args: tuple, output: Tensor, name: str = group.name) -> None:
            seen[name, "parallel"] = _flatten(output)

        for part, module in (("residual", group.wiring.residual), ("source", next(iter(group.producers)))):
            handles.append(layer.get_submodule(module).register_forward_pre_hook(see(part), with_kwargs=True))
        if group.wiring.parallel:
            handles.append(find_linear(layer, group.wiring.parallel).register_forward_hook(see_parallel))
        handles.append(find_linear(layer, group.consumer).register_forward_pre_hook(see_inputs))
        handles.append(find_linear(layer, group.consumer).register_forward_hook(see_output))

    def take(group: UnitGroup) -> Stream:
        residual, source, inputs = (seen.pop((group.name, part)) for part in ("residual", "source", "inputs"))
        stream = Stream(residual, source, inputs, seen.pop((group.name, "output"), None))
        if group.wiring.parallel:
            stream.residual = stream.residual + group.wiring.residual_scale * seen.pop((group.name, "parallel"))
        return stream

    try:
        yield take
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def skip_linears(layer: nn.Module, groups: Sequence[UnitGroup]) -> Iterator[None]:
    """Let the linears of groups give zeros at once, in a pass whose output nobody reads."""

    def answer(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda hidden: hidden.new_zeros(()).expand(*hidden.shape[:-1], linear.out_features)

    with ExitStack() as stack:
        for group in groups:
            for name in (*group.producers, group.consumer):
                linear = find_linear(layer, name)
                stack.enter_context(patch_attr(linear, "forward", answer(linear)))
        yield


@contextmanager
def replace_weights(layer: nn.Module, weights: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let linears of a layer compute with other weights; their own stay where they are.

    :param weights: (weight, bias) by the linear's name in the layer; the bias counts where the linear has one
    """

    def answer(linear: nn.Linear, weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
        def forward(inputs: Tensor) -> Tensor:
            own = None if linear.bias is None else bias.to(inputs)
            return nn.functional.linear(inputs, weight.to(inputs), own)

        return forward

    with ExitStack() as stack:
        for name, (weight, bias) in weights.items():
            linear = find_linear(layer, name)
            stack.enter_context(patch_attr(linear, "forward", answer(linear, weight, bias)))
        yield


@contextmanager
def pass_by(layers: Sequence[nn.Module], hidden: Tensor | None, wraps: bool, room: Room) -> Iterator[None]:
    """Let decoder layers do nothing, and the last of them give these hidden states.

    :param hidden: what entered the first where None
    :param wraps: whether decoder layers give tuples
    """

    def pass_on(states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return (states,) if wraps else states

    def give(states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return pass_on(states if hidden is None else room.to_device(hidden, states.device))

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patch_attr(layer, "forward", give if layer is layers[-1] else pass_on))
        yield


def _first(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _flatten(hidden: Tensor) -> Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1])


@dataclass
class LayerCall:
    """One call of a decoder layer, kept on the host so that it can be repeated.

    :param hidden: hidden states, shape [batch, sequence, d]
    :param args: the other positional arguments; equal tensors of successive batches are held once
    :param kwargs: the other named arguments, the same
    :param tokens: indices of the tokens that are no padding, shape [kept]; None where all are
    """

    hidden: Tensor
    args: tuple
    kwargs: dict[str, Any]
    tokens: Tensor | None
    device: torch.device

    @property
    def length(self) -> int:
        """Tokens of a sequence, padding included."""
        return self.hidden.shape[1]

    @classmethod
    def record(
        cls, args: tuple, kwargs: dict[str, Any], previous: LayerCall | None, room: Room, held: Tensor | None = None
    ) -> LayerCall:
        """Take down a call as a hook sees it.

        :param previous: the call of the batch before, whose equal tensors are shared
        :param held: hidden states of that shape that are on the host already, in place of the call's own
        """
        hidden = _first(args, kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        known = previous or cls(hidden, (), {}, None, hidden.device)
        named = {name: _hold(value, known.kwargs.get(name), room) for name, value in rest.items()}
        return cls(
            room.park(hidden) if held is None else held,
            _hold(args[1:], known.args, room),
            named,
            find_tokens(rest.get("attention_mask"), room),
            hidden.device,
        )

    def repeat(self, layer: Callable[..., Any], room: Room, hidden: Tensor | None = None) -> Tensor:
        """Run the layer again, on other hidden states where given; return its output on the device."""
        kwargs = {name: _send(value, self.device, room) for name, value in self.kwargs.items()}
        hidden = room.to_device(self.hidden if hidden is None else hidden, self.device)
        return take_hidden(layer(hidden, *_send(self.args, self.device, room), **kwargs))


def take_hidden(output: Any) -> Tensor:
    """Return the hidden states of a decoder layer's output, which some families wrap in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def _hold(value: Any, known: Any, room: Room) -> Any:
    """Move a tensor, or a tuple of them, to the host, or reuse the equal one that is there already."""
    if isinstance(value, tuple):
        others = known if isinstance(known, tuple) and len(known) == len(value) else (None,) * len(value)
        return tuple(_hold(part, other, room) for part, other in zip(value, others, strict=True))
    if not isinstance(value, Tensor):
        return value
    value = room.to_host(value)
    same = isinstance(known, Tensor) and known.shape == value.shape and known.dtype == value.dtype
    return known if same and torch.equal(known, value) else value


def _send(value: Any, device: torch.device, room: Room) -> Any:
    """Move a tensor, or a tuple of them, to a device."""
    if isinstance(value, tuple):
        return tuple(_send(part, device, room) for part in value)
    return room.to_device(value, device) if isinstance(value, Tensor) else value


def find_tokens(mask: Tensor | None, room: Room) -> Tensor | None:
    """Return the flat indices of the tokens that are no padding, read off the layer's attention mask.

    A token that may not attend to itself is padding.

    :param mask: additive or boolean, shape [batch, 1, sequence, sequence]; None where nothing is padded
    :return: shape [kept], int64, on the host; None where all tokens count
    """
    if mask is None:
        return None
    diagonal = mask[:, 0].diagonal(dim1=1, dim2=2)
    valid = diagonal if mask.dtype == torch.bool else diagonal == 0
    return None if valid.all() else room.to_host(valid.reshape(-1).nonzero().flatten())


def split_tokens(tokens: Tensor | None, num_tokens: int, length: int) -> list[Any]:
    """Return what picks the tokens that count out of a micro-batch's, one slice or tensor of indices a sequence.

    Sums that are made sequence by sequence do not depend on how sequences are split into batches.

    :param tokens: flat indices of those that count, sorted, shape [counted]; None where all do
    :param num_tokens: of the micro-batch, padding included
    :param length: tokens of a sequence, padding included
    """
    if tokens is None:
        return [slice(start, start + length) for start in range(0, num_tokens, length)]
    return list(tokens.split(torch.bincount(tokens // length, minlength=num_tokens // length).tolist()))


@dataclass(frozen=True)
class Visit:
    """One micro-batch of one group: what its module sees, and what its consumer should give.

    :param source: inputs of the producing linears, shape [tokens, d]
    :param inputs: inputs of the consuming linear, shape [tokens, n]
    :param target: wanted output of the consumer, shape [tokens, d], float32
    :param call: the layer's call: batch shape, attention mask, tokens that are no padding
    """

    source: Tensor
    inputs: Tensor
    target: Tensor
    call: LayerCall
