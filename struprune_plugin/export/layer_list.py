"""Removal of empty decoder layers from a model's list of layers, and renumbering of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from loguru import logger
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.export import modeling_struprune as modeling
from struprune_plugin.export.any_class import build_dense, describe_form, make_dense_config
from struprune_plugin.model.structure.finder import describe_kind, is_position
from struprune_plugin.model.structure.locate import find_stock, locate_layers

_BY_LAYER = ("linears", "parameters", "skip")  # entries of a layout that are lists over layers


def drop_layers(model: PreTrainedModel) -> None:
    """Remove empty layers from a model's list and renumber the others, as caches and configuration count them.

    Empty layers stay in the list, without effect, where the class would build other layers from the shorter configuration.
    """
    path = locate_layers(model)
    layers = list(model.get_submodule(path).children())
    left = [index for index, layer in enumerate(layers) if next(layer.parameters(), None) is not None]
    if len(left) == len(layers):
        return
    made = build_dense(find_stock(type(model)), before := make_dense_config(model.config))
    changes = _list_changes(before.get_text_config(decoder=True), len(layers), left)
    try:
        twins = _build_shorter(model, before, changes).get_submodule(path)
        wanted = [describe_kind(layer) for layer in made.get_submodule(path)]
        if [describe_kind(layer) for layer in twins] != [wanted[index] for index in left]:
            raise ValueError("a shorter model of this class would have layers of other kinds")
    except Exception as error:  # any error of a class that numbers its layers in another way
        logger.warning(f"{len(layers) - len(left)} decoder layers without weights stay in the list of layers: {error}")
        return
    for index, twin in zip(left, twins, strict=True):
        _renumber(layers[index], twin)
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, nn.ModuleList(layers[index] for index in left))
    config = model.config
    if describe_form(config) == "per_layer":
        config.per_layer_config = None  # read from the layers again when saving
    for name, value in changes.items():
        setattr(config.get_text_config(decoder=True), name, value)
    if describe_form(config) == "linears":
        config.layout = {
            name: [said[i] for i in left] if name in _BY_LAYER else said for name, said in config.layout.items()
        }


def _list_changes(text: Any, count: int, left: Sequence[int]) -> dict[str, Any]:
    """Return the changes of a configuration for fewer layers: their number, and lists with one entry per layer."""
    lists = {name: value for name, value in text.to_dict().items() if isinstance(value, list) and len(value) == count}
    number = next(
        name for name in (text.attribute_map.get("num_hidden_layers", ""), "num_hidden_layers") if hasattr(text, name)
    )
    return {name: [value[index] for index in left] for name, value in lists.items()} | {number: len(left)}


def _build_shorter(model: PreTrainedModel, config: Any, changes: Mapping[str, Any]) -> PreTrainedModel:
    """Return a model of the stock class with fewer layers, its weights on the meta device."""
    short = deepcopy(config)
    text = short.get_text_config(decoder=True)
    for name, value in changes.items():
        setattr(text, name, value)
    values = {name: value for name, value in short.to_dict().items() if name != "model_type"}
    made = type(short)(**values)  # as it will be read from the file
    modeling.copy_settings(config, made)
    return build_dense(find_stock(type(model)), made)


def _renumber(layer: nn.Module, twin: nn.Module) -> None:
    """Set the position attributes of a layer's modules to those of another layer's modules."""
    twins = dict(twin.named_modules())
    for name, module in layer.named_modules():
        known = vars(twins[name]) if name in twins else {}
        for key in [key for key in vars(module) if is_position(key) and isinstance(known.get(key), int)]:
            setattr(module, key, known[key])
