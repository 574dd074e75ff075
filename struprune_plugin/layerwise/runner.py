"""Layer-by-layer runs of a model on the host: one decoder layer at a time on the device, all micro-batches of a step through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from struprune_plugin.layerwise.calls import LayerCall, States
from struprune_plugin.layerwise.ends import bypass_layers, enter_layers, run_to_head
from struprune_plugin.layerwise.head import Head, Piece
from struprune_plugin.layerwise.samples import Sample
from struprune_plugin.model.layers import QUANTISER_PARAMETERS, find_decoder_layers
from struprune_plugin.model.structure.locate import find_decoder
from struprune_plugin.runtime.device_context import DeviceContext

Weights = dict[str, Tensor]


@dataclass
class MicroBatch:
    """Micro-batch on its way through the layers, stored on the host.

    :param samples: samples of one length
    :param calls: calls of all layers, without the hidden states
    :param states: inputs of the layers that have run, and the last output
    :param wanted: the dense model's hidden states after every layer; None without a loss on them
    :param above: gradients at the present layer's output states, in the order of :meth:`States.list_learning`
    """

    samples: list[Sample]
    calls: list[LayerCall]
    states: list[States]
    wanted: list[Tensor] | None = None
    above: list[Tensor] | None = None

    @property
    def tokens(self) -> Tensor:
        return torch.stack([sample.tokens for sample in self.samples])


class LayerwiseRunner:
    """Runner of a model whose weights are on the host, decoder layer by decoder layer.

    :param model: the model; its weights and buffers are plain tensors
    :param device: device on which layers run
    :param dtype: dtype of weights and hidden states on the device
    :param ahead: whether the next layer's weights are fetched while a layer computes
    :param vocabulary: number of rows of the output embeddings on the device at the same time
    :ivar layers: the decoder layers
    :ivar rest: tensors of the decoder outside layers and embeddings, such as the final norm, by name within the base model
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context: DeviceContext,
        device: torch.device,
        dtype: torch.dtype,
        ahead: bool = False,
        vocabulary: int = 1 << 20,
    ):
        self.model, self.context, self.device, self.dtype = model, context, device, dtype
        self.layers = [layer for _, layer in find_decoder_layers(model)]
        self._base: nn.Module = model.base_model
        self._prefix = next(
            f"{name}." if name else "" for name, module in model.named_modules() if module is self._base
        )
        self._vocabulary, self._ahead = vocabulary, ahead
        self._embeddings = [module for module in self._base.modules() if isinstance(module, nn.Embedding)]
        self.rest = list_rest(model)
        self._calls: dict[torch.Size, list[LayerCall]] = {}  # the last calls by token shape; equal tensors are shared
        self._head: Head | None = None
        self._side = torch.cuda.Stream(device) if ahead and device.type == "cuda" else None

    # -- what is on the device ------------------------------------------------------------------------------------

    def stream_layers(self, order: Sequence[int]) -> Iterator[tuple[int, Weights]]:
        """Yield (index, weights on the device) of the layers, in an order."""
        ahead: Weights | None = None
        for position, index in enumerate(order):
            weights = self._take(self._send(index) if ahead is None else ahead)
            following = order[position + 1 : position + 2]
            ahead = self._send(following[0]) if self._ahead and following else None
            yield index, weights
            del weights

    def fetch_rest(self) -> Weights:
        """Return the tensors of :attr:`rest` on the device."""
        return {name: self._move(tensor) for name, tensor in self.rest.items()}

    def make_head(self) -> Head:
        """Return the output embeddings, in pieces."""
        if self._head is None:
            with self.context.on_host():
                self._head = Head.of(self.model, self._split_head)
        return self._head

    def _split_head(self) -> Iterator[Piece]:
        head: Any = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        for start in range(0, len(head.weight), self._vocabulary):
            rows = slice(start, start + self._vocabulary)
            yield start, self._move(head.weight[rows]), None if bias is None else self._move(bias[rows])

    def _send(self, index: int) -> Weights:
        """Start to fetch a layer's weights, without those of a quantiser later in the recipe, which have no values yet."""
        layer = self.layers[index]
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))  # after the update's writes
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
        return self._cast(self.context.to_device(tensor.detach(), self.device))

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    # -- forward --------------------------------------------------------------------------------------------------

    def embed(self, samples: list[Sample]) -> MicroBatch:
        """Return an embedded micro-batch with its calls; tensors equal to those of the last one of its shape are shared."""
        tokens = torch.stack([sample.tokens for sample in samples]).to(next(self.model.parameters()).device)
        with self.context.on_host():
            flow = enter_layers(self.model, {"input_ids": tokens}, self.context, self._calls.get(tokens.shape))
            states = flow.states.map(self._cast)
        calls = [replace(call, hidden=torch.empty(0), device=self.device, dtype=self.dtype) for call in flow.calls]
        self._calls[tokens.shape] = calls
        return MicroBatch(samples, calls, [states])

    def run(self, index: int, weights: Weights, micro_batch: MicroBatch, states: States) -> States:
        """Run a layer on a micro-batch with given weights."""
        layer = self.layers[index]
        return micro_batch.calls[index].run(lambda *a, **k: functional_call(layer, weights, a, k), self.context, states)

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[MicroBatch], keep: bool = True, seed: Callable[[int, int], None] | None = None
    ) -> None:
        """Run micro-batches through all layers.

        :param keep: whether the inputs of all layers are stored on the host; else only the last output
        :param seed: called with the indices of layer and micro-batch before each run
        """
        for index, weights in self.stream_layers(range(len(self.layers))):
            for number, micro_batch in enumerate(micro_batches):
                if seed is not None:
                    seed(index, number)
                output = self.run(index, weights, micro_batch, micro_batch.states[-1])
                micro_batch.states = [*(micro_batch.states if keep else []), output.map(self.context.park)]
                del output
            del weights

    @torch.no_grad()
    def finish_all(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield every micro-batch after all layers have run, with the inputs of its head on the device."""
        rest = self.fetch_rest()
        for micro_batch in micro_batches:
            yield (
                micro_batch,
                self.finish(micro_batch, self.context.to_device(micro_batch.states[-1].hidden, self.device), rest),
            )

    def finish(self, micro_batch: MicroBatch, hidden: Tensor, weights: Weights) -> Tensor:
        """Run the modules after the last layer on the device; embeddings return zeros.

        :param hidden: output of the last layer, on the device
        :param weights: as :meth:`fetch_rest` returns them
        :return: inputs of the head, shape [batch, sequence, d]
        """

        def zeros(module: nn.Embedding) -> Callable[..., Tensor]:
            own = module.forward

            def look_up(ids: Any, *args: Any, **kwargs: Any) -> Tensor:
                if isinstance(ids, Tensor):
                    return hidden.new_zeros((*ids.shape, module.embedding_dim))
                return own(ids, *args, **kwargs).to(hidden)  # positions, from the embedded shape

            return look_up

        with ExitStack() as stack:
            stack.enter_context(bypass_layers(self.layers, lambda _: hidden))
            for module in self._embeddings:
                stack.enter_context(patch_attr(module, "forward", zeros(module)))
            batch = {"input_ids": self.context.to_device(micro_batch.tokens, self.device)}
            named = {self._prefix + name: tensor for name, tensor in weights.items()}
            run = partial(functional_call, self.model, named, ())
            return run_to_head(lambda **inputs: run(inputs), batch, self.model.get_output_embeddings())


def compute_dtype_of(model: PreTrainedModel, compute: str) -> torch.dtype:
    """Return the dtype of weights and hidden states in a layer, see the field ``compute``."""
    if compute != "model":
        return getattr(torch, compute)
    return torch.bfloat16 if model.dtype == torch.float16 else model.dtype


def list_rest(model: PreTrainedModel) -> Weights:
    """Return the tensors of the decoder outside layers and embeddings, by name within the base model."""
    base: nn.Module = model.base_model
    apart = [layer for _, layer in find_decoder_layers(model)]
    apart += [module for module in base.modules() if isinstance(module, nn.Embedding)]
    known = {id(part) for module in apart for part in module.modules()}
    own = {id(part) for part in find_decoder(model).modules()}
    return {
        f"{name}.{leaf}" if name else leaf: tensor
        for name, module in base.named_modules()
        if id(module) in own - known
        for leaf, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }
