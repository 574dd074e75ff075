"""Prefill and decode throughput of pruned models against the dense one, measured in one run, beside the ideal.

python -m eval.speed --dense ../shared/testbed/opt-lab --pruned out/opt-lab-30 --output results/speed
python -m eval.speed --dense ../shared/testbed/opt-lab --sparsity 0.1,0.3,0.5 --channel-multiple 1,64 --output results/speed

With ``--sparsity`` models are pruned here, all layers alike and fast: their sizes matter, not their weights. The ideal is the
speed-up that the weights kept in all linears would give, the head's too; *linears alone* is what their products take of a new
token, everything else left out. ``--compile`` runs dense and pruned models through
torch.compile, new tokens with a static cache.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, CompileConfig, PreTrainedModel

from eval.measure import count_own_seconds, time_side_by_side
from struprune_plugin import StruPruneModifier, oneshot
from struprune_plugin.data import DEMO_CALIBRATION, make_calibration_dataset
from struprune_plugin.evaluation import load_checkpoint
from struprune_plugin.report import format_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", required=True)
    parser.add_argument("--pruned", nargs="*", default=[])
    parser.add_argument("--sparsity", default="", help="also prune here, by so much each, comma-separated")
    parser.add_argument("--channel-multiple", default="1", help="and with each of these")
    parser.add_argument("--attention-unit", default="vo")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="dense and pruned; takes minutes")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")

    models = {path: load_checkpoint(path)[0] for path in (args.dense, *args.pruned)}
    for sparsity in filter(None, args.sparsity.split(",")):
        for multiple in args.channel_multiple.split(","):
            models[f"{sparsity}, multiple {multiple}"] = prune_fast(args, float(sparsity), int(multiple))
    with count_own_seconds():
        rows = [row for batch in args.batch.split(",") for row in measure_models(models, args, int(batch))]
    device = models[args.dense].device
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    name += ", compiled" if args.compile else ""
    heading = (
        f"{args.dense}, {args.length} tokens of prompt, {args.new_tokens} new ones, {models[args.dense].dtype}, {name}"
    )
    table = format_rows(rows)
    print(heading, table, sep="\n")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "speed.md").write_text(f"{heading}\n\n{table}\n", encoding="utf-8")
        (args.output / "speed.json").write_text(json.dumps({"what": heading, "rows": rows}, indent=1) + "\n")


def prune_fast(args: argparse.Namespace, sparsity: float, multiple: int) -> PreTrainedModel:
    """Return a model of the sizes that uniform allocation gives, of whatever quality."""
    tokenizer = AutoTokenizer.from_pretrained(args.dense)
    recipe = StruPruneModifier(
        sparsity=sparsity,
        channel_multiple=multiple,
        attention_unit=args.attention_unit,
        allocation="uniform",
        sensitivity="none",
        importance="magnitude",
        restoration="none",
    )
    with tempfile.TemporaryDirectory() as folder:
        data = make_calibration_dataset(DEMO_CALIBRATION, tokenizer, 1, args.length)
        oneshot(model=args.dense, dataset=data, recipe=recipe, output_dir=f"{folder}/out", num_calibration_samples=1)
        return load_checkpoint(f"{folder}/out")[0]


@torch.no_grad()
def measure_models(models: dict[str, Any], args: argparse.Namespace, batch: int) -> list[dict[str, Any]]:
    """Return parameters, prefill and decode tokens a second of every model at one batch size."""
    dense = models[args.dense]
    ids = torch.randint(4, dense.config.vocab_size, (batch, args.length)).to(dense.device)
    options: dict[str, Any] = {
        "max_new_tokens": args.new_tokens,
        "min_new_tokens": args.new_tokens,
        "do_sample": False,
        "pad_token_id": 1,
    }
    called = models
    if args.compile:
        called = {path: torch.compile(model, dynamic=False) for path, model in models.items()}
        options |= {"cache_implementation": "static", "compile_config": make_compile_config()}
    prefill = time_side_by_side({path: partial(m, ids) for path, m in called.items()}, args.repeats)
    decode = time_side_by_side(
        {path: partial(m.generate, ids[:, :32], **options) for path, m in models.items()}, max(3, args.repeats // 3)
    )
    products = time_side_by_side({path: partial(run_linears, m, batch) for path, m in models.items()}, args.repeats)
    return [
        {
            "model": path,
            "batch": batch,
            "linears_seconds": products[path],
            "linears_speedup": products[args.dense] / products[path],
            "decode_seconds": decode[path] / args.new_tokens,
            "parameters": model.num_parameters() / dense.num_parameters(),
            "linears": _count_linears(model) / _count_linears(dense),
            "prefill": batch * args.length / prefill[path],
            "prefill_speedup": prefill[args.dense] / prefill[path],
            "decode": batch * args.new_tokens / decode[path],
            "decode_speedup": decode[args.dense] / decode[path],
        }
        for path, model in models.items()
    ]


def run_linears(model: PreTrainedModel, batch: int) -> None:
    """Multiply by all linears once, in their order, as for one new token of every sequence."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module(module.weight.new_ones(batch, 1, module.in_features))


def make_compile_config() -> CompileConfig:
    """Return what lets ``generate`` compile on a CPU, too."""
    config = CompileConfig(fullgraph=False, dynamic=False, mode="default")
    config._compile_all_devices = True
    return config


def _count_linears(model: PreTrainedModel) -> int:
    """Count what every token is multiplied by: the weights of all linears, the head's too."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def format_rows(rows: list[dict[str, Any]]) -> str:
    header = ["model", "batch", "parameters", "ideal", "prefill tok/s", "speed-up", "decode tok/s", "speed-up"]
    header += ["ms a new token", "linears alone", "speed-up"]
    cells = [
        [
            row["model"],
            str(row["batch"]),
            f"{row['parameters']:.3f}",
            f"{1 / row['linears']:.2f} ×",
            f"{row['prefill']:,.0f}",
            f"{row['prefill_speedup']:.2f} ×",
            f"{row['decode']:,.0f}",
            f"{row['decode_speedup']:.2f} ×",
            f"{1e3 * row['decode_seconds']:.1f}",
            f"{1e3 * row['linears_seconds']:.1f}",
            f"{row['linears_speedup']:.2f} ×",
        ]
        for row in rows
    ]
    return format_table(header, cells)


if __name__ == "__main__":
    main()
