"""Saving of pruned models of any class: differences from the dense class are read from the modules, not described per class."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.offload.module import unwrap_offload_forward
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from struprune_plugin.export import modeling_struprune as modeling
from struprune_plugin.linalg.second_moments import append_bias
from struprune_plugin.model.experts import list_packed_shapes
from struprune_plugin.model.layers import find_layouts
from struprune_plugin.model.structure.layout import UnitLayout
from struprune_plugin.model.structure.locate import (
    PADDING,
    find_stock,
    make_dense_config,
    read_counts,
    read_numbers,
    read_padding,
)
from struprune_plugin.model.surgery import change_tensor, read_weight, set_weight
from struprune_plugin.model.unit_kind import UNIT_KINDS

Shapes = dict[str, tuple[int, ...]]


@contextmanager
def keep_offload(module: nn.Module) -> Iterator[None]:
    """Unwrap the offloading of a module's forward pass during the block, so that its class and forward function can change."""
    with unwrap_offload_forward(module):
        yield
        if not (isinstance(module, nn.Linear) and hasattr(module, "quantization_scheme")):  # a quantiser has wrapped it
            module.__dict__.pop("forward", None)


def replace_conv1d(model: nn.Module) -> None:
    """Convert a dense model's Conv1D modules (GPT-2), which store their weights transposed, to linears, before anything is cut."""
    for module in [module for module in model.modules() if type(module) is Conv1D]:
        with keep_offload(module):
            module.__class__ = nn.Linear
            module.out_features, module.in_features = module.nf, module.nx
        change_tensor(module, "weight", torch.t)


def restore_conv1d(model: nn.Module) -> None:
    """Undo :func:`replace_conv1d`."""
    linears: list[Any] = [m for m in model.modules() if type(m) is nn.Linear and hasattr(m, "nf")]
    for module in linears:
        with keep_offload(module):
            module.__class__ = Conv1D
            module.nx, module.nf = module.in_features, module.out_features
        change_tensor(module, "weight", torch.t)


def grow_padded(model: nn.Module) -> None:
    """Restore the dense shapes of a model's padded linears, with zeros, and its stock classes; its function does not change."""
    for owner in list_padded(model):
        for name, padding in owner.struprune_padding.items():
            if name not in owner._modules:  # a buffer, which is as wide as ever
                continue
            linear = owner.get_submodule(name)
            weight, bias = read_weight(linear)
            if "narrow" in padding:
                weight = modeling.pad(weight, padding["narrow"])
            weight = append_bias(weight, bias)
            set_weight(linear, modeling.pad(weight.mT, padding["pad"]).mT if "pad" in padding else weight)
        _restore_class(owner)


def release_padding(model: nn.Module) -> None:
    """Let modules that see zeros in place of removed units count the present ones, for a configuration of fewer units."""
    for layer, layout in find_layouts(model):
        for unit in layout.units:
            if name := UNIT_KINDS.parse(unit.kind).release(unit, layer):
                for owner in list_padded(layer.get_submodule(name)):
                    _restore_class(owner)


def _restore_class(owner: Any) -> None:
    """Restore the stock class of a module whose linears have the width that it handles."""
    with keep_offload(owner):
        owner.__class__ = find_stock(type(owner))
        del owner.struprune_padding


def list_padded(model: nn.Module) -> list[Any]:
    """Return the modules of a model that hold padded linears."""
    return [module for module in model.modules() if PADDING in vars(module)]


def copy_settings(old: Any, new: Any) -> None:
    """Copy the attributes outside the fields from one configuration to another."""
    new.dtype, new._name_or_path = old.dtype, old._name_or_path
    new._attn_implementation = old._attn_implementation
    new._experts_implementation = old._experts_implementation


def share_config(model: nn.Module, old: Any, new: Any) -> None:
    """Set another configuration in all modules that hold the old one."""
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new


def build_dense(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a dense model of a class and configuration, with its weights on the meta device."""
    with torch.device("meta"):
        return model_class._from_config(copy.deepcopy(config))


def describe_layout(model: PreTrainedModel, layers: str) -> modeling.Layout:
    """Return the layout of a sliced model: all that differs from its dense class in the list ``layers`` of decoder layers.

    :raises ValueError: another tensor differs
    """
    dense = build_dense(find_stock(type(model)), make_dense_config(model.config))
    layout: modeling.Layout = {"version": modeling.VERSION, "layers": layers}
    if any(hasattr(module, "nf") and isinstance(module, nn.Linear) for module in model.modules()):
        layout["conv1d"] = True
        modeling.replace_conv1d(dense)
    pairs = (each.get_submodule(layers).children() for each in (model, dense))
    units = [measured.units for _, measured in find_layouts(model)]
    differences = (_describe_layer(*each) for each in zip(*pairs, units, strict=True))
    linears, counts, parameters = zip(*differences, strict=True)
    layout["linears"] = [*linears]
    if any(counts):
        layout["counts"] = [*counts]
    if any(parameters):
        layout["parameters"] = [*parameters]
    modeling.fit_layers(dense, layout)
    if problems := list_differences(list_shapes(model), list_shapes(dense)):
        raise ValueError(f"{problems[0]}. Only linears of decoder layers may be cut.")
    return layout


def _describe_layer(
    layer: nn.Module, dense: nn.Module, units: Sequence[UnitLayout]
) -> tuple[dict[str, modeling.LinearLayout], dict[str, int | float], dict[str, list[int]]]:
    """Return a layer's linears, numbers that modules store, and shapes of other tensors that differ from the dense layer's."""
    linears, counts, known = dict[str, Any](), dict[str, int | float](), dict[str, Any](dense.named_modules())
    # modules whose numbers change with that of units beside the linears'
    resized = {name.rpartition(".")[0] for unit in units if unit.tensors for name in (*unit.tensors, unit.output)}
    for name, module in layer.named_modules():
        old = known.get(name)
        if old is None:  # an expert split by llm-compressor
            continue
        if isinstance(module, nn.Linear):
            said = {"shape": [module.out_features, module.in_features], **copy.deepcopy(read_padding(layer, name))}
            if said != {"shape": [old.out_features, old.in_features]}:
                linears[name] = said
        for key, count in (read_numbers if name in resized else read_counts)(module).items():
            if getattr(old, key, count) != count:
                counts[f"{name}.{key}"] = count
    wanted, shapes = list_shapes(dense), list_shapes(layer)
    experts = {name.rpartition(".")[0] for name, shape in wanted.items() if len(shape) == 3}
    beside = {name for unit in units for name in unit.tensors}
    linears |= {name: copy.deepcopy(padding) for name in beside if (padding := read_padding(layer, name))}
    others = {name: shape for name, shape in shapes.items() if name in beside or name.rpartition(".")[0] in experts}
    return linears, counts, {n: [*shape] for n, shape in others.items() if wanted.get(n, shape) != shape}


def list_shapes(model: nn.Module) -> Shapes:
    """Return the shapes of a model's parameters and saved buffers by name, including those of a quantiser later in the recipe."""
    with disable_onloading():
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}


def list_stock_shapes(model: nn.Module) -> Shapes:
    """Return a model's shapes after growing its padded linears, restoring its transposed modules and packing its experts."""
    shapes = list_shapes(model)
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        size = {"pad": linear.out_features, "narrow": linear.in_features}
        for key, form in read_padding(model, name).items():
            size[key] = form["blocks"] * sum(count * wide for count, _, wide in form["segments"])
        rows, columns = size.values()
        shapes[f"{name}.weight"] = (columns, rows) if hasattr(linear, "nf") else (rows, columns)
        if linear.bias is not None:
            shapes[f"{name}.bias"] = (rows,)
    return shapes | list_packed_shapes(model)


def list_differences(shapes: Shapes, wanted: Shapes) -> list[str]:
    """Return a message for every tensor whose shape differs from the class' shape."""
    return [
        f"{name}: must have the shape {shape} of its class and configuration, got {shapes[name]}"
        for name, shape in wanted.items()
        if shapes.get(name, shape) != shape  # experts split by llm-compressor have other names
    ]
