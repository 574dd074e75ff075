"""Decoder layers and the head in float32 while they run, where the device has no products of their own dtype."""

from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.layerwise.calls import map_tensors, split_call
from struprune_plugin.linalg.second_moments import multiply_in_parts
from struprune_plugin.model.layers import find_decoder_layers

_ROWS = 4096  # of the head that are converted at once
Dtypes = Collection[torch.dtype]


@contextmanager
def compute_wide(model: PreTrainedModel, dtypes: Dtypes) -> Iterator[None]:
    """Let decoder layers and the head of some dtypes compute in float32. Their weights stay as they are, and between layers
    hidden states keep their dtype; logits are float32."""
    head = model.get_output_embeddings()
    with ExitStack() as stack:
        if dtypes:
            for _, layer in find_decoder_layers(model):
                run = partial(_run_layer, layer, layer.forward, dtypes)
                stack.enter_context(patch_attr(layer, "forward", run))
            if isinstance(head, nn.Linear):
                stack.enter_context(patch_attr(head, "forward", partial(_run_head, head, head.forward, dtypes)))
        yield


@contextmanager
def widen_weights(module: nn.Module, dtypes: Dtypes) -> Iterator[None]:
    """Show a module's weights of some dtypes as float32 copies in the block, in which they must not be changed."""
    with ExitStack() as stack:
        for part in module.modules() if dtypes else ():
            for kind in ("_parameters", "_buffers"):
                held = dict(vars(part)[kind].items())  # offloaded ones come to the device
                wide = {name: None if tensor is None else _widen(dtypes, tensor) for name, tensor in held.items()}
                if any(wide[name] is not held[name] for name in held):
                    stack.callback(vars(part).__setitem__, kind, vars(part)[kind])
                    vars(part)[kind] = wide
        yield


def _widen(dtypes: Dtypes, tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in dtypes else tensor


def _run_layer(layer: nn.Module, forward: Callable[..., Any], dtypes: Dtypes, /, *args: Any, **kwargs: Any) -> Any:
    """Run a decoder layer on float32 copies of its weights and arguments; what it returns, or puts into mappings that it fills,
    has the dtype of the hidden states."""
    dtype = split_call(args, kwargs)[1].dtype
    if dtype not in dtypes:
        return forward(*args, **kwargs)
    widen = partial(map_tensors, partial(_widen, dtypes))
    narrow = partial(map_tensors, lambda part: part.to(dtype) if part.dtype is torch.float32 else part)
    places: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    wide = {place: widen(value) for place, value in places.items()}
    mappings = {place: value for place, value in places.items() if isinstance(value, MutableMapping)}
    filled = [(mapping, wide[place], dict(wide[place])) for place, mapping in mappings.items()]
    positional = [wide.pop(place) for place in range(len(args))]
    with widen_weights(layer, dtypes):
        output = forward(*positional, **wide)
    for mapping, copy, before in filled:
        mapping.update({key: narrow(value) for key, value in copy.items() if before.get(key) is not value})
    return narrow(output)


def _run_head(head: nn.Linear, forward: Callable[..., Tensor], dtypes: Dtypes, inputs: Tensor) -> Tensor:
    """Return the logits in float32; no more than a part of the weights is converted at once."""
    weight = head.weight
    if weight.dtype not in dtypes:
        return forward(inputs)
    logits = _PartedLinear.apply(inputs.to(weight.device).float(), weight)
    return logits if head.bias is None else logits + head.bias.float()


class _PartedLinear(torch.autograd.Function):
    """``x W^T`` in float32 with a weight of another dtype, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.cat([nn.functional.linear(inputs, rows.float()) for rows in weight.split(_ROWS)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        product = multiply_in_parts(gradient.flatten(0, -2), weight)
        return product.view(*gradient.shape[:-1], weight.shape[1]), None
