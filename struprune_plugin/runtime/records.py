"""Values of dataclasses taken apart into tensors and JSON, for files and for other processes."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

_TENSOR = "__tensor__"


def split_tensors(value: Any) -> tuple[str, list[Tensor]]:
    """Return a value as JSON that refers to tensors by index, and these tensors.

    :param value: dataclasses, mappings whose keys are strings or integers, lists, tuples, tensors and JSON values, nested
    :raises TypeError: it holds something else
    """
    tensors: list[Tensor] = []

    def encode(inner: Any) -> dict[str, Any]:
        if isinstance(inner, Tensor):
            tensors.append(inner)
            return {_TENSOR: len(tensors) - 1}
        return {field.name: getattr(inner, field.name) for field in fields(inner)}

    return json.dumps(value, default=encode), tensors


def join_tensors(record: str, value_type: Any, fetch: Callable[[int], Tensor]) -> Any:
    """Return the value that :func:`split_tensors` took apart.

    :param value_type: type of the value
    :param fetch: returns a tensor by its index
    :raises ValueError: the record holds no value of this type
    """
    value = json.loads(record, object_hook=lambda held: fetch(held[_TENSOR]) if _TENSOR in held else held)
    reader = TypeAdapter(list[value_type], config=ConfigDict(arbitrary_types_allowed=True))  # a dataclass takes none
    return reader.validate_python([value])[0]
