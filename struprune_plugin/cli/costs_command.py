"""``struprune costs``: times of a model's modules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from struprune_plugin.cli.console import Screen
from struprune_plugin.cli.options import Device, Dtype, Model, check_names, option, prepare, whole

_PHASES, _UNITS = ("prompt", "token"), ("ffn", "value_channels", "head")


@dataclass(frozen=True)
class Timing:
    """Settings of the timing."""

    output: Annotated[Path, option("file to write, for a recipe's budget.engine", "FILE.json")]
    engine: Annotated[str, option("transformers, llama.cpp (through llama-cpp-python) or vllm", "NAME")] = (
        "transformers"
    )
    phases: Annotated[str, option("prompt, token or both", "a,b")] = "prompt,token"
    units: Annotated[str, option("kinds of units [default: all of the model]", "a,b")] = ""
    batch: Annotated[int, whole("sequences per batch")] = 1
    length: Annotated[int, whole("tokens of the prompt, or in the cache")] = 512
    python: Annotated[str, option("Python with llama-cpp-python or vLLM [default: this one]", "PATH")] = ""
    dtype: Dtype = "auto"
    device: Device = "auto"


def costs(model: Model, timing: Timing, screen: Screen) -> None:
    """Time a model's modules at several sizes, for speed-up budgets.

    Run it on the machine and in the engine that will serve. It times models with a few layers, random weights and the model's own
    sizes, and cuts one kind of module at a time; then, if memory allows, the whole model with half of its units.
    `prune --budget '{speedup: 1.3, engine: FILE.json}'` uses the file, on any machine. This takes minutes and needs no calibration.
    """
    phases = _split("--phases", timing.phases, _PHASES)
    units = _split("--units", timing.units, _UNITS) if timing.units else []
    check_names(timing.device, None, [model], [])
    prepare(timing.device, screen)
    from struprune_plugin.allocation.costs.cost_table import ENGINE_NAMES, write_table
    from struprune_plugin.allocation.costs.engines import ENGINES, find_table, list_units
    from struprune_plugin.allocation.costs.measure_costs import Run
    from struprune_plugin.reporting.cost_summary import format_costs
    from struprune_plugin.storage.files import check_place
    from struprune_plugin.studies.plan import read_shapes

    if timing.engine not in ENGINES:
        raise ValueError(
            f"--engine: must be {ENGINE_NAMES}, the engines that can be timed, got {timing.engine!r}. Name one of them."
        )
    check_place("--output", timing.output.absolute().parent)
    shapes = read_shapes(model, timing.dtype)
    run = Run(phases, timing.batch, timing.length, timing.python)  # type: ignore[arg-type]
    table = find_table(timing.engine, shapes.model, shapes.dtype, units or list_units(shapes.model), run)
    write_table(table, timing.output)
    screen.show(table.model_dump(), *format_costs(table), f"wrote {timing.output}")


def _split(where: str, text: str, known: tuple[str, ...]) -> list[str]:
    """Return the comma-separated names of a text.

    :raises ValueError: an unknown or repeated name
    """
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise ValueError(f"{where}: must be of {', '.join(known)}, with commas between them, got {text!r}. Correct it.")
    return names
