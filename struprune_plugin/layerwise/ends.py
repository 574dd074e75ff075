"""Forward pass before and after the decoder layers: the layers' calls, and the model's logits."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from compressed_tensors.offload import disable_offloading
from compressed_tensors.utils import patch_attr
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.calls import LayerCall, States, mark_tokens, split_call, store
from struprune_plugin.layerwise.capture import Stopped, replay
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.model.structure.finder import find_structure
from struprune_plugin.runtime.device_context import DeviceContext


@dataclass
class BatchFlow:
    """Batch on its way through the layers; waiting tensors are offloaded.

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
        self.states = output.map(context.offload)
        return call

    def run_backward(self, index: int, layer: nn.Module, context: DeviceContext) -> None:
        """Run a layer forward and backward; the gradients at its inputs replace those at its outputs; forget the call."""
        call, above = self.calls[index], self.above or []
        states = call.states.map(lambda part: context.to_device(part, call.device).detach())
        leaves = [leaf.requires_grad_() for leaf in states.list_learning()]
        with torch.enable_grad():
            with context.offload_saved(layer):
                learning = call.run(layer, context, states).list_learning()[: len(above)]
            pairs = [(part, gradient) for part, gradient in zip(learning, above, strict=True) if part.requires_grad]
            parts, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(parts, [context.to_device(gradient, call.device) for gradient in gradients])
        del learning, pairs, parts
        self.above = [context.offload(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) for leaf in leaves]
        self.forget(index, context)

    def forget(self, index: int, context: DeviceContext) -> None:
        """Release the tensors of a layer's call."""
        call = self.calls[index]
        context.discard(call.hidden)
        self.calls[index] = replace(call, hidden=call.hidden.new_empty(0), arguments={}, others={})


@torch.no_grad()
def enter_layers(
    model: PreTrainedModel, batch: dict[str, Tensor], context: DeviceContext, known: Sequence[LayerCall] | None = None
) -> BatchFlow:
    """Return a batch at the first layer, with the calls of all layers; no layer runs.

    What runs in a layer's place returns tensors that mark its output, and recognises them among the next layer's arguments.

    :param known: calls of another batch, whose equal tensors are shared
    :raises ValueError: a layer does not run on the hidden states that the layer before it returned
    """
    named, head, num_parts = find_decoder_layers(model), model.get_output_embeddings(), find_structure(model).num_parts
    tokens = mark_tokens(batch).cpu()
    calls, marks, seen = list[LayerCall](), list[Tensor](), dict[int, tuple[Tensor, Tensor]]()

    def run(name: str, /, *args: Any, **kwargs: Any) -> Any:
        argument, hidden, arguments = split_call(args, kwargs)
        parts = {id(mark): part for part, mark in enumerate(marks)}
        wires = {place: parts[id(value)] for place, value in arguments.items() if id(value) in parts}
        arguments |= dict.fromkeys(wires)
        before = calls[-1] if calls else None
        if before is not None:
            if hidden is not marks[0] and not (hidden.shape == marks[0].shape and torch.equal(hidden, marks[0])):
                raise ValueError(
                    f"{name}: a decoder layer must run on the hidden states that the layer before it returned, got others. "
                    "Choose another model."
                )
            before.keeps = tuple(sorted(set(wires.values())))
        other = known[len(calls)] if known else before
        stored = other.arguments if other else {}
        held = {place: store(value, stored.get(place), context, seen) for place, value in arguments.items()}
        waiting = before.hidden if before else context.offload(hidden)
        calls.append(LayerCall(waiting, held, tokens, hidden.device, argument, wires=wires))
        marks[:] = [hidden.detach(), *(hidden.new_empty(0) for _ in range(num_parts - 1))]
        return tuple(marks) if num_parts else marks[0]

    def stop(*_args: Any, **_kwargs: Any) -> Tensor:
        raise Stopped

    forwards = [partial(run, name) for name, _ in named]
    with replace_layers([layer for _, layer in named], forwards), patch_attr(head, "forward", stop), suppress(Stopped):
        model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"), use_cache=False)
    return BatchFlow(batch, calls, calls[0].states)


def enter_batches(
    model: PreTrainedModel, batches: Iterable[dict[str, Tensor]], context: DeviceContext
) -> list[BatchFlow]:
    """Return batches at the first layer, see :func:`enter_layers`; the embeddings stay on the device until all have entered."""
    flows: list[BatchFlow] = []
    with disable_offloading():
        for batch in batches:
            flows.append(enter_layers(model, batch, context, flows[-1].calls if flows else None))
    return flows


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
