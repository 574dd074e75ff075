"""Measure the seconds of a pruning run by stage, against the floor.

python -m eval.profile --model MODEL --data books_calibration.jsonl --output results/profile
python -m eval.profile --model MODEL --data books_calibration.jsonl --fasp --output results/profile
python -m eval.profile --shape OPT-1.3B --layers 1 --samples 17 --length 512 --batch 1 --output results/profile-1.3b

The floor is the forward passes that the statistics need, plus the products that give the Gram matrices, each measured
in the same run: the dense path once, the pruned path twice (attention, then the FFN on pruned attention); on the allocation's
samples, one pass for the curves and two for the sensitivity (forth and back). The rest of llm-compressor's passes,
solves, saving and loading count as overhead. With one thread on a CPU the seconds are the process' own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTForCausalLM, PreTrainedModel

from eval.measure import count_own_seconds, time_side_by_side
from eval.paper_sizes import make_opt_config
from struprune_plugin import StruPruneModifier, oneshot
from struprune_plugin.evaluation.text import DEMO_MODEL, make_calibration_dataset
from struprune_plugin.linalg.second_moments import MomentSums
from struprune_plugin.model.units import find_groups
from struprune_plugin.model.units.group import UnitGroup
from struprune_plugin.reporting.tables import format_table
from struprune_plugin.storage.manifest import read_manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; or --shape")
    parser.add_argument("--data", help="JSON-lines file of calibration text, with --model")
    parser.add_argument(
        "--shape", default="OPT-1.3B", help="name of an OPT whose sizes to use, with random weights and tokens"
    )
    parser.add_argument("--layers", type=int, default=1, help="number of decoder layers of the shape")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--fasp", action="store_true", help="also measure FASP in the same run, with --model")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        model, dataset = _prepare(args)
        started = time.perf_counter()
        with count_own_seconds():
            floor = measure_floor(model, args)
            oneshot(
                model=model,
                dataset=dataset,
                recipe=StruPruneModifier(sparsity=args.sparsity),
                output_dir=Path(folder) / "out",
                num_calibration_samples=args.samples,
                batch_size=args.batch,
                shuffle_calibration_samples=False,
                **({} if args.model else {"tokenizer": AutoTokenizer.from_pretrained(DEMO_MODEL)}),
            )
            fasp = _time_fasp(args, dataset) if args.fasp and args.model else None
        total = time.perf_counter() - started
        stages = {stage.name: stage.seconds for stage in read_manifest(Path(folder) / "out").stages}
    table = make_table(stages, floor, total)
    if fasp is not None:
        table += f"\n\nFASP: {fasp:.2f} s; the whole pass is {stages['whole pass'] / fasp:.2f} × that."
    heading = (
        f"{args.model or f'{args.shape}, {args.layers} layer(s)'}, {args.samples} × {args.length} tokens, "
        f"{torch.get_num_threads()} thread(s), {model.device.type}"
    )
    print(heading, table, sep="\n")
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "profile.md").write_text(f"{heading}\n\n{table}\n", encoding="utf-8")
    record = {"stages": stages, "floor": floor, "total": total, "fasp": fasp, "what": heading}
    (args.output / "profile.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _prepare(args: argparse.Namespace) -> tuple[PreTrainedModel, Dataset]:
    """Return (model, calibration windows): float32, which ``eval.scale`` counts in, but beside FASP the checkpoint's dtype."""
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto" if args.fasp else "float32")
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        return model, make_calibration_dataset(args.data, tokenizer, args.samples, args.length)
    config = make_opt_config(args.shape, num_hidden_layers=args.layers, vocab_size=2048)
    torch.manual_seed(0)
    model = OPTForCausalLM(config).eval()
    model.config._name_or_path = str(DEMO_MODEL)
    ids = torch.randint(4, 2048, (args.samples, args.length))
    return model, Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})


def _time_fasp(args: argparse.Namespace, dataset: Dataset) -> float:
    """Return the seconds that FASP takes for the same model, data and sparsity, loading and saving left out."""
    from eval.peers.fasp import prune_fasp

    return prune_fasp(args.model, torch.tensor(dataset[:]["input_ids"]), args.sparsity, batch_size=args.batch).seconds


def measure_floor(model: PreTrainedModel, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of one forward pass of all layers and of all Gram products over one batch, times the batches.

    :param model: where it lies is measured
    :param args: batch, length and samples of the calibration data
    """
    like = {"device": model.device, "dtype": model.dtype}
    ids = torch.randint(4, model.config.vocab_size, (args.batch, args.length), device=model.device)
    groups = find_groups(model, "value_channels")
    sizes = {size for group in groups for size in _sizes(group, model)}
    inputs = {size: torch.randn(args.batch * args.length, size, **like) for size in sizes}
    runs = {"forward": partial(_run_layers, model, ids), "gram": partial(_make_grams, model, groups, inputs)}
    num_batches = args.samples / args.batch
    seconds = time_side_by_side(runs, 3)
    forward, gram = (seconds[name] * num_batches for name in ("forward", "gram"))
    widest = max(group.num_columns for group in groups)
    allocated = min(1.0, max(16, 4 * widest / args.length) / args.samples)
    return {
        "forward": forward,
        "gram": gram,
        "sensitivity": 2 * forward * min(1.0, 16 / args.samples),
        "allocate": (forward + gram) * allocated,
        "statistics": 2 * forward + gram,
        "whole pass": 3 * forward + gram + (forward + gram) * allocated + 2 * forward * min(1.0, 16 / args.samples),
    }


def _sizes(group: UnitGroup, model: PreTrainedModel) -> tuple[int, int]:
    return group.num_columns, model.config.hidden_size


@torch.no_grad()
def _run_layers(model: PreTrainedModel, ids: Tensor) -> None:
    """Run all decoder layers with the attention that they calibrate with, without the head."""
    model.get_decoder()(ids, use_cache=False)


def _make_grams(model: PreTrainedModel, groups: list[UnitGroup], inputs: dict[int, Tensor]) -> None:
    for group in groups:
        sums = MomentSums((group.num_columns, model.config.hidden_size), model.device, torch.float32)
        sums.add(inputs[group.num_columns], inputs[model.config.hidden_size])


def make_table(stages: dict[str, float], floor: dict[str, float], total: float) -> str:
    """Return measured seconds beside the floor, stage by stage, as a Markdown table."""
    named: dict[str, Any] = {name: seconds for name, seconds in stages.items() if name != "whole pass"}
    named["the host's two passes"] = stages["whole pass"] - sum(named.values())
    floors = {**floor, "the host's two passes": floor["forward"]}
    rows = [
        [
            name,
            f"{seconds:.2f}",
            f"{floors[name]:.2f}" if name in floors else "—",
            f"{seconds / floors[name]:.2f} ×" if name in floors else "",
        ]
        for name, seconds in {**named, "whole pass": stages["whole pass"]}.items()
    ]
    rows.append(["with loading, saving and the floor itself, wall", f"{total:.2f}", "", ""])
    return format_table(["stage", "seconds", "floor", "ratio"], rows)


if __name__ == "__main__":
    main()
