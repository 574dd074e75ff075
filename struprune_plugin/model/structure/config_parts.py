"""Parts of a configuration: nested configurations, values, the vocabulary and special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

Values = Mapping[str, Any]
_VOCABULARY = 160  # where the configuration has none
SPECIAL_TOKEN = re.compile(r"_token_(id|ids|index)$")


def list_values(node: Any) -> dict[str, Any]:
    """Return a node's values by name, as stored, including per-layer attributes that the configuration itself refuses to return."""
    return node if isinstance(node, dict) else vars(node)


def walk_parts(node: Any) -> Iterator[Any]:
    """Yield a configuration and the configurations nested in it."""
    yield node
    for value in list(list_values(node).values()):
        if isinstance(value, PreTrainedConfig):
            yield from walk_parts(value)


def set_value(node: Any, name: str, value: Any) -> None:
    node.__setitem__(name, value) if isinstance(node, dict) else setattr(node, name, value)


def find_first(values: Values, names: tuple[str, ...]) -> int:
    """Return the first integer among the values of ``names``, or 0."""
    found = (values[name] for name in names if name in values)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), 0)


def find_vocabulary(config: PreTrainedConfig) -> int:
    """Return the size of a configuration's vocabulary."""
    sizes = [
        find_first(list_values(node), ("vocab_size", "padded_vocab_size"))
        for node in walk_parts(config.get_text_config())
    ]
    return next((size for size in sizes if size), _VOCABULARY)


def cut_special_tokens(node: Any, vocabulary: int, ids: dict[int, int]) -> None:
    """Replace special token ids outside the vocabulary by ids at its end, the same one for the same token."""

    def cut(value: Any) -> Any:
        if isinstance(value, list):
            return [cut(part) for part in value]
        if not isinstance(value, int) or value < vocabulary:
            return value
        return ids.setdefault(value, max(vocabulary - 1 - len(ids), 0))

    for name, value in list(list_values(node).items()):
        if SPECIAL_TOKEN.search(name) and isinstance(value, (int, list)):
            set_value(node, name, cut(value))
