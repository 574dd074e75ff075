"""Saving of a peer's model in its stock class, so that it can be recovered and scored as any other folder."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from struprune_plugin.export.stock_config import make_uniform_config
from struprune_plugin.model.layers import find_linear
from struprune_plugin.model.units import find_groups


@torch.no_grad()
def save_as_stock(model: PreTrainedModel, folder: Path) -> None:
    """Save a peer's model as a folder that its stock class loads.

    FFNs whose widths differ by a channel of rounding are padded with zeros to the widest.

    :param model: pruned, every layer with the same heads; its FFNs are padded in place
    :raises ValueError: the stock class cannot have its sizes
    """
    groups = find_groups(model, "none")
    width = max(group.num_units for group in groups)
    for group in groups:
        layer, missing = model.get_submodule(group.layer_name), width - group.num_units
        for name in group.producers:
            _pad(find_linear(layer, name), rows=missing)
        _pad(find_linear(layer, group.consumer), columns=missing)
    model.config = make_uniform_config(model)
    model.save_pretrained(folder)


def _pad(linear: nn.Linear, rows: int = 0, columns: int = 0) -> None:
    """Append zeros to a linear."""
    linear.weight = nn.Parameter(F.pad(linear.weight, (0, columns, 0, rows)), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(F.pad(linear.bias, (0, rows)), requires_grad=False)
    linear.out_features, linear.in_features = linear.weight.shape
