"""Position of the decoder layers in a model."""

from __future__ import annotations

from compressed_tensors.offload import disable_onloading
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

ABSENT = "StruPruneAbsent"  # class of what stands for a module that is gone


def locate_layers(model: nn.Module) -> str:
    """Return the name of the list of a model's decoder layers: of its lists on the text's way, that with the most parameters.

    Every member of it holds a linear.

    :raises ValueError: there is none
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
    """Return what a model calls its decoder, where lists of layers are in it; else the model."""
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    return decoder if decoder is not None and _list_stacks(decoder) else model


def _list_stacks(module: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of modules that hold linears, the outermost first, but for those of parts that are not for text."""
    if isinstance(module, nn.ModuleList) and module and all(map(_holds_linear, module)):
        return [module]
    parts = [part for part in module.children() if "text" in getattr(part, "input_modalities", "text")]
    return [stack for part in parts for stack in _list_stacks(part)]


def _holds_linear(layer: nn.Module) -> bool:
    """Return whether a layer has a linear, or had one: whole sublayers may have gone from it."""
    kinds = (nn.Linear, Conv1D)
    return any(isinstance(each, kinds) or type(each).__name__ == ABSENT for each in layer.modules())
