"""Table of module costs in an engine: a JSON file, written on the machine that serves and used on the one that prunes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from struprune_plugin.linalg.cost_curves import fit_rising, interpolate, weigh_alignment
from struprune_plugin.model.layers import find_decoder_layers, find_linear
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.storage.files import shorten_error, shorten_value, write_whole
from struprune_plugin.storage.records import CLOSED, Count

PHASES = ("prompt", "token")
ENGINE_NAMES = "transformers, llama.cpp or vllm"  # for messages


@dataclass(frozen=True, config=CLOSED)
class ModuleCosts:
    """Seconds of one module of a decoder layer, by number of kept units.

    :param module: description of the module, see :func:`describe_module`
    :param units: numbers of kept units, ascending, the last all of them
    :param seconds: seconds at these, on the line fitted to the measurements
    :param penalties: factor on the line by the largest power of two that divides the width, as text
    :param error: root mean square error of the line at points left out of its fit, in seconds
    """

    module: str
    units: list[Count]
    seconds: list[float]
    penalties: dict[str, float]
    error: float

    @model_validator(mode="after")
    def _check(self) -> ModuleCosts:
        rising = all(a < b for a, b in zip(self.units, self.units[1:], strict=False))
        if len(self.units) < 2 or not rising or self.units[0] < 1 or len(self.seconds) != len(self.units):
            raise ValueError("units must rise from 1 or more, at least two, with as many seconds")
        numbers = [*self.seconds, *self.penalties.values(), self.error]
        powers_of_two = all(key.isdigit() and 0 < len(key) < 6 and int(key).bit_count() == 1 for key in self.penalties)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or not powers_of_two:
            raise ValueError("seconds, penalties and error must be finite and at least 0, penalties by powers of two")
        return self

    def list_costs(self, num_units: int, per_block: int) -> Tensor:
        """Return seconds with k = 0 ... num_units units kept, shape [num_units + 1], float64; 0 at k = 0.

        :param per_block: as in :func:`~struprune_plugin.linalg.cost_curves.weigh_alignment`
        """
        line = interpolate(self.units, fit_rising(torch.tensor(self.seconds, dtype=torch.float64)), num_units)
        return line * weigh_alignment(num_units, per_block, {int(key): value for key, value in self.penalties.items()})


@dataclass(frozen=True, config=CLOSED)
class PhaseCosts:
    """Costs of one phase of the whole model.

    :param phase: ``prompt`` or ``token``
    :param dense: seconds of the whole dense model
    :param whole: seconds of a pruned model that still has all units, whose attention may be of another class
    :param modules: costs of every kind of module, once each
    """

    phase: Literal["prompt", "token"]
    batch: Count
    length: Count
    dense: float
    whole: float
    modules: list[ModuleCosts]

    @model_validator(mode="after")
    def _check(self) -> PhaseCosts:
        if not all(math.isfinite(value) and value > 0 for value in (self.dense, self.whole)):
            raise ValueError("dense and whole must be finite and above 0")
        return self


class CostTable(BaseModel):
    """Costs of a model's modules in an engine.

    :param engine: name of the engine
    :param machine: machine of the measurement, for people
    :param dtype: dtype of the weights there
    :param model: names and shapes of the model's weights, with their counts, see :func:`describe_shapes`
    """

    model_config = CLOSED | ConfigDict(frozen=True)

    format_version: Literal[1] = 1
    engine: str
    machine: str
    dtype: str
    model: dict[str, int]
    phases: list[PhaseCosts] = Field(min_length=1)

    def find_phase(self, phase: str, batch: int, length: int, where: str) -> PhaseCosts:
        """Return the phase that a budget asks for.

        :param where: name of the table, for messages
        :raises ValueError: the phase was not measured
        """
        for known in self.phases:
            if (known.phase, known.batch, known.length) == (phase, batch, length):
                return known
        told = ", ".join(f"{p.phase} of batch {p.batch}, length {p.length}" for p in self.phases)
        raise ValueError(
            f"budget.engine: {where} must hold a {phase} of batch {batch}, length {length}, got {told}. Measure it with struprune "
            f"costs --batch {batch} --length {length}."
        )

    def check_model(self, model: nn.Module, where: str) -> None:
        """Raise if the table is of a model with other shapes.

        :raises ValueError: the shapes differ
        """
        shapes = describe_shapes(model)
        for name in {**shapes, **self.model}:
            if shapes.get(name) != self.model.get(name):
                raise ValueError(
                    f"budget.engine: {where} must be of this model's shapes, got {self.model.get(name, 0)} × {name!r}, here "
                    f"{shapes.get(name, 0)}. Measure this model with struprune costs."
                )


def describe_module(model: nn.Module, group: UnitGroup) -> str:
    """Return the description that identifies a kind of module: its units, and the sizes of its linears."""
    layer, parts = model.get_submodule(group.layer_name), []
    for name in (*group.producers, group.consumer):
        linear = find_linear(layer, name)
        parts.append(f"{name.rpartition('.')[2]} {linear.in_features}x{linear.out_features}")
    return f"{group.kind} {group.num_units}: {', '.join(parts)}"


def describe_shapes(model: nn.Module) -> dict[str, int]:
    """Return the shapes of a model's weights that the time depends on, each with its count."""
    found: dict[str, int] = {}
    for _, layer in find_decoder_layers(model):
        for inner, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                key = f"{inner} {module.in_features}x{module.out_features}"
                found[key] = found.get(key, 0) + 1
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    rows, columns = embeddings.weight.shape
    return {**found, f"embeddings {rows}x{columns}": 1}


def find_costs(phase: PhaseCosts, model: nn.Module, group: UnitGroup, where: str) -> Tensor:
    """Return a group's seconds with k = 0 ... num_units units kept, shape [num_units + 1], float64.

    :raises ValueError: the table lacks its kind of units
    """
    if group.num_units == group.num_blocks:  # no unit can be removed
        return torch.zeros(group.num_units + 1, dtype=torch.float64)
    name = describe_module(model, group)
    for known in phase.modules:
        if known.module == name:
            return known.list_costs(group.num_units, group.num_blocks)
    raise ValueError(
        f"budget.engine: {where} must hold {name!r}, got {', '.join(known.module for known in phase.modules)}. Measure it with "
        f"struprune costs, with these units among --units."
    )


def write_table(table: CostTable, path: Path) -> None:
    """Write a table to a file, atomically."""
    write_whole(path, table.model_dump_json(indent=1) + "\n")


def read_table(path: str | Path) -> CostTable:
    """Return the table that a file holds.

    :raises ValueError: the file is missing or holds no table
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(
            f"budget.engine: must be {ENGINE_NAMES}, the engines that can be timed, or a file of struprune costs, "
            f"got {str(path)!r}. Correct it."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return CostTable.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        told = f"{place}: {first['msg'].removeprefix('Value error, ')}, got {shorten_value(first['input'])}"
    except (ValueError, RecursionError, OSError) as error:
        told = shorten_error(error)
    raise ValueError(f"budget.engine: {file} must be a table that struprune costs wrote, got {told}. Make it anew.")
