"""Conversion of dataclasses to JSON and tensors, for the disk."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

Payload = tuple[Any, dict[str, Tensor]]  # JSON, and the tensors that it names
_TENSOR = "__tensor__"


def dump(value: object) -> Payload:
    """Return a value as JSON data, and its tensors by their path within it.

    :param value: dataclasses, mappings with string keys, lists, tuples, tensors and JSON values, nested
    """
    tensors: dict[str, Tensor] = {}

    def walk(part: Any, place: str) -> Any:
        if isinstance(part, Tensor):
            tensors[place] = part
            return {_TENSOR: place}
        if is_dataclass(part):
            part = {field.name: getattr(part, field.name) for field in fields(part)}
        if isinstance(part, Mapping):
            return {name: walk(inner, f"{place}/{name}") for name, inner in part.items()}
        if isinstance(part, (list, tuple)):
            return [walk(inner, f"{place}/{index}") for index, inner in enumerate(part)]
        return part

    return walk(value, ""), tensors


def load(kind: Any, record: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that was passed to :func:`dump`.

    :param kind: type of the value
    :raises ValueError: the record does not fit the type
    """

    def walk(part: Any) -> Any:
        if isinstance(part, dict):
            return tensors[part[_TENSOR]] if _TENSOR in part else {name: walk(inner) for name, inner in part.items()}
        return [walk(inner) for inner in part] if isinstance(part, list) else part

    return _make_reader(kind).validate_python([walk(record)])[0]


@functools.cache
def _make_reader(kind: Any) -> TypeAdapter:
    return TypeAdapter(
        list[kind], config=ConfigDict(arbitrary_types_allowed=True)
    )  # TypeAdapter refuses a config for a dataclass itself
