"""Structure of a model, from its configuration alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from struprune_plugin.model.structure.couplings import COPIES, Call, measure_couplings, record_linears
from struprune_plugin.model.structure.expert_units import find_experts
from struprune_plugin.model.structure.joins import find_joins
from struprune_plugin.model.structure.layout import AttentionLayout, FFNLayout, LayerLayout, Structure
from struprune_plugin.model.structure.locate import find_stock, locate_layers
from struprune_plugin.model.structure.tiny import build_tiny, draw_tokens, find_class, shrink_config
from struprune_plugin.model.structure.trial_removal import find_flaw, make_trial, mixes
from struprune_plugin.model.structure.units import Measured, is_plain, list_channel_rows, read_units

TOKENS = 24
_MAX_LAYERS = 1 << 12  # upper limit of a plausible configuration
_LABELS = [
    "_name_or_path",
    "architectures",
    "auto_map",
    "disable_custom_kernels",
    "dtype",
    "transformers_version",
    "use_cache",
]
_KNOWN: dict[str, Structure] = {}


def find_structure(model: nn.Module) -> Structure:
    """Return a model's removable structure, see :func:`find_structure_of`."""
    config: Any = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"model: must be a language model of transformers, got {type(model).__name__!r}.")
    return find_structure_of(config, find_stock(type(model)))


def find_structure_of(config: PreTrainedConfig, kind: Any = None) -> Structure:
    """Return the removable structure of models of a configuration; measured once per class and configuration.

    :param kind: class of the model; the one that transformers' auto classes choose where None
    :raises ValueError: no instance can be built and run
    """
    config = make_dense(config)
    try:
        kind, config = find_class(config, kind)
        _check_layers(config)
        facts = _drop_labels(shrink_config(config).to_dict())
        key = f"{kind.__module__}.{kind.__name__} {json.dumps(facts, sort_keys=True, default=str)}"
        if key not in _KNOWN:
            _KNOWN[key] = measure_structure(build_tiny(config, kind=kind))
        structure = _KNOWN[key]
    except Exception as error:  # any error of a class that is no decoder, or of a broken configuration
        raise ValueError(
            f"model: {config.model_type!r} must be a decoder of which a tiny instance can be built and run, got "
            f"{type(error).__name__}: {error}. Choose another model, or correct its configuration."
        ) from None
    if not any(kind.attention or kind.ffns or kind.experts for kind in structure.kinds):
        raise ValueError(
            f"model: {config.model_type!r} must have layers with attention or an FFN that can be cut, got none: "
            f"{describe_left(structure)}. Choose another model."
        )
    return structure


def describe_left(structure: Structure) -> str:
    """Return the linears that keep their width, with the reasons; those common to several kinds of layers are listed once."""
    left = dict.fromkeys(f"{name} ({reason})" for kind in structure.kinds for name, reason in kind.left.items())
    return ", ".join(left) or "no linear reads the output of another linear of its layer"


def _check_layers(config: PreTrainedConfig) -> None:
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 1)
    if not 0 < count <= _MAX_LAYERS:
        raise ValueError(f"num_hidden_layers must be in [1, {_MAX_LAYERS}], got {count}")


def _drop_labels(values: Any) -> Any:
    """Return a configuration's values without those that no structure depends on, including nested ones."""
    if isinstance(values, dict):
        return {name: _drop_labels(value) for name, value in values.items() if name not in _LABELS}
    return values


def make_dense(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the dense model that a pruned model was made from; a dense model's configuration unchanged."""
    is_pruned = getattr(config, "layout", None) and hasattr(config, "make_dense")
    return config.make_dense() if is_pruned else config


@torch.no_grad()
def measure_structure(model: Any) -> Structure:
    """Return the removable structure of a tiny instance."""
    path = locate_layers(model)
    layers = list(model.get_submodule(path).children())
    tokens = draw_tokens(model.config, 1, TOKENS)
    calls = _record_calls(model, layers, tokens.expand(COPIES, -1))
    kinds: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(describe_kind(layer), []).append(index)

    def run() -> Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    layouts, shared = list[LayerLayout](), _list_shared(layers)
    for alike in kinds.values():
        measured = _measure(layers[alike[0]], calls[alike[0]])
        own = _leave_cut_twice(read_units(measured), layers[alike[0]], shared)
        proved = _prove(own, measured, [layers[index] for index in alike], run)
        layouts.append(_describe_joins(proved, measured, calls[alike[0]]))
    layouts = find_experts(
        model, [([layers[i] for i in alike], calls[alike[0]]) for alike in kinds.values()], layouts, TOKENS, run
    )
    kind_of = {index: kind for kind, alike in enumerate(kinds.values()) for index in alike}
    return Structure(path, tuple(layouts), tuple(kind_of[index] for index in range(len(layers))))


def _measure(layer: nn.Module, call: Call) -> Measured:
    inputs, outputs = record_linears(layer, call, TOKENS)
    return Measured(layer, inputs, outputs, measure_couplings(layer, call, inputs, outputs))


def _list_shared(layers: Sequence[nn.Module]) -> set[int]:
    """Return the ids of the parameters that several layers share."""
    counts = Counter(identity for layer in layers for identity in {id(p) for p in layer.parameters()})
    return {identity for identity, count in counts.items() if count > 1}


def _leave_cut_twice(layout: LayerLayout, layer: nn.Module, shared: set[int]) -> LayerLayout:
    """Return a layout without modules whose linears would be cut twice, because several layers or two modules use them."""

    def is_shared(module: AttentionLayout | FFNLayout) -> bool:
        linears = [layer.get_submodule(name) for name in (*module.producers, module.output)]
        return any(id(parameter) in shared for linear in linears for parameter in linear.parameters())

    modules: list[AttentionLayout | FFNLayout] = [*([layout.attention] if layout.attention else []), *layout.ffns]
    left = {module.output: "several layers share its weights" for module in modules if is_shared(module)}
    chained = {name for module in modules for name in module.producers}
    left |= {module.output: "its rows are another module's units" for module in modules if module.output in chained}
    attention = None if layout.attention and layout.attention.output in left else layout.attention
    ffns = tuple(ffn for ffn in layout.ffns if ffn.output not in left)
    return LayerLayout(attention, ffns, {**layout.left, **left})


def _prove(
    layout: LayerLayout, measured: Measured, layers: Sequence[nn.Module], run: Callable[[], Tensor]
) -> LayerLayout:
    """Return a layout without the modules whose units fail the trial removal, see :func:`find_flaw`.

    :param layers: all layers of this kind
    :param run: returns the model's logits
    """
    left, ffns, attention = dict(layout.left), [], layout.attention
    for ffn in layout.ffns:
        columns = torch.arange(0, measured.inputs[ffn.output].shape[-1], 3)
        reached = {name: measured.couplings[name, ffn.output].reached for name in ffn.producers}
        flaw = find_flaw(layers, make_trial(ffn.output, reached, columns, slices=True), run)
        left |= {ffn.output: flaw} if flaw else {}
        ffns += [] if flaw else [ffn]
    if attention is not None:
        attention, flaw = _prove_attention(attention, measured, layers, run)
        left |= {} if attention else {layout.attention.output: flaw}  # type: ignore[union-attr]
    return LayerLayout(attention, tuple(ffns), left)


def _prove_attention(
    attention: AttentionLayout, measured: Measured, layers: Sequence[nn.Module], run: Callable[[], Tensor]
) -> tuple[AttentionLayout | None, str]:
    """Return the attention layout with its proved properties, or None and the reason why its channels cannot be removed."""
    width = getattr(measured.layer.get_submodule(attention.module), attention.width_name)
    channels = torch.arange(measured.inputs[attention.output].shape[-1])
    reached = {name: measured.couplings[name, attention.output].reached for name in attention.producers}
    trial = make_trial(attention.output, reached, channels[channels % width % 3 == 0], slices=False)
    if flaw := find_flaw(layers, trial, run):
        return None, flaw
    rows, eye = list_channel_rows(measured, attention, width), torch.eye(width)
    if not mixes(layers, attention.output, rows, eye.roll(1, 0), run):
        return None, "the channels of a head cannot be exchanged"
    rotates = attention.rotates and mixes(layers, attention.output, rows, eye - 2 / width, run)
    blocks = next(len(heads) for _, part, heads in rows if part == "value")
    first = make_trial(
        attention.output, reached, channels[: len(channels) // blocks], slices=True, heads=(attention.module, blocks)
    )
    fits = attention.has_heads and (blocks == 1 or not find_flaw(layers, first, run))
    return replace(attention, rotates=rotates, takes_fewer_heads=fits), ""


def _describe_joins(layout: LayerLayout, measured: Measured, call: Call) -> LayerLayout:
    """Return a layout with the joins of its modules with the residual stream."""
    consumers = [module.output for module in (layout.attention, *layout.ffns) if module]
    ordered = [name for name in measured.outputs if name in consumers]
    if not ordered:
        return layout
    joins = find_joins(measured.layer, call, measured.outputs, ordered)
    attention = layout.attention
    if attention is not None:
        attention = replace(attention, join=joins[attention.output], is_plain=is_plain(measured, attention))
    return replace(layout, attention=attention, ffns=tuple(replace(f, join=joins[f.output]) for f in layout.ffns))


def _record_calls(model: Any, layers: list[nn.Module], tokens: Tensor) -> dict[int, Call]:
    """Return the call of every layer, by its position.

    :raises ValueError: the layers do not run in their order, each once
    """
    calls: dict[int, Call] = {}
    order: list[int] = []

    def see(index: int) -> Any:
        def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            order.append(index)
            calls[index] = Call(args, kwargs)

        return hook

    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(see(index), with_kwargs=True).remove)
        model(input_ids=tokens, use_cache=False)
    if order != list(range(len(layers))):
        raise ValueError(
            f"its {len(layers)} decoder layers must run on text one after the other, each once, got a pass that runs "
            f"{', '.join(map(str, order[:9]))}{', …' if len(order) > 9 else ''}"
        )
    return calls


def describe_kind(layer: nn.Module) -> str:
    """Return a description that distinguishes kinds of layers: classes, shapes and attributes of modules."""
    return repr([(name, type(module).__name__, *_list_facts(module)) for name, module in layer.named_modules()])


def _list_facts(module: nn.Module) -> Iterator[Any]:
    yield [(name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False)]
    known = (int, str, bool, type(None))
    facts = {name: value for name, value in vars(module).items() if type(value) in known and name[0] != "_"}
    yield sorted((name, repr(value)) for name, value in facts.items() if not is_position(name))


def is_position(name: str) -> bool:
    """Return whether an attribute of that name stores a layer's position, which does not distinguish kinds of layers."""
    return bool({"idx", "layer"} & {*name.split("_")})
