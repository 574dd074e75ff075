"""Estimate of a run's time and memory and of the result's speed, from a short run on a model of few layers.

The probe runs the recipe itself, on random weights of the model's own widths in two decoder layers. Each stage's seconds are
scaled to the whole model by the ratio of operation counts. If that would take longer than half a minute, the probe has fewer
calibration sequences, then narrower layers.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
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

from struprune_plugin.entrypoint import oneshot
from struprune_plugin.evaluation.text import DEMO_MODEL
from struprune_plugin.model.footprint import count_bytes
from struprune_plugin.model.layers import count_parameters, find_decoder_layers
from struprune_plugin.model.structure.locate import locate_layers
from struprune_plugin.model.structure.tiny import draw_tokens
from struprune_plugin.modifiers import RecoveryModifier, SparsityAllocatorModifier
from struprune_plugin.runtime.stopwatch import measure_rate, time_runs, watch_memory
from struprune_plugin.storage.manifest import read_manifest
from struprune_plugin.studies.sizes import Shapes, count_kept_moments, find_pruning

_LAYERS, _SECONDS, _FEWEST = 2, 20.0, 8  # of a probe: decoder layers, seconds it should take, sequences
_OVER_COUNTED = 2.5  # rough ratio of a run's time to that of its operations at the machine's rate (docs/cost.md)
_WIDTHS = ("hidden_size", "intermediate_size", "ffn_dim", "word_embed_proj_dim")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_PROMPT, _REPEATS = 256, 15
_SAMPLES = (16, 16)  # sequences of the sensitivity and of the allocation, by default


@dataclass(frozen=True)
class Workload:
    """Calibration size of a run: sequences, tokens per sequence, sequences on the device at a time."""

    num_samples: int
    seq_length: int
    batch_size: int


@dataclass(frozen=True)
class Costs:
    """Time and memory of a run on this machine, and the speed of its result.

    :param seconds: seconds of the whole command
    :param peak_bytes: peak memory of the process
    :param device_bytes: peak memory of the accelerator; None without one
    :param prefill: dense over pruned seconds of a prompt
    :param decode: dense over pruned seconds of one further token
    :param probe: description of the probe
    """

    seconds: float
    peak_bytes: int
    device_bytes: int | None
    prefill: float
    decode: float
    probe: str


def probe_costs(shapes: Shapes, sparsity: float, recipe: Recipe, work: Workload) -> Costs:
    """Run a recipe on few layers of a model's shapes, and return the estimated costs of the whole run without recovery stages.

    :param sparsity: sparsity of its pruning stage
    :param recipe: a fresh recipe, as modifiers run only once
    """
    started = time.time() - psutil.Process().create_time()  # start-up time of any command
    stages = [stage for stage in recipe.modifiers if not isinstance(stage, RecoveryModifier)]
    trains, recipe.modifiers = len(stages) < len(recipe.modifiers), stages
    _, modifier = find_pruning(recipe.modifiers)
    for stage in recipe.modifiers:
        if isinstance(stage, SparsityAllocatorModifier):
            stage.sparsity, stage.budget = sparsity, []
    modifier.sparsity, modifier.budget = sparsity, []
    groups = modifier.find_groups(shapes.model)
    widest = max(group.num_columns for group in groups)
    samples = (modifier.sensitivity_samples or _SAMPLES[0], getattr(modifier.allocation, "samples", _SAMPLES[1]))
    small = _choose_probe(shapes, widest, work, samples)
    with tempfile.TemporaryDirectory() as scratch, watch_memory() as peaks:
        before = psutil.Process().memory_info().rss
        dense = _make_model(small, Path(scratch))
        held = count_bytes(dense)
        tokens = draw_tokens(small.config, small.work.num_samples, work.seq_length).tolist()
        start = time.perf_counter()
        with redirect_stdout(StringIO()):
            oneshot(
                model=copy.deepcopy(dense),
                recipe=recipe,
                dataset=Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * len(row) for row in tokens]}),
                output_dir=f"{scratch}/out",
                batch_size=work.batch_size,
                num_calibration_samples=small.work.num_samples,
                shuffle_calibration_samples=False,
            )
        seconds = time.perf_counter() - start
        stages = read_manifest(f"{scratch}/out").stages
        device = [stage.peak_bytes for stage in stages if stage.peak_bytes] if torch.cuda.is_available() else []
        pruned = AutoModelForCausalLM.from_pretrained(f"{scratch}/out", dtype=torch.float32)
    layers, hidden = shapes.config.num_hidden_layers, shapes.config.hidden_size
    prefill, decode = _measure_speed(dense.float(), pruned, layers)
    here = _count_work(dense, shapes.config, small.work, _LAYERS, samples)
    there = _count_work(shapes.model, shapes.config, work, layers, samples)
    parts = _split_seconds({stage.name: stage.seconds for stage in stages}, seconds)
    memory = _count_memory(hidden, widest, work)
    memory /= _count_memory(dense.config.hidden_size, widest / small.divisor, small.work)
    kept = count_kept_moments(modifier, groups, hidden)
    kept_here = kept * _LAYERS / layers / small.divisor**2
    weights = count_parameters(shapes.model) * shapes.dtype.itemsize
    return Costs(
        seconds=started + sum(part * there[name] / here[name] for name, part in parts.items()),
        peak_bytes=round(before + weights + kept + max(0.0, max(peaks) - before - 2 * held - kept_here) * memory),
        device_bytes=max(device, default=None),
        prefill=prefill,
        decode=decode,
        probe=f"{_LAYERS} of {layers} layers, {small.describe(work)}, {seconds:.0f} s{', without recovery' * trains}",
    )


@dataclass(frozen=True)
class _Probe:
    """Model and data of a probe.

    :param divisor: divisor of all widths
    """

    config: Any
    work: Workload
    divisor: int
    dtype: torch.dtype

    def describe(self, work: Workload) -> str:
        told = f"{self.work.num_samples} of {work.num_samples} sequences"
        return told if self.divisor == 1 else f"{told}, widths over {self.divisor}"


def _choose_probe(shapes: Shapes, widest: int, work: Workload, samples: tuple[int, int] = _SAMPLES) -> _Probe:
    """Return the largest probe that fits the time at this machine's rate; it has all sequences and widths if they fit.

    :param widest: input columns of the widest solve
    :param samples: sequences of the sensitivity and of the allocation
    """
    rate = measure_rate(shapes.dtype)
    chosen = _Probe(_shrink(shapes.config, 1), work, 1, shapes.dtype)
    while True:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(chosen.config))
        counted = sum(_count_work(model, chosen.config, chosen.work, _LAYERS, samples).values())
        if _OVER_COUNTED * counted / rate <= _SECONDS:
            return chosen
        fewer = chosen.work.num_samples // 2
        # a run is refused with fewer tokens than the widest solve has columns
        if fewer >= max(_FEWEST, math.ceil((widest // chosen.divisor + 1) / work.seq_length)):
            chosen = replace(chosen, work=replace(work, num_samples=fewer))
        elif (config := _shrink(shapes.config, 2 * chosen.divisor)) is not None:
            chosen = replace(chosen, config=config, divisor=2 * chosen.divisor)
        else:
            return chosen


def _shrink(config: Any, divisor: int) -> Any:
    """Return a configuration with few layers and divided widths; None if a width is not divisible."""
    small = copy.deepcopy(config)
    small.num_hidden_layers = min(_LAYERS, config.num_hidden_layers)
    if isinstance(getattr(config, "layer_types", None), list):
        small.layer_types = config.layer_types[: small.num_hidden_layers]
    for name in (*_WIDTHS, *_HEADS):
        size = getattr(config, name, None)
        if isinstance(size, int) and divisor > 1:
            if size % divisor:
                return None
            setattr(small, name, size // divisor)
    return small


def _make_model(probe: _Probe, folder: Path) -> PreTrainedModel:
    """Return a model with random weights, whose configuration and tokenizer are saved to a folder for llm-compressor."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(probe.config).to(probe.dtype).eval()
        for parameter in model.parameters():  # constant vectors would make all directions equal
            if parameter.dim() == 1:
                parameter.data += 0.01 * torch.randn_like(parameter)
    probe.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


@torch.no_grad()
def _measure_speed(dense: PreTrainedModel, pruned: PreTrainedModel, layers: int) -> tuple[float, float]:
    """Return the speed-ups of a prompt and of one token for a pruned model with ``layers`` layers.

    :param dense: dense model of few layers
    :param pruned: pruned model of few layers
    """
    place, count = locate_layers(dense), len(find_decoder_layers(dense))
    every, found = dense.get_submodule(place), []
    for length in (min(_PROMPT, getattr(dense.config, "max_position_embeddings", _PROMPT)), 1):
        tokens = draw_tokens(dense.config, 1, length).to(dense.device)

        def run_empty(tokens: torch.Tensor = tokens) -> None:
            """Run all but the decoder layers."""
            dense.set_submodule(place, nn.ModuleList())
            try:
                dense(tokens, use_cache=False)
            finally:
                dense.set_submodule(place, every)

        runs: dict[str, Callable[[], object]] = {
            "empty": run_empty,
            "dense": partial(dense, tokens, use_cache=False),
            "pruned": partial(pruned, tokens, use_cache=False),
        }
        seconds = time_runs(runs, _REPEATS)
        rest = seconds["empty"]
        whole = [rest + layers * max(seconds[kind] - rest, 0.0) / count for kind in ("dense", "pruned")]
        found.append(whole[0] / whole[1])
    return found[0], found[1]


def _split_seconds(stages: dict[str, float], whole: float) -> dict[str, float]:
    """Return seconds by the kind of work that they scale with; nested stages count once."""
    kinds = {
        "sensitivity": ("sensitivity", "gradients"),
        "allocate": ("allocate",),
        "solve": ("select and solve", "surgery"),
    }
    parts = {kind: sum(stages.get(name, 0.0) for name in names) for kind, names in kinds.items()}
    inside = stages.get("whole pass", whole)
    passes = max(inside - sum(parts.values()), 0.0)
    return {**parts, "passes": passes, "rest": max(whole - inside, 0.0)}


def _count_work(
    model: nn.Module, config: Any, work: Workload, layers: int, samples: tuple[int, int] = _SAMPLES
) -> dict[str, float]:
    """Return operation counts by kind of work, for a model with ``layers`` layers.

    :param samples: sequences of the sensitivity and of the allocation
    """
    modules = [module for _, layer in find_decoder_layers(model) for module in layer.modules()]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    body = float(sum(m.in_features * m.out_features for m in linears))
    inner = [float(m.in_features) for m in linears if m.out_features == config.hidden_size]
    head = float(config.vocab_size * config.hidden_size)
    tokens = float(work.num_samples * work.seq_length)
    sensed = float(min(samples[0], work.num_samples) * work.seq_length)
    widest = max(inner, default=1.0)
    allotted = min(tokens, max(float(samples[1] * work.seq_length), 4.0 * widest))
    maps = 4.0 * work.seq_length * config.hidden_size * layers
    gram = sum(n * (n + config.hidden_size) for n in inner)
    solves = sum(n**3 + 4 * n * n * config.hidden_size for n in inner)
    return {
        "sensitivity": sensed * (6 * body + 6 * head + 3 * maps),
        "allocate": allotted * (4 * body + 2 * maps + gram) + 6 * solves,
        "solve": 6 * solves,
        "passes": tokens * (8 * body + 4 * maps + gram),
        "rest": tokens * (2 * body + maps) + 20 * (body + head),
    }


def _count_memory(hidden: int, widest: float, work: Workload) -> float:
    """Return the number of values that a run holds beside its weights: hidden states on three paths, and the widest solve."""
    return 3.0 * work.num_samples * work.seq_length * hidden + 12 * widest * (widest + hidden)
