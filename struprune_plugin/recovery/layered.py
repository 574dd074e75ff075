"""A model that lies on the host and runs one decoder layer at a time, all micro-batches of a step in one visit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from struprune_plugin.device.room import Room
from struprune_plugin.layer.calls import LayerCall
from struprune_plugin.model.families import find_family
from struprune_plugin.model.layers import QUANTISER_PARAMETERS, find_decoder_layers
from struprune_plugin.recovery.head import Head, Piece
from struprune_plugin.recovery.samples import Sample

Weights = dict[str, Tensor]


@dataclass
class Flow:
    """One micro-batch on its way through the layers, at rest on the host.

    :param samples: of one length
    :param calls: of every layer: what it is called with beside the hidden states
    :param hidden: inputs of the layers so far, the last output too, shape [batch, sequence, d]
    :param graphs: (input, output) of every layer on the device, where the graph is kept for the backward pass
    :param wanted: the dense model's outputs of every layer; None without a loss on them
    :param above: gradient at the output of the layer at hand
    """

    samples: list[Sample]
    calls: list[LayerCall]
    hidden: list[Tensor]
    graphs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    wanted: list[Tensor] | None = None
    above: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        return torch.stack([sample.tokens for sample in self.samples])


class LayeredModel:
    """Runs a model whose weights lie on the host, decoder layer by decoder layer.

    :param model: its weights and buffers are plain tensors
    :param device: that layers run on
    :param dtype: of weights and hidden states there
    :param ahead: whether the next layer's weights are fetched while one computes
    :param vocabulary: rows of the output embeddings that are there at once
    :ivar layers: the decoder layers
    :ivar rest: names, within the base model, of what stands on the last layer: neither layers nor embeddings
    """

    def __init__(
        self,
        model: PreTrainedModel,
        room: Room,
        device: torch.device,
        dtype: torch.dtype,
        ahead: bool = False,
        vocabulary: int = 1 << 20,
    ):
        self.model, self.room, self.device, self.dtype = model, room, device, dtype
        self.layers = [layer for _, layer in find_decoder_layers(model)]
        self._base: nn.Module = model.base_model
        self._vocabulary, self._ahead = vocabulary, ahead
        self._embeddings = [module for module in self._base.modules() if isinstance(module, nn.Embedding)]
        self.rest = list_rest(model)
        self._calls: dict[tuple[int, ...], list[LayerCall]] = {}
        self._side = torch.cuda.Stream(device) if ahead and device.type == "cuda" else None

    # -- what is on the device ------------------------------------------------------------------------------------

    def visit(self, order: Sequence[int]) -> Iterator[tuple[int, Weights]]:
        """Give every layer's weights, on the device while it is its turn."""
        ahead: Weights | None = None
        for position, index in enumerate(order):
            weights = self._take(self._send(index) if ahead is None else ahead)
            following = order[position + 1 : position + 2]
            ahead = self._send(following[0]) if self._ahead and following else None
            yield index, weights
            del weights

    def fetch_rest(self) -> Weights:
        """Return what stands on the last layer, on the device."""
        return {name: self._move(tensor) for name, tensor in self.rest.items()}

    def make_head(self) -> Head:
        """Return the output embeddings, in pieces."""
        family, config = find_family(self.model), self.model.config
        scale = getattr(config, family.logit_scale) if family.logit_scale else 1.0
        return Head(self._split_head, scale, getattr(config, family.logit_cap, None) if family.logit_cap else None)

    def _split_head(self) -> Iterator[Piece]:
        head: Any = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        for start in range(0, len(head.weight), self._vocabulary):
            rows = slice(start, start + self._vocabulary)
            yield start, self._move(head.weight[rows]), None if bias is None else self._move(bias[rows])

    def _send(self, index: int) -> Weights:
        """Start a layer's weights on their way: those of a quantiser later in the recipe stay, they have no values yet."""
        layer = self.layers[index]
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))  # what the update wrote is to be seen
        with torch.cuda.stream(self._side) if self._side else nullcontext():
            return {
                name: self._move(tensor)
                for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
                if name.rpartition(".")[2] not in QUANTISER_PARAMETERS
            }

    def _take(self, weights: Weights) -> Weights:
        if self._side is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self._side)
            for tensor in weights.values():
                tensor.record_stream(here)
        return weights

    def _move(self, tensor: Tensor) -> Tensor:
        return self._cast(self.room.to_device(tensor.detach(), self.device))

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    # -- forward --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, samples: list[Sample]) -> Flow:
        """Look a micro-batch up where the embeddings are; what layers are called with depends on its shape alone."""
        tokens = torch.stack([sample.tokens for sample in samples]).to(next(self.model.parameters()).device)
        seen: list[tuple[tuple, dict[str, Any]]] = []

        def take(*args: Any, **kwargs: Any) -> Tensor:
            seen.append((args, kwargs))
            return args[0] if args else kwargs["hidden_states"]

        with self.room.on_host(), ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(patch_attr(layer, "forward", take))
            self._base(input_ids=tokens, use_cache=False)
            args, kwargs = seen[0]
            hidden = self._cast(self.room.park(args[0] if args else kwargs["hidden_states"]))
            shape = tuple(tokens.shape)
            if shape not in self._calls:
                self._calls[shape] = self._record(seen)
        return Flow(samples, self._calls[shape], [hidden])

    def _record(self, seen: list[tuple[tuple, dict[str, Any]]]) -> list[LayerCall]:
        calls: list[LayerCall] = []
        for args, kwargs in seen:
            call = LayerCall.record(args, kwargs, calls[-1] if calls else None, self.room)
            calls.append(replace(call, hidden=torch.empty(0), tokens=None, device=self.device))
        return [replace(c, args=tree_map(self._cast, c.args), kwargs=tree_map(self._cast, c.kwargs)) for c in calls]

    def run(self, index: int, weights: Weights, flow: Flow, hidden: Tensor) -> Tensor:
        """Run a layer on a micro-batch, with the weights given."""
        layer = self.layers[index]
        return flow.calls[index].repeat(lambda *a, **k: functional_call(layer, weights, a, k), self.room, hidden)

    @torch.no_grad()
    def forward(
        self,
        flows: Sequence[Flow],
        keep: bool = True,
        prepare: Callable[[int, Weights], bool] | None = None,
        seed: Callable[[int, int], None] | None = None,
    ) -> None:
        """Take micro-batches through all layers.

        :param keep: keep the inputs of all layers on the host; the last output alone else
        :param prepare: called with the number and the weights of a layer; says whether its graphs are kept on the device
        :param seed: called with the numbers of layer and micro-batch before each run
        """
        for index, weights in self.visit(range(len(self.layers))):
            with_graph = prepare is not None and prepare(index, weights)
            for number, flow in enumerate(flows):
                if seed is not None:
                    seed(index, number)
                hidden = self.room.to_device(flow.hidden[-1], self.device)
                run = self._run_with_graph if with_graph else self.run
                output = run(index, weights, flow, hidden)
                flow.hidden = [*(flow.hidden if keep else []), self.room.park(output)]
                del hidden, output
            del weights

    def _run_with_graph(self, index: int, weights: Weights, flow: Flow, hidden: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            output = self.run(index, weights, flow, leaf)
        flow.graphs.append((leaf, output))
        return output

    def finish(self, flow: Flow, hidden: Tensor, weights: Weights) -> Tensor:
        """Run what stands on the last layer; embeddings give zeros, all on the device.

        :param hidden: output of the last layer, on the device
        :param weights: as :meth:`fetch_rest` gives them
        :return: inputs of the head, shape [batch, sequence, d]
        """

        def skip(*args: Any, **kwargs: Any) -> Tensor:
            return args[0] if args else kwargs["hidden_states"]

        def zeros(width: int) -> Callable[..., Tensor]:
            return lambda ids, *_a, **_k: hidden.new_zeros((*ids.shape, width))

        with ExitStack() as stack:
            for layer in self.layers[:-1]:
                stack.enter_context(patch_attr(layer, "forward", skip))
            stack.enter_context(patch_attr(self.layers[-1], "forward", lambda *_a, **_k: hidden))
            for module in self._embeddings:
                stack.enter_context(patch_attr(module, "forward", zeros(module.embedding_dim)))
            inputs = {"input_ids": self.room.to_device(flow.tokens, self.device), "use_cache": False}
            return functional_call(self._base, weights, (), inputs).last_hidden_state


def find_compute_dtype(model: PreTrainedModel, compute: str) -> torch.dtype:
    """Return the dtype of weights and hidden states in a layer, see the field ``compute``."""
    if compute != "model":
        return getattr(torch, compute)
    return torch.bfloat16 if model.dtype == torch.float16 else model.dtype


def list_rest(model: PreTrainedModel) -> Weights:
    """Return what of the base model is neither layers nor embeddings, by name within it."""
    base: nn.Module = model.base_model
    apart = [layer for _, layer in find_decoder_layers(model)]
    apart += [module for module in base.modules() if isinstance(module, nn.Embedding)]
    known = {id(part) for module in apart for part in module.modules()}
    return {
        f"{name}.{leaf}" if name else leaf: tensor
        for name, module in base.named_modules()
        if id(module) not in known
        for leaf, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }


@contextmanager
def carry_weights(model: nn.Module, room: Room, device: torch.device) -> Iterator[None]:
    """Let the whole model be on the device while the block lasts."""

    def move(to: Callable[[Tensor], Tensor]) -> None:
        for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
            tensor.data = to(tensor.data)

    move(lambda tensor: room.to_device(tensor, device))
    try:
        yield
    finally:
        move(room.to_host)
