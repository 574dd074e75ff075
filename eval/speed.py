"""Measure prefill and decode throughput of pruned models against the dense model in one run, beside the ideal.

python -m eval.speed --dense MODEL --pruned out/opt-lab-30 --output results/speed
python -m eval.speed --dense MODEL --sparsity 0.1,0.3,0.5 --width-multiple 1,64 --output results/speed

With ``--sparsity`` models are pruned here, uniformly and by a fast method: their sizes matter, not their weights. ``generate``
writes the new tokens, and each is timed. Models take turns: seconds are those of the fastest tenth of all turns, a speed-up is the
median ratio of two models in the same turn. Other jobs may share the machine, so many short turns are better than a few long ones.

*ideal*: the speed-up by the kept weights of all linears, including the head. *linears*: the seconds of all linears alone. *else*:
the rest. `python -m eval.accelerator` compiles models, too.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eval.measure import count_own_seconds, time_turns
from struprune_plugin import StruPruneModifier, oneshot
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, make_calibration_dataset
from struprune_plugin.reporting.tables import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", required=True)
    parser.add_argument("--pruned", nargs="*", default=[])
    parser.add_argument("--sparsity", default="", help="also prune here to these sparsities, separated by commas")
    parser.add_argument("--width-multiple", default="1", help="width multiples for --sparsity, separated by commas")
    parser.add_argument("--attention-unit", default="value_channels")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=4, help="new tokens per turn")
    parser.add_argument("--repeats", type=int, default=20, help="number of turns")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.new_tokens < 2:
        parser.error(
            f"--new-tokens: must be 2 or more, got {args.new_tokens}: the first one's seconds are the prompt's."
        )
    warnings.filterwarnings("ignore")

    models = {path: load_checkpoint(path)[0] for path in (args.dense, *args.pruned)}
    for sparsity in filter(None, args.sparsity.split(",")):
        for multiple in args.width_multiple.split(","):
            models[f"{sparsity}, multiple {multiple}"] = prune_fast(args, float(sparsity), int(multiple))
    with count_own_seconds():
        rows = [row for batch in args.batch.split(",") for row in measure_models(models, args, int(batch))]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    size = f"{args.length} tokens of prompt, {args.new_tokens} new ones"
    heading = f"{args.dense}, {size}, {models[args.dense].dtype}, {name}"
    table = format_rows(rows)
    print(heading, table, sep="\n")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "speed.md").write_text(f"{heading}\n\n{table}\n", encoding="utf-8")
        (args.output / "speed.json").write_text(json.dumps({"what": heading, "rows": rows}, indent=1) + "\n")


def prune_fast(args: argparse.Namespace, sparsity: float, multiple: int) -> PreTrainedModel:
    """Return a model of the sizes that uniform allocation gives, of whatever quality."""
    tokenizer = AutoTokenizer.from_pretrained(args.dense)
    fast: dict[str, Any] = {"allocation": "uniform", "sensitivity": "none", "importance": "magnitude"}
    sizes = {"sparsity": sparsity, "width_multiple": multiple, "attention_unit": args.attention_unit}
    recipe = StruPruneModifier(**sizes, **fast, weight_update="none")
    with tempfile.TemporaryDirectory() as folder:
        data = make_calibration_dataset(DEMO_CALIBRATION, tokenizer, 1, args.length)
        oneshot(model=args.dense, dataset=data, recipe=recipe, output_dir=f"{folder}/out", num_calibration_samples=1)
        return load_checkpoint(f"{folder}/out")[0]


@torch.no_grad()
def measure_models(models: dict[str, Any], args: argparse.Namespace, batch: int) -> list[dict[str, Any]]:
    """Return parameters, prefill and decode tokens a second of every model at one batch size."""
    dense = models[args.dense]
    ids = torch.randint(4, dense.config.vocab_size, (batch, args.length)).to(dense.device)
    options: dict[str, Any] = {"max_new_tokens": args.new_tokens, "do_sample": False, "pad_token_id": 1}
    for model in models.values():  # else an early end, or the search for it in all logits
        model.generation_config.eos_token_id = None
    prefill = time_turns({path: partial(m, ids) for path, m in models.items()}, args.repeats)
    prompt = {path: partial(run_linears, m, batch, args.length) for path, m in models.items()}
    token = {path: partial(run_linears, m, batch, 1) for path, m in models.items()}
    tokens = time_tokens(models, ids[:, :32], options, args.repeats)
    of_prompt, of_token = time_turns(prompt, args.repeats), time_turns(token, args.repeats * 4)
    seconds = {"prefill": (prefill, of_prompt), "decode": (tokens, of_token)}
    rows = []
    for path, model in models.items():
        row = {"model": path, "batch": batch, "parameters": model.num_parameters() / dense.num_parameters()}
        row["linears"] = _count_linears(model) / _count_linears(dense)
        for name, (wholes, products) in seconds.items():
            whole, linears = pick_tenth(wholes[path]), pick_tenth(products[path])
            row[name] = batch * (args.length if name == "prefill" else 1) / whole
            row[f"{name}_seconds"], row[f"{name}_linears_seconds"] = whole, linears
            row[f"{name}_speedup"] = compare_turns(wholes[args.dense], wholes[path])
        rows.append(row)
    return rows


class TokenClock(BaseStreamer):
    """Takes down when ``generate`` hands out each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def time_tokens(
    models: dict[str, Any], ids: torch.Tensor, options: dict[str, Any], repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of all new tokens in ``generate`` but each turn's first."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(repeats + 1):
        for name, model in models.items():
            clock = TokenClock()
            model.generate(ids, streamer=clock, **options)
            if turn:  # the first warms up
                written = clock.times[1:]  # the first is handed out with the prompt's end
                seconds[name] += [after - before for before, after in pairwise(written)]
    return seconds


def compare_turns(dense: list[float], pruned: list[float]) -> float:
    """Return how many times as fast a model is, the median over turns."""
    return statistics.median(before / after for before, after in zip(dense, pruned, strict=True))


def pick_tenth(values: list[float]) -> float:
    """Return the value that a tenth of them do not exceed."""
    return sorted(values)[len(values) // 10]


def run_linears(model: PreTrainedModel, batch: int, length: int) -> None:
    """Multiply by all linears once, in their order."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module(module.weight.new_ones(batch, length, module.in_features))


def _count_linears(model: PreTrainedModel) -> int:
    """Count what every token is multiplied by: the weights of all linears, the head's too."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def format_rows(rows: list[dict[str, Any]]) -> str:
    header = ["model", "batch", "parameters", "ideal"]
    for name in ("prompt", "new token"):
        header += [f"{name}: tok/s", "ms", "linears", "else", "speed-up", "of ideal"]
    cells = []
    for row in rows:
        cells.append([row["model"], str(row["batch"]), f"{row['parameters']:.3f}", f"{1 / row['linears']:.2f} ×"])
        for name in ("prefill", "decode"):
            whole, linears = 1e3 * row[f"{name}_seconds"], 1e3 * row[f"{name}_linears_seconds"]
            speedup = row[f"{name}_speedup"]
            cells[-1] += [f"{row[name]:,.0f}", f"{whole:.1f}", f"{linears:.1f}", f"{whole - linears:.1f}"]
            cells[-1] += [f"{speedup:.2f} ×", f"{speedup * row['linears']:.2f}"]
    return str(Table(header, cells))


if __name__ == "__main__":
    main()
