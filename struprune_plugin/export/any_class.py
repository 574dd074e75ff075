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
from struprune_plugin.model.structure.locate import find_stock, is_pruned
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
    for module in [module for module in model.modules() if hasattr(module, "nf")]:
        with keep_offload(module):
            modeling.restore_conv1d(module)


def mark_padded(linear: nn.Linear, spread: dict[str, Any] | None = None, gather: dict[str, Any] | None = None) -> None:
    """Mark a linear, sliced or about to be sliced, as padded: the module around it continues to handle the dense width.

    Parameters as in :func:`~struprune_plugin.export.modeling_struprune.adopt_padded`.

    :raises ValueError: the sizes do not match the linear's number of rows or columns
    """
    for name, form, size in (("spread", spread, linear.out_features), ("gather", gather, linear.in_features)):
        kept = size if form is None else form["outer"] * sum(count * kept for count, kept, _ in form["segments"])
        if kept != size:
            raise ValueError(
                f"{name}: must keep the {size} channels of the linear, got {kept} by {form}. Slice it first."
            )
    with keep_offload(linear):
        modeling.adopt_padded(linear, spread, gather)


def grow_padded(linear: Any) -> None:
    """Restore a padded linear's dense shape, with zeros, and its original class; its function does not change."""
    spread, gather = linear.spread, linear.gather
    weight, bias = read_weight(linear)
    if gather is not None:
        weight = modeling.widen(weight, gather)
    weight = append_bias(weight, bias)
    set_weight(linear, weight if spread is None else modeling.widen(weight.mT, spread).mT)
    with keep_offload(linear):
        modeling.release_padded(linear)


def list_padded(model: nn.Module) -> list[Any]:
    """Return the linears of a model that are padded."""
    return [module for module in model.modules() if hasattr(module, "spread")]


def make_dense_config(config: PreTrainedConfig) -> Any:
    """Return a copy of the dense class' configuration, from the configuration of a dense or pruned model."""
    return copy.deepcopy(config) if describe_form(config) == "dense" else modeling.make_dense_config(config)


def describe_form(config: PreTrainedConfig) -> str:
    """Return the form of a configuration: ``dense``, ``per_layer`` or ``linears``."""
    layout = getattr(config, "layout", None) if is_pruned(type(config)) else None
    return "dense" if layout is None else "linears" if "linears" in layout else "per_layer"


def build_dense(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a dense model of a class, with its weights on the meta device.

    :param config: configuration of the dense class; it is copied
    """
    with torch.device("meta"):
        return kind._from_config(copy.deepcopy(config))


def describe_linears(model: PreTrainedModel, layers: str) -> dict[str, Any]:
    """Return the layout of a sliced model: its decoder layers' linears that differ from the dense class'.

    :param layers: name of the list of decoder layers
    :raises ValueError: another tensor differs, or attention modules have been narrowed
    """
    narrowed = any(
        getattr(module, "value_head_dim", 0) != module.wide for module in model.modules() if hasattr(module, "wide")
    )
    if narrowed or describe_form(model.config) == "per_layer":
        raise ValueError(
            f"{type(model).__name__}: a model must hold padded linears or narrow attention, got both. Prune the dense model again."
        )
    dense = build_dense(find_stock(type(model)), make_dense_config(model.config))
    layout: dict[str, Any] = {"layers": layers, "linears": []}
    if any(hasattr(module, "nf") and isinstance(module, nn.Linear) for module in model.modules()):
        layout["conv1d"] = True
        modeling.replace_conv1d(dense)
    pairs = zip(*(m.get_submodule(layout["layers"]).children() for m in (model, dense)), strict=True)
    for layer, before in pairs:
        linears, known = {}, dict(before.named_modules())
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and name in known:  # excludes experts split by llm-compressor
                forms = {form: getattr(module, form, None) for form in ("spread", "gather")}
                said = {"shape": [module.out_features, module.in_features]}
                said |= {form: value for form, value in forms.items() if value is not None}
                old: Any = known[name]
                if said != {"shape": [old.out_features, old.in_features]}:
                    linears[name] = said
        layout["linears"].append(linears)
    modeling.fit_linears(dense, layout)
    layout |= describe_parameters(model, dense, layers)
    modeling.fit_parameters(dense, layout)
    problems = list_differences(list_shapes(model), list_shapes(dense))
    if problems:
        raise ValueError(f"{problems[0]}. Only linears of decoder layers may be cut.")
    return layout


def describe_parameters(model: nn.Module, dense: nn.Module, layers: str) -> dict[str, Any]:
    """Return the layout's entry on the shapes of experts' tensors in the decoder layers that differ from the dense class'.

    :param layers: name of the list of decoder layers
    """
    found = []
    for layer, before in zip(*(m.get_submodule(layers).children() for m in (model, dense)), strict=True):
        wanted, shapes = list_shapes(before), list_shapes(layer)
        experts = {name.rpartition(".")[0] for name, shape in wanted.items() if len(shape) == 3}
        of_experts = {name: shape for name, shape in shapes.items() if name.rpartition(".")[0] in experts}
        found.append({name: list(shape) for name, shape in of_experts.items() if wanted.get(name, shape) != shape})
    return {"parameters": found} if any(found) else {}


def list_shapes(model: nn.Module) -> Shapes:
    """Return the shapes of a model's parameters and saved buffers by name, including those of a quantiser later in the recipe."""
    with disable_onloading():
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}


def list_stock_shapes(model: nn.Module) -> Shapes:
    """Return a model's shapes after growing its padded linears, restoring its transposed modules and packing its experts."""
    shapes = list_shapes(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        size = [module.out_features, module.in_features]
        for i, form in enumerate((getattr(module, "spread", None), getattr(module, "gather", None))):
            if form is not None:
                size[i] = form["outer"] * sum(count * wide for count, _, wide in form["segments"])
        shapes[f"{name}.weight"] = (size[1], size[0]) if hasattr(module, "nf") else (size[0], size[1])
        if module.bias is not None:
            shapes[f"{name}.bias"] = (size[0],)
    return shapes | list_packed_shapes(model)


def list_differences(shapes: Shapes, wanted: Shapes) -> list[str]:
    """Return a message for every tensor whose shape differs from the class' shape."""
    return [
        f"{name}: must have the shape {shape} of its class and configuration, got {shapes[name]}"
        for name, shape in wanted.items()
        if shapes.get(name, shape) != shape  # experts split by llm-compressor have other names
    ]
