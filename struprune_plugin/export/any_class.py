"""Saving of pruned models of any class: differences from the dense class are read from the modules, not described per class."""

from __future__ import annotations

import copy
from collections.abc import Iterator
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
from struprune_plugin.model.layers import find_layouts, pads_heads, read_counts, read_padding
from struprune_plugin.model.structure.locate import PADDING, find_stock, is_pruned
from struprune_plugin.model.surgery import read_weight, set_weight

Shapes = dict[str, tuple[int, ...]]


@contextmanager
def keep_offload(module: nn.Module) -> Iterator[None]:
    """Unwrap the offloading of a module's forward pass during the block, so that its class and forward function can change.

    The forward function of a linear that a later quantiser has wrapped stays: no class of a linear here changes it.
    """
    with unwrap_offload_forward(module):
        yield
        if not (isinstance(module, nn.Linear) and hasattr(module, "quantization_scheme")):
            module.__dict__.pop("forward", None)


def replace_conv1d(model: nn.Module) -> None:
    """Convert a dense model's Conv1D modules (GPT-2), which store their weights transposed, to linears, before anything is cut."""
    for module in [module for module in model.modules() if type(module) is Conv1D]:
        with keep_offload(module):
            modeling.replace_conv1d(module)


def restore_conv1d(model: nn.Module) -> None:
    """Undo :func:`replace_conv1d`."""
    linears: list[Any] = [m for m in model.modules() if type(m) is nn.Linear and hasattr(m, "nf")]
    for module in linears:
        with keep_offload(module):
            modeling.transpose(module, Conv1D)
            module.nx, module.nf = module.in_features, module.out_features


def adopt_padding(layer: nn.Module, name: str, padding: modeling.Padding) -> None:
    """Let the module around a linear, sliced or about to be sliced, handle the dense width of it from now on.

    :param layer: a decoder layer
    :param name: name of the linear in it
    :raises ValueError: the sizes do not match the linear's number of rows or columns
    """
    linear = layer.get_submodule(name)
    for key, size in (("pad", linear.out_features), ("narrow", linear.in_features)):
        form = padding.get(key)
        if form is not None and count_channels(form, 1) != size:
            raise ValueError(f"{key}: must keep the {size} channels of {name}, got {form}. Slice it first.")
    owner_name, _, own = name.rpartition(".")
    owner = layer.get_submodule(owner_name)
    with keep_offload(owner):
        modeling.adopt_padding(owner, own, padding)


def count_channels(form: Any, width: int) -> int:
    """Return the number of channels that a linear has (``width`` 1) or that the module around it handles (2)."""
    return form["blocks"] * sum(segment[0] * segment[width] for segment in form["segments"])


def grow_padded(model: nn.Module) -> None:
    """Restore the dense shapes of a model's padded linears, with zeros, and its stock classes; its function does not change."""
    for owner in list_padded(model):
        for name, padding in owner.struprune_padding.items():
            linear = owner.get_submodule(name)
            weight, bias = read_weight(linear)
            if "narrow" in padding:
                weight = modeling.pad(weight, padding["narrow"])
            weight = append_bias(weight, bias)
            set_weight(linear, modeling.pad(weight.mT, padding["pad"]).mT if "pad" in padding else weight)
        with keep_offload(owner):
            modeling.release_padding(owner)


def release_heads(model: nn.Module) -> None:
    """Let attention modules that see zeros in place of removed heads count the present ones, for a configuration of fewer heads."""
    for layer, layout in find_layouts(model):
        if layout.attention is None or not pads_heads(layout.attention, layer):
            continue
        _, kept, dense = read_padding(layer, layout.attention.output)["narrow"]["segments"][0]
        attention = layer.get_submodule(layout.attention.module)
        for name, count in read_counts(attention).items():
            setattr(attention, name, count * kept // dense)
        for owner in list_padded(attention):
            with keep_offload(owner):
                modeling.release_padding(owner)


def list_padded(model: nn.Module) -> list[Any]:
    """Return the modules of a model some of whose linears are padded."""
    return [module for module in model.modules() if PADDING in vars(module)]


def make_dense_config(config: PreTrainedConfig) -> Any:
    """Return a copy of the dense class' configuration, from the configuration of a dense or pruned model."""
    return modeling.make_dense_config(config) if is_pruned(type(config)) else copy.deepcopy(config)


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


def build_dense(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a dense model of a class, with its weights on the meta device.

    :param config: configuration of the dense class; it is copied
    """
    with torch.device("meta"):
        return kind._from_config(copy.deepcopy(config))


def describe_layout(model: PreTrainedModel, layers: str) -> modeling.Layout:
    """Return the layout of a sliced model: all that differs from its dense class.

    :param layers: name of the list of decoder layers
    :raises ValueError: another tensor differs
    """
    dense = build_dense(find_stock(type(model)), make_dense_config(model.config))
    layout: modeling.Layout = {"version": modeling.VERSION, "layers": layers}
    if any(hasattr(module, "nf") and isinstance(module, nn.Linear) for module in model.modules()):
        layout["conv1d"] = True
        modeling.replace_conv1d(dense)
    pairs = [*zip(*(m.get_submodule(layers).children() for m in (model, dense)), strict=True)]
    layout["linears"] = [_describe_linears(*pair) for pair in pairs]
    for key, describe in (("counts", _describe_counts), ("parameters", _describe_parameters)):
        if any(found := [describe(*pair) for pair in pairs]):
            layout[key] = found  # type: ignore[literal-required]
    modeling.fit_layers(dense, layout)
    problems = list_differences(list_shapes(model), list_shapes(dense))
    if problems:
        raise ValueError(f"{problems[0]}. Only linears of decoder layers may be cut.")
    return layout


def _describe_linears(layer: nn.Module, dense: nn.Module) -> dict[str, modeling.LinearLayout]:
    """Return the linears of a layer that differ from the dense layer's, without experts split by llm-compressor."""
    known, found = dict(dense.named_modules()), {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and name in known:
            old: Any = known[name]
            said: Any = {"shape": [module.out_features, module.in_features], **copy.deepcopy(read_padding(layer, name))}
            if said != {"shape": [old.out_features, old.in_features]}:
                found[name] = said
    return found


def _describe_counts(layer: nn.Module, dense: nn.Module) -> dict[str, int]:
    """Return the numbers of heads that a layer's modules store and that differ from those of the dense layer."""
    known = dict(dense.named_modules())
    named = [(name, module) for name, module in layer.named_modules() if name in known]
    return {
        f"{name}.{key}": count
        for name, module in named
        for key, count in read_counts(module).items()
        if getattr(known[name], key, count) != count
    }


def _describe_parameters(layer: nn.Module, dense: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of the experts' tensors of a layer that differ from those of the dense layer."""
    wanted, shapes = list_shapes(dense), list_shapes(layer)
    experts = {name.rpartition(".")[0] for name, shape in wanted.items() if len(shape) == 3}
    of_experts = {name: shape for name, shape in shapes.items() if name.rpartition(".")[0] in experts}
    return {name: list(shape) for name, shape in of_experts.items() if wanted.get(name, shape) != shape}


def list_shapes(model: nn.Module) -> Shapes:
    """Return the shapes of a model's parameters and saved buffers by name, including those of a quantiser later in the recipe."""
    with disable_onloading():
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}


def list_stock_shapes(model: nn.Module) -> Shapes:
    """Return a model's shapes after growing its padded linears, restoring its transposed modules and packing its experts."""
    shapes = list_shapes(model)
    sizes = {name: [m.out_features, m.in_features] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for path, owner in model.named_modules():
        for own, padding in owner.struprune_padding.items() if PADDING in vars(owner) else ():
            for i, key in enumerate(("pad", "narrow")):
                if key in padding:
                    sizes[f"{path}.{own}"][i] = count_channels(padding[key], 2)
    for name, (rows, columns) in sizes.items():
        linear = model.get_submodule(name)
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
