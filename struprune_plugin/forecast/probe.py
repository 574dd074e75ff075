"""How long a run will take here, what memory it needs and how fast its result is: a short run on a model of few layers.

The probe is the recipe itself, on random weights of the model's own widths in two decoder layers. Each stage's seconds grow to the
whole model's by the operations that both count. Where that would take longer than half a minute, the probe has fewer calibration
sequences, then narrower layers.
"""

from __future__ import annotations

import copy
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from llmcompressor.recipe import Recipe
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from struprune_plugin.data import DEMO_MODEL
from struprune_plugin.entrypoint import oneshot
from struprune_plugin.export import read_manifest
from struprune_plugin.forecast.sizes import Outline, Shapes, find_pruning
from struprune_plugin.model.families import find_family
from struprune_plugin.model.layers import count_parameters, find_decoder_layers
from struprune_plugin.modifiers.outline import tries_plans
from struprune_plugin.passes.allocation import can_keep_moments, count_moment_bytes

_LAYERS, _SECONDS, _FEWEST = 2, 20.0, 8  # of a probe: decoder layers, seconds it should take, sequences
_OVER_COUNTED = 2.5  # how much longer than its operations at the machine's own rate a run takes, about (docs/cost.md)
_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "ffn_dim",
    "word_embed_proj_dim",
    "num_attention_heads",
    "num_key_value_heads",
)
_BLOCK = 512  # of the matrices that the rate is measured with
_SAMPLING = 0.02  # seconds between two looks at the memory
_PROMPT = 256
_REPEATS = 15


@dataclass(frozen=True)
class Workload:
    """What a run calibrates on.

    :param samples: sequences
    :param length: tokens of each
    """

    samples: int
    length: int
    batch: int


@dataclass(frozen=True)
class Costs:
    """What a run takes on this machine, and how fast what it leaves is.

    :param seconds: of the whole command
    :param peak_bytes: of the process' memory, at its peak
    :param device_bytes: of the accelerator's; None without one
    :param prefill: dense over pruned seconds of a prompt
    :param decode: of one token more
    :param probe: what the probe was, for people
    """

    seconds: float
    peak_bytes: int
    device_bytes: int | None
    prefill: float
    decode: float
    probe: str


def probe_costs(shapes: Shapes, outline: Outline, load: Callable[[], Recipe], work: Workload, started: float) -> Costs:
    """Run a recipe on few layers of a model's shapes, and tell what the whole run takes.

    :param load: a fresh recipe, whose modifiers run once
    :param started: seconds of wall time since this process began, before it was asked
    """
    small = _choose_probe(shapes, outline, work)
    recipe = load()
    _, modifier = find_pruning(recipe.modifiers)
    modifier.sparsity = outline.sparsity
    with tempfile.TemporaryDirectory() as scratch, _watch_memory() as peaks:
        before = psutil.Process().memory_info().rss
        dense = _make_model(small, Path(scratch))
        held = sum(p.numel() * p.element_size() for p in {id(p): p for p in dense.parameters()}.values())
        start = time.perf_counter()
        with redirect_stdout(StringIO()):
            oneshot(
                model=copy.deepcopy(dense),
                recipe=recipe,
                dataset=_make_tokens(small),
                output_dir=f"{scratch}/out",
                batch_size=work.batch,
                num_calibration_samples=small.work.samples,
                shuffle_calibration_samples=False,
            )
        seconds = time.perf_counter() - start
        stages = read_manifest(f"{scratch}/out")["stages"]
        found = {stage["name"]: stage["seconds"] for stage in stages}
        device = [stage["peak_bytes"] for stage in stages if stage["peak_bytes"]] if torch.cuda.is_available() else []
        pruned = AutoModelForCausalLM.from_pretrained(f"{scratch}/out", dtype=torch.float32)
    speeds = _measure_speed(dense.float(), pruned, shapes.config.num_hidden_layers)
    here = _count_work(dense, shapes.config, small.work, _LAYERS)
    there = _count_work(shapes.model, shapes.config, work, shapes.config.num_hidden_layers)
    memory = _count_memory(shapes.config.hidden_size, outline, work) / _count_memory(
        dense.config.hidden_size, outline, small.work, small.divisor
    )
    kept = 0
    if tries_plans(modifier) and can_keep_moments(outline.groups, shapes.config.hidden_size):
        kept = count_moment_bytes(outline.groups, shapes.config.hidden_size)
    kept_here = kept * _LAYERS / shapes.config.num_hidden_layers / small.divisor**2
    told = sum(part * there[name] / here[name] for name, part in _split_seconds(found, seconds).items())
    weights = count_parameters(shapes.model) * shapes.dtype.itemsize
    return Costs(
        seconds=started + told,
        peak_bytes=round(before + weights + kept + max(0.0, max(peaks) - before - 2 * held - kept_here) * memory),
        device_bytes=max(device) if device else None,
        prefill=speeds[0],
        decode=speeds[1],
        probe=f"{_LAYERS} of {shapes.config.num_hidden_layers} layers, {small.describe(work)}, {seconds:.0f} s",
    )


def measure_start() -> float:
    """Return the seconds since this process began: what any command takes before it does something."""
    return time.time() - psutil.Process().create_time()


@dataclass(frozen=True)
class _Probe:
    """The model and the data of a probe.

    :param divisor: of all widths
    """

    config: Any
    work: Workload
    divisor: int
    dtype: torch.dtype

    def describe(self, work: Workload) -> str:
        told = f"{self.work.samples} of {work.samples} sequences"
        return told if self.divisor == 1 else f"{told}, widths over {self.divisor}"


def _choose_probe(shapes: Shapes, outline: Outline, work: Workload) -> _Probe:
    """Choose how much of the run fits the time, by the rate of this machine: all sequences and widths where they do."""
    rate = _measure_rate(shapes.dtype)
    widest = max(group.num_columns for group in outline.groups)
    samples, divisor = work.samples, 1
    chosen = _Probe(_shrink(shapes.config, 1), work, 1, shapes.dtype)
    while True:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(chosen.config))
        counted = sum(_count_work(model, chosen.config, chosen.work, _LAYERS).values())
        if _OVER_COUNTED * counted / rate <= _SECONDS:
            return chosen
        enough = -(
            -(widest // divisor + 1) // work.length
        )  # the host refuses fewer tokens than the widest solve has columns
        if samples // 2 >= max(_FEWEST, enough):
            samples //= 2
        else:
            config = _shrink(shapes.config, 2 * divisor)
            if config is None:
                return chosen
            divisor *= 2
        chosen = _Probe(_shrink(shapes.config, divisor), replace(work, samples=samples), divisor, shapes.dtype)


def _shrink(config: Any, divisor: int) -> Any:
    """Return a configuration of few layers and of widths over a divisor; None where they cannot be divided."""
    small = copy.deepcopy(config)
    small.num_hidden_layers = min(_LAYERS, config.num_hidden_layers)
    if isinstance(getattr(config, "layer_types", None), list):
        small.layer_types = config.layer_types[: small.num_hidden_layers]
    for name in _WIDTHS:
        size = getattr(config, name, None)
        if isinstance(size, int) and divisor > 1:
            if size % divisor:
                return None
            setattr(small, name, size // divisor)
    return small


def _make_model(probe: _Probe, folder: Path) -> PreTrainedModel:
    """Make a model of random weights, whose configuration the host finds in a folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(probe.config).to(probe.dtype).eval()
        for parameter in model.parameters():  # constant ones: no direction would matter
            if parameter.dim() == 1:
                parameter.data += 0.01 * torch.randn_like(parameter)
    probe.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


def _make_tokens(probe: _Probe) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    size = (probe.work.samples, probe.work.length)
    tokens = torch.randint(4, probe.config.vocab_size, size, generator=generator)
    return Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()})


@torch.no_grad()
def _measure_rate(dtype: torch.dtype) -> float:
    """Return the operations a second of a matrix product on this machine's device."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    matrix = torch.randn(_BLOCK, _BLOCK).to(device, dtype)
    seconds = _time({"product": lambda: matrix @ matrix}, 5)
    return 2 * _BLOCK**3 / seconds["product"]


def _time(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the least seconds of each run, in rounds, so that what else the machine does hits all alike.

    One thread of a CPU is timed by its own seconds: others may share the machine.
    """
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = time.process_time if alone else time.perf_counter
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = clock()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[name] = min(best[name], clock() - start)
    return best


@torch.no_grad()
def _measure_speed(dense: PreTrainedModel, pruned: PreTrainedModel, layers: int) -> tuple[float, float]:
    """Return how much faster a prompt and a token are in a pruned model of so many layers.

    :param dense: and ``pruned``: of few layers
    """
    family, count = find_family(dense), len(find_decoder_layers(dense))
    holder: Any = dense.get_submodule(family.layers.rpartition(".")[0])
    name, every = family.layers.rpartition(".")[2], dense.get_submodule(family.layers)
    found = []
    for length in (min(_PROMPT, getattr(dense.config, "max_position_embeddings", _PROMPT)), 1):
        tokens = torch.randint(4, dense.config.vocab_size, (1, length), device=dense.device)

        def run_empty(tokens: torch.Tensor = tokens) -> None:
            """Run all but the decoder layers."""
            setattr(holder, name, nn.ModuleList())
            try:
                dense(tokens, use_cache=False)
            finally:
                setattr(holder, name, every)

        runs: dict[str, Callable[[], object]] = {
            "empty": run_empty,
            "dense": partial(dense, tokens, use_cache=False),
            "pruned": partial(pruned, tokens, use_cache=False),
        }
        seconds = _time(runs, _REPEATS)
        rest = seconds["empty"]
        whole = [rest + layers * max(seconds[kind] - rest, 0.0) / count for kind in ("dense", "pruned")]
        found.append(whole[0] / whole[1])
    return found[0], found[1]


def _split_seconds(stages: dict[str, float], whole: float) -> dict[str, float]:
    """Return seconds by the kind of work that they grow with; stages within others once."""
    parts = {"sensitivity": stages.get("sensitivity", 0.0) + stages.get("saliency", 0.0)}
    parts["allocate"] = stages.get("allocate", 0.0) + stages.get("search", 0.0)
    parts["solve"] = stages.get("select and solve", 0.0) + stages.get("surgery", 0.0)
    inside = stages.get("whole pass", whole)
    parts["passes"] = max(inside - sum(parts.values()), 0.0)
    parts["rest"] = max(whole - inside, 0.0)
    return parts


def _count_work(model: nn.Module, config: Any, work: Workload, layers: int) -> dict[str, float]:
    """Return operations by kind, of a model of so many layers."""
    linears = [
        m
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and "lm_head" not in name and "embed_out" not in name
    ]
    body = float(sum(m.in_features * m.out_features for m in linears))
    inner = [float(m.in_features) for m in linears if m.out_features == config.hidden_size]
    head = float(config.vocab_size * config.hidden_size)
    tokens = float(work.samples * work.length)
    sensed = float(min(16, work.samples) * work.length)
    widest = max(inner, default=1.0)
    allotted = min(tokens, max(16.0 * work.length, 4.0 * widest))
    maps = 4.0 * work.length * config.hidden_size * layers
    gram = sum(n * (n + config.hidden_size) for n in inner)
    solves = sum(n**3 + 4 * n * n * config.hidden_size for n in inner)
    return {
        "sensitivity": sensed * (6 * body + 6 * head + 3 * maps),
        "allocate": allotted * (4 * body + 2 * maps + gram) + 6 * solves,
        "solve": 6 * solves,
        "passes": tokens * (8 * body + 4 * maps + gram),
        "rest": tokens * (2 * body + maps) + 20 * (body + head),
    }


def _count_memory(hidden: int, outline: Outline, work: Workload, divisor: int = 1) -> float:
    """Return values that a run holds beside its weights: hidden states on three paths, and the widest solve."""
    widest = max(group.num_columns for group in outline.groups) / divisor
    return 3.0 * work.samples * work.length * hidden + 12 * widest * (widest + hidden)


@contextmanager
def _watch_memory() -> Iterator[Sequence[int]]:
    """Give a list of the process' resident bytes, looked at all along the block."""
    process, over = psutil.Process(), threading.Event()
    seen = [process.memory_info().rss]

    def look() -> None:
        while not over.wait(_SAMPLING):
            seen.append(process.memory_info().rss)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
