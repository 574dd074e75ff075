"""Token ids in a folder's configuration files: which tokens they name, and their new numbers."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from struprune_plugin.model.structure.shrinking import SPECIAL_TOKEN, find_vocabulary
from struprune_plugin.storage.files import shorten_error

_NAMES = re.compile(rf"{SPECIAL_TOKEN.pattern}|^(bad_words|force_words)_ids$|^sequence_bias$")
_DROPPED = re.compile(r"^(begin_)?suppress_tokens$")  # lists whose tokens may go
_POSITIONS = "forced_decoder_ids"  # pairs of a position and an id
_DECODER = "added_tokens_decoder"  # contents by id
_SIZES = ("vocab_size", "padded_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input")


def read_settings(folder: Path, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
    """Return the contents of a folder's configuration files by name; ids and sizes that the class fills in are in config.json."""
    files = {file.name: read_json(file) for file in sorted(folder.glob("*config*.json"))}
    settings = {name: content for name, content in files.items() if isinstance(content, dict)}
    _fill(settings["config.json"], config)
    return settings


def read_json(file: Path) -> Any:
    """Return the content of a JSON file of a model's folder.

    :raises ValueError: it is broken
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: must be valid JSON, got: {shorten_error(error)}. Copy it again.") from None


def _fill(content: dict[str, Any], config: Any) -> None:
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            if isinstance(content.get(name), dict):
                _fill(content[name], value)
        elif value is not None and (name in _SIZES or SPECIAL_TOKEN.search(name)):
            content.setdefault(name, value)


def list_named(node: Any) -> set[int]:
    """Return the token ids that a configuration's content names and that must stay; not those that it only describes."""
    return {number for name, value in _walk(node) for number in _list_ids(name, value)}


def _walk(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the settings of a content that hold token ids."""
    for key, value in node.items() if isinstance(node, dict) else ():
        name = str(key)
        if _NAMES.search(name) or name == _POSITIONS:
            yield name, value
        elif isinstance(value, dict) and name != _DECODER:
            yield from _walk(value)


def _list_ids(name: str, value: Any) -> Iterator[int]:
    if name == _POSITIONS:
        yield from (pair[1] for pair in value or () if pair[1] is not None)
    elif isinstance(value, list):
        for part in value:
            yield from _list_ids("", part)
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        yield value


def renumber(node: Any, new_ids: Mapping[int, int]) -> Any:
    """Return a configuration's content with new token ids; ids that went are left out of lists of suppressed tokens."""

    def change(value: Any) -> Any:
        if isinstance(value, list):
            return [change(part) for part in value]
        return new_ids.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    if not isinstance(node, dict):
        return node
    renumbered: dict[Any, Any] = {}
    for key, value in node.items():
        name = str(key)
        if name == _DECODER:
            renumbered[key] = {str(new_ids[int(old)]): token for old, token in value.items() if int(old) in new_ids}
        elif name == _POSITIONS:
            renumbered[key] = value and [[place, change(number)] for place, number in value]
        elif _DROPPED.match(name) and isinstance(value, list):
            renumbered[key] = [new_ids[number] for number in value if number in new_ids]
        else:
            renumbered[key] = change(value) if _NAMES.search(name) else renumber(value, new_ids)
    return renumbered


def change_sizes(content: dict[str, Any], rows: int, resize: Callable[[int], int]) -> dict[str, Any]:
    """Return a configuration's content with the sizes of a smaller vocabulary.

    :param rows: size of the vocabulary; sizes of others' vocabularies, e.g. of an image tower's, stay
    :param resize: returns how many of the first ids stay
    :raises ValueError: a size or an offset of the vocabulary that nobody knows
    """
    resized: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            resized[name] = change_sizes(value, rows, resize)
        elif name in _SIZES and isinstance(value, int):
            resized[name] = resize(value) if value == rows or name != "vocab_size" else value
        elif "vocab" in str(name) and isinstance(value, int) and not isinstance(value, bool):
            raise ValueError(
                f"config.json: {name} must be a size of the vocabulary that trimming knows ({', '.join(_SIZES)}), got "
                f"{value}. Prune this model without trimming."
            )
        else:
            resized[name] = value
    return resized


def resize_config(
    config: PretrainedConfig, resize: Callable[[int], int], new_ids: Mapping[int, int]
) -> PretrainedConfig:
    """Return a configuration of a smaller vocabulary."""
    content = change_sizes(config.to_dict(), find_vocabulary(config), resize)
    return type(config).from_dict(renumber(content, new_ids))
