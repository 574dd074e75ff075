"""Timing of modules in llama.cpp, on files of random weights in the architecture that ``struprune convert --to gguf`` writes."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from struprune_plugin.allocation.costs.engine_process import EngineProcess
from struprune_plugin.allocation.costs.measure_costs import Change, Engine, Run, removes
from struprune_plugin.export.random_gguf import check_random_gguf, write_random_gguf
from struprune_plugin.export.stock_config import list_sizes
from struprune_plugin.model.layers import LayerSizes
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.model.units.kinds import HEAD, VALUE
from struprune_plugin.runtime.stopwatch import compare_rounds

_PROCESS = EngineProcess("llama.cpp", "llama-cpp-python", Path(__file__).with_name("llama_cpp_worker.py"))
_REPEATS = {"prompt": 5, "token": 25}


def time_files(dense: Path, changed: Path, run: Run) -> dict[str, tuple[float, float]]:
    """Return the seconds, by phase, of two GGUF files run in turn in llama.cpp.

    See :func:`~struprune_plugin.runtime.stopwatch.compare_rounds`.

    :raises ValueError: llama-cpp-python is missing, or llama.cpp refuses a file
    """
    job = {"files": [str(dense), str(changed)], "phases": list(run.phases), "batch": run.batch, "length": run.length}
    job |= {"threads": torch.get_num_threads(), "repeats": _REPEATS}
    first, second = _PROCESS.ask(job, run.python)["seconds"]
    return {phase: compare_rounds(first[phase], second[phase]) for phase in run.phases}


class LlamaCppEngine(Engine):
    """Engine of llama.cpp, whose architecture for layers of several sizes pads values to the width of keys.

    :param model: model whose shapes are timed; it may be without values
    :param dtype: dtype of the files' matrices
    :param num_layers: number of decoder layers that are timed
    :raises ValueError: the model is not a LLaMA
    """

    name = "llama.cpp"
    num_whole = 1  # a cache needs a layer

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, run: Run, num_layers: int):
        check_random_gguf(model.config)
        self.num_layers = num_layers
        self._sizes = list_sizes(model)[: self.num_layers]
        self._config, self._dtype, self._run = model.config, dtype, run
        self._folder = tempfile.TemporaryDirectory()
        self._dense = Path(self._folder.name) / "dense.gguf"
        write_random_gguf(self._config, self._sizes, dtype, self._dense)
        self.dtype = str(dtype).removeprefix("torch.")
        self.machine = (
            f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, llama-cpp-python"
        )

    def compare(self, changes: Sequence[Change] | None) -> Mapping[str, tuple[float, float]]:
        file = self._dense.with_name("changed.gguf")
        whole = self.num_whole if removes(changes) else 0
        rest = [] if changes is None else self._sizes[whole:]
        for change in changes or ():
            rest = [_resize(size, change) for size in rest]
        write_random_gguf(self._config, [*self._sizes[:whole], *rest], self._dtype, file)
        return time_files(self._dense, file, self._run)

    def can_remove(self, group: UnitGroup) -> bool:
        return not group.unit.is_ffn  # llama.cpp skips the attention of a layer without an FFN

    def is_flat(self, group: UnitGroup) -> bool:
        return group.unit is VALUE


def _resize(size: LayerSizes, change: Change) -> LayerSizes:
    """Return the sizes of a layer with another number of units in one module."""
    if change.group.unit.is_ffn:
        return replace(size, width=change.units)
    heads = change.units if change.group.unit is HEAD else size.num_key_value_heads * (change.units > 0)
    return replace(
        size, num_key_value_heads=heads, num_heads=heads * size.num_heads // max(size.num_key_value_heads, 1)
    )
