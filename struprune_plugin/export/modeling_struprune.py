"""Decoder models with layers of different sizes. This file is saved with every pruned checkpoint and needs only transformers.

``StruPruneLlamaForCausalLM`` and similar classes are created on first access from transformers' own classes of the same name
without the prefix. Their configuration is the dense model's, with additions of one of two forms:

- every layer's sizes in transformers' ``per_layer_config`` (under the stock configuration's own names, and ``value_head_dim``), and
  ``layout``, which holds the names of the layers' linears and the parts of their rows and columns: attention is narrowed
- ``layout`` alone, for any class: the linears that differ from the dense model's, by layer and name, with their shapes. A
  linear whose attention module reshapes to a fixed width pads its output with zeros (``spread``) or reads some columns (``gather``)

In both, ``parameters`` of ``layout`` holds the shapes of tensors outside linears: packed experts of a mixture.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

PREFIX = "StruPrune"
NARROWING = {  # attention classes whose forward pass StruPruneAttention rewrites; others get padded linears
    *("OPTAttention", "LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention"),
    *("GemmaAttention", "Gemma2Attention", "Gemma3Attention", "GraniteAttention", "PhiAttention", "Phi3Attention"),
    "GPTNeoXAttention",
}


def __getattr__(name: str) -> Any:
    if name.startswith(PREFIX) and hasattr(transformers, name.removeprefix(PREFIX)):
        return derive_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def derive_class(name: str) -> Any:
    """Return the pruned configuration or model class of that name, derived from the stock class without the prefix."""
    stock = getattr(transformers, name.removeprefix(PREFIX))
    if issubclass(stock, transformers.PreTrainedConfig):
        members = {
            "__annotations__": {"layout": dict | None, "value_head_dim": int | None},
            "layout": None,
            "value_head_dim": None,
            "model_type": f"struprune_{stock.model_type}",
            # these read the one head count that a stock model has; the dense configuration has passed them
            "validate_architecture": lambda self: None,
            "validate_rope": lambda self: None,
            "make_dense": make_dense_config,
            "is_custom_code": _is_custom_code,
        }
        if not hasattr(stock, "head_dim"):  # else vLLM divides the hidden size by a layer's own heads
            members["head_dim"] = _HeadSize()
        return strict(type(name, (stock,), {**members, "__module__": __name__}))

    config_class = derive_class(PREFIX + stock.config_class.__name__)
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


def _derive_model(stock: Any, config_class: Any, module: str) -> Any:
    def __init__(self, config):  # no annotations: vLLM reads them, and takes texts for types
        if "linears" in config.layout:
            super(made, self).__init__(config)
            fit_linears(self, config.layout)
            fit_parameters(self, config.layout)
            return
        dense = make_dense_config(config)
        super(made, self).__init__(dense)
        copy_settings(dense, config)
        fit_layers(self, dense, config)
        fit_parameters(self, config.layout)
        if "fused" in config.layout:
            fuse_layers(self, config.layout)

    members = {"__init__": __init__, "config_class": config_class, "__module__": module}
    made = type(PREFIX + stock.__name__, (stock,), members)
    return made


class _HeadSize:
    """Attribute read from the layout, for configurations without a value; not a property, which could not be set."""

    def __get__(self, config: Any, owner: type | None = None) -> int | None:
        if config is not None and "linears" in (config.layout or {}):
            raise AttributeError("head_dim")  # as of the stock configuration
        return None if config is None else (config.layout or {}).get("head_dim")


def make_dense_config(config: Any) -> Any:
    """Return the stock configuration of the dense model that a pruned one was made from."""
    dense = copy.deepcopy(config)  # parts of it are configurations themselves
    if "linears" not in dense.layout:  # else it is the dense model's own
        dense.per_layer_config = None
    dense.__class__ = next(c for c in type(config).__mro__ if not c.__name__.startswith(PREFIX))
    for name in ("layout", "value_head_dim", "model_type", "auto_map", "architectures"):
        dense.__dict__.pop(name, None)
    return dense


def copy_settings(old: Any, new: Any) -> None:
    """Copy the attributes outside the fields from one configuration to another."""
    new.dtype, new._name_or_path = old.dtype, old._name_or_path
    new._attn_implementation = old._attn_implementation
    new._experts_implementation = old._experts_implementation


def list_layers(model: Any, layout: dict[str, Any]) -> Any:
    """Return the decoder layers of a model, with its head or without."""
    path = layout["layers"]
    if not hasattr(model, path.split(".")[0]):
        path = path.removeprefix(f"{model.base_model_prefix}.")
    return model.get_submodule(path)


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
    return type(
        PREFIX + stock.__name__,
        (stock,),
        {"__init__": __init__, "model_type": model_type, "make_dense": make_dense_config, "__module__": module},
    )


def fit_linears(model: Any, layout: dict[str, Any]) -> None:
    """Set the sizes and the padding of the layout in the linears of a dense model, fresh or on the meta device.

    :param layout: ``linears`` holds, for every layer, by name ``{"shape": [rows, columns]}``, and ``spread`` or ``gather`` as in
        :func:`adopt_padded`; ``conv1d`` is set where the dense class has transposed linears
    """
    if layout.get("conv1d"):
        replace_conv1d(model)
    for layer, linears in zip(list_layers(model, layout), layout["linears"], strict=True):
        for name, said in linears.items():
            linear = layer.get_submodule(name)
            _resize(linear, *said["shape"])
            if "spread" in said or "gather" in said:
                adopt_padded(linear, said.get("spread"), said.get("gather"))


def fit_parameters(model: Any, layout: dict[str, Any]) -> None:
    """Set the shapes of the layout in a dense model's tensors outside linears, those of experts.

    :param layout: ``parameters`` holds, for every layer, the shapes by name
    """
    for layer, shapes in zip(list_layers(model, layout), layout.get("parameters", ()), strict=False):
        for name, shape in shapes.items():
            owner, _, own = name.rpartition(".")
            old = getattr(layer.get_submodule(owner), own)
            setattr(layer.get_submodule(owner), own, nn.Parameter(old.new_empty(shape), old.requires_grad))


def replace_conv1d(model: Any) -> None:
    """Convert modules that store their weights transposed to linears, in place; the function does not change."""
    for module in model.modules():
        if type(module) is Conv1D:
            _transpose(module, nn.Linear)
            module.out_features, module.in_features = module.nf, module.nx


def restore_conv1d(model: Any) -> None:
    """Undo :func:`replace_conv1d`."""
    for module in model.modules():
        if type(module) is nn.Linear and hasattr(module, "nf"):
            _transpose(module, Conv1D)
            module.nx, module.nf = module.in_features, module.out_features


def _transpose(module: Any, kind: type) -> None:
    module.__class__ = kind
    module.weight = nn.Parameter(module.weight.detach().t().contiguous(), module.weight.requires_grad)


def adopt_padded(linear: Any, spread: dict[str, Any] | None = None, gather: dict[str, Any] | None = None) -> Any:
    """Convert a linear with fewer channels than the module around it handles to a padded one; return it.

    Both are ``{"outer": o, "segments": [[count, kept, wide], ...]}``: channels seen as o blocks of the segments in order, each
    of ``count`` times ``wide``, of which the linear has the first ``kept``.

    :param spread: padding of its rows: zeros follow in the output
    :param gather: padding of its columns: the rest of the input is not read
    """
    if not hasattr(linear, "spread"):  # as in adopt_attention
        linear.__class__ = _derive_module(StruPruneLinear, type(linear))
    linear.spread, linear.gather = spread, gather
    return linear


def release_padded(linear: Any) -> None:
    """Restore a linear's original class."""
    linear.__class__ = type(linear).__mro__[2]
    del linear.spread, linear.gather


@cache
def _derive_module(mixin: type, stock: type) -> type:
    return type(PREFIX + stock.__name__, (mixin, stock), {"__module__": __name__})


class StruPruneLinear:
    """Linear with fewer rows or columns than the module around it handles; mixed in before a linear's own class.

    Hooks and ``forward`` handle the channels that the weights have, so that quantisers and others see a linear like any other.

    :ivar spread: padding of its rows, as in :func:`adopt_padded`; None where no row is missing
    :ivar gather: padding of its columns, likewise
    """

    spread: dict[str, Any] | None
    gather: dict[str, Any] | None

    def __call__(self: Any, input: torch.Tensor) -> torch.Tensor:  # the name that torch's linears use
        is_wide = self.gather is not None and input.shape[-1] != self.in_features  # not if a hook's input is run again
        made = super().__call__(narrow(input, self.gather) if is_wide else input)  # type: ignore[misc]
        return made if self.spread is None else widen(made, self.spread)


def widen(states: torch.Tensor, form: dict[str, Any]) -> torch.Tensor:
    """Return states with zeros after the kept channels of every block, in the last dimension; form as in :func:`adopt_padded`."""
    blocks = states.unflatten(-1, (form["outer"], -1))
    pieces = blocks.split([count * kept for count, kept, _ in form["segments"]], -1)
    made = [
        nn.functional.pad(piece.unflatten(-1, (count, kept)), (0, wide - kept)).flatten(-2) if kept < wide else piece
        for piece, (count, kept, wide) in zip(pieces, form["segments"], strict=True)
    ]
    return torch.cat(made, -1).flatten(-2)


def narrow(states: torch.Tensor, form: dict[str, Any]) -> torch.Tensor:
    """Return the kept channels of every block, in the last dimension: the reverse of :func:`widen`."""
    blocks = states.unflatten(-1, (form["outer"], -1))
    pieces = blocks.split([count * wide for count, _, wide in form["segments"]], -1)
    made = [
        piece.unflatten(-1, (count, wide))[..., :kept].flatten(-2) if kept < wide else piece
        for piece, (count, kept, wide) in zip(pieces, form["segments"], strict=True)
    ]
    return torch.cat(made, -1).flatten(-2)


def fit_layers(model: Any, dense: Any, config: Any) -> None:
    """Set the sizes of the configuration in every layer of a dense model, fresh or on the meta device."""
    layout = config.layout
    for layer, sizes in zip(list_layers(model, layout), config.per_layer_config, strict=True):
        columns = {"ffn": getattr(sizes, layout["width_key"])}
        rows = columns | _fit_attention(layer, sizes, layout)
        columns["attention"] = sizes.num_attention_heads * sizes.value_head_dim
        linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        for name, parts in layout["rows"].items():
            if name in linears:
                _resize(linears[name], out_features=sum(rows[part] for part in parts))
        for name, part in layout["columns"].items():
            if name in linears:
                _resize(linears[name], in_features=columns[part])
    share_config(model, dense, config)


def _fit_attention(layer: Any, sizes: Any, layout: dict[str, Any]) -> dict[str, int]:
    """Set the sizes of a layer's attention module; return the number of rows of its linears, by part."""
    attention = layer.get_submodule(layout["attention"])
    heads, wide = sizes.num_attention_heads, _read_width(attention)
    if sizes.value_head_dim != wide or _cuts_by_config(layout):  # else the stock class does, and is faster
        adopt_attention(attention, layout)
        attention.value_head_dim = sizes.value_head_dim
    value_heads = heads // getattr(attention, "num_key_value_groups", 1)
    for name, count in (("num_heads", heads), ("num_key_value_heads", value_heads)):
        if hasattr(attention, name):
            setattr(attention, name, count)
    return {"query": heads * wide, "key": value_heads * wide, "value": value_heads * sizes.value_head_dim}


def fuse_layers(model: Any, layout: dict[str, Any]) -> None:
    """Convert a pruned model, loaded, fresh or on the meta device, to its static form: the same function in fewer, larger steps.

    Linears that read the same input become one, whose rows are those of its parts in order: one linear for queries, keys and
    values, and one for the gate and up projections. RMS norms become calls of torch's own.

    :param layout: layout of the configuration; ``fused`` holds the names of the joined linears, and their parts
    """
    for layer in list_layers(model, layout):
        for name, parts in layout["fused"].items():
            owner_name, _, own_name = name.rpartition(".")
            owner = layer.get_submodule(owner_name)
            short = [part.rpartition(".")[2] for part in parts]
            if not hasattr(owner, short[0]):  # a mixture of experts
                continue
            setattr(owner, own_name, _join([getattr(owner, part) for part in short]))
            for part in short:
                delattr(owner, part)
            if owner_name == layout["attention"]:
                adopt_attention(owner, layout).rows = {own_name: tuple(layout["rows"][part][0] for part in parts)}
            else:
                owner.__class__ = _derive_module(StruPruneGated, type(owner))
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.__class__ = _derive_module(StruPruneNorm, type(module))


def _join(linears: list[Any]) -> nn.Linear:
    first, rows = linears[0], sum(linear.out_features for linear in linears)
    made = nn.Linear(first.in_features, rows, bias=first.bias is not None, device="meta")
    for name in dict(made.named_parameters()):
        values = torch.cat([getattr(linear, name).detach() for linear in linears])
        setattr(made, name, nn.Parameter(values, requires_grad=getattr(first, name).requires_grad))
    return made


class StruPruneGated:
    """Gated FFN whose gate and up projections are one linear."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)


class StruPruneNorm:
    """RMS norm that is one call of torch's."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def share_config(model: Any, old: Any, new: Any) -> None:
    """Set another configuration in all modules except rotary embeddings, which read the dense model's head size."""
    for module in model.modules():
        rotary = any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
        if getattr(module, "config", None) is old and not rotary:
            module.config = new


def _resize(linear: nn.Linear, out_features: int | None = None, in_features: int | None = None) -> None:
    rows, columns = out_features or linear.out_features, in_features or linear.in_features
    if (rows, columns) == (linear.out_features, linear.in_features):
        return
    linear.out_features, linear.in_features = rows, columns
    linear.weight = nn.Parameter(linear.weight.new_empty(rows, columns))
    nn.init.normal_(linear.weight, std=0.02)
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.new_zeros(rows))


def adopt_attention(attention: Any, layout: dict[str, Any]) -> Any:
    """Convert a stock attention module to accept values of any width; its function does not change."""
    if not hasattr(attention, "wide"):  # a class of this file may have come twice, by the plugin and with a checkpoint
        attention.wide = _read_width(attention)
        attention.value_head_dim = attention.wide
        attention.__class__ = _derive_module(StruPruneAttention, type(attention))
        prefix = f"{layout['attention']}."
        attention.rows = {n.removeprefix(prefix): p for n, p in layout["rows"].items() if n.startswith(prefix)}
        attention.output = next(n for n, part in layout["columns"].items() if part == "attention").removeprefix(prefix)
        attention.interleaved = layout["interleaved"]
        named = [(f"q_{norm}", f"k_{norm}") for norm in ("norm", "layernorm")]
        attention.norms = next((pair for pair in named if hasattr(attention, pair[0])), ())
    return attention


def _read_width(attention: Any) -> int:
    """Return the width of a head's queries and keys."""
    return getattr(attention, "head_dim", None) or attention.head_size


def _cuts_by_config(layout: dict[str, Any]) -> bool:
    """Return whether stock code cuts a fused projection's rows by the configuration's one head count."""
    return not layout["interleaved"] and any({"query", "value"} <= {*parts} for parts in layout["rows"].values())


def release_attention(attention: Any) -> None:
    """Restore the stock class of an attention module with values of full width."""
    assert attention.value_head_dim == attention.wide
    attention.__class__ = type(attention).__mro__[2]
    for name in ("wide", "value_head_dim", "rows", "output", "interleaved", "norms"):
        delattr(attention, name)


class StruPruneAttention:
    """Attention whose values may be narrower than its queries and keys; mixed in before a stock attention class.

    :ivar wide: width of queries and keys of one head
    :ivar value_head_dim: width of its values
    :ivar rows: parts of the rows of the linears that produce them, by linear
    :ivar output: name of the output projection
    :ivar interleaved: whether a fused projection's rows are ordered head by head
    :ivar norms: names of the norms of queries and keys, where it has them
    """

    wide: int
    value_head_dim: int
    rows: dict[str, tuple[str, ...]]
    output: str
    interleaved: bool
    norms: tuple[str, ...]

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,  # named, because quantisers of the cache look for it in the signature
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        if self.fits_stock():
            given = {"position_embeddings": position_embeddings, "past_key_values": past_key_values}
            given |= {"layer_past": layer_past}
            kwargs |= {name: value for name, value in given.items() if value is not None}
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        query, key, value = self._make_states(hidden_states, position_embeddings)
        cache = layer_past if past_key_values is None else past_key_values
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        kind = self.config._attn_implementation
        if kind == "sdpa" and query.shape[2] == 1 and not self.training:
            output = attend_one(query, key, value, attention_mask, self.scaling)
            return getattr(self, self.output)(output), None
        stock = sys.modules[type(self).__mro__[2].__module__]
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(kind, stock.eager_attention_forward)
        if kind != "eager" and self.value_head_dim < self.wide:
            # fused kernels want one width for all three; the cache holds the narrow values
            value = nn.functional.pad(value, (0, self.wide - self.value_head_dim))
        dropout = self.attention_dropout if hasattr(self, "attention_dropout") else self.dropout
        if getattr(self, "attn_logit_softcapping", None) is not None:
            kwargs["softcap"] = self.attn_logit_softcapping
        window = (
            self.sliding_window if hasattr(self, "sliding_window") else getattr(self.config, "sliding_window", None)
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=window,
            **kwargs,
        )
        output = output.reshape(*hidden_states.shape[:-1], -1, value.shape[-1])[..., : self.value_head_dim].flatten(-2)
        return getattr(self, self.output)(output), weights

    def fits_stock(self) -> bool:
        """Return whether the stock class' own function gives the output."""
        return self.value_head_dim == self.wide and not self.is_joined()  # stock code cuts by the config's head count

    def is_joined(self) -> bool:
        """Return whether one linear produces all queries, then all keys, then all values."""
        return len(self.rows) == 1 and not self.interleaved

    def _make_states(self: Any, hidden: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor] | None) -> Any:
        """Return queries, keys and values, normed and rotated, each of shape [batch, heads, tokens, width]."""
        if self.is_joined() and positions is not None and not self.norms:
            both, value = self._project_joined(hidden)
        else:
            query, key, value = self._project(hidden)
            if self.norms:
                query, key = getattr(self, self.norms[0])(query), getattr(self, self.norms[1])(key)
            if positions is None:
                return query, key, value
            both = torch.cat((query, key), 1)
        return *_part(rotate(both, *positions), value), value

    def _project_joined(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys as one, of shape [batch, heads, tokens, width], and values."""
        rows = getattr(self, next(iter(self.rows)))(hidden)
        wide, narrow, shape = self.wide, self.value_head_dim, (*hidden.shape[:-1], -1)
        value_heads = rows.shape[-1] // ((getattr(self, "num_key_value_groups", 1) + 1) * wide + narrow)
        cut = rows.shape[-1] - value_heads * narrow
        both, value = rows.split_with_sizes((cut, value_heads * narrow), -1)
        return both.view(*shape, wide).transpose(1, 2), value.view(*shape, narrow).transpose(1, 2)

    def _project(self: Any, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Return queries, keys and values, each of shape [batch, heads, tokens, width]."""
        if self.is_joined():
            both, value = self._project_joined(hidden)
            return [*_part(both, value), value]
        shape = hidden.shape[:-1]
        widths = {"query": self.wide, "key": self.wide, "value": self.value_head_dim}
        if len(self.rows) == len(widths):
            made = {
                part: getattr(self, name)(hidden).view(*shape, -1, widths[part]).transpose(1, 2)
                for name, (part,) in self.rows.items()
            }
            return [made["query"], made["key"], made["value"]]
        repeated = {"query": getattr(self, "num_key_value_groups", 1), "key": 1, "value": 1}
        found = {}
        for name, parts in self.rows.items():
            shares = [repeated[part] * widths[part] for part in parts]
            rows = getattr(self, name)(hidden).unflatten(-1, (-1, sum(shares)))
            for part, piece in zip(parts, rows.split(shares, -1), strict=True):
                found[part] = piece.reshape(*shape, -1, widths[part]).transpose(1, 2)
        return [found[part] for part in ("query", "key", "value")]


def _part(both: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return queries and keys; there are as many heads of keys as of values."""
    num_keys = value.shape[1]
    return both.split_with_sizes((both.shape[1] - num_keys, num_keys), 1)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries and keys by position, together: x cos + (-second half of x, first half of x) sin.

    Stock code rotates them separately, in twice as many steps, which dominate the time per new token. Some classes rotate the
    first channels only.

    :param states: queries and keys, shape [batch, heads, tokens, width]
    :param cos: shape [batch, tokens, rotated width]
    :param sin: the same
    """
    width = cos.shape[-1]
    whole = width == states.shape[-1]
    turning = states if whole else states[..., :width]
    first, second = turning.chunk(2, -1)
    turned = torch.cat((-second, first), -1).mul_(sin.unsqueeze(1))
    rotated = (turning * cos.unsqueeze(1)).add_(turned)  # not addcmul: rounded as stock code does
    return rotated if whole else torch.cat((rotated, states[..., width:]), -1)


def attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return the attention output of one new token, shape [batch, 1, heads * width of values].

    Fused kernels would require padding all cached values for every token; here each value is read once for all the query
    heads that share it.

    :param query: query of the token, shape [batch, heads, 1, width]
    :param key: shape [batch, value heads, tokens, width]
    :param value: shape [batch, value heads, tokens, width of values]
    :param mask: visible tokens, or terms added to the logits, shape [batch, 1, 1, tokens]; None where all tokens are visible
    """
    batch, heads, _, width = query.shape
    shared = batch * key.shape[1]
    key, value = key.reshape(shared, -1, width), value.reshape(shared, -1, value.shape[-1])
    query = query.reshape(shared, -1, width)
    logits = torch.bmm(query.float() * scaling, key.mT.float())
    if mask is not None:
        mask, logits = mask[:, 0, :, : key.shape[1]], logits.view(batch, heads, -1)
        hidden = torch.finfo(logits.dtype).min
        logits = torch.where(mask, logits, hidden) if mask.dtype == torch.bool else logits + mask
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.bmm(weights.view(shared, -1, weights.shape[-1]), value).view(batch, 1, -1)
