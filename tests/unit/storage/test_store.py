"""Dataclasses go to the disk, and come back as they were."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from struprune_plugin.storage.resume_store import ResumeStore


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


def test_what_is_written_is_read_as_it_was(tmp_path):
    part = Inner((3, 1), torch.randn(2, 3, dtype=torch.bfloat16))
    value, store = (
        Outer("x", 0.1 + 0.2, {"a/b": part, "c": Inner((), torch.zeros(0), torch.ones(()))}),
        ResumeStore(tmp_path),
    )
    store.write("part", value)
    again = store.read("part", Outer)
    assert isinstance(again.parts["c"], Inner)
    assert (again.name, again.loss, again.parts["a/b"].order) == (value.name, value.loss, (3, 1))
    assert again.parts["a/b"].bias is None
    assert torch.equal(again.parts["a/b"].weight, part.weight)
    assert torch.equal(again.parts["c"].bias, torch.ones(()))


def test_a_record_of_another_type_counts_as_missing(tmp_path):
    store = ResumeStore(tmp_path)
    store.write("part", {"order": "many", "weight": torch.ones(1)})
    assert store.read("part", Inner) is None
    assert store.read("other", Inner) is None
