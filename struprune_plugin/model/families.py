"""The declarative descriptions of the model families. Adding a family means adding one of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

Part = Literal["query", "key", "value", "ffn"]
Producers = Mapping[str, tuple[Part, ...]]  # linears, each with the parts of its rows in order
PRUNED_PREFIX = "struprune_"  # of the model_type of a pruned model


@dataclass(frozen=True)
class AttentionLayout:
    """The attention of a family; names are relative to the decoder layer.

    :param module: the attention module
    :param producers: linears that make queries, keys and values, each with the parts of its rows in order
    :param output: the output projection
    :param residual: submodule whose input is the residual stream before attention
    :param interleaved: whether a fused projection's rows come head by head (q, k, v of head 0, of head 1, …)
    :param free_heads: whether the stock class takes the head size from the config, so that it can load fewer heads
    :param rotary: whether queries and keys are rotated by position
    :param logit_cap: the config's name of a soft cap on attention logits, which fused kernels drop; empty where none
    """

    module: str
    producers: Producers
    output: str
    residual: str
    interleaved: bool = False
    free_heads: bool = False
    rotary: bool = True
    logit_cap: str = ""


@dataclass(frozen=True)
class FFNLayout:
    """The FFN of a family; names are relative to the decoder layer.

    :param producers: ``("ffn",)`` a linear, or ``("ffn", "ffn")`` for a fused gate and up projection
    :param output: the linear that reads the channels
    :param residual: submodule whose input is the residual stream before the FFN
    :param width_key: the width's name in the config
    :param activation_key: the activation's name in the config
    """

    producers: Producers
    output: str
    residual: str
    width_key: str = "intermediate_size"
    activation_key: str = "hidden_act"

    @property
    def gated(self) -> bool:
        return sum(map(len, self.producers.values())) == 2


@dataclass(frozen=True)
class Family:
    """One model family. A layer without the FFN named here (a mixture of experts) has attention units only.

    :param model_types: ``config.model_type`` of the models described
    :param layers: the list of decoder layers, relative to the model
    :param pre_norm_flag: boolean attribute of the layer; False means that norms follow the residual addition
    :param parallel: whether attention and FFN read the same residual stream, or the layer's attribute that says so
    :param normed_output: whether norms stand between the consumers and the residual stream
    :param residual_scale: the layer's attribute that holds a factor on its modules' outputs; empty where there is none
    :param logit_scale: the config's name of what the model's logits are divided by; empty where nothing
    :param logit_cap: the config's name of a soft cap on the model's logits; empty where none
    """

    model_types: tuple[str, ...]
    layers: str
    attention: AttentionLayout
    ffn: FFNLayout
    pre_norm_flag: str = ""
    parallel: str | bool = False
    normed_output: bool = False
    residual_scale: str = ""
    logit_scale: str = ""
    logit_cap: str = ""


_SEPARATE: Producers = {
    "self_attn.q_proj": ("query",),
    "self_attn.k_proj": ("key",),
    "self_attn.v_proj": ("value",),
}
_LLAMA_ATTENTION = AttentionLayout(
    module="self_attn",
    producers=_SEPARATE,
    output="self_attn.o_proj",
    residual="input_layernorm",
    free_heads=True,
)
_LLAMA_FFN = FFNLayout(
    producers={"mlp.gate_proj": ("ffn",), "mlp.up_proj": ("ffn",)},
    output="mlp.down_proj",
    residual="post_attention_layernorm",
)
_LLAMA = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3", "gemma", "qwen3_moe"),
    layers="model.layers",
    attention=_LLAMA_ATTENTION,
    ffn=_LLAMA_FFN,
)
FAMILIES = (
    Family(
        model_types=("opt",),
        layers="model.decoder.layers",
        attention=replace(
            _LLAMA_ATTENTION,
            output="self_attn.out_proj",
            residual="self_attn_layer_norm",
            free_heads=False,
            rotary=False,
        ),
        ffn=FFNLayout(
            producers={"fc1": ("ffn",)},
            output="fc2",
            residual="final_layer_norm",
            width_key="ffn_dim",
            activation_key="activation_function",
        ),
        pre_norm_flag="do_layer_norm_before",
    ),
    _LLAMA,
    replace(
        _LLAMA,
        model_types=("granite",),
        attention=replace(_LLAMA_ATTENTION, free_heads=False),
        residual_scale="residual_multiplier",
        logit_scale="logits_scaling",
    ),
    replace(
        _LLAMA,
        model_types=("gemma2", "gemma3_text"),
        attention=replace(_LLAMA_ATTENTION, logit_cap="attn_logit_softcapping"),
        ffn=replace(_LLAMA_FFN, residual="pre_feedforward_layernorm", activation_key="hidden_activation"),
        normed_output=True,
        logit_cap="final_logit_softcapping",
    ),
    replace(
        _LLAMA,
        model_types=("phi3",),
        attention=replace(_LLAMA_ATTENTION, producers={"self_attn.qkv_proj": ("query", "key", "value")}),
        ffn=replace(_LLAMA_FFN, producers={"mlp.gate_up_proj": ("ffn", "ffn")}),
    ),
    replace(
        _LLAMA,
        model_types=("phi",),
        attention=replace(_LLAMA_ATTENTION, output="self_attn.dense", free_heads=False),
        ffn=FFNLayout(producers={"mlp.fc1": ("ffn",)}, output="mlp.fc2", residual="input_layernorm"),
        parallel=True,
    ),
    Family(
        model_types=("gpt_neox",),
        layers="gpt_neox.layers",
        attention=AttentionLayout(
            module="attention",
            producers={"attention.query_key_value": ("query", "key", "value")},
            output="attention.dense",
            residual="input_layernorm",
            interleaved=True,
        ),
        ffn=FFNLayout(
            producers={"mlp.dense_h_to_4h": ("ffn",)},
            output="mlp.dense_4h_to_h",
            residual="post_attention_layernorm",
        ),
        parallel="use_parallel_residual",
    ),
)


def find_family(model: nn.Module) -> Family:
    """Return the description of a model's family.

    :raises ValueError: the architecture is not supported; the message lists those that are. Or as :func:`check_form` does
    """
    config = getattr(model, "config", None)
    check_form(config)
    return check_model_type(getattr(config, "model_type", type(model).__name__))


def check_form(config: Any) -> None:
    """Refuse the configuration of a model whose linears are joined.

    :raises ValueError: it is in the static form
    """
    if "fused" in (getattr(config, "layout", None) or {}):
        raise ValueError(
            f"model: {config._name_or_path!r} must be in the per-layer form, got the static one, whose linears are joined for "
            "running alone. Use the folder that it was made from."
        )


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
