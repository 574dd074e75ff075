"""Forward pass before and after the decoder layers: the layers' calls, and the model's logits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from compressed_tensors.offload import disable_offloading
from compressed_tensors.utils import patch_attr
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.calls import (
    LayerCall,
    States,
    find_tokens,
    list_tensors,
    split_call,
    store,
)
from struprune_plugin.layerwise.capture import replay
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.runtime.device_context import DeviceContext


@dataclass
class BatchFlow:
    """Batch on its way through the layers; waiting tensors are parked.

    :param calls: calls of all layers
    :param states: output states of the last layer that ran, or the inputs of the first
    :param above: gradients at the states in the order of :meth:`States.list_learning`, of the hidden states only behind the last
        layer; in a backward pass those at the inputs of the last layer that ran
    """

    batch: dict[str, Tensor]
    calls: list[LayerCall]
    states: States
    above: list[Tensor] | None = None

    def enter(self, index: int) -> LayerCall:
        """Return a layer's call on the current states."""
        call = self.calls[index]
        call.hidden, call.others = self.states.hidden, self.states.others
        return call

    def advance(self, index: int, layer: nn.Module, context: DeviceContext) -> LayerCall:
        """Run a layer on the current states, which its outputs replace; return the call."""
        call = self.enter(index)
        with replay(layer, call, context):
            output = call.run(layer, context)
        self.leave(output, context)
        return call

    def turn_back(self, index: int, layer: nn.Module, context: DeviceContext) -> None:
        """Run a layer forward and backward; the gradients at its inputs replace those at its outputs; forget the call."""
        call, above = self.calls[index], self.above or []
        states = call.states.map(partial(context.to_device, device=call.device)).watch()
        with torch.enable_grad():
            with context.save_on_host(layer):
                learning = call.run(layer, context, states).list_learning()[: len(above)]
            pairs = [(part, gradient) for part, gradient in zip(learning, above, strict=True) if part.requires_grad]
            parts, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(parts, [context.to_device(gradient, call.device) for gradient in gradients])
        del learning, pairs, parts
        leaves = states.list_learning()
        below = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        self.above = [context.park(gradient) for gradient in below]
        self.forget(index, context)

    def forget(self, index: int, context: DeviceContext) -> None:
        """Release the tensors of a layer's call."""
        call = self.calls[index]
        context.release(call.hidden)
        self.calls[index] = replace(call, hidden=call.hidden.new_empty(0), arguments={}, others={})

    def leave(self, states: States, context: DeviceContext) -> None:
        """Store a layer's output states."""
        self.states = states.map(context.park)


@torch.no_grad()
def enter_layers(
    model: PreTrainedModel,
    batch: dict[str, Tensor],
    context: DeviceContext,
    known: Sequence[LayerCall] | None = None,
) -> BatchFlow:
    """Return a batch at the first layer, with the calls of all layers; no layer runs.

    :param known: calls of another batch, whose equal tensors are shared
    :raises ValueError: the model does not call its layers one after the other, each once, on the previous layer's hidden states
    """
    named = find_decoder_layers(model)
    recorder = _Recorder(batch, context, known, find_structure(model).num_parts)
    forwards = [partial(recorder.run, index, name) for index, (name, _) in enumerate(named)]
    with replace_layers([layer for _, layer in named], forwards):
        run_to_head(model, batch)
    if len(recorder.calls) < len(named):
        raise ValueError(
            f"{named[len(recorder.calls)][0]}: every decoder layer must run on text, got a model that skips this one. "
            "Choose another model."
        )
    return BatchFlow(batch, recorder.calls, recorder.calls[0].states)


def enter_batches(
    model: PreTrainedModel, batches: Iterable[dict[str, Tensor]], context: DeviceContext
) -> list[BatchFlow]:
    """Return batches at the first layer, see :func:`enter_layers`; the embeddings stay on the device until all have entered."""
    flows: list[BatchFlow] = []
    with disable_offloading():
        for batch in batches:
            flows.append(enter_layers(model, batch, context, flows[-1].calls if flows else None))
    return flows


class _Recorder:
    """Recorder of the calls of decoder layers, which runs in their place.

    The tensors that it returns mark a layer's output, and are recognised among the next layer's arguments.

    :param num_parts: number of parts of a layer's output; 0 where it is a tensor
    """

    def __init__(
        self, batch: dict[str, Tensor], context: DeviceContext, known: Sequence[LayerCall] | None, num_parts: int
    ):
        self.calls: list[LayerCall] = []
        self._context, self._known, self._num_parts = context, known, num_parts
        self._shape = (batch["input_ids"].shape[0], batch["input_ids"].shape[1])
        self._tokens = find_tokens(batch.get("attention_mask"))
        self._marks: list[Tensor] = []  # of the previous layer
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self, index: int, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Record the call of a layer; return what marks its output."""
        argument, hidden, arguments = split_call(args, kwargs)
        if len(self.calls) != index:
            raise ValueError(
                f"{name}: decoder layers must run on text one after the other, each once, got this one as number "
                f"{len(self.calls)}. Choose another model."
            )
        before = self.calls[-1] if self.calls else None
        if before is not None and not (
            hidden is self._marks[0] or (hidden.shape == self._marks[0].shape and torch.equal(hidden, self._marks[0]))
        ):
            raise ValueError(
                f"{name}: a decoder layer must run on the hidden states that the layer before it returned, got others. "
                "Choose another model."
            )
        marks = {id(mark): part for part, mark in enumerate(self._marks)}
        wires = {place: marks[id(value)] for place, value in arguments.items() if id(value) in marks}
        arguments |= dict.fromkeys(wires)
        if any(id(leaf) in marks for leaf in list_tensors(arguments)):
            raise ValueError(
                f"{name}: a decoder layer must receive the output of the layer before as it is, got it inside another argument. "
                "Choose another model."
            )
        known = self._known[len(self.calls)] if self._known else before
        held = store(arguments, known.arguments if known else {}, self._context, self._seen)
        parked = self._context.park(hidden) if before is None else before.hidden
        if before is not None:
            before.keeps = tuple(sorted(set(wires.values())))
        self.calls.append(
            LayerCall(parked, held, self._tokens, hidden.device, argument, wires=wires, shape=self._shape)
        )
        self._marks = [hidden.detach(), *(hidden.new_empty(0) for _ in range(self._num_parts - 1))]
        return tuple(self._marks) if self._num_parts else self._marks[0]


class _Reached(Exception):
    """Signal, not an error, that ends a forward pass at the wanted module."""


def run_to_head(model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    """Run a model's own forward pass up to its output embeddings.

    :raises ValueError: the model has no output embeddings, or does not call them
    """
    head = model.get_output_embeddings()

    def stop(*_args: Any, **_kwargs: Any) -> Tensor:
        raise _Reached

    if head is not None:
        with patch_attr(head, "forward", stop):
            try:
                model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"), use_cache=False)
            except _Reached:
                return
    raise ValueError(
        "model: its output embeddings must be a module that the model calls, got none. Choose another model."
    )


def compute_logits(
    model: PreTrainedModel, batch: dict[str, Tensor], row: int, hidden: Tensor, context: DeviceContext
) -> Tensor:
    """Return the model's own logits for one sequence of a batch, shape [tokens, V].

    :param row: index of the sequence in the batch
    :param hidden: the last decoder layer's hidden states of the whole batch, anywhere
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    axis = next(axis for axis in range(hidden.dim() - 1) if hidden.shape[axis : axis + 2] == ids.shape)
    last = hidden.narrow(axis, row, 1)  # classes with several streams may have one axis before
    part = {"input_ids": ids[row : row + 1], "attention_mask": None if mask is None else mask[row : row + 1]}
    layers = [layer for _, layer in find_decoder_layers(model)]
    num_parts = find_structure(model).num_parts

    def skip(is_last: bool, /, *args: Any, **kwargs: Any) -> Any:
        hidden = split_call(args, kwargs)[1]
        hidden = context.to_device(last, hidden.device) if is_last else hidden
        return (hidden, *(None for _ in range(num_parts - 1))) if num_parts else hidden

    with replace_layers(layers, [partial(skip, layer is layers[-1]) for layer in layers]):
        return model(**part, use_cache=False).logits[0]


@contextmanager
def replace_layers(layers: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Run other functions in place of decoder layers, without the layers' hooks, which would move weights."""
    with ExitStack() as stack:
        for layer, forward in zip(layers, forwards, strict=True):
            stack.enter_context(patch_attr(layer, "forward", forward))
            for hooks in ("_forward_pre_hooks", "_forward_hooks"):
                stack.enter_context(patch_attr(layer, hooks, OrderedDict()))
        yield
