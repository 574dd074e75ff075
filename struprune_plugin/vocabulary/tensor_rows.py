"""Tensors with a row per token: found on tiny instances of the class, copied without the rows that go."""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig

from struprune_plugin.model.structure.shrinking import find_vocabulary, shrink_config
from struprune_plugin.model.structure.tiny import TinyRun, build_instance, draw_tokens, find_class, prove_once
from struprune_plugin.vocabulary.token_ids import list_named, read_json, resize_config

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    dtype: str
    shape: list[int]
    file: str

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
        stay = [number for number in kept if number < logits.shape[-1]]
        if difference := run.describe_difference(smaller[..., : len(kept)], logits[..., stay]):
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
    files = [SINGLE]
    if index.is_file() and not is_one:
        content = read_json(index)
        if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
            raise ValueError(f"{index}: must have a weight_map, the file of every tensor, got none. Copy it again.")
        files = sorted({*content["weight_map"].values()})
    tensors = dict[str, Stored]()
    for file in files:
        try:
            with safe_open(folder / file, "pt") as opened:
                parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                tensors |= {name: Stored(part.get_dtype(), part.get_shape(), file) for name, part in parts.items()}
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"model: {folder / file} must be a whole safetensors file, got: {str(error)[:200]}. Copy it again, or load the "
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
    parts = list[torch.Tensor]()
    for name in rows:
        with safe_open(folder / stored[name].file, "pt") as opened:
            parts.append(opened.get_tensor(name).view(torch.uint8))  # a view of the file
    return [name for place, name in enumerate(rows) if any(torch.equal(parts[place], each) for each in parts[:place])]


def copy_tensors(
    source: Path, target: Path, stored: Mapping[str, Stored], rows: Sequence[str], kept: Sequence[int]
) -> None:
    """Copy a folder's tensors file by file, some of them without the rows of tokens that went.

    :param rows: names of the tensors with a row per token
    :param kept: sorted old ids
    """
    for file in sorted({tensor.file for tensor in stored.values()}):
        with safe_open(source / file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (views of the file)
        for name in tensors.keys() & {*rows}:
            tensors[name] = tensors[name][kept[: bisect_left(kept, len(tensors[name]))]]
        save_file(tensors, target / file, metadata={"format": "pt"})
    if (source / INDEX).is_file() and not (target / SINGLE).is_file():
        index = json.loads((source / INDEX).read_text())
        size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
        index.setdefault("metadata", {})["total_size"] = size
        (target / INDEX).write_text(json.dumps(index, indent=2))
