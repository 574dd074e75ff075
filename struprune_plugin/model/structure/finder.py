"""Structure of a model, from its configuration alone."""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from struprune_plugin.model.structure.couplings import COPIES, Call, Measured, measure, watch
from struprune_plugin.model.structure.joins import find_joins
from struprune_plugin.model.structure.layout import LayerLayout, Structure, UnitLayout
from struprune_plugin.model.structure.locate import find_stock, locate_layers, make_dense_config
from struprune_plugin.model.structure.tiny import TinyRun, build_tiny, draw_tokens, find_class, prove_once
from struprune_plugin.model.structure.units import read_units
from struprune_plugin.model.unit_kind import UNIT_KINDS, list_kinds

_TOKENS = 24
_MAX_LAYERS = 1 << 12  # upper limit of a plausible configuration


def find_structure(model: nn.Module) -> Structure:
    """Return a model's removable structure, see :func:`find_structure_of`."""
    config: Any = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"model: must be a language model of transformers, got {type(model).__name__!r}.")
    return find_structure_of(config, find_stock(type(model)))


def find_structure_of(config: PreTrainedConfig, model_class: Any = None) -> Structure:
    """Return the removable structure of models of a configuration; measured once per class and configuration.

    :param model_class: the model's; the one that transformers' auto classes choose where None
    :raises ValueError: no instance can be built and run, or nothing in it can be removed
    """
    config = make_dense_config(config)
    try:
        model_class, config = find_class(config, model_class)
        count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 1)
        if not 0 < count <= _MAX_LAYERS:
            raise ValueError(f"num_hidden_layers must be in [1, {_MAX_LAYERS}], got {count}")
        what = f"structure {[*UNIT_KINDS]}"
        structure = prove_once(
            what, model_class, config, lambda: _measure_structure(build_tiny(config, model_class=model_class))
        )
    except Exception as error:  # any error of a class that is no decoder, or of a broken configuration
        raise ValueError(
            f"model: {config.model_type!r} must be a decoder of which a tiny instance can be built and run, got "
            f"{type(error).__name__}: {error}. Choose another model, or correct its configuration."
        ) from None
    if not structure.list_units():
        reasons = [pair for layout in structure.layouts for pair in layout.unprunable.items()]
        left = dict.fromkeys(f"{name} ({reason})" for name, reason in reasons)
        raise ValueError(
            f"model: {config.model_type!r} must have layers with attention or an FFN that can be cut, got none: "
            f"{', '.join(left) or 'no linear reads the output of another linear of its layer'}. Choose another model."
        )
    return structure


@torch.no_grad()
def _measure_structure(model: Any) -> Structure:
    """Return the removable structure of a tiny instance."""
    path = locate_layers(model)
    layers = list(model.get_submodule(path).children())
    tokens = draw_tokens(model.config, 1, _TOKENS)
    run = TinyRun(model, tokens)
    calls = _record_calls(model, path, tokens.expand(COPIES, -1))
    types: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        types.setdefault(_describe_type(layer), []).append(index)

    counts = Counter(identity for layer in layers for identity in {id(p) for p in layer.parameters()})
    shared = {identity for identity, count in counts.items() if count > 1}
    measured = [measure([layers[i] for i in places], calls[places[0]], _TOKENS) for places in types.values()]
    layouts = [_find_units(each, shared, run) for each in measured]
    type_of = {index: place for place, indices in enumerate(types.values()) for index in indices}
    for kind in list_kinds():
        layouts = kind.extend(model, measured, layouts, run)
    num_parts = 0 if isinstance(calls[0].output, Tensor) else len(calls[0].output)
    return Structure(path, tuple(layouts), tuple(type_of[index] for index in range(len(layers))), num_parts)


def _record_calls(model: Any, path: str, tokens: Tensor) -> list[Call]:
    """Return the call of every layer; ValueError where they do not run in their order, each once."""
    names = [f"{path}.{name}" for name, _ in model.get_submodule(path).named_children()]
    with watch(model, names) as calls:
        model(input_ids=tokens, use_cache=False)
    if [call.name for call in calls] != names:
        order = [names.index(call.name) for call in calls]
        raise ValueError(
            f"its {len(names)} decoder layers must run on text one after the other, each once, got a pass that runs "
            f"{', '.join(map(str, order[:9]))}{', …' if len(order) > 9 else ''}"
        )
    return calls


def _find_units(measured: Measured, shared: set[int], run: TinyRun) -> LayerLayout:
    """Return the proved units of a type of layer, with their joins; ``shared`` are ids of parameters that several layers share."""
    layout = read_units(measured)
    chained = {name for module in layout.units for name in module.producers}
    proved, left = list[UnitLayout](), dict(layout.unprunable)
    for module in layout.units:
        linears = [measured.layer.get_submodule(name) for name in (*module.producers, module.output)]
        flaw = ""
        if module.output in chained:
            flaw = "its rows are another module's units"
        elif any(id(parameter) in shared for linear in linears for parameter in linear.parameters()):
            flaw = "several layers share its weights"
        else:
            flaw, module = UNIT_KINDS.parse(module.kind).prove(module, measured, run)
        if flaw:
            left[module.output] = flaw
        else:
            proved.append(module)
    consumers = [module.output for module in proved]
    joins = find_joins(measured, [name for name in measured.outputs if name in consumers]) if proved else {}
    return LayerLayout([replace(module, join=joins[module.output]) for module in proved], left)


def _describe_type(layer: nn.Module) -> str:
    """Return a description that distinguishes types of layers: classes, shapes and plain attributes of modules, but positions.

    Of a fraction it holds whether it is 0, which turns something off (sparse activations of Gemma 3n); others may follow the depth.
    """
    facts, plain = list[Any](), (int, float, str, bool, type(None))
    for path, module in layer.named_modules():
        facts += path, type(module).__name__, [(n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False)]
        held = {name: value for name, value in vars(module).items() if type(value) in plain and name[0] != "_"}
        values = {name: repr(bool(value) if type(value) is float else value) for name, value in held.items()}
        facts.append(sorted(pair for pair in values.items() if not {"idx", "layer"} & {*pair[0].split("_")}))
    return repr(facts)
