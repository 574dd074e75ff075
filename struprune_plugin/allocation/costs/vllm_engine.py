"""Timing of modules in vLLM, on folders that hold a configuration alone, in the form in which pruning leaves models."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from struprune_plugin.allocation.costs.engine_process import EngineProcess
from struprune_plugin.allocation.costs.few_layers import adopt_all, cut_alike, shorten_class
from struprune_plugin.allocation.costs.measure_costs import Change, Engine, Run
from struprune_plugin.export.any_class import replace_conv1d
from struprune_plugin.export.convert import adopt_config
from struprune_plugin.model.structure.tiny import draw_tokens
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.runtime.stopwatch import compare_rounds

_PROCESS = EngineProcess("vllm", "vLLM", Path(__file__).with_name("vllm_timing_worker.py"))
_PACKAGE = str(Path(__file__).parents[2])
_REPEATS = {"prompt": 3, "token": 15}  # in each order
_SPARE = 512  # tokens of cache beyond a prompt, per sequence: blocks are of up to 128


class VLLMEngine(Engine):
    """Engine of vLLM: the dense model in vLLM's own class, changed ones in this package's, as the output of a run is served.

    :param model: model whose shapes are timed; it may be without values
    :param dtype: dtype of the timed weights
    :param num_layers: number of decoder layers that are timed
    """

    name = "vllm"
    num_whole = 1  # a cache needs attention

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, run: Run, num_layers: int):
        self.num_layers = num_layers
        self.dtype, self.machine, self._dtype, self._run = str(dtype).removeprefix("torch."), "", dtype, run
        self._dense = self._build(model, self.num_layers)
        self._folder = tempfile.TemporaryDirectory()
        write_stock(self._dense, Path(self._folder.name) / "dense")

    def compare(self, changes: Sequence[Change] | None) -> Mapping[str, tuple[float, float]]:
        changed, folder = copy.deepcopy(self._dense), Path(self._folder.name)
        if changes is None:
            changed = self._build(self._dense, self.num_whole)
        adopt_all(changed)
        for change in changes or ():
            cut_alike(changed, change)
        write_pruned(changed, folder / "changed")
        times, self.machine = time_folders(
            [folder / "dense", folder / "changed"], self._dense.config, self._dtype, self._run
        )
        return times

    def can_remove(self, group: UnitGroup) -> bool:
        return False

    def _build(self, model: PreTrainedModel, num_layers: int) -> Any:
        """Return a model with fewer decoder layers, without weights."""
        kind, part = shorten_class(model, num_layers)
        with torch.device("meta"):
            shorter = kind._from_config(part, dtype=self._dtype)
        replace_conv1d(shorter)
        return shorter


def write_stock(model: PreTrainedModel, folder: Path) -> None:
    """Write a dense model's configuration to a folder."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


def write_pruned(model: PreTrainedModel, folder: Path) -> None:
    """Write the configuration with which pruning saves a model to a folder; the model becomes one of its class."""
    adopt_config(model)
    model.config.save_pretrained(folder)


def time_folders(
    folders: list[Path], config: PreTrainedConfig, dtype: torch.dtype, run: Run
) -> tuple[dict[str, tuple[float, float]], str]:
    """Return the seconds, by phase, of a dense and a changed folder run in turn in vLLM, and a description of the machine.

    See :func:`~struprune_plugin.runtime.stopwatch.compare_rounds`. The folders need hold a configuration alone. One process loads
    them in this order, another one in the opposite: of two equal models, the one that was loaded later can be 5 % faster.

    :param config: configuration of the dense model
    :raises ValueError: vLLM is missing, or refuses a folder
    """
    job: dict[str, Any] = {"package": _PACKAGE, "cache_bytes": _count_cache_bytes(config, dtype, run)}
    job |= {"dtype": str(dtype).removeprefix("torch."), "phases": list(run.phases), "repeats": _REPEATS}
    job |= {"prompts": draw_tokens(config, run.batch, run.length).tolist(), "threads": torch.get_num_threads()}
    names = [str(folder) for folder in folders]
    there, back = (_PROCESS.ask(job | {"folders": order}, run.python) for order in (names, names[::-1]))
    times: dict[str, tuple[float, float]] = {}
    for phase in run.phases:
        dense = [*there["seconds"][0][phase], *back["seconds"][1][phase]]
        changed = [*there["seconds"][1][phase], *back["seconds"][0][phase]]
        times[phase] = compare_rounds(dense, changed)
    return times, there["machine"]


def _count_cache_bytes(config: Any, dtype: torch.dtype, run: Run) -> int:
    """Return bytes that hold the cache of a run: as if every query head had keys and values."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    width = max(hidden, heads * (getattr(config, "head_dim", None) or hidden // heads))
    return int(2 * width * dtype.itemsize * config.num_hidden_layers * run.batch * (run.length + _SPARE))
