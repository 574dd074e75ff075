"""Tensors with a row per token: found on tiny instances of the class, copied without the rows that go."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from struprune_plugin.model.structure.shrinking import find_vocabulary, shrink_config
from struprune_plugin.model.structure.tiny import TinyRun, build_instance, draw_tokens, find_class, prove_once
from struprune_plugin.vocabulary.token_ids import list_named, resize_config

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_CHUNK = 1 << 24  # bytes that are copied at a time


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    dtype: str
    shape: list[int]
    file: str
    start: int  # of its bytes in the file
    size: int  # in bytes

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def find_row_tensors(config: PretrainedConfig, custom: Any = None) -> dict[str, bool]:
    """Return, by name, whether each tensor of the class has a row per token.

    Two tiny instances tell which shapes change with the vocabulary. The proof: with some rows removed, the second one gives the
    first one's logits for all tokens that stay.

    :raises ValueError: it does not, or the class uses sizes of the vocabulary in another way
    """

    def prove() -> dict[str, bool]:
        kind, small = find_class(shrink_config(config), custom)
        rows, named = find_vocabulary(small), list_named(small.to_dict())
        kept = [number for number in range(rows) if number in named or number % 3]
        new_ids = {old: new for new, old in enumerate(kept)}
        large = build_instance(kind, small)
        other = build_instance(kind, resize_config(small, lambda size: bisect_left(kept, size), new_ids))
        weights, wanted = large.state_dict(), other.state_dict()
        changed = {name: value.shape != wanted[name].shape for name, value in weights.items()}
        for name in (name for name, is_row in changed.items() if is_row):
            weights[name] = weights[name][kept[: bisect_left(kept, len(weights[name]))]]
            if weights[name].shape != wanted[name].shape:
                raise ValueError(f"{name} has no row per token")
        other.load_state_dict(weights)
        plain = [number for number in kept if number not in named]
        drawn = draw_tokens(small, 2, 12) % len(plain)
        old = torch.tensor(plain)[drawn]
        run = TinyRun(large, old)
        with torch.no_grad():
            smaller = run.forward(other, torch.tensor([new_ids[number] for number in plain])[drawn])
            logits = run()
        difference = run.describe_difference(
            smaller[..., : len(kept)], logits[..., [k for k in kept if k < logits.shape[-1]]]
        )
        if difference:
            raise ValueError(f"logits of kept tokens differ by {difference}")
        return changed

    try:
        return prove_once("rows per token", custom or type(config), config, prove)
    except Exception as error:  # the class may raise errors of many kinds
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"model: the logits of {config.model_type} must stay the same without some rows, got: {reason}. Prune it without "
            "trimming its vocabulary."
        ) from None


def read_headers(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a folder's safetensors files by name, without reading them.

    :raises ValueError: there are no such files, or one is broken
    """
    index, is_one = folder / INDEX, (folder / SINGLE).is_file()  # which transformers reads before an index
    files = (
        sorted({*json.loads(index.read_text())["weight_map"].values()}) if index.is_file() and not is_one else [SINGLE]
    )
    tensors = {}
    for name in files:
        try:
            with (folder / name).open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            for tensor_name, entry in header.items():
                if tensor_name != "__metadata__":
                    start, end = entry["data_offsets"]
                    tensors[tensor_name] = Stored(entry["dtype"], entry["shape"], name, 8 + length + start, end - start)
            if max(t.start + t.size for t in tensors.values() if t.file == name) != (folder / name).stat().st_size:
                raise ValueError("it is not whole")
        except (OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
            raise ValueError(
                f"model: {folder / name} must be a whole safetensors file, got: {str(error)[:200]}. Copy it again, or load the "
                "model with transformers and save it with save_pretrained."
            ) from None
    return tensors


def match_rows(stored: Mapping[str, Stored], known: Mapping[str, bool], rows: int) -> list[str]:
    """Return the names of the stored tensors that have a row per token.

    :param known: as :func:`find_row_tensors` returns it; a checkpoint's names may begin otherwise
    :param rows: size of the vocabulary
    :raises ValueError: one of them is quantised; a tensor of that many rows that the class does not know
    """

    def end(name: str, parts: int) -> str:
        return ".".join(name.split(".")[-parts:])

    ends = {end(name, 2) for name, is_row in known.items() if is_row}
    others = {end(name, 3) for name, is_row in known.items() if not is_row}
    with_rows = [name for name in stored if known.get(name, end(name, 2) in ends)]
    strange = [
        name
        for name, tensor in stored.items()
        if name not in with_rows and rows in tensor.shape and name not in known and end(name, 3) not in others
    ]
    packed = [name for name in with_rows if stored[name].dtype not in ("F64", "F32", "F16", "BF16")]
    packed += [name for name in strange if name.rpartition(".")[0] in {one.rpartition(".")[0] for one in known}]
    if packed:
        raise ValueError(
            f"model: {packed[0]} must not be quantised, got {stored[packed[0]].dtype}. Trim the full-precision model, and "
            "quantise afterwards."
        )
    if strange or not with_rows:
        raise ValueError(
            f"model: tensors with {rows} rows must be those of its class, got {strange[0] if strange else 'none of them'}. "
            "Load the model with transformers and save it, which leaves out what its class does not read."
        )
    return with_rows


def find_copies(folder: Path, stored: Mapping[str, Stored], rows: Sequence[str]) -> list[str]:
    """Return the names of tensors that equal another one to the bit: of tied weights that a folder stores twice.

    :param rows: names of the tensors that are compared
    """

    def is_equal(name: str, other: str) -> bool:
        one, two = stored[name], stored[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        first, second = (np.memmap(folder / each.file, np.uint8, "r", each.start, each.size) for each in (one, two))
        pieces = (slice(start, start + _CHUNK) for start in range(0, one.size, _CHUNK))
        return all(np.array_equal(first[piece], second[piece]) for piece in pieces)

    return [name for place, name in enumerate(rows) if any(is_equal(name, other) for other in rows[:place])]


def copy_tensors(
    source: Path, target: Path, stored: Mapping[str, Stored], rows: Sequence[str], kept: Sequence[int]
) -> None:
    """Copy a folder's tensors, some of them without the rows of tokens that went; a few rows are in memory at a time.

    :param rows: names of the tensors with a row per token
    :param kept: sorted old ids
    """
    for file in sorted({tensor.file for tensor in stored.values()}):
        in_file = {name: tensor for name, tensor in stored.items() if tensor.file == file}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        stays, place = {}, 0
        for name, tensor in in_file.items():
            shape, size = tensor.shape, tensor.size
            if name in rows:
                stays[name] = np.array(kept[: bisect_left(kept, shape[0])])
                shape, size = [len(stays[name]), *shape[1:]], size // shape[0] * len(stays[name])
            header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (source / file).open("rb") as read, (target / file).open("wb") as write:
            write.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in in_file.items():
                if name not in stays:
                    read.seek(tensor.start)
                    for start in range(0, tensor.size, _CHUNK):
                        write.write(read.read(min(_CHUNK, tensor.size - start)))
                    continue
                width = tensor.size // tensor.shape[0]
                table = np.memmap(source / file, np.uint8, "r", tensor.start, (tensor.shape[0], width))
                step = max(_CHUNK // max(width, 1), 1)
                for start in range(0, len(stays[name]), step):
                    write.write(table[stays[name][start : start + step]].tobytes())
    if (source / INDEX).is_file() and not (target / SINGLE).is_file():
        index = json.loads((source / INDEX).read_text())
        size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
        index.setdefault("metadata", {})["total_size"] = size
        (target / INDEX).write_text(json.dumps(index, indent=2))
