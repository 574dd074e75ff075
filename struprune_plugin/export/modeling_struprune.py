"""Decoder models whose linears are narrower than the dense model's; saved with every checkpoint, needs transformers >= 5.15 alone.

``StruPruneLlamaForCausalLM`` and similar classes are created on first access from transformers' own, whose forward passes run:
where a module handles the dense width, such as values of a head, on a :class:`View` of it, in which narrow linears pad their output
or read a part of their input. The configuration is the dense model's with one addition, ``layout``.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, TypedDict

import torch
import transformers
from torch import nn

if [int(part) for part in transformers.__version__.split(".")[:2]] < [5, 15]:
    raise ImportError(
        f"modeling_struprune.py: transformers must be 5.15 or newer, got {transformers.__version__}. Install a newer one, or write "
        "the model for stock classes: `struprune convert FOLDER --to uniform-padded --output NEW`."
    )

from huggingface_hub.dataclasses import strict
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForQuestionAnswering
from transformers.pytorch_utils import Conv1D

PREFIX = "StruPrune"
VERSION = 1  # of the layout


class Form(TypedDict):
    """Channels that a linear has, of those that the module around it handles: ``blocks`` runs of the ``segments`` in order."""

    blocks: int
    segments: list[list[int]]  # (count, kept, dense): count heads of dense channels, the linear has the first kept ones


class LinearLayout(TypedDict, total=False):
    """Shape (rows, columns) of a linear; ``pad``: its output gets zeros; ``narrow``: its input, or a buffer, is read in part."""

    shape: list[int]
    pad: Form
    narrow: Form


class Layout(TypedDict, total=False):
    """Difference of a pruned model from its dense class; lists have one entry per decoder layer."""

    version: int
    layers: str  # name of the list of decoder layers
    linears: list[dict[str, LinearLayout]]  # that differ from the dense model's, by name
    counts: list[dict[str, float]]  # numbers that modules store and that differ, such as those of heads
    parameters: list[dict[str, list[int]]]  # shapes of tensors outside linears that differ, such as packed experts
    conv1d: bool  # whether the class' transposed linears (GPT-2) are ordinary ones
    dense: dict[str, int]  # the dense model's values of keys of the text configuration, which states the pruned model's
    states_sizes: bool  # whether the configuration's ``per_layer_config`` repeats sizes, for other readers


def __getattr__(name: str) -> Any:
    if name.startswith(PREFIX) and hasattr(transformers, name.removeprefix(PREFIX)):
        return derive_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def derive_class(name: str) -> Any:
    """Return the pruned configuration or model class of that name, derived from the stock class without the prefix."""
    stock = getattr(transformers, name.removeprefix(PREFIX))
    # else loading does not initialise some buffers
    members: dict[str, Any] = {"is_custom_code": classmethod(lambda cls: False), "__module__": __name__}
    if issubclass(stock, transformers.PreTrainedConfig):
        members |= {
            "__annotations__": {"layout": dict | None},
            "layout": None,
            "model_type": f"struprune_{stock.model_type}",
            # these read the one head count that a stock model has; the dense configuration has passed them
            **dict.fromkeys(("validate_architecture", "validate_rope"), lambda self: None),
            "make_dense": make_dense_config,
            "per_layer_config": property(stock.per_layer_config.fget, _set_layer_configs),
        }
        return strict(type(name, (stock,), members))
    config_class = derive_class(PREFIX + stock.config_class.__name__)
    trunk = transformers.MODEL_MAPPING.get(stock.config_class, None)  # from whose configuration other heads make it
    if trunk is not stock and getattr(trunk, "config_class", None) is stock.config_class:
        pruned_trunk = derive_class(PREFIX + trunk.__name__)
        pruned_trunk.register_for_auto_class("AutoModel")
        transformers.AutoModel.register(config_class, pruned_trunk, exist_ok=True)
    dense_type, pruned_type = stock.config_class.model_type, config_class.model_type
    for before, after in ((stock.__name__, name), (dense_type, pruned_type)):  # names of weights, by class or by type
        if (conversions := get_checkpoint_conversion_mapping(before)) is not None:
            register_checkpoint_conversion_mapping(after, conversions, overwrite=True)
    if importlib.util.find_spec("peft") is not None:  # its tables of modules that adapters change, by type
        for table_name, table in vars(importlib.import_module("peft.utils.constants")).items():
            if table_name.startswith("TRANSFORMERS_MODELS_TO_") and dense_type in table:
                table[pruned_type] = table[dense_type]
    if trunk is not None and issubclass(stock, GenericForQuestionAnswering):
        members["base_model_prefix"] = trunk.base_model_prefix  # its own passes over a checkpoint's trunk
    return _derive_model(stock, config_class, members)


def _set_layer_configs(config: Any, stated: dict[int | str, dict[str, Any]] | None) -> None:
    """Set the sizes by layer of those layers that are there: users load fewer, or saved fewer."""
    if stated is not None:
        stated = {index: sizes for index, sizes in stated.items() if int(index) < config.num_hidden_layers}
    transformers.PreTrainedConfig.per_layer_config.fset(config, stated)


def derive_custom(stock: Any, module: str, config_class: Any = None) -> Any:
    """Return, for a module, the pruned class of a class that came with its checkpoint; a model class needs ``config_class``."""
    if config_class is not None:
        return _derive_model(stock, config_class, {"__module__": module})

    def __init__(self, *args, layout=None, **kwargs):
        stock.__init__(self, *args, **kwargs)
        self.layout = layout

    model_type = f"struprune_custom_{stock.model_type}"  # no type of transformers' own
    members = {"__init__": __init__, "model_type": model_type, "make_dense": make_dense_config, "__module__": module}
    return type(PREFIX + stock.__name__, (stock,), members)


def _derive_model(stock: Any, config_class: Any, members: dict[str, Any]) -> Any:
    def __init__(self, config):  # no annotations: vLLM reads them, and takes texts for types
        with dense_sizes(config):
            super(pruned, self).__init__(config)
        for module in self.modules():  # a trunk below a head has a copy, made while it stated the dense sizes
            if type(getattr(module, "config", None)) is type(config):
                module.config = config
        fit_layers(self, config.layout)
        check_parts(self, config.layout)

    def save_pretrained(self, *args, **kwargs):
        follow_layers(self)
        super(pruned, self).save_pretrained(*args, **kwargs)

    def _get_static_cache_init_shape(self, *args, **kwargs):  # None: layer by layer, at the first call
        varies = "num_attention_heads" in (self.config.per_layer_attributes or ())
        return None if varies else super(pruned, self)._get_static_cache_init_shape(*args, **kwargs)

    methods = {each.__name__: each for each in (__init__, save_pretrained, _get_static_cache_init_shape)}
    pruned = type(PREFIX + stock.__name__, (stock,), {"config_class": config_class, **methods, **members})
    return pruned


def make_dense_config(config: Any) -> Any:
    """Return the stock configuration of the dense model that a pruned one was made from."""
    dense = copy.deepcopy(config)  # parts of it are configurations themselves
    with dense_sizes(dense):
        dense = copy.deepcopy(dense)
    dense.__class__ = next(c for c in type(config).__mro__ if not c.__name__.startswith(PREFIX))
    for name in ("layout", "model_type", "auto_map", "architectures"):
        dense.__dict__.pop(name, None)
    return dense


@contextmanager
def dense_sizes(config: Any) -> Iterator[None]:
    """Let the configuration state the dense model's sizes during the block, for stock code, which reads one value of each key."""
    text, layout = config.get_text_config(decoder=True), config.layout or {}
    if layout.get("version") != VERSION:
        raise ValueError(
            f"{config._name_or_path or type(config).__name__}: the layout must be of version {VERSION}, got "
            f"{layout.get('version')}: another version of struprune_plugin wrote this checkpoint. Prune the dense model again."
        )
    pruned = {name: getattr(text, name) for name in layout.get("dense", ())}
    stated = config.to_dict().get("per_layer_config") if layout.get("states_sizes") else None
    if stated is not None:
        config.per_layer_config = None
    for name in pruned:
        setattr(text, name, layout["dense"][name])
    try:
        yield
    finally:
        for name, value in pruned.items():
            setattr(text, name, value)
        if stated is not None:
            config.per_layer_config = stated


def fit_layers(model: Any, layout: Layout) -> None:
    """Give a dense model, with its head or without, fresh or on the meta device, the sizes and the padding of a layout."""
    if layout.get("conv1d"):
        replace_conv1d(model)
        for module in model.modules():
            if any(hasattr(child, "nf") for child in module.children()) and not module._non_persistent_buffers_set:
                module._is_hf_initialized = True  # its class would initialise weights that a quantiser has packed
    layers = mark_layers(model, layout)
    if len(layers) > (known := len(layout["linears"])):
        raise ValueError(
            f"num_hidden_layers: must be at most {known}, the number of layers that were saved, got {len(layers)}. Set it to that."
        )
    differences = (layout.get(key, repeat({})) for key in ("linears", "counts", "parameters"))
    for layer, linears, counts, parameters in zip(layers, *differences, strict=False):  # users may load the first ones
        for name, said in linears.items():
            if "shape" in said:
                _resize(layer.get_submodule(name), *said["shape"])
            if padding := {key: said[key] for key in ("pad", "narrow") if key in said}:
                adopt_padding(*find_owner(layer, name), padding)
        for name, count in counts.items():
            setattr(*find_owner(layer, name), count)
        for name, shape in parameters.items():
            old = getattr(*find_owner(layer, name))
            setattr(*find_owner(layer, name), nn.Parameter(old.new_empty(shape), old.requires_grad))


def check_parts(model: Any, layout: Layout) -> None:
    """Raise ValueError where tensor parallelism cannot share a layer evenly, or vLLM's backend would lose recurrent states."""
    if getattr(model, "_is_stateful", False) and getattr(model.config, "_attn_implementation", None) == "vllm":
        raise ValueError(
            "vLLM: its Transformers backend keeps no recurrent states. For its own class, `struprune convert --to uniform-padded`."
        )
    distributed = getattr(model.config, "distributed_config", None)
    if (ranks := getattr(distributed, "tp_size", None) or 1) == 1:
        return
    plan = distributed.tp_plan if isinstance(distributed.tp_plan, dict) else getattr(model, "tp_plan", None) or {}
    styles = {name.rpartition(".*.")[2]: style for name, style in plan.items()}
    described = find_layers(model, layout), layout["linears"], layout.get("parameters", repeat({}))
    for index, (layer, linears, parameters) in enumerate(zip(*described, strict=False)):
        sizes = {name: shape[-1] for name, shape in parameters.items() if styles.get(name) == "rowwise"}
        for name, said in linears.items():
            side, axis = {"colwise": ("pad", 0), "rowwise": ("narrow", 1)}.get(styles.get(name), ("", 0))
            if form := said.get(side):
                blocks, segments = form["blocks"], form["segments"]
                sizes[name] = blocks if blocks > 1 else math.gcd(*(each[0] for each in segments))
            elif side:
                sizes[name] = said["shape"][axis] // getattr(find_owner(layer, name)[0], "head_dim", 1)
        for name, size in sizes.items():
            if size % ranks:
                raise ValueError(
                    f"{layout['layers']}.{index}.{name}: must have heads or channels that tp_size={ranks} divides, got {size}. "
                    f"Choose another tp_size, or prune with `width_multiple: {ranks}` and `attention_unit: value_channels`."
                )


def find_layers(model: Any, layout: Layout) -> Any:
    """Return the list of decoder layers of a model, of its trunk, or of the trunk with another head."""
    first, _, rest = layout["layers"].partition(".")
    return model.get_submodule(layout["layers"]) if hasattr(model, first) else model.base_model.get_submodule(rest)


def mark_layers(model: Any, layout: Layout) -> Any:
    """Let every decoder layer know its place in a layout, whatever becomes of the list of layers; return the list."""
    layers = find_layers(model, layout)
    for index, layer in enumerate(layers):
        layer.struprune_index = index
    return layers


def follow_layers(model: Any) -> None:
    """Let a model's configuration describe the layers that are there, also where some were dropped, moved or repeated; raise
    ValueError where one is none of the checkpoint's, or the configuration states another number of them."""
    config, layout = model.config, model.config.layout
    layers = find_layers(model, layout)
    places = [getattr(layer, "struprune_index", None) for layer in layers]
    if places == [*range(len(layout["linears"]))]:
        return
    count, where = config.get_text_config(decoder=True).num_hidden_layers, f"save_pretrained: {layout['layers']}"
    if None in places:
        raise ValueError(
            f"{where}.{places.index(None)} must be a layer of the loaded model or a copy of one (copy.deepcopy), got another "
            f"{type(layers[places.index(None)]).__name__}. Put such a layer there."
        )
    if count != len(places):
        raise ValueError(
            f"{where} must have num_hidden_layers = {count} layers, got {len(places)}. Set model.config.num_hidden_layers to that."
        )
    config.layout = {k: [v[place] for place in places] if isinstance(v, list) else v for k, v in layout.items()}
    if (stated := config.to_dict().get("per_layer_config")) is not None:
        stated = {int(index): sizes for index, sizes in stated.items()}
        config.per_layer_config = {index: stated[place] for index, place in enumerate(places) if place in stated}
    mark_layers(model, config.layout)


def find_owner(layer: Any, name: str) -> tuple[Any, str]:
    """Return the module that holds an attribute of a layer, and the attribute's name in it."""
    owner, _, attribute = name.rpartition(".")
    return layer.get_submodule(owner), attribute


def _resize(linear: nn.Linear, rows: int, columns: int) -> None:
    if (rows, columns) == (linear.out_features, linear.in_features):
        return
    linear.out_features, linear.in_features = rows, columns
    linear.weight = nn.Parameter(linear.weight.detach().new_empty(rows, columns).normal_(std=0.02))
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.new_zeros(rows))


def replace_conv1d(model: Any) -> None:
    """Convert modules that store their weights transposed to linears, in place; the function does not change."""
    for module in model.modules():
        if type(module) is Conv1D:
            module.__class__ = nn.Linear
            module.weight = nn.Parameter(module.weight.detach().t().contiguous(), module.weight.requires_grad)
            module.out_features, module.in_features = module.nf, module.nx


def adopt_padding(owner: Any, name: str, padding: LinearLayout) -> None:
    """Set the padding of a module's linear or buffer; from now on the module's stock code runs on a :class:`View` of it. Raise
    ValueError where no method of the class reads a linear of that name, so that a view would change nothing."""
    methods = list_methods(type(owner)).values() if name in owner._modules else ()
    if methods and not any(name in inspect.unwrap(method).__code__.co_names for method in methods):
        raise ValueError(
            f"{type(owner).__name__}: its code in transformers {transformers.__version__} must call the linear {name!r}, and does "
            "not. Load the checkpoint with an older transformers, or convert it there: `struprune convert --to uniform-padded`."
        )
    if "struprune_padding" not in vars(owner):
        owner.__class__, owner.struprune_padding = derive_padded(type(owner)), {}
    owner.struprune_padding[name] = padding


def list_methods(owner: type) -> dict[str, Any]:
    """Return the methods of a module's stock class and its bases, without those that all modules have, by name."""
    bases = [base for base in owner.__mro__[: owner.__mro__.index(nn.Module)] if not base.__name__.startswith(PREFIX)]
    return {name: each for base in reversed(bases) for name, each in vars(base).items() if inspect.isfunction(each)}


@functools.cache
def derive_padded(stock: Any) -> Any:
    """Return the class of a module of a stock class some of whose linears are padded."""

    @functools.wraps(stock.forward)  # vLLM reads the stock source, quantisers the names of its arguments
    def forward(self, *args, **kwargs):
        return stock.forward(View(self), *args, **kwargs)

    def __reduce_ex__(self, protocol):  # no module has this class by name
        _, _, *state = stock.__reduce_ex__(self, protocol)
        return make_padded, (stock,), *state

    members = {"forward": forward, "__reduce_ex__": __reduce_ex__, "stock_methods": list_methods(stock)}
    return type(PREFIX + stock.__name__, (stock,), {**members, "__module__": __name__})


def make_padded(stock: Any) -> Any:
    """Return an empty module of the class that :func:`derive_padded` returns, for copies to be filled."""
    padded = derive_padded(stock)
    return padded.__new__(padded)


class View:
    """A module as its own stock code sees it: its narrow linears take and give the dense width.

    Linears are found by name at every call, so that whatever replaces one (an adapter, a quantiser, an engine) is called.
    """

    def __init__(self, module: Any):
        object.__setattr__(self, "_module", module)

    def __getattr__(self, name: str) -> Any:
        module = self._module
        if name in module.struprune_padding:
            part, form = getattr(module, name), module.struprune_padding[name]
            is_linear = isinstance(part, nn.Module)
            return functools.partial(_run_padded, part, form) if is_linear else narrow(part, form["narrow"])
        if name in module.stock_methods and name not in module.__dict__:  # its other methods see the view, too
            return functools.partial(module.stock_methods[name], self)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def _run_padded(linear: Any, padding: LinearLayout, states: torch.Tensor) -> torch.Tensor:
    """Return the output of a narrow linear for an input of the dense width, in the dense width."""
    states = linear(narrow(states, padding["narrow"]) if "narrow" in padding else states)
    return pad(states, padding["pad"]) if "pad" in padding else states


def narrow(states: torch.Tensor, form: Form) -> torch.Tensor:
    """Return the kept channels of every head, in the last dimension: the reverse of :func:`pad`."""
    return pad(states, form, old=2, new=1)


def pad(states: torch.Tensor, form: Form, old: int = 1, new: int = 2) -> torch.Tensor:
    """Return states with zeros after the kept channels of every head, in the last dimension (old, new: places in a segment)."""
    blocks, segments, size = form["blocks"], form["segments"], states.shape[-1]
    width = blocks * sum(each[0] * each[old] for each in segments)
    if size != width:  # in one of several processes, each of which has its part of the heads
        ranks, rest = divmod(width, size)
        if rest or any(count % ranks for count in ([blocks] if blocks > 1 else [each[0] for each in segments])):
            raise ValueError(
                f"tensor parallelism: must leave every process whole heads, got {size} of {width} channels. Use a number of "
                "processes that divides the number of heads."
            )
        segments = segments if blocks > 1 else [[each[0] // ranks, *each[1:]] for each in segments]
        blocks = max(blocks // ranks, 1)
    pieces = list(states.unflatten(-1, (blocks, -1)).split([each[0] * each[old] for each in segments], -1))
    for place, each in enumerate(segments):
        if each[old] != each[new]:  # a negative number of zeros cuts
            heads = pieces[place].unflatten(-1, (each[0], each[old]))
            pieces[place] = nn.functional.pad(heads, (0, each[new] - each[old])).flatten(-2)
    return (torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]).flatten(-2)
