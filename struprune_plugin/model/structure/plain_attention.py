"""Test for plain attention: the softmax of scaled products of queries and keys, without position encodings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from struprune_plugin.model.structure.layout import AttentionLayout
from struprune_plugin.model.structure.units import Measured


@torch.no_grad()
def is_plain(measured: Measured, attention: AttentionLayout) -> bool:
    """Return whether the output projection's input equals the attention formula applied to the outputs of the producers."""
    if (
        attention.is_grouped
        or attention.repeated
        or sorted(attention.producers.values()) != [("key",), ("query",), ("value",)]
    ):
        return False
    module: Any = measured.layer.get_submodule(attention.module)
    width = getattr(module, attention.width_name)
    states = {
        parts[0]: measured.outputs[name].reshape(-1, measured.outputs[name].shape[-1] // width, width).transpose(0, 1)
        for name, parts in attention.producers.items()
    }
    if len({state.shape for state in states.values()}) > 1:
        return False
    given = _attend(states["query"], states["key"], states["value"], getattr(module, "scaling", width**-0.5))
    wanted = measured.inputs[attention.output]
    return torch.allclose(given.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    logits = query @ key.mT * scaling
    unseen = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return (logits.masked_fill(unseen, -torch.inf).softmax(-1) @ value).transpose(0, 1)
