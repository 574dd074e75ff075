"""Position of the decoder layers in a model."""

from __future__ import annotations

import copy
from typing import Any

from compressed_tensors.offload import disable_onloading
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

PREFIX = "StruPrune"  # of the names of pruned classes
PADDING = "struprune_padding"  # attribute of a module: the padding of its narrow linears, by name


def is_pruned(kind: type) -> bool:
    """Return whether a class of models or configurations is a pruned one."""
    return kind.__name__.startswith(PREFIX)


def find_stock(kind: type) -> Any:
    """Return the dense class of a class, pruned or not."""
    return next(base for base in kind.__mro__ if not is_pruned(base))


def make_dense_config(config: PreTrainedConfig) -> Any:
    """Return a copy of the dense class' configuration, from the configuration of a dense or pruned model."""
    return config.make_dense() if is_pruned(type(config)) else copy.deepcopy(config)


def locate_layers(model: nn.Module) -> str:
    """Return the name of the list of a model's decoder layers: the list on the text path with the most parameters.

    Every member of the list holds a linear.

    :raises ValueError: there is no such list
    """
    with disable_onloading():
        sizes = {stack: sum(p.numel() for p in stack.parameters()) for stack in _list_stacks(find_decoder(model))}
    best = max(sizes, key=lambda stack: sizes[stack], default=None)
    if best is None:
        raise ValueError(
            f"model: it must have a list of decoder layers that hold linears, got none in {type(model).__name__}. "
            "Choose another model."
        )
    return next(name for name, module in model.named_modules() if module is best)


def find_decoder(model: nn.Module) -> nn.Module:
    """Return the module that ``get_decoder`` returns where it contains lists of layers; else the model."""
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    return decoder if decoder is not None and _list_stacks(decoder) else model


def _list_stacks(module: nn.Module) -> list[nn.ModuleList]:
    """Return the outermost lists of modules that hold linears, without those of parts that do not process text."""
    if isinstance(module, nn.ModuleList) and module and all(map(_holds_linear, module)):
        return [module]
    parts = [part for part in module.children() if "text" in getattr(part, "input_modalities", "text")]
    return [stack for part in parts for stack in _list_stacks(part)]


def _holds_linear(layer: nn.Module) -> bool:
    return any(isinstance(each, (nn.Linear, Conv1D)) for each in layer.modules())
