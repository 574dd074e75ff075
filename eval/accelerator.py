"""Checks that need a real accelerator: its results against the CPU's, its memory against the account, and its speed.

    python -m eval.accelerator --output results/accelerator

One card of 80 GB or more (a CPU runs a reduced form), no network and no weights. Every step runs in a process of its own: one that
fails, hangs or dies is told in the report, and the others go on. Finished steps are read back when the command is started again.
The exit status is 1 where a step failed. Writes a JSON file per step and ``accelerator.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from safetensors.torch import load_file
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from eval.account import LiveBytes, count_memory
from eval.coverage import Case
from eval.paper_sizes import make_llama_config, make_opt_config, prune_random
from eval.speed import format_rows, measure_models
from struprune_plugin import StruPruneModifier, read_manifest
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.reporting.tables import Table

SPARSITY, TOLERANCE, WITHIN = 0.3, 1e-3, 0.1  # removed; of weights and logits; of the account's peak
Figures = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model's sizes, with random weights.

    :param layers: that are made here, of all those of the model
    """

    name: str
    layers: int
    samples: int = 128
    length: int = 2048
    batch: int = 1

    def make_config(self) -> PreTrainedConfig:
        if self.name == "tiny":
            sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
            return LlamaConfig(**sizes, num_hidden_layers=self.layers, vocab_size=2048)
        make = make_opt_config if self.name.startswith("OPT") else make_llama_config
        return make(self.name, num_hidden_layers=self.layers)

    def make_random(self) -> PreTrainedModel:
        """Return a model of random bfloat16 weights, on the host; a card draws them fast."""
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.make_config(), dtype=torch.bfloat16)
        return model.eval().to("cpu")


@dataclass(frozen=True)
class Step:
    """A unit of work.

    :param seconds: that it may take
    :param run: returns its figures; ``passed`` says whether they are as they should be, where that can be said
    """

    seconds: float
    run: Callable[[], Figures]


TINY = Shape("tiny", 2, samples=8, length=32, batch=4)
CORRECT: dict[str, tuple[str, dict[str, Any]]] = {  # a type's tiny model, and fields of the recipe
    "default, llama": ("llama", {}),
    "default, opt": ("opt", {}),
    "default, phi3": ("phi3", {}),
    "default, gpt_neox": ("gpt_neox", {}),
    "default, qwen3_moe": ("qwen3_moe", {}),
    "ADMM, opt": ("opt", {"weight_update": {"method": "admm", "steps": 2, "inner_steps": 2}, "attention_unit": "head"}),
}
SPEED = (
    Shape("OPT-125M", 12, batch=8),
    Shape("LLaMA-2-7B", 4, batch=2),
    Shape("LLaMA-2-70B", 4),
)
MEMORY = (Shape("LLaMA-2-7B", 4, samples=6), Shape("LLaMA-2-70B", 4, samples=15))  # as few as the widest solve needs
OUTPUTS = Shape("LLaMA-2-7B", 4)
MULTIPLES = (1, 8, 64, 128)


def list_steps(reduced: bool) -> dict[str, Step]:
    """Return all steps in the order of their worth."""
    correct = dict(list(CORRECT.items())[:1]) if reduced else CORRECT
    speed, memory, outputs = ((TINY,), (TINY,), TINY) if reduced else (SPEED, MEMORY, OUTPUTS)
    steps = {f"correct: {name}": Step(120.0, partial(compare_with_cpu, *case)) for name, case in correct.items()}
    steps |= {f"speed: {shape.name}": Step(420.0, partial(measure_speed, shape)) for shape in speed}
    steps |= {f"memory: {shape.name}": Step(480.0, partial(measure_memory, shape)) for shape in memory}
    return steps | {f"outputs: {outputs.name}": Step(240.0, partial(measure_outputs, outputs, reduced))}


def compare_with_cpu(model_type: str, fields: dict[str, Any]) -> Figures:
    """Prune a tiny model here and, in a process that sees no card, on the CPU; return how far they differ."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = {side: Path(scratch) / side for side in ("cpu", "here")}
        words = [sys.executable, "-m", "eval.accelerator", "--prune", model_type, json.dumps(fields)]
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([*words, "--output", str(folders["cpu"])], env=hidden, check=True)
        prune_tiny(model_type, fields, folders["here"])
        theirs, ours = (read_manifest(folder / "all").groups for folder in folders.values())
        pairs = [(set(a.keep), set(b.keep)) for a, b in zip(theirs, ours, strict=True)]
        weights = measure_difference(*(load_file(f / "all" / "model.safetensors") for f in folders.values()))
        logits = []
        for folder in folders.values():
            model = AutoModelForCausalLM.from_pretrained(folder / "all", dtype=torch.float32)
            model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
            with torch.no_grad():
                logits.append({"logits": model(torch.arange(4, 36, device=model.device)[None]).logits.cpu()})
    same = sum(len(a & b) for a, b in pairs) / sum(len(a | b) for a, b in pairs)
    reloaded = measure_difference(*logits)
    passed = same == 1 and max(weights, reloaded) <= TOLERANCE
    return {"same_units": same, "weights": weights, "reloaded": reloaded, "passed": passed}


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


def measure_speed(shape: Shape) -> Figures:
    """Prune a shape by the default; return seconds and peak bytes by stage."""
    manifest = prune_random(
        shape.make_random(), StruPruneModifier(sparsity=SPARSITY), shape.samples, shape.length, shape.batch
    )
    stages = {stage.name: (stage.seconds, stage.peak_bytes) for stage in manifest.stages}
    return {"layers": shape.layers, "stages": stages, "layer_seconds": stages["whole pass"][0] / shape.layers}


class CardBytes(LiveBytes):
    """The account, of the card's tensors: what an operation makes is counted where it lies on the card."""

    granule = 512  # as the card's allocator counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                self._add(leaf.untyped_storage())
        return result


def measure_memory(shape: Shape) -> Figures:
    """Prune by given sizes and damping; return the peak by the card's counters and by the account.

    What is on the card does not depend on how many systems are solved, so allocation and damping are given.
    """
    model = shape.make_random()
    layer = sum(p.numel() * p.element_size() for p in find_decoder_layers(model)[0][1].parameters())
    modifier = StruPruneModifier(sparsity=SPARSITY, allocation="uniform", dampening_frac=0.01)
    account: CardBytes | None
    with CardBytes() if torch.cuda.is_available() else nullcontext() as account, count_memory():
        manifest = prune_random(model, modifier, shape.samples, shape.length)
    peak = max(stage.peak_bytes or 0 for stage in manifest.stages)
    counted = peak if account is None else account.peak
    return {
        **{"layer_bytes": layer, "peak_bytes": peak, "account_bytes": counted, "measure": manifest.memory_measure},
        "passed": abs(counted / peak - 1) <= WITHIN,
    }


def shrink(model: PreTrainedModel, multiple: int) -> PreTrainedModel:
    """Prune in place to the sizes that uniform allocation gives, of whatever quality."""
    cheap: dict[str, Any] = {"importance": "magnitude", "weight_update": "none", "sensitivity": "none"}
    recipe = StruPruneModifier(sparsity=SPARSITY, allocation="uniform", width_multiple=multiple, **cheap)
    prune_random(model, recipe, 1, 32)
    return model


def measure_outputs(shape: Shape, reduced: bool) -> Figures:
    """Return the rows of ``eval.speed`` for the dense model and one per multiple that widths are rounded to, in bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models: dict[str, Any] = {"dense": shape.make_random().to(device)}
    for multiple in MULTIPLES[:2] if reduced else MULTIPLES:
        models[f"multiple {multiple}"] = shrink(shape.make_random(), multiple).to(device)
    repeats, new = (1, 2) if reduced else (7, 32)
    args = argparse.Namespace(dense="dense", length=shape.length, repeats=repeats, new_tokens=new, compile=False)
    return {"rows": [row for batch in (1, 4 if reduced else 16) for row in measure_models(models, args, batch)]}


def run_step(name: str, step: Step, file: Path, reduced: bool) -> Figures:
    """Run a step in a process of its own; return its figures, or what became of it."""
    words = [sys.executable, "-m", "eval.accelerator", "--step", name, "--output", str(file)]
    quiet = {"TQDM_DISABLE": "1", "LLM_COMPRESSOR_LOG_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    quiet["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*words, *(["--reduced"] if reduced else [])],
            env={**quiet, **os.environ},
            stderr=subprocess.PIPE,
            text=True,
            timeout=step.seconds,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {step.seconds:.0f} s, and was ended"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    figures = {**json.loads(file.read_text()), "seconds": time.monotonic() - start}
    file.write_text(json.dumps(figures, indent=1))
    return figures


def make_report(rows: Mapping[str, Figures], waiting: Sequence[str]) -> str:
    """Return the Markdown text of all steps that are done."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    parts = [f"# On an accelerator\n\n{device}, torch {torch.__version__}"]
    parts += [f"- {name}: {row['error']}" for name, row in rows.items() if "error" in row]
    parts += [f"- {name}: not as it should be" for name, row in rows.items() if row.get("passed") is False]
    parts += [f"- {name}: not done yet" for name in waiting]
    good = {name: row for name, row in rows.items() if "error" not in row}
    lines = [
        [name, f"{row['same_units']:.1%}", f"{row['weights']:.1e}", f"{row['reloaded']:.1e}"]
        for name, row in good.items()
        if "same_units" in row
    ]
    tables = [str(Table(["case", "same units", "weights differ by", "reloaded logits by"], lines))] if lines else []
    lines = [
        [name, *(f"{row[f'{what}_bytes'] / 1e9:.4f}" for what in ("layer", "peak", "account"))]
        for name, row in good.items()
        if "layer_bytes" in row
    ]
    tables += [str(Table(["GB", "one layer", "peak", "account"], lines))] if lines else []
    for name, row in good.items():
        if "stages" in row:
            lines = [[stage, f"{s:.2f}", f"{(peak or 0) / 1e9:.3f}"] for stage, (s, peak) in row["stages"].items()]
            lines.append(["per layer", f"{row['layer_seconds']:.2f}", ""])
            tables.append(str(Table([f"{name}, {row['layers']} layers", "seconds", "peak, GB"], lines)))
        elif "rows" in row:
            tables.append(format_rows(row["rows"]))
    return "\n\n".join([*parts, *(f"```\n{table}\n```" for table in tables)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only steps whose name contains this")
    parser.add_argument("--deadline", type=float, default=530.0, help="seconds for all steps")
    parser.add_argument("--reduced", action="store_true", help="use tiny shapes on a card, too")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--prune", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logger.remove()
    if args.prune:
        prune_tiny(args.prune[0], json.loads(args.prune[1]), args.output)
        return 0
    reduced = args.reduced or not torch.cuda.is_available()
    steps = list_steps(reduced)
    if args.step:
        args.output.write_text(json.dumps(steps[args.step].run()))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    ends_at, rows = time.monotonic() + args.deadline, {}
    waiting = [name for name in steps if args.only in name]
    for name in list(waiting):
        file = args.output / f"{name.replace(': ', '-').replace(', ', '-')}{'-reduced' if reduced else ''}.json"
        if file.exists():
            rows[name] = json.loads(file.read_text())
        elif (left := ends_at - time.monotonic()) > 10:
            step = Step(min(steps[name].seconds, left), steps[name].run)
            rows[name] = run_step(name, step, file, reduced)
        else:
            continue
        waiting.remove(name)
        (args.output / "accelerator.md").write_text(make_report(rows, waiting), encoding="utf-8")
    print(make_report(rows, waiting))
    return int(any("error" in row or row.get("passed") is False for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
