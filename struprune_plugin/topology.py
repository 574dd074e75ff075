"""Find the coupled units of every decoder layer. The one room that knows model families.

A *unit* is the smallest thing that can go: an FFN channel, an attention head (under grouped-query attention a KV head
with its query heads), or one value channel of one value head. A *group* is all units of one module that share a
consuming linear: the linear whose input columns go with them (``fc2``, ``o_proj``). Its producing linears lose the
matching output rows.

Everything outside this room sees the consumer's columns in *unit order*: those of one unit side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from compressed_tensors.utils import match_name
from torch import Tensor, nn

AttentionUnit = Literal["head", "vo", "none"]
Part = Literal["query", "key", "value", "ffn"]
PRUNED_PREFIX = "struprune_"  # of the model_type of a pruned model


@dataclass(frozen=True)
class UnitGroup:
    """The coupled units of one module of one decoder layer. Names of modules are relative to the layer.

    :param name: full name of the consuming linear; what recipes target and messages name
    :param layer_index: position of the decoder layer
    :param layer_name: full name of the decoder layer
    :param kind: ``ffn``, ``head`` or ``vo``
    :param num_units: units now present
    :param unit_cost: parameters that removing one unit frees
    :param num_blocks: equal runs of units that keep the same number each: the value heads for ``vo``, else 1
    :param columns_per_unit: input columns of the consumer that belong to one unit
    :param repeats: for ``vo``, query heads that share one value head; else 1
    :param producers: linears that lose rows, each with the parts of which its rows consist
    :param part_rows: rows of one part: of one value head and the query heads that share it; empty for ``ffn``
    :param interleaved: whether a fused projection's rows come head by head, not part by part
    :param consumer: the linear that loses the columns
    :param residual: submodule whose input is the residual stream that the consumer's output is added to
    :param parallel: linear whose output is added to the same residual stream in parallel; empty where none
    :param normed_output: whether a norm stands between the consumer and the residual stream
    :param attention: the attention module; empty for ``ffn``
    """

    name: str
    layer_index: int
    layer_name: str
    kind: Literal["ffn", "head", "vo"]
    num_units: int
    unit_cost: int
    num_blocks: int
    columns_per_unit: int
    repeats: int
    producers: Mapping[str, tuple[Part, ...]]
    part_rows: Mapping[Part, int]
    interleaved: bool
    consumer: str
    residual: str
    parallel: str
    normed_output: bool
    attention: str

    @property
    def module_kind(self) -> Literal["attention", "ffn"]:
        return "ffn" if self.kind == "ffn" else "attention"

    @property
    def num_columns(self) -> int:
        return self.num_units * self.columns_per_unit

    def find_row_owners(self, producer: str) -> Tensor:
        """Return the unit that every row of a producing linear belongs to, -1 where it always stays, shape [rows]."""
        parts = self.producers[producer]
        if self.kind == "ffn":
            return torch.arange(self.num_units).repeat(len(parts))
        num_heads = self.num_units if self.kind == "head" else self.num_blocks
        owners = []
        for part in parts:
            rows = self.part_rows[part]
            if self.kind == "head":
                owners.append(torch.arange(num_heads)[:, None].expand(-1, rows))
            elif part == "value":
                owners.append(torch.arange(self.num_units).view(num_heads, rows))
            else:
                owners.append(torch.full((num_heads, rows), -1))
        if self.interleaved:
            return torch.cat(owners, 1).flatten()
        return torch.cat([owner.flatten() for owner in owners])

    def find_kept_rows(self, producer: str, keep: Tensor) -> Tensor:
        """Return the rows of a producing linear that stay with the kept units, sorted, shape [kept rows]."""
        owners = self.find_row_owners(producer)
        stays = torch.zeros(self.num_units + 1, dtype=torch.bool)  # the last entry stands for owner -1
        stays[keep.cpu()] = stays[-1] = True
        return stays[owners].nonzero().flatten()

    def resize(self, num_units: int) -> UnitGroup:
        """Return the description of the same module with another number of units, the same in every block."""
        part_rows: Mapping[Part, int] = self.part_rows
        if self.kind == "vo":
            part_rows = {**part_rows, "value": num_units // self.num_blocks}
        return replace(self, num_units=num_units, part_rows=part_rows)

    def to_unit_order(self, columns: Tensor) -> Tensor:
        """Bring consumer columns (the last dimension) from the module's order to unit order."""
        if self.repeats == 1:
            return columns
        return columns.unflatten(-1, (self.num_blocks, self.repeats, -1)).transpose(-1, -2).flatten(-3)

    def to_module_order(self, columns: Tensor) -> Tensor:
        """Bring consumer columns (the last dimension), of all or of the kept units, back to the module's order."""
        if self.repeats == 1:
            return columns
        return columns.unflatten(-1, (self.num_blocks, -1, self.repeats)).transpose(-1, -2).flatten(-3)


@dataclass(frozen=True)
class Family:
    """The declarative description of one model family; adding a family means adding one of these.

    Names are relative to the model (``layers``) or to the decoder layer (the rest). A layer without the FFN named here
    (a mixture of experts) has attention units only.

    :param model_types: ``config.model_type`` of the models described
    :param attention_producers: linears that make queries, keys and values, each with the parts of its rows in order
    :param ffn_producers: the same for the FFN: ``("ffn",)``, or ``("ffn", "ffn")`` for a fused gate and up projection
    :param attention_residual: submodule whose input is the residual stream before attention
    :param ffn_residual: the same before the FFN
    :param width_key: the FFN width's name in the config
    :param interleaved: whether a fused projection's rows come head by head (q, k, v of head 0, of head 1, …)
    :param pre_norm_flag: boolean attribute of the layer; False means that norms follow the residual addition
    :param parallel: whether attention and FFN read the same residual stream, or the layer's attribute that says so
    :param normed_output: whether norms stand between the consumers and the residual stream
    :param free_heads: whether the stock class takes the head size from the config, so that it can load fewer heads
    :param rotary: whether queries and keys are rotated by position
    """

    model_types: tuple[str, ...]
    layers: str
    attention: str
    attention_producers: Mapping[str, tuple[Part, ...]]
    attention_output: str
    ffn_producers: Mapping[str, tuple[Part, ...]]
    ffn_output: str
    attention_residual: str
    ffn_residual: str
    width_key: str
    interleaved: bool = False
    pre_norm_flag: str = ""
    parallel: str | bool = False
    normed_output: bool = False
    free_heads: bool = False
    rotary: bool = True


_SEPARATE: dict[str, tuple[Part, ...]] = {
    "self_attn.q_proj": ("query",),
    "self_attn.k_proj": ("key",),
    "self_attn.v_proj": ("value",),
}
_GATED: dict[str, tuple[Part, ...]] = {"mlp.gate_proj": ("ffn",), "mlp.up_proj": ("ffn",)}
_LLAMA = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3", "gemma", "qwen3_moe"),
    layers="model.layers",
    attention="self_attn",
    attention_producers=_SEPARATE,
    attention_output="self_attn.o_proj",
    ffn_producers=_GATED,
    ffn_output="mlp.down_proj",
    attention_residual="input_layernorm",
    ffn_residual="post_attention_layernorm",
    width_key="intermediate_size",
    free_heads=True,
)
FAMILIES = (
    Family(
        model_types=("opt",),
        layers="model.decoder.layers",
        attention="self_attn",
        attention_producers=_SEPARATE,
        attention_output="self_attn.out_proj",
        ffn_producers={"fc1": ("ffn",)},
        ffn_output="fc2",
        attention_residual="self_attn_layer_norm",
        ffn_residual="final_layer_norm",
        width_key="ffn_dim",
        pre_norm_flag="do_layer_norm_before",
        rotary=False,
    ),
    _LLAMA,
    replace(
        _LLAMA,
        model_types=("gemma2", "gemma3_text"),
        ffn_residual="pre_feedforward_layernorm",
        normed_output=True,
    ),
    replace(
        _LLAMA,
        model_types=("phi3",),
        attention_producers={"self_attn.qkv_proj": ("query", "key", "value")},
        ffn_producers={"mlp.gate_up_proj": ("ffn", "ffn")},
    ),
    replace(
        _LLAMA,
        model_types=("phi",),
        attention_output="self_attn.dense",
        ffn_producers={"mlp.fc1": ("ffn",)},
        ffn_output="mlp.fc2",
        ffn_residual="input_layernorm",
        parallel=True,
        free_heads=False,
    ),
    Family(
        model_types=("gpt_neox",),
        layers="gpt_neox.layers",
        attention="attention",
        attention_producers={"attention.query_key_value": ("query", "key", "value")},
        attention_output="attention.dense",
        ffn_producers={"mlp.dense_h_to_4h": ("ffn",)},
        ffn_output="mlp.dense_4h_to_h",
        attention_residual="input_layernorm",
        ffn_residual="post_attention_layernorm",
        width_key="intermediate_size",
        interleaved=True,
        parallel="use_parallel_residual",
    ),
)


def find_family(model: nn.Module) -> Family:
    """Return the description of a model's family.

    :raises ValueError: the architecture is not supported; the message lists those that are
    """
    return check_model_type(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def check_model_type(model_type: str) -> Family:
    """Return the family of a ``config.model_type``, dense or pruned; raises as :func:`find_family` does."""
    for family in FAMILIES:
        if model_type.removeprefix(PRUNED_PREFIX) in family.model_types:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(
        f"model: the architecture must be one of {supported}, or one of these pruned, got {model_type!r}. "
        "Choose a supported model."
    )


def find_decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every decoder layer, first to last."""
    family = find_family(model)
    layers = model.get_submodule(family.layers)
    return [(f"{family.layers}.{name}", layer) for name, layer in layers.named_children()]


def find_linear(layer: nn.Module, name: str) -> nn.Linear:
    """Return a linear of a decoder layer by its name within the layer."""
    return cast(nn.Linear, layer.get_submodule(name))


def list_linears(family: Family, layer: nn.Module) -> list[str]:
    """Return the names, within a decoder layer, of the linears whose parameters the budget counts."""
    names = [*family.attention_producers, family.attention_output]
    return names + ([*family.ffn_producers, family.ffn_output] if has_ffn(family, layer) else [])


def has_ffn(family: Family, layer: nn.Module) -> bool:
    """Tell whether a layer has the FFN that its family describes; a mixture of experts has not."""
    return any(name == family.ffn_output for name, _ in layer.named_modules())


def count_prunable_parameters(model: nn.Module) -> int:
    """Count the parameters, biases too, of all linears of the decoder layers: the base of every ``sparsity``.

    Experts of a mixture are not counted, they hold no units; nor is what a quantiser later in the recipe has added.
    """
    family = find_family(model)
    return sum(
        parameter.numel()
        for _, layer in find_decoder_layers(model)
        for name in list_linears(family, layer)
        for parameter_name, parameter in layer.get_submodule(name).named_parameters(recurse=False)
        if parameter_name in ("weight", "bias")
    )


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one decoder layer.

    :param num_heads: query heads
    :param num_key_value_heads: key and value heads
    :param head_dim: of queries and keys
    :param value_head_dim: of values
    :param width: FFN channels; 0 where there is no FFN to prune
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    value_head_dim: int
    width: int


def measure_layer(family: Family, layer: nn.Module) -> LayerSizes:
    """Read a decoder layer's sizes off its linears."""
    attention: Any = layer.get_submodule(family.attention)
    head_dim = getattr(attention, "head_dim", None) or attention.head_size
    value_dim = getattr(attention, "value_head_dim", head_dim)
    repeats = getattr(attention, "num_key_value_groups", 1)
    rows = sum(find_linear(layer, name).out_features for name in family.attention_producers)
    num_key_value_heads = rows // ((repeats + 1) * head_dim + value_dim)
    width = find_linear(layer, family.ffn_output).in_features if has_ffn(family, layer) else 0
    return LayerSizes(repeats * num_key_value_heads, num_key_value_heads, head_dim, value_dim, width)


def has_uniform_layers(model: nn.Module) -> bool:
    """Tell whether all layers have the same sizes (layers without an FFN apart), values as wide as queries and keys."""
    family = find_family(model)
    sizes = [measure_layer(family, layer) for _, layer in find_decoder_layers(model)]
    widths = {size.width for size in sizes if size.width}
    heads = {replace(size, width=0) for size in sizes}
    return len(widths) <= 1 and len(heads) == 1 and sizes[0].value_head_dim == sizes[0].head_dim


def update_counts(layer: nn.Module, group: UnitGroup, num_keep: int) -> None:
    """Let an attention module know how many units its linears now hold."""
    if group.kind == "ffn":
        return
    attention: Any = layer.get_submodule(group.attention)
    if group.kind == "vo":
        attention.value_head_dim = num_keep // group.num_blocks
        return
    for name, count in read_counts(attention).items():
        if name != "value_head_dim":
            setattr(attention, name, count * num_keep // group.num_units)


def read_counts(attention: nn.Module) -> dict[str, int]:
    """Return the sizes that an attention module keeps in attributes and that slicing changes, by name."""
    names = ("num_heads", "num_key_value_heads", "value_head_dim")
    return {name: getattr(attention, name) for name in names if hasattr(attention, name)}


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
        if prune_ffn and has_ffn(family, layer):
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
    sizes = measure_layer(family, layer)
    repeats = sizes.num_heads // sizes.num_key_value_heads
    part_rows: dict[Part, int] = {
        "query": repeats * sizes.head_dim,
        "key": sizes.head_dim,
        "value": sizes.value_head_dim,
    }
    vo = attention_unit == "vo"
    producers = {n: parts for n, parts in family.attention_producers.items() if not vo or "value" in parts}
    group = UnitGroup(
        name=f"{name}.{family.attention_output}",
        layer_index=index,
        layer_name=name,
        kind=attention_unit,
        num_units=sizes.num_key_value_heads * (sizes.value_head_dim if vo else 1),
        unit_cost=0,
        num_blocks=sizes.num_key_value_heads if vo else 1,
        columns_per_unit=repeats * (1 if vo else sizes.value_head_dim),
        repeats=repeats if vo else 1,
        producers=producers,
        part_rows=part_rows,
        interleaved=family.interleaved,
        consumer=family.attention_output,
        residual=_find_residual(family, layer, family.attention_residual, family.attention_producers),
        parallel="",
        normed_output=family.normed_output,
        attention=family.attention,
    )
    return replace(group, unit_cost=_count_unit_parameters(layer, group))


def _describe_ffn(family: Family, index: int, name: str, layer: nn.Module) -> UnitGroup:
    parallel = getattr(layer, family.parallel) if isinstance(family.parallel, str) else family.parallel
    group = UnitGroup(
        name=f"{name}.{family.ffn_output}",
        layer_index=index,
        layer_name=name,
        kind="ffn",
        num_units=find_linear(layer, family.ffn_output).in_features,
        unit_cost=0,
        num_blocks=1,
        columns_per_unit=1,
        repeats=1,
        producers=family.ffn_producers,
        part_rows={},
        interleaved=False,
        consumer=family.ffn_output,
        residual=_find_residual(family, layer, family.ffn_residual, family.ffn_producers),
        parallel=family.attention_output if parallel else "",
        normed_output=family.normed_output,
        attention="",
    )
    return replace(group, unit_cost=_count_unit_parameters(layer, group))


def _find_residual(family: Family, layer: nn.Module, norm: str, producers: Mapping[str, tuple[Part, ...]]) -> str:
    """Return the submodule that the residual stream enters: the norm, or the first linear where norms come after."""
    pre_norm = not family.pre_norm_flag or getattr(layer, family.pre_norm_flag)
    return norm if pre_norm else next(iter(producers))


def _count_unit_parameters(layer: nn.Module, group: UnitGroup) -> int:
    """Count the parameters that go with one unit: its rows with their biases, and its columns."""
    count = group.columns_per_unit * find_linear(layer, group.consumer).out_features
    for name in group.producers:
        producer = find_linear(layer, name)
        rows = int((group.find_row_owners(name) == 0).sum())
        count += rows * (producer.in_features + (producer.bias is not None))
    return count


def list_head_weights(model: nn.Module, layer: nn.Module) -> list[Tensor]:
    """Return all weights of every head (rows of Q, K and V, columns of O), flattened, one tensor a head.

    Under grouped-query attention a head is a KV head with its query heads.
    """
    group = _describe_attention(find_family(model), 0, "", layer, "head")
    parts = []
    for name in group.producers:
        weight, owners = find_linear(layer, name).weight.detach(), group.find_row_owners(name)
        parts.append(weight[owners.argsort(stable=True).to(weight.device)].unflatten(0, (group.num_units, -1)))
    parts.append(find_linear(layer, group.consumer).weight.detach().T.unflatten(0, (group.num_units, -1)))
    return [torch.cat([part[head].flatten() for part in parts]) for head in range(group.num_units)]
