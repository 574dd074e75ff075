"""Copies of configurations with reduced sizes, by a table of the keys that classes use for sizes and a few rules."""

import copy
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from transformers import PreTrainedConfig

Values = Mapping[str, Any]
Changes = MutableMapping[str, Any]
SPECIAL_TOKEN = re.compile(r"_token_(id|ids|index)$")
HIDDEN, HEADS, HEAD, WIDTH, VOCABULARY = 96, 6, 16, 112, 160
_TABLE = {  # size in the tiny instance -> keys that classes use for it
    HIDDEN: "hidden_size d_model n_embd dim emb_dim embedding_dim model_dim dim_model out_hidden_size projector_input_dim "
    "projector_output_dim vision_output_dim hidden_size_global ext_pw_out_channel depthwise_separable_out_channel "
    "nemo_conv_channels shape_embed_dim pronunciation_embed_dim",
    WIDTH: "intermediate_size ffn_dim n_inner ffn_hidden_size dff d_ff dim_ff decoder_ffn_dim encoder_ffn_dim "
    "feed_forward_size mlp_dim d_inner ffn_intermediate_size",
    52: "moe_intermediate_size expert_ffn_hidden_size expert_intermediate_size",
    144: "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size",
    128: "dense_intermediate_size intermediate_size_mlp prefix_dense_intermediate_size backbone_hidden_size",
    VOCABULARY: "vocab_size decoder_vocab_size padded_vocab_size vocab_size_per_layer_input vocab_offset num_centroids "
    "ngram_vocab_size_base encoder_hash_byte_group_vocab shape_vocab_size pronunciation_vocab_size unpadded_vocab_size",
    256: "max_position_embeddings n_positions n_ctx max_seq_len seq_length model_max_length max_sequence_length "
    "max_source_positions max_target_positions context_length rel_extent",
    8: "sliding_window sliding_window_size attention_window_size window_size local_attention attention_chunk_size "
    "keep_window_size block_multiple_of mamba_d_state state_size ssm_state_size qk_rope_head_dim "
    "chunk_size mamba_chunk_size block_size linear_key_head_dim centroid_intermediate_top_k split_ngram_parts",
    HEAD: "dim_head d_head kv_channels attention_head_size head_size d_kv qk_nope_head_dim index_head_dim indexer_head_dim "
    "swa_head_dim linear_head_dim prompt_mid_dim router_hidden_size hc_lowrank gated_norm_rank adapter_rank",
    24: "global_head_dim kv_lora_rank swa_v_head_dim",
    12: "v_head_dim linear_value_head_dim laurel_rank ple_embed_dim",
    40: "q_lora_rank",
    32: "o_lora_rank base_channels",
    60: "moe_latent_size",
    20: "hidden_size_per_layer_input",
    4: "num_experts n_routed_experts num_local_experts moe_num_experts",
    6: "time_step_rank mamba_dt_rank",
    2: "num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k top_k_experts router_top_k zero_expert_num "
    "index_n_heads indexer_n_heads indexer_kv_heads o_groups n_groups mamba_n_groups mamba_ngroups linear_num_key_heads "
    "linear_num_heads heads_per_ngram",
}
_SIZES = {name: size for size, names in _TABLE.items() for name in names.split()}
_LAYERS = "num_hidden_layers depth num_layers layers encoder_layers num_blocks conf_num_hidden_layers num_global_layers"
_TOWER_SIZES = _SIZES | dict.fromkeys(_LAYERS.split(), 2)  # outside the decoder, number of layers too
_TOWER_SIZES |= {"image_size": 56, "num_position_embeddings": 64, "window_size": 10**9, "chunk_size": 10**9}
_PART = re.compile(r"(attn|attention|ffn|moe|ssm)_config$")  # dictionaries that belong to the decoder's values
_TOWER = re.compile(r"vision|audio|speech|image|video|encoder_config|vq_config|perceiver")
_HIDDEN_KEYS = tuple(_TABLE[HIDDEN].split()[:8])
_NAMES = {
    "heads": "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads conf_num_attention_heads",
    "key and value heads": "num_key_value_heads num_kv_heads n_head_kv kv_n_heads n_kv_heads multi_query_group_num "
    "num_query_groups swa_num_key_value_heads num_global_key_value_heads",
    "fractions of the hidden size": "attention_hidden_size word_embed_proj_dim lru_width embedding_size "
    "input_embedding_size output_embedding_size",
    "head size": "head_dim dim_head d_head kv_channels attention_head_size",
    "head size of state-space layers": "mamba_d_head mamba_head_dim mamba_headdim",
}
_HEADS_KEYS, _KV_KEYS, _SCALED_KEYS, _HEAD_KEYS, _MAMBA_HEAD_KEYS = (tuple(names.split()) for names in _NAMES.values())
_HEADS_OF = {"codegen": 8, "mimo_v2_flash": 8, "xlstm": 4}  # four groups; twice the key heads where windows slide; 2ⁿ


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy whose sizes are reduced so that an instance has about 10⁵ to 10⁶ parameters.

    Sizes differ from each other where the class allows it. Smaller ones do not change, so that shrinking is idempotent. Layers,
    patterns, activations, scales, caps and flags stay, and per-layer lists keep their lengths.
    """
    small = copy.deepcopy(config)
    _shrink(small, {}, {}, tower=False)
    _cut_special_tokens(small)
    return small


def _shrink(node: Any, old_outer: Values, new_outer: Values, tower: bool) -> None:
    """Reduce the sizes of one configuration, or of one dictionary in it, and of those nested in it."""
    values = dict(_list_values(node))
    old = ChainMap(values, {"model_type": getattr(node, "model_type", "")}, dict(old_outer))
    changes: dict[str, Any] = {}
    new = ChainMap(changes, values, dict(new_outer))
    for name, size in (_TOWER_SIZES if tower else _SIZES).items():
        if name in values:
            changes[name] = _cut(values[name], size)
    for rule in (_cut_heads, _cut_head_sizes, _cut_state_space, _cut_groups):
        rule(old, new)
    for name, value in changes.items():
        if name in values and value != values[name]:
            node.__setitem__(name, value) if isinstance(node, dict) else setattr(node, name, value)
    if values.pop("quantization_config", None) is not None:
        vars(node).pop("quantization_config")
    scale = _rotary_size(new) / _rotary_size(old)
    for name, value in values.items():
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            _cut_rope(value, scale)
        elif name == "_heterogeneity_spec":  # of transformers' per_layer_config
            for layer in value.per_layer_overrides.values():
                before = dict(layer)
                _shrink(layer, old, new, tower=False)
                for key in ("head_dim", "intermediate_size"):  # stay different from the other layers'
                    if key in layer and layer[key] == new.get(key):
                        layer[key] = min(before[key], layer[key] + 8)
        elif isinstance(value, PreTrainedConfig) or (isinstance(value, dict) and name.endswith("_config")):
            outer = (old, new) if _PART.match(name) else ({}, {})
            _shrink(value, *outer, tower or bool(_TOWER.search(name)))


def _cut(value: Any, size: int) -> Any:
    """Return ``value`` limited to ``size``; in a list the smallest value is limited, and different values stay different."""
    if not isinstance(value, (list, tuple)):
        return min(value, size) if isinstance(value, int) and not isinstance(value, bool) else value
    few, last = dict[int, int](), -size
    for part in sorted({part for part in value if isinstance(part, int)}):
        least = _cut(part, size)
        last = few[part] = min(part, max(least, last + (16 if least >= 80 else 8 if least > 8 else 2)))
    return type(value)(few[part] if isinstance(part, int) else part for part in value)


def _cut_heads(old: Values, new: Changes) -> None:
    """Reduce the query heads with the hidden size, and the KV heads to as many, one or two; raise a single head to two."""
    hidden, small = find_first(old, _HIDDEN_KEYS), find_first(new, _HIDDEN_KEYS)
    if isinstance(old.get("hidden_dim"), int):  # the FFN width where the hidden size is called dim
        new["hidden_dim"] = min(old["hidden_dim"], WIDTH if "dim" in old else HIDDEN)
    if find_first(old, _HEADS_KEYS) == 1:  # two heads show which rows belong to one head
        for name in (*_HEADS_KEYS, *_KV_KEYS):
            if old.get(name) == 1:
                new[name] = 2
        return
    if hidden == small:
        return
    most = _HEADS_OF.get(old.get("model_type", ""), HEADS)
    for name in (*_HEADS_KEYS, "num_attention_heads_per_layer"):
        heads = old.get(name)
        if isinstance(heads, int):
            new[name] = next(n for n in range(min(heads, most), 0, -1) if HIDDEN % n == 0)
        elif isinstance(heads, list):
            new[name] = _cut(heads, most)
    for name in _KV_KEYS:
        keys = ("swa_num_attention_heads",) if name.startswith("swa_") else _HEADS_KEYS
        heads, fewer, kv = find_first(old, keys), find_first(new, keys), old.get(name)
        if heads > fewer and kv:
            each = kv if isinstance(kv, list) else [kv]
            few = [fewer if count >= heads else 1 if count == 1 or fewer % 2 else 2 for count in each]
            new[name] = few if isinstance(kv, list) else few[0]
    for name in _SCALED_KEYS:
        if isinstance(old.get(name), int):
            new[name] = max(old[name] * small // hidden, 1)


def _head_size(values: Values) -> int:
    return find_first(values, _HEAD_KEYS) or find_first(values, _HIDDEN_KEYS) // max(find_first(values, _HEADS_KEYS), 1)


def _rotary_size(values: Values) -> int:
    return find_first(values, ("qk_rope_head_dim",)) or _head_size(values) or 1


def _cut_head_sizes(old: Values, new: Changes) -> None:
    """Reduce head sizes; a size that is a sum of others or a fraction of the hidden size or of a head keeps that relation."""
    hidden, heads = find_first(old, _HIDDEN_KEYS), find_first(old, _HEADS_KEYS)
    rope, nope = (find_first(old, (f"qk_{part}_head_dim",)) for part in ("rope", "nope"))
    for name in ("head_dim", "qk_head_dim", "attention_head_dim"):
        size = find_first(old, (name,))
        ratio = size * heads / hidden if hidden else 0
        if rope and size == rope:
            new[name] = new["qk_rope_head_dim"]
        elif nope and size == rope + nope:
            new[name] = new["qk_rope_head_dim"] + new["qk_nope_head_dim"]
        elif ratio == 1 or (ratio == 2 and (name == "attention_head_dim" or "expand" in old)):
            new[name] = int(ratio) * find_first(new, _HIDDEN_KEYS) // find_first(new, _HEADS_KEYS)
        elif size:
            new[name] = min(size, HEAD)
    before, after = _head_size(old), _head_size(new)
    if rope and not nope:  # a part of the head
        new["qk_rope_head_dim"] = max(rope * after // before, 2)
    if find_first(old, ("rotary_dim",)):
        new["rotary_dim"] = max(old["rotary_dim"] * after // before // 2 * 2, 2)


def _cut_state_space(old: Values, new: Changes) -> None:
    """Reduce the heads of state-space layers to match the expanded hidden size, and the heads of linear attention."""
    hidden, small = find_first(old, _HIDDEN_KEYS), find_first(new, _HIDDEN_KEYS)
    keys, values = old.get("linear_num_key_heads"), old.get("linear_num_value_heads")
    if keys and values:
        new["linear_num_value_heads"] = min(values, new["linear_num_key_heads"] * min(values // keys, 2))
    if hidden == small:
        return
    expand = next((old[name] for name in ("mamba_expand", "expand") if name in old), None)
    inner = int(expand * small) if expand else small
    if isinstance(old.get("mamba_d_ssm"), int):
        inner = new["mamba_d_ssm"] = 2 * small
    names = [(a, b) for a in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads") for b in _MAMBA_HEAD_KEYS]
    names += [("num_heads", "head_dim")] if "expand" in old else []
    for heads, size in [pair for pair in names if {*pair} <= {*old}]:
        new[heads] = min(old[heads], 4)
        new[size] = inner // new[heads]


def _cut_groups(old: Values, new: Changes) -> None:
    """Reduce grouped routing to at most two groups of experts, of which one is selected."""
    for name, few in (("n_group", 2), ("num_expert_group", 2), ("topk_group", 1)):
        if isinstance(old.get(name), int):
            new[name] = min(old[name], few)
    if old.get("topk_group") and old.get("topk_group") == old.get("n_group"):
        new["topk_group"] = new["n_group"]


def _cut_rope(rope: dict[str, Any], scale: float) -> None:
    """Reduce the per-frequency lists of rope parameters, which may be nested per kind of layer."""
    for name, value in rope.items():
        if isinstance(value, dict):
            _cut_rope(value, scale)
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            rope[name] = value[: max(round(len(value) * scale), 1)]
        elif name == "mrope_section" and isinstance(value, list):
            ends = [round(sum(value[: i + 1]) * scale) for i in range(len(value))]
            rope[name] = [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _list_values(node: Any) -> dict[str, Any]:
    """Return a node's values by name, as stored, including per-layer attributes that the configuration itself refuses to return."""
    return node if isinstance(node, dict) else vars(node)


def walk_parts(node: Any) -> Iterator[Any]:
    """Yield a configuration and the configurations nested in it."""
    yield node
    for value in list(_list_values(node).values()):
        if isinstance(value, PreTrainedConfig):
            yield from walk_parts(value)


def find_first(values: Values, names: tuple[str, ...]) -> int:
    """Return the first integer among the values of ``names``, or 0."""
    matches = (values[name] for name in names if name in values)
    return next((value for value in matches if isinstance(value, int) and not isinstance(value, bool)), 0)


def find_vocabulary(config: PreTrainedConfig) -> int:
    """Return the size of a configuration's vocabulary."""
    parts = map(_list_values, walk_parts(config.get_text_config()))
    sizes = (find_first(values, ("vocab_size", "padded_vocab_size")) for values in parts)
    return next(filter(None, sizes), VOCABULARY)


def _cut_special_tokens(config: PreTrainedConfig) -> None:
    """Replace special token ids outside the vocabulary by ids at its end, the same one for the same token."""
    vocabulary, ids = find_vocabulary(config), dict[int, int]()

    def cut(value: Any) -> Any:
        if isinstance(value, list):
            return [cut(part) for part in value]
        if not isinstance(value, int) or value < vocabulary:
            return value
        return ids.setdefault(value, max(vocabulary - 1 - len(ids), 0))

    for node in walk_parts(config):
        for name, value in list(vars(node).items()):
            if SPECIAL_TOKEN.search(name) and isinstance(value, (int, list)):
                setattr(node, name, cut(value))
