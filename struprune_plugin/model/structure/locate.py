"""Parts of a model that others ask for: its decoder layers, linears, dense class and numbers of heads."""

import copy
from typing import Any, cast

from compressed_tensors.offload import disable_onloading
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

PREFIX = "StruPrune"  # of the names of pruned classes
HEAD_COUNTS = ("num_heads", "num_key_value_heads")  # attributes of attention modules that removed heads change
PADDING = "struprune_padding"  # attribute of a module: the padding of its narrow linears, by name


def is_pruned(derived: type) -> bool:
    """Return whether a class of models or configurations is a pruned one."""
    return derived.__name__.startswith(PREFIX)


def find_stock(derived: type) -> Any:
    """Return the dense class of a class, pruned or not."""
    return next(base for base in derived.__mro__ if not is_pruned(base))


def make_dense_config(config: PreTrainedConfig) -> Any:
    """Return a copy of the dense class' configuration, from the configuration of a dense or pruned model."""
    return config.make_dense() if is_pruned(type(config)) else copy.deepcopy(config)


def locate_layers(model: nn.Module) -> str:
    """Return the name of the list of a model's decoder layers: of the lists on the text path the one with the most parameters.

    :raises ValueError: there is no list of layers that all hold a linear
    """
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    stacks = (_list_stacks(decoder) if decoder is not None else []) or _list_stacks(model)
    if not stacks:
        raise ValueError(
            f"model: it must have a list of decoder layers that hold linears, got none in {type(model).__name__}. "
            "Choose another model."
        )
    with disable_onloading():
        best = max(stacks, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))
    return next(name for name, module in model.named_modules() if module is best)


def _list_stacks(module: nn.Module) -> list[nn.ModuleList]:
    """Return the outermost lists of modules that hold linears, without those of parts that do not process text."""
    if isinstance(module, nn.ModuleList) and module and all(map(list_linears, module)):
        return [module]
    parts = [part for part in module.children() if "text" in getattr(part, "input_modalities", "text")]
    return [stack for part in parts for stack in _list_stacks(part)]


def find_linear(layer: nn.Module, name: str) -> nn.Linear:
    """Return a linear of a decoder layer by its name within the layer."""
    return cast(nn.Linear, layer.get_submodule(name))


def list_linears(layer: nn.Module) -> dict[str, nn.Module]:
    """Return all linears of a layer by name."""
    return {name: module for name, module in layer.named_modules() if isinstance(module, (nn.Linear, Conv1D))}


def read_counts(attention: nn.Module) -> dict[str, int]:
    """Return the numbers of heads that a module stores in attributes, by name."""
    return {name: getattr(attention, name) for name in HEAD_COUNTS if hasattr(attention, name)}


def read_numbers(module: nn.Module) -> dict[str, int | float]:
    """Return the numbers that a module stores in attributes, by name."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float) and name[0] != "_"}


def scale_counts(attention: nn.Module, kept: int, present: int) -> None:
    """Scale the numbers of heads that a module stores to ``kept`` of ``present`` ones."""
    for name, count in read_counts(attention).items():
        setattr(attention, name, count * kept // present)


def read_padding(layer: nn.Module, name: str) -> dict[str, Any]:
    """Return how the module around a linear pads it: ``pad`` for its rows, ``narrow`` for its columns; empty where it does not.

    The forms are those of :class:`~struprune_plugin.export.modeling_struprune.LinearLayout`; they are not copies.
    """
    owner, _, last = name.rpartition(".")
    return vars(layer.get_submodule(owner)).get(PADDING, {}).get(last, {})
