"""Dataclasses go to the disk and to other processes, and come back as they were."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from struprune_plugin.runtime.payload import dump, load


@dataclass(frozen=True)
class Inner:
    order: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    loss: float
    parts: Mapping[str, Inner]


def test_what_is_dumped_loads_as_it_was():
    part = Inner((3, 1), torch.randn(2, 3, dtype=torch.bfloat16))
    value = Outer("x", 0.1 + 0.2, {"a/b": part, "c": Inner((), torch.zeros(0), torch.ones(()))})
    record, tensors = dump(value)
    assert sorted(tensors) == ["/parts/a/b/weight", "/parts/c/bias", "/parts/c/weight"]
    again = load(Outer, record, tensors)
    assert isinstance(again.parts["c"], Inner)
    assert (again.name, again.loss, again.parts["a/b"].order) == (value.name, value.loss, (3, 1))
    assert again.parts["a/b"].bias is None
    assert torch.equal(again.parts["a/b"].weight, part.weight)
    assert torch.equal(again.parts["c"].bias, torch.ones(()))


def test_another_record_is_refused():
    record, tensors = dump(Inner((1,), torch.ones(1)))
    with pytest.raises(ValueError, match="order"):
        load(Inner, record | {"order": "many"}, tensors)
