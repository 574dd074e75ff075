"""Decoder models whose linears are narrower than the dense model's; saved with every checkpoint, needs transformers >= 5.15 alone.

``StruPruneLlamaForCausalLM`` and similar classes are created on first access from transformers' own classes of the same name
without the prefix. Every linear is an ordinary ``nn.Linear`` of its narrow shape. Where the module around it handles the dense
width, such as values of a head, the module's stock forward pass runs on a :class:`View` of the module, in which that linear pads
its output or reads a part of its input. No forward pass is written anew: arguments, caches, masks and kernels are the stock class'.

The configuration is the dense model's with one addition, ``layout``.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.pytorch_utils import Conv1D

PREFIX = "StruPrune"
VERSION = 1  # of the layout


class Form(TypedDict):
    """Channels that a linear has, of those that the module around it handles: ``blocks`` runs of the ``segments`` in order.

    A segment is (count, kept, dense): ``count`` heads of ``dense`` channels, of which the linear has the first ``kept``.
    """

    blocks: int
    segments: list[list[int]]


class LinearLayout(TypedDict, total=False):
    """Shape (rows, columns) of a linear; ``pad``: its output is padded with zeros; ``narrow``: it reads a part of its input."""

    shape: list[int]
    pad: Form
    narrow: Form


class Layout(TypedDict, total=False):
    """Difference of a pruned model from its dense class; lists have one entry per decoder layer.

    :ivar version: :data:`VERSION`
    :ivar layers: name of the list of decoder layers
    :ivar linears: linears that differ from the dense model's, by name
    :ivar counts: numbers of heads that modules store and that differ, by module and attribute
    :ivar parameters: shapes of tensors outside linears that differ, the packed experts, by name
    :ivar conv1d: whether the class' transposed linears (GPT-2) are ordinary ones
    :ivar dense: the dense model's values of keys of the text configuration, which itself states the pruned model's
    :ivar states_sizes: whether the configuration's ``per_layer_config`` repeats sizes of this layout, for other readers
    """

    version: int
    layers: str
    linears: list[dict[str, LinearLayout]]
    counts: list[dict[str, int]]
    parameters: list[dict[str, list[int]]]
    conv1d: bool
    dense: dict[str, int]
    states_sizes: bool


def __getattr__(name: str) -> Any:
    if name.startswith(PREFIX) and hasattr(transformers, name.removeprefix(PREFIX)):
        return derive_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def derive_class(name: str) -> Any:
    """Return the pruned configuration or model class of that name, derived from the stock class without the prefix."""
    stock = getattr(transformers, name.removeprefix(PREFIX))
    if issubclass(stock, transformers.PreTrainedConfig):
        members = {
            "__annotations__": {"layout": dict | None},
            "layout": None,
            "model_type": f"struprune_{stock.model_type}",
            # these read the one head count that a stock model has; the dense configuration has passed them
            "validate_architecture": lambda self: None,
            "validate_rope": lambda self: None,
            "make_dense": make_dense_config,
            "is_custom_code": _is_custom_code,
        }
        return strict(type(name, (stock,), {**members, "__module__": __name__}))
    config_class = derive_class(PREFIX + stock.config_class.__name__)
    _register_with_peft(stock.config_class.model_type, config_class.model_type)
    for known, own in ((stock.__name__, name), (stock.config_class.model_type, config_class.model_type)):
        conversions = get_checkpoint_conversion_mapping(known)  # names of weights on disk, by class or by type
        if conversions is not None:
            register_checkpoint_conversion_mapping(own, conversions, overwrite=True)
    made = _derive_model(stock, config_class, __name__)
    made.is_custom_code = _is_custom_code
    return made


@classmethod
def _is_custom_code(cls: type) -> bool:
    """Return False, so that transformers treats the class as its own: else some buffers are not initialised on loading."""
    return False


def _register_with_peft(stock: str, own: str) -> None:
    """Give a type the entries of its dense type in peft's tables of modules that adapters change, where peft is installed."""
    if importlib.util.find_spec("peft") is not None:
        for name, table in vars(importlib.import_module("peft.utils.constants")).items():
            if name.startswith("TRANSFORMERS_MODELS_TO_") and stock in table:
                table[own] = table[stock]


def derive_custom(stock: Any, module: str, config_class: Any = None) -> Any:
    """Return the pruned class of a class whose code came with its checkpoint.

    :param stock: the original configuration class or model class
    :param module: name of the module that will contain the new class
    :param config_class: for a model class, the class of its pruned configuration
    """
    if config_class is not None:
        return _derive_model(stock, config_class, module)

    def __init__(self, *args, layout=None, **kwargs):
        stock.__init__(self, *args, **kwargs)
        self.layout = layout

    model_type = f"struprune_custom_{stock.model_type}"  # no type of transformers' own
    members = {"__init__": __init__, "model_type": model_type, "make_dense": make_dense_config, "__module__": module}
    return type(PREFIX + stock.__name__, (stock,), members)


def _derive_model(stock: Any, config_class: Any, module: str) -> Any:
    def __init__(self, config):  # no annotations: vLLM reads them, and takes texts for types
        with dense_sizes(config):
            super(made, self).__init__(config)
        fit_layers(self, config.layout)

    def _get_static_cache_init_shape(self, *args, **kwargs):  # None: layer by layer, at the first call
        varies = "num_attention_heads" in (self.config.per_layer_attributes or ())
        return None if varies else super(made, self)._get_static_cache_init_shape(*args, **kwargs)

    members = {"__init__": __init__, "config_class": config_class, "__module__": module}
    members["_get_static_cache_init_shape"] = _get_static_cache_init_shape
    made = type(PREFIX + stock.__name__, (stock,), members)
    return made


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
    check_layout(config)
    text, layout = config.get_text_config(decoder=True), config.layout
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


def check_layout(config: Any) -> None:
    """Raise a ValueError where another version of this file wrote a configuration's layout."""
    found = (config.layout or {}).get("version")
    if found != VERSION:
        raise ValueError(
            f"{config._name_or_path or type(config).__name__}: the layout must be of version {VERSION}, got {found}: "
            "another version of struprune_plugin wrote this checkpoint. Prune the dense model again."
        )


def list_layers(model: Any, layout: Layout) -> Any:
    """Return the decoder layers of a model, with its head or without."""
    path = layout["layers"]
    if not hasattr(model, path.split(".")[0]):
        path = path.removeprefix(f"{model.base_model_prefix}.")
    return model.get_submodule(path)


def fit_layers(model: Any, layout: Layout) -> None:
    """Give a dense model, fresh or on the meta device, the sizes and the padding of a layout."""
    if layout.get("conv1d"):
        replace_conv1d(model)
        for module in model.modules():
            if any(hasattr(child, "nf") for child in module.children()):
                module._is_hf_initialized = True  # its class would initialise weights that a quantiser has packed
    layers = list_layers(model, layout)
    for layer, linears in zip(layers, layout["linears"], strict=True):
        for name, said in linears.items():
            _resize(layer.get_submodule(name), *said["shape"])
            if "pad" in said or "narrow" in said:
                adopt_padding(*_find_owner(layer, name), {key: said[key] for key in ("pad", "narrow") if key in said})
    for layer, counts in zip(layers, layout.get("counts", ()), strict=False):
        for name, count in counts.items():
            setattr(*_find_owner(layer, name), count)
    for layer, shapes in zip(layers, layout.get("parameters", ()), strict=False):
        for name, shape in shapes.items():
            owner, own = _find_owner(layer, name)
            setattr(owner, own, nn.Parameter(getattr(owner, own).new_empty(shape), getattr(owner, own).requires_grad))


def _find_owner(layer: Any, name: str) -> tuple[Any, str]:
    """Return the module that holds an attribute of a layer, and the attribute's name in it."""
    owner, _, own = name.rpartition(".")
    return layer.get_submodule(owner), own


def _resize(linear: nn.Linear, rows: int, columns: int) -> None:
    if (rows, columns) == (linear.out_features, linear.in_features):
        return
    linear.out_features, linear.in_features = rows, columns
    linear.weight = nn.Parameter(linear.weight.new_empty(rows, columns))
    nn.init.normal_(linear.weight, std=0.02)
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.new_zeros(rows))


def adopt_padding(owner: Any, name: str, padding: LinearLayout) -> None:
    """Set the padding of one of a module's linears; from now on the module's stock code runs on a :class:`View` of it.

    :param owner: the module whose code calls the linear
    :param name: name of the linear in it
    :raises ValueError: no method of the class reads a linear of that name, so that a view would change nothing
    """
    if not any(name in inspect.unwrap(method).__code__.co_names for method in list_methods(type(owner)).values()):
        raise ValueError(
            f"{type(owner).__name__}: its code in transformers {transformers.__version__} must call the linear {name!r}, "
            "and does not. Load the checkpoint with an older transformers, or convert it there: `struprune convert "
            "--to uniform-padded`."
        )
    if "struprune_padding" not in vars(owner):
        owner.__class__ = derive_padded(type(owner))
        owner.struprune_padding = {}
    owner.struprune_padding[name] = padding


def release_padding(owner: Any) -> None:
    """Restore the stock class of a module whose linears have the width that it handles."""
    owner.__class__ = type(owner).__mro__[1]
    del owner.struprune_padding


def list_methods(kind: type) -> dict[str, Any]:
    """Return the methods of a module's stock class and its bases, without those that all modules have, by name."""
    kinds = [base for base in kind.__mro__[: kind.__mro__.index(nn.Module)] if not base.__name__.startswith(PREFIX)]
    return {name: each for base in reversed(kinds) for name, each in vars(base).items() if inspect.isfunction(each)}


@functools.cache
def derive_padded(stock: Any) -> Any:
    """Return the class of a module of a stock class some of whose linears are padded."""

    @functools.wraps(stock.forward)  # vLLM reads the stock source, quantisers the names of its arguments
    def forward(self, *args, **kwargs):
        return stock.forward(View(self), *args, **kwargs)

    members = {"forward": forward, "stock_methods": list_methods(stock), "__module__": __name__}
    return type(PREFIX + stock.__name__, (stock,), members)


class View:
    """A module as its own stock code sees it: its narrow linears take and give the dense width.

    Linears are found by name at every call, so that whatever replaces one (an adapter, a quantiser, an engine) is called.
    """

    def __init__(self, module: Any):
        object.__setattr__(self, "_module", module)

    def __getattr__(self, name: str) -> Any:
        module = self._module
        if name in module.struprune_padding:
            return functools.partial(run_padded, getattr(module, name), module.struprune_padding[name])
        if name in module.stock_methods and name not in module.__dict__:  # its other methods see the view, too
            return functools.partial(module.stock_methods[name], self)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def run_padded(linear: Any, padding: LinearLayout, states: torch.Tensor) -> torch.Tensor:
    """Return the output of a narrow linear for an input of the dense width, in the dense width."""
    made = linear(narrow(states, padding["narrow"]) if "narrow" in padding else states)
    return pad(made, padding["pad"]) if "pad" in padding else made


def pad(states: torch.Tensor, form: Form) -> torch.Tensor:
    """Return states with zeros after the kept channels of every head, in the last dimension."""
    pieces = [
        nn.functional.pad(piece, (0, dense - kept)) if kept < dense else piece
        for piece, (_, kept, dense) in zip(_split(states, form, 1), form["segments"], strict=True)
    ]
    return _join(pieces)


def narrow(states: torch.Tensor, form: Form) -> torch.Tensor:
    """Return the kept channels of every head, in the last dimension: the reverse of :func:`pad`."""
    pieces = zip(_split(states, form, 2), form["segments"], strict=True)
    return _join([piece[..., :kept] for piece, (_, kept, _) in pieces])


def _split(states: torch.Tensor, form: Form, width: int) -> list[torch.Tensor]:
    """Return the segments, shape [..., blocks, count, width of a head]; ``width`` is the place of that width in a segment."""
    sizes = [(segment[0], segment[width]) for segment in form["segments"]]
    states = states.unflatten(-1, (form["blocks"], -1))
    pieces = states.split([count * size for count, size in sizes], -1) if len(sizes) > 1 else [states]
    return [piece.unflatten(-1, size) for piece, size in zip(pieces, sizes, strict=True)]


def _join(pieces: list[torch.Tensor]) -> torch.Tensor:
    pieces = [piece.flatten(-2) for piece in pieces]
    return (torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]).flatten(-2)


def replace_conv1d(model: Any) -> None:
    """Convert modules that store their weights transposed to linears, in place; the function does not change."""
    for module in model.modules():
        if type(module) is Conv1D:
            transpose(module, nn.Linear)
            module.out_features, module.in_features = module.nf, module.nx


def transpose(module: Any, kind: type) -> None:
    """Turn a linear into a module that stores its weights transposed, or back."""
    module.__class__ = kind
    module.weight = nn.Parameter(module.weight.detach().t().contiguous(), module.weight.requires_grad)
