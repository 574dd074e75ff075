"""Lookup of the cost table that a budget names: measured now in an engine, or read from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from loguru import logger
from tqdm import tqdm
from transformers import PreTrainedModel

from struprune_plugin.allocation.costs.cost_table import CostTable, read_table
from struprune_plugin.allocation.costs.llama_cpp_engine import LlamaCppEngine
from struprune_plugin.allocation.costs.measure_costs import Engine, Run, check_measurable, choose_layers, measure_costs
from struprune_plugin.allocation.costs.transformers_engine import TransformersEngine
from struprune_plugin.allocation.costs.vllm_engine import VLLMEngine
from struprune_plugin.allocation.costs.whole_model import can_hold, scale_to_whole
from struprune_plugin.export.any_class import replace_conv1d
from struprune_plugin.export.convert import check_heads
from struprune_plugin.model.layers import find_decoder_layers, find_layouts
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.distributed import compute_on_rank0

ENGINES: dict[str, Callable[[PreTrainedModel, torch.dtype, Run, int], Engine]] = {
    "transformers": TransformersEngine,
    "llama.cpp": LlamaCppEngine,
    "vllm": VLLMEngine,
}
_measured: dict[str, CostTable] = {}  # tables of this process, shared by two stages or the points of a sweep


def list_kinds(model: PreTrainedModel, units: Sequence[str]) -> list[UnitGroup]:
    """Return the first layer's groups of the named kinds (``ffn``, ``head``, ``value_channels``) that can lose units."""
    found: list[UnitGroup] = []
    for unit in units:
        groups = find_groups(model, "none") if unit == "ffn" else find_groups(model, unit, prune_ffn=False)  # type: ignore[arg-type]
        found += [group for group in groups if group.layer_index == 0 and group.num_units > group.num_blocks]
    return found


def list_units(model: PreTrainedModel) -> list[str]:
    """Return the kinds of units that a model has."""
    layouts = [layout for _, layout in find_layouts(model)]
    found = ["ffn"] if any(layout.ffns for layout in layouts) else []
    if any(layout.attention is not None for layout in layouts):
        found.append("value_channels")
        with suppress(ValueError):  # whole heads cannot be removed
            check_heads(model)
            found.append("head")
    return found


def find_table(engine: str, model: PreTrainedModel, dtype: torch.dtype, units: Sequence[str], run: Run) -> CostTable:
    """Return a model's cost table, from an engine or from a file.

    :param engine: a name of :data:`ENGINES`, or a path
    :param dtype: dtype of the weights that an engine is timed with
    :param units: kinds of units, see :func:`list_kinds`
    :raises ValueError: the file is missing, holds no table or is of another model; the model cannot be measured
    """
    replace_conv1d(model)
    if engine not in ENGINES:
        table = read_table(engine)
        table.check_model(model, engine)
        return table
    key = json.dumps([engine, model.config.to_dict(), str(dtype), list(units), vars(run)], default=str)
    if key not in _measured:
        check_measurable(model, run)
        logger.info(
            f"timing the model's modules in {engine}: {', '.join(run.phases)}, batch {run.batch}, length {run.length}"
        )
        measure = partial(_measure_table, ENGINES[engine], model, dtype, list_kinds(model, units), run)
        # all processes plan with the same speeds
        found = compute_on_rank0(lambda: measure().model_dump(), dict[str, Any], torch.device("cpu"))
        _measured[key] = CostTable.model_validate(found)
    return _measured[key]


def _measure_table(
    start: Callable[[PreTrainedModel, torch.dtype, Run, int], Engine],
    model: PreTrainedModel,
    dtype: torch.dtype,
    groups: Sequence[UnitGroup],
    run: Run,
) -> CostTable:
    """Return a table measured on a few layers, scaled to the whole model if this machine can hold it."""
    few, layers = choose_layers(model, dtype.itemsize), len(find_decoder_layers(model))
    with tqdm(desc="timing", unit=" models", leave=False) as bar:

        def tell(timed: str) -> None:
            bar.set_postfix_str(timed, refresh=False)
            bar.update()

        table = measure_costs(start(model, dtype, run, few), model, groups, run, tell)
        if few < layers and can_hold(model, dtype):
            return scale_to_whole(table, start(model, dtype, run, layers), model, groups, tell)
    if few < layers:
        logger.info("the whole model does not fit in memory to be timed: speeds may differ from the table by a tenth")
    return table
