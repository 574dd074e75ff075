"""Export of a pruned LLaMA to a GGUF file for llama.cpp, whose ``deci`` architecture has per-layer heads and FFN widths."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from struprune_plugin.export.stock_config import list_sizes
from struprune_plugin.model.layers import LayerSizes
from struprune_plugin.storage.checkpoint import load_tokenizer

FILE_NAME = "model.gguf"
_ARCHITECTURE = "deci"  # LLaMA's computation with per-layer sizes; keys and values have the same width
_FILE_TYPES = {torch.float32: ("F32", 0), torch.float16: ("F16", 1), torch.bfloat16: ("BF16", 32)}  # llama.cpp's names
_LLAMA3 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"  # start of its expression


def check_gguf(config: Any, tokenizer: Path) -> None:
    """Raise ValueError where a model cannot be written as a GGUF file, before any work.

    :param config: configuration of the dense model
    :param tokenizer: its ``tokenizer.json``
    """
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    for name, wanted, got in (
        ("model_type", "llama", config.model_type),
        ("hidden_act", "silu", getattr(config, "hidden_act", None)),
        ("rope_type", "default", rope),
        ("attention_bias", False, getattr(config, "attention_bias", False)),
        ("mlp_bias", False, getattr(config, "mlp_bias", False)),
    ):
        if got != wanted:
            raise ValueError(
                f"gguf: {name} must be {wanted!r}, which llama.cpp's {_ARCHITECTURE} architecture computes, got {got!r}. "
                "Try llama.cpp's own converter, on a pruned folder after `convert --to uniform-padded`."
            )
    _name_splitting(_read_tokenizer(tokenizer))
    if find_spec("gguf") is None:
        raise ValueError("gguf: the package gguf must be installed, got none. Run `pip install 'gguf>=0.19,<0.20'`.")


def write_gguf(model: PreTrainedModel, config: Any, source: Path, output: Path) -> None:
    """Write a model whose values are as wide as its keys to a file, in its dtype, with the tokenizer of the folder ``source``."""
    import gguf

    writer, sizes = gguf.GGUFWriter(output, _ARCHITECTURE), list_sizes(model)
    _write_sizes(writer, config, sizes)
    _write_tokenizer(writer, config, source)
    dtype, number = _FILE_TYPES[model.dtype]
    writer.add_file_type(number)
    names: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DECI, len(sizes))
    written, last = dict[str, int](), ("", b"")
    for name, weight in model.named_parameters():  # a tied head is listed once
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _pair_channels(weight, len(weight) // sizes[0].head_dim)
        form = gguf.GGMLQuantizationType[dtype if weight.dim() > 1 else "F32"]
        values = gguf.quants.quantize(weight.detach().float().contiguous().numpy(), form)
        new_name = names.get_name(name, (".weight",))
        written[new_name], last = values.nbytes, (new_name, values.tobytes())
        writer.add_tensor(new_name, values, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()
    read = {tensor.name: tensor.data for tensor in gguf.GGUFReader(output).tensors}
    if {name: data.nbytes for name, data in read.items()} != written or read[last[0]].tobytes() != last[1]:
        raise OSError(f"output_dir: {output.name} must hold the model's weights, got others. Check the disk.")


def _pair_channels(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return a projection with its rows reordered: llama.cpp rotates adjacent channels, transformers the halves of a head."""
    rows, columns = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_sizes(writer: Any, config: Any, sizes: Sequence[LayerSizes]) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(sizes))
    writer.add_feed_forward_length([size.width for size in sizes])
    writer.add_head_count([size.num_heads for size in sizes])
    writer.add_head_count_kv([size.num_key_value_heads for size in sizes])
    writer.add_key_length(sizes[0].head_dim)
    writer.add_value_length(sizes[0].value_head_dim)
    writer.add_rope_dimension_count(sizes[0].head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _read_tokenizer(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"gguf: {path} does not exist. Copy the tokenizer into the folder.")
    return json.loads(path.read_text(encoding="utf-8"))


def _name_splitting(tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name for a tokenizer's splitting of text before merges; ValueError where it is not known here."""
    split, model, normalizer = (tokenizer.get(name) or {} for name in ("pre_tokenizer", "model", "normalizer"))
    steps = split.get("pretokenizers", [split])
    types = [step.get("type") for step in steps]
    changes = normalizer.get("normalizers", normalizer) or steps[-1].get("add_prefix_space")  # text, before it is split
    if model.get("type") == "BPE" and not changes and steps[-1].get("use_regex", True) == (types[0] != "Split"):
        if types == ["ByteLevel"]:
            return "gpt-2"
        if types == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
            return "smollm"
        if types == ["Split", "ByteLevel"] and str(steps[0]["pattern"].get("Regex")).startswith(_LLAMA3):
            return "llama-bpe"
    raise ValueError(
        "gguf: the tokenizer must be a byte-level BPE that splits as GPT-2's, SmolLM's or LLaMA-3's does, got a "
        f"{model.get('type')} with {types}{' and a change of the text before' if changes else ''}. Convert to uniform-padded, and "
        "try llama.cpp's own converter."
    )


def _write_tokenizer(writer: Any, config: Any, source: Path) -> None:
    from gguf import TokenType

    content = _read_tokenizer(source / "tokenizer.json")
    tokens = {number: (text, TokenType.NORMAL) for text, number in content["model"]["vocab"].items()}
    for added in content.get("added_tokens", []):
        tokens[added["id"]] = (added["content"], TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    filled = [tokens.get(number, (f"[PAD{number}]", TokenType.UNUSED)) for number in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_name_splitting(content))
    writer.add_token_list([text for text, _ in filled])
    writer.add_token_types([token_type for _, token_type in filled])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]])
    tokenizer = load_tokenizer(source)  # gguf's own reader takes other templates and beginnings than transformers
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):  # several templates
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)
    begin = tokenizer.bos_token_id
    writer.add_add_bos_token(begin is not None and tokenizer("a").input_ids[0] == begin)
    for name in ("bos", "eos", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
