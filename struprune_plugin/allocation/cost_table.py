"""Table of the seconds that a model's modules take by their number of kept units: a JSON file for a budget ``speedup``.

``python -m eval.costs`` writes one for transformers. Any program may, for any engine::

    {
      "format_version": 2,
      "about": "transformers, token after 512, batch 1, AMD EPYC 7B13, 2 threads, float32",
      "dense": 0.0412,
      "rest": 0.0127,
      "shapes": {"fc1 768x3072": 12, "embeddings 50272x768": 1},
      "modules": [{"module": "ffn 3072: fc1 768x3072, fc2 3072x768", "units": [384, 3072], "seconds": [0.0003, 0.0011]}]
    }
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn

from struprune_plugin.model.layers import find_decoder_layers, find_linear
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.storage.files import shorten_error
from struprune_plugin.storage.registry import Config, describe_error

_REMEDY = "Make it anew with python -m eval.costs."
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ModuleCosts(Config):
    """Seconds of one kind of module in one decoder layer.

    :param module: see :func:`describe_module`
    :param units: numbers of kept units that were timed, rising
    :param seconds: seconds at these, above any common offset; those between are interpolated, those below the first constant
    """

    module: str
    units: list[int] = Field(min_length=1)
    seconds: list[Seconds]

    @model_validator(mode="after")
    def _check(self) -> ModuleCosts:
        rising = all(a < b for a, b in pairwise(self.units))
        if not rising or self.units[0] < 1 or len(self.units) != len(self.seconds):
            raise ValueError(f"{self.module}: units must rise from 1 or more, with as many seconds.")
        return self

    def list_costs(self, num_units: int) -> Tensor:
        """Return the seconds with k = 0 ... num_units units kept, shape [num_units + 1], float64."""
        return torch.from_numpy(np.interp(range(num_units + 1), self.units, self.seconds))


class CostTable(Config):
    """Seconds of one workload, such as one token after 512 others.

    :param about: engine, workload and machine, for people
    :param dense: seconds of the dense model
    :param rest: seconds of a pruned model besides the modules: embeddings, norms and whatever pruning leaves
    :param shapes: shapes of the model's weights, with their counts, see :func:`describe_shapes`
    :param modules: every kind of module that may be pruned
    """

    format_version: Literal[2] = 2
    about: str
    dense: float = Field(gt=0, allow_inf_nan=False)
    rest: Seconds
    shapes: dict[str, int]
    modules: list[ModuleCosts]

    def list_costs(self, model: nn.Module, group: UnitGroup) -> Tensor:
        """Return a group's seconds with k = 0 ... num_units units kept, shape [num_units + 1], float64.

        :raises ValueError: the table lacks its kind of module
        """
        name, known = describe_module(model, group), {costs.module: costs for costs in self.modules}
        if name not in known:
            told = ", ".join(known)
            raise ValueError(
                f"budget.costs: must hold {name!r}, got {told}. Time these units, too, or do not prune them."
            )
        return known[name].list_costs(group.num_units)

    def add_whole(self, model: nn.Module, pruned: Sequence[UnitGroup]) -> CostTable:
        """Return the table of a run that prunes these groups: the seconds of all other modules are part of ``rest``."""
        names, known = {group.output_name for group in pruned}, {costs.module for costs in self.modules}
        unit: Any = "head" if any(name.startswith("head ") for name in known) else "value_channels"
        whole = [group for group in find_groups(model, unit) if group.output_name not in names]
        costs = [self.list_costs(model, group)[-1] for group in whole if describe_module(model, group) in known]
        return self.model_copy(update={"rest": self.rest + float(sum(costs))})


def describe_module(model: nn.Module, group: UnitGroup) -> str:
    """Return the name of a kind of module: its units, and the inputs and outputs of its linears."""
    layer, parts = model.get_submodule(group.layer_name), []
    for name in (*group.producers, group.consumer):
        linear = find_linear(layer, name)
        parts.append(f"{name.rpartition('.')[2]} {linear.in_features}x{linear.out_features}")
    return f"{group.kind} {group.num_units}: {', '.join(parts)}"


def describe_shapes(model: nn.Module) -> dict[str, int]:
    """Return the shapes of a model's weights on which its time depends, each with its count."""
    rows, columns = model.get_input_embeddings().weight.shape  # type: ignore[operator]
    found = {f"embeddings {rows}x{columns}": 1}
    for _, layer in find_decoder_layers(model):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                key = f"{name} {module.in_features}x{module.out_features}"
                found[key] = found.get(key, 0) + 1
    return found


def read_table(path: str, model: nn.Module) -> CostTable:
    """Return the table that a file holds for a model; a ValueError if it holds none, or one of other shapes."""
    try:
        table = CostTable.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, RecursionError, OSError) as error:
        told = describe_error(error, {}) if isinstance(error, ValidationError) else shorten_error(error)
        raise ValueError(f"budget.costs: {path} must hold a cost table, got {told}. {_REMEDY}") from None
    shapes = describe_shapes(model)
    for name in {**shapes, **table.shapes}:
        if shapes.get(name) != table.shapes.get(name):
            raise ValueError(
                f"budget.costs: {path} must be of this model's shapes, got {table.shapes.get(name, 0)} × {name!r}, here "
                f"{shapes.get(name, 0)}. {_REMEDY}"
            )
    return table
