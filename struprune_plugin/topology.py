"""Find the coupled units of every decoder layer. The one room that knows model families.

A *unit* is the smallest thing that can go: an FFN channel, an attention head, or one value channel of one head. A
*group* is all units of one module that share a consuming linear: the linear whose input columns go with them
(``fc2``, ``out_proj``). Its producing linears lose the matching output rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from compressed_tensors.utils import match_name
from torch import Tensor, nn

AttentionUnit = Literal["head", "vo", "none"]


@dataclass(frozen=True)
class UnitGroup:
    """The coupled units of one module of one decoder layer. Names of modules are relative to the layer.

    :param name: full name of the consuming linear; what recipes target and messages name
    :param layer_index: position of the decoder layer
    :param layer_name: full name of the decoder layer
    :param kind: ``ffn``, ``head`` or ``vo``
    :param num_units: units now present
    :param unit_cost: parameters that removing one unit frees
    :param num_blocks: equal runs of units that keep the same number each: the heads for ``vo``, else 1
    :param columns_per_unit: input columns of the consumer that belong to one unit, consecutive
    :param producers: linears that lose ``columns_per_unit`` rows a unit
    :param consumer: the linear that loses the columns
    :param residual: submodule whose input is the residual stream that the consumer's output is added to
    :param count_module: submodule that keeps the size in ``count_attribute``
    :param count_attribute: its attribute, in units per block; empty where shapes alone tell
    """

    name: str
    layer_index: int
    layer_name: str
    kind: Literal["ffn", "head", "vo"]
    num_units: int
    unit_cost: int
    num_blocks: int
    columns_per_unit: int
    producers: tuple[str, ...]
    consumer: str
    residual: str
    count_module: str = ""
    count_attribute: str = ""

    @property
    def module_kind(self) -> Literal["attention", "ffn"]:
        return "ffn" if self.kind == "ffn" else "attention"

    @property
    def num_columns(self) -> int:
        return self.num_units * self.columns_per_unit


@dataclass(frozen=True)
class Family:
    """The declarative description of one model family; adding a family means adding one of these.

    Names are relative to the model (``layers``) or to the decoder layer (the rest).

    :param model_types: ``config.model_type`` of the models described
    :param pre_norm_flag: boolean attribute of the layer; False means that norms follow the residual addition
    :param attention_residual: (pre-norm, post-norm) submodule whose input is the residual stream before attention
    :param ffn_residual: the same before the FFN
    """

    model_types: tuple[str, ...]
    layers: str
    attention: str
    query: str
    key: str
    value: str
    attention_output: str
    ffn_producers: tuple[str, ...]
    ffn_output: str
    pre_norm_flag: str
    attention_residual: tuple[str, str]
    ffn_residual: tuple[str, str]


FAMILIES = (
    Family(
        model_types=("opt", "struprune_opt"),
        layers="model.decoder.layers",
        attention="self_attn",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_output="self_attn.out_proj",
        ffn_producers=("fc1",),
        ffn_output="fc2",
        pre_norm_flag="do_layer_norm_before",
        attention_residual=("self_attn_layer_norm", "self_attn.q_proj"),
        ffn_residual=("final_layer_norm", "fc1"),
    ),
)


def find_family(model: nn.Module) -> Family:
    """Return the description of a model's family.

    :raises ValueError: the architecture is not supported; the message lists those that are
    """
    return check_model_type(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def check_model_type(model_type: str) -> Family:
    """Return the family of a ``config.model_type``; raises as :func:`find_family` does."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(
        f"model: the architecture must be one of {supported}, got {model_type!r}. Choose a supported model."
    )


def find_decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every decoder layer, first to last."""
    family = find_family(model)
    layers = model.get_submodule(family.layers)
    return [(f"{family.layers}.{name}", layer) for name, layer in layers.named_children()]


def find_linear(layer: nn.Module, name: str) -> nn.Linear:
    """Return a linear of a decoder layer by its name within the layer."""
    return cast(nn.Linear, layer.get_submodule(name))


def list_linears(family: Family) -> tuple[str, ...]:
    """Return the names, within a decoder layer, of the linears whose parameters the budget counts."""
    attention = (family.query, family.key, family.value, family.attention_output)
    return (*attention, *family.ffn_producers, family.ffn_output)


def count_prunable_parameters(model: nn.Module) -> int:
    """Count the parameters, biases too, of all linears of the decoder layers: the base of every ``sparsity``.

    What a quantiser later in the recipe has added to them does not count.
    """
    names = list_linears(find_family(model))
    return sum(
        parameter.numel()
        for _, layer in find_decoder_layers(model)
        for name in names
        for parameter_name, parameter in layer.get_submodule(name).named_parameters(recurse=False)
        if parameter_name in ("weight", "bias")
    )


def find_groups(
    model: nn.Module,
    attention_unit: AttentionUnit,
    prune_ffn: bool = True,
    targets: Sequence[str] = ("re:.*",),
    ignore: Sequence[str] = (),
) -> list[UnitGroup]:
    """Find the groups of coupled units to prune, in the order in which the model computes them.

    :param attention_unit: ``head`` (method.md section 1), ``vo`` (value channels, the same number from every head) or
        ``none``
    :param targets: names of consuming linears, exact or ``re:<pattern>``, as in the host's recipes
    :param ignore: the same, for those to leave alone
    :raises ValueError: unsupported architecture; a target or the whole choice matches nothing
    """
    family = find_family(model)
    groups = []
    for index, (name, layer) in enumerate(find_decoder_layers(model)):
        if attention_unit != "none":
            groups.append(_describe_attention(family, index, name, layer, attention_unit))
        if prune_ffn:
            groups.append(_describe_ffn(family, index, name, layer))
    for target in (*targets, *ignore):
        if groups and not any(match_name(group.name, target) for group in groups):
            raise ValueError(
                f"targets: {target!r} must match the consuming linear of a module to prune, got no match "
                f"({len(groups)} candidates, the first is {groups[0].name!r}). Correct the name or the pattern."
            )
    chosen = [
        group
        for group in groups
        if any(match_name(group.name, target) for target in targets)
        and not any(match_name(group.name, target) for target in ignore)
    ]
    if not chosen:
        raise ValueError(
            "targets: at least one module must be left to prune, got none "
            f"(attention_unit={attention_unit}, prune_ffn={prune_ffn}). Choose a unit or widen targets."
        )
    return chosen


def _describe_attention(
    family: Family, index: int, name: str, layer: nn.Module, attention_unit: Literal["head", "vo"]
) -> UnitGroup:
    attention: Any = layer.get_submodule(family.attention)
    value, output = find_linear(layer, family.value), find_linear(layer, family.attention_output)
    num_heads, width = attention.num_heads, value.out_features // attention.num_heads
    post_norm = not getattr(layer, family.pre_norm_flag)
    value_cost = value.in_features + output.out_features + (value.bias is not None)
    if attention_unit == "vo":
        producers: tuple[str, ...] = (family.value,)
        unit_cost = value_cost
    else:
        producers = (family.query, family.key, family.value)
        query = find_linear(layer, family.query)
        head_dim = query.out_features // num_heads
        unit_cost = width * value_cost + 2 * head_dim * (query.in_features + (query.bias is not None))
    return UnitGroup(
        name=f"{name}.{family.attention_output}",
        layer_index=index,
        layer_name=name,
        kind=attention_unit,
        num_units=num_heads * width if attention_unit == "vo" else num_heads,
        unit_cost=unit_cost,
        num_blocks=num_heads if attention_unit == "vo" else 1,
        columns_per_unit=1 if attention_unit == "vo" else width,
        producers=producers,
        consumer=family.attention_output,
        residual=family.attention_residual[post_norm],
        count_module=family.attention,
        count_attribute="value_head_dim" if attention_unit == "vo" else "num_heads",
    )


def _describe_ffn(family: Family, index: int, name: str, layer: nn.Module) -> UnitGroup:
    producers = [find_linear(layer, producer) for producer in family.ffn_producers]
    output = find_linear(layer, family.ffn_output)
    rows = sum(producer.in_features + (producer.bias is not None) for producer in producers)
    return UnitGroup(
        name=f"{name}.{family.ffn_output}",
        layer_index=index,
        layer_name=name,
        kind="ffn",
        num_units=output.in_features,
        unit_cost=rows + output.out_features,
        num_blocks=1,
        columns_per_unit=1,
        producers=family.ffn_producers,
        consumer=family.ffn_output,
        residual=family.ffn_residual[not getattr(layer, family.pre_norm_flag)],
    )


def list_head_weights(model: nn.Module, layer: nn.Module) -> list[Tensor]:
    """Return all weights of every head (rows of Q, K and V, columns of O), flattened, one tensor a head."""
    family = find_family(model)
    attention: Any = layer.get_submodule(family.attention)
    parts = [find_linear(layer, name).weight.detach() for name in (family.query, family.key, family.value)]
    parts.append(find_linear(layer, family.attention_output).weight.detach().T)
    return [torch.cat(rows) for rows in zip(*(part.reshape(attention.num_heads, -1) for part in parts), strict=True)]
