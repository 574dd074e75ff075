"""GGUF files with random weights, in llama.cpp's architecture for pruned models, for timings only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from struprune_plugin.export.llama_cpp_gguf import ARCHITECTURE, FILE_TYPES, check_library, write_sizes
from struprune_plugin.model.layers import LayerSizes


def check_random_gguf(config: Any) -> None:
    """Raise where llama.cpp's architecture for layers of several sizes does not compute a model.

    :raises ValueError: the library is missing, or the model has another type
    """
    check_library()
    if config.model_type != "llama":
        raise ValueError(
            f"gguf: the model must be a llama, which llama.cpp's {ARCHITECTURE} architecture computes, got {config.model_type!r}. "
            "Use the engine transformers."
        )


def write_random_gguf(config: Any, sizes: Sequence[LayerSizes], dtype: torch.dtype, output: Path) -> None:
    """Write a model with random weights, without a tokenizer.

    :param config: configuration of a LLaMA
    :param sizes: sizes of every layer, at least one layer; attention without heads and FFNs without channels are omitted
    """
    import gguf

    kind, number = FILE_TYPES[dtype]
    writer, generator = gguf.GGUFWriter(output, ARCHITECTURE), torch.Generator().manual_seed(0)
    hidden, head = config.hidden_size, config.head_dim
    write_sizes(writer, config, [replace(size, value_head_dim=head) for size in sizes])  # narrower values are padded
    writer.add_tokenizer_model("none")
    writer.add_file_type(number)
    form = gguf.GGMLQuantizationType[kind]

    def add(name: str, *shape: int) -> None:
        values = torch.randn(*shape, generator=generator).mul_(0.02)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", (1 + values).numpy(), raw_dtype=gguf.GGMLQuantizationType.F32)
            return
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values.numpy(), form), raw_dtype=form)

    add("token_embd", config.vocab_size, hidden)
    for index, size in enumerate(sizes):
        block, queries, keys = f"blk.{index}", size.num_heads * head, size.num_key_value_heads * head
        if queries:
            add(f"{block}.attn_norm", hidden)
            add(f"{block}.attn_q", queries, hidden)
            add(f"{block}.attn_k", keys, hidden)
            add(f"{block}.attn_v", keys, hidden)
            add(f"{block}.attn_output", hidden, queries)
        if size.width:
            add(f"{block}.ffn_norm", hidden)
            add(f"{block}.ffn_gate", size.width, hidden)
            add(f"{block}.ffn_up", size.width, hidden)
            add(f"{block}.ffn_down", hidden, size.width)
    add("output_norm", hidden)
    if not config.tie_word_embeddings:
        add("output", config.vocab_size, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()
