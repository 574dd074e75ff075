"""What only a real accelerator shows: rates, seconds and peaks by stage, results against the CPU's, decoding, memory under a limit.

    python -m eval.accelerator

One command of at most eight minutes on one card of 80 GB or more: no network, no weights, and the package need only be on the
path. A step that fails is told, the others go on, and the exit status is 1. ``--tiny`` does the same with tiny models on a CPU.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.offload import remove_dispatch
from loguru import logger
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    StaticCache,
)

from eval.coverage import Case
from eval.methods import FASP_RECIPE
from eval.paper_sizes import make_llama_config, make_opt_config, prune_random
from struprune_plugin import StruPruneModifier, read_manifest
from struprune_plugin.modifiers.needs import Workload, count_needs
from struprune_plugin.modifiers.setup import set_up

SPARSITY, TOLERANCE = 0.3, 1e-3  # removed; largest difference of weights and logits, relative to the largest number
CHEAP: dict[str, Any] = {"importance": "magnitude", "weight_update": "none"}
CHEAP |= {"allocation": "uniform", "sensitivity": "none", "width_multiple": 8}
CORRECT: dict[str, tuple[str, dict[str, Any]]] = {  # a type's tiny model, and fields of the recipe
    "llama": ("llama", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "opt, ADMM": ("opt", {"weight_update": {"method": "admm", "steps": 2, "inner_steps": 2}, "attention_unit": "head"}),
}


@dataclass(frozen=True)
class Shape:
    """A model's sizes, with random weights, and calibration text.

    :param config: of the whole model, to whose layers seconds are scaled
    :param layers: how many are made and pruned, in one run after the other; the runs' difference is that of a layer
    """

    config: PreTrainedConfig
    layers: Sequence[int]
    samples: int = 128
    length: int = 2048
    batch: int = 8

    def make_random(self, layers: int) -> PreTrainedModel:
        """Return a model of random bfloat16 weights, on the host; a card draws them fast."""
        torch.manual_seed(0)
        config = deepcopy(self.config)
        config.num_hidden_layers = layers
        with torch.device(find_device()):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return model.eval().to("cpu")


def make_shapes(tiny: bool) -> dict[str, Shape]:
    """Return the shapes that are pruned, by name."""
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        return {"tiny": Shape(LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=2048), (1, 2), 8, 32, 4)}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    mixture = Qwen3MoeConfig(hidden_size=2048, num_hidden_layers=48, vocab_size=151936, **heads, **experts)
    return {
        "LLaMA-2-7B": Shape(make_llama_config("LLaMA-2-7B"), (1, 4)),
        "OPT-125M": Shape(make_opt_config("OPT-125M"), (12,)),
        "Qwen3-30B-A3B": Shape(mixture, (1, 2), samples=32),
    }


def find_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_seconds(act: Callable[[], Any], repeats: int = 5) -> float:
    """Return the least seconds of some calls, after one that warms up."""
    found = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        act()
        wait()
        found.append(time.perf_counter() - start)
    return min(found[1:])


# -- steps: each yields lines ---------------------------------------------------------------------------------------


def measure_rates(size: int) -> Iterator[str]:
    """Yield the rates of products, and of copies from pinned memory."""
    device = find_device()
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    yield f"{name}, torch {torch.__version__}"
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        left = torch.randn(size, size, device=device).to(dtype)
        seconds = measure_seconds(partial(torch.mm, left, left))
        yield f"product of {size} x {size} in {dtype}: {2 * size**3 / seconds / 1e12:.1f} TFLOP/s"
    if device.type == "cuda":
        held = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(held, device=device)
        for what, act in (("to the card", partial(there.copy_, held)), ("to the host", partial(held.copy_, there))):
            yield f"pinned copy {what}: {held.nbytes / measure_seconds(act) / 1e9:.1f} GB/s"


def compare_with_cpu(cases: Mapping[str, tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Prune tiny models here and, in processes that see no card, on the CPU; yield how far they differ.

    :raises ValueError: other units, or logits beyond the tolerance; weights of inputs that are nearly alike differ by more
    """
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        started, hidden = [], {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        for name, (model_type, fields) in cases.items():
            words = [sys.executable, "-m", "eval.accelerator", "--prune", model_type, json.dumps(fields)]
            started.append(subprocess.Popen([*words, str(Path(scratch) / name / "cpu")], env=hidden))
        for process, (name, case) in zip(started, cases.items(), strict=True):
            folders = [Path(scratch) / name / side / "all" for side in ("cpu", "here")]
            prune_tiny(*case, folders[1].parent)
            if process.wait():
                raise ValueError(f"{name}: pruning on the CPU must succeed")
            theirs, ours = (read_manifest(folder).groups for folder in folders)
            pairs = [(set(a.keep), set(b.keep)) for a, b in zip(theirs, ours, strict=True)]
            same = sum(len(a & b) for a, b in pairs) / sum(len(a | b) for a, b in pairs)
            weights = measure_difference(*(load_file(folder / "model.safetensors") for folder in folders))
            logits = measure_difference(*map(compute_tiny_logits, folders))
            yield f"{name}: {same:.1%} of the units are the same, weights differ by {weights:.1e}, reloaded logits by {logits:.1e}"
            if same < 1 or logits > TOLERANCE:
                wrong.append(name)
    if wrong:
        raise ValueError(f"results must be those of the CPU, not so with {' and '.join(wrong)}")


@torch.no_grad()
def compute_tiny_logits(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(find_device()).eval()
    return {"logits": model(torch.arange(4, 36, device=model.device)[None]).logits.cpu()}


def prune_tiny(model_type: str, fields: dict[str, Any], work: Path) -> None:
    """Prune a type's tiny random model, the same on every machine, into ``work/all``."""
    case = Case(model_type, work)
    case.prune(case.dense if case.tiny is not None else work, "all", **fields)


def measure_difference(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of any tensor, relative to the largest number in it; infinite where shapes differ."""
    if expected.keys() != found.keys() or any(expected[name].shape != found[name].shape for name in expected):
        return float("inf")
    pairs = ((expected[name].double(), found[name].double()) for name in expected)
    return max(float((a - b).abs().max()) / max(float(a.abs().max()), 1e-30) for a, b in pairs if a.numel())


def measure_stages(shape: Shape, fields: dict[str, Any]) -> Iterator[str]:
    """Prune a shape; yield seconds and peak bytes by stage, and the seconds of the whole model."""
    runs, whole = [], shape.config.num_hidden_layers
    for layers in shape.layers:
        recipe = StruPruneModifier(sparsity=SPARSITY, **fields)
        manifest = prune_random(shape.make_random(layers), recipe, shape.samples, shape.length, shape.batch)
        runs.append({stage.name: stage for stage in manifest.stages})
    few, many, apart = runs[0], runs[-1], shape.layers[-1] - shape.layers[0]
    for name, stage in many.items():
        peak = f", peak {stage.peak_bytes / 1e9:.2f} GB" if stage.peak_bytes else ""
        each = f", {(stage.seconds - few[name].seconds) / apart:.3f} a layer" if apart else ""
        yield f"{name}, {shape.layers[-1]} layers: {stage.seconds:.2f} s{each}{peak}"
    seconds = many["whole pass"].seconds
    if apart:
        seconds += (whole - shape.layers[-1]) * (seconds - few["whole pass"].seconds) / apart
    yield f"scaled to {whole} layers: {seconds:.1f} s"


def warm_up(shape: Shape) -> Iterator[str]:
    """Prune the fewest layers on two batches, so that all kernels are loaded when others are measured."""
    model, recipe = shape.make_random(shape.layers[0]), StruPruneModifier(sparsity=SPARSITY)
    whole = prune_random(model, recipe, 2 * shape.batch, shape.length, shape.batch).stages[-1]
    yield f"{whole.seconds:.2f} s with kernels that are loaded for the first time"


@torch.no_grad()
def measure_decoding(shape: Shape, length: int, engines: Sequence[str]) -> Iterator[str]:
    """Yield the seconds of a new token after others in a static cache, pruned beside dense, by batch and engine."""
    dense, pruned = (shape.make_random(shape.layers[-1]) for _ in range(2))
    prune_random(pruned, StruPruneModifier(sparsity=SPARSITY, **CHEAP), 1, 32)
    models = {"dense": dense.to(find_device()), "pruned": remove_dispatch(pruned).to(find_device())}
    for engine in engines:
        for batch in (1, 16):
            seconds = {}
            for name, model in models.items():
                run = make_decoder(model, batch, length, engine)
                seconds[name] = measure_seconds(partial(repeat, run), 3) / 10
            times = ", ".join(f"{name} {1e3 * value:.3f} ms" for name, value in seconds.items())
            yield f"batch {batch}, {engine}: {times}, pruned {seconds['dense'] / seconds['pruned']:.2f} x as fast"


def repeat(act: Callable[[], Any]) -> None:
    for _ in range(10):
        act()


def make_decoder(model: PreTrainedModel, batch: int, length: int, engine: str) -> Callable[[], Any]:
    """Return a function that computes one new token of a batch after ``length`` others.

    :param engine: ``eager``, ``graph`` (a CUDA graph), or ``compiled`` (and a CUDA graph)
    """
    cache = StaticCache(config=model.config, max_cache_len=length + 128)
    prompt = torch.randint(4, model.config.vocab_size, (batch, length), device=model.device)
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    called = torch.compile(model, dynamic=False) if engine == "compiled" else model

    def step() -> torch.Tensor:
        logits: torch.Tensor = called(prompt[:, :1], past_key_values=cache, use_cache=True).logits
        return logits

    if engine == "eager":
        return step
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def prune_under_limit(shape: Shape) -> Iterator[str]:
    """Prune with ``offload`` while the allocator refuses more than the plan says; yield the plan and the peak."""
    recipe = StruPruneModifier(sparsity=SPARSITY, offload=True, allocation="uniform", dampening_frac=0.01)
    model = shape.make_random(shape.layers[-1])
    planned = count_needs(model, set_up(recipe, model, ([], [])), Workload(shape.samples, shape.length, 1)).device
    yield f"planned on the device: {planned / 1e9:.3f} GB"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        limit = 1.1 * planned + (64 << 20)  # libraries' workspaces
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        manifest = prune_random(model, recipe, shape.samples, shape.length)
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(1.0)
    yield f"peak {max(stage.peak_bytes or 0 for stage in manifest.stages) / 1e9:.3f} GB"


def list_steps(tiny: bool) -> dict[str, Callable[[], Iterator[str]]]:
    """Return all steps in the order of their worth."""
    shapes = make_shapes(tiny)
    first = next(iter(shapes.values()))
    steps: dict[str, Callable[[], Iterator[str]]] = {"rates": partial(measure_rates, 256 if tiny else 8192)}
    for name, shape in shapes.items():
        steps[f"{name}, warm-up"] = partial(warm_up, shape)
        steps[f"{name}, default"] = partial(measure_stages, shape, {})
        steps[f"{name}, FASP's recipe"] = partial(measure_stages, shape, FASP_RECIPE)
    steps["against the CPU"] = partial(compare_with_cpu, dict(list(CORRECT.items())[: 1 if tiny else None]))
    engines = ("eager", "graph", "compiled") if torch.cuda.is_available() else ("eager",)
    steps["decoding"] = partial(measure_decoding, first, 4 if tiny else 512, engines)
    small = Shape(make_opt_config("OPT-1.3B"), (2,), samples=5, batch=1)
    steps["offload under a limit"] = partial(prune_under_limit, first if tiny else small)
    return steps


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models, in seconds")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only steps whose name contains this")
    parser.add_argument("--seconds", type=int, default=470, help="for all steps")
    parser.add_argument("--prune", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logger.remove()
    if args.prune:
        prune_tiny(args.prune[0], json.loads(args.prune[1]), Path(args.prune[2]))
        return 0
    start, failed = time.monotonic(), False

    def tell(name: str, text: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {name}: {text}", flush=True)

    def stop(*_args: Any) -> None:
        raise TimeoutError(f"not finished within the {args.seconds} s of all steps")

    sink = logger.add(lambda message: tell("log", message.strip()), filter=lambda r: "device:" in r["message"])
    signal.signal(signal.SIGALRM, stop)
    for name, step in list_steps(args.tiny).items():
        if args.only not in name:
            continue
        signal.alarm(max(int(start + args.seconds - time.monotonic()), 1))
        try:
            for line in step():
                tell(name, line)
        except Exception as error:  # the other steps go on
            failed = True
            tell(name, f"FAILED: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        finally:
            signal.alarm(0)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    logger.remove(sink)
    return int(failed)


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
