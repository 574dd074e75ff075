"""Prune with other batch sizes, threads and dtypes, and count the kept units that differ.

    python -m eval.determinism --model MODEL --num-samples 32

Every run is compared with that of the first batch size and one thread in its dtype. The last digits of weights may differ, because
sums have other orders; kept units must not. The exit status is 1 if a kept unit differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from struprune_plugin import StruPruneModifier, oneshot, read_manifest
from struprune_plugin.evaluation.text import DEMO_CALIBRATION, DEMO_MODEL, load_tokenizer, make_calibration_dataset
from struprune_plugin.reporting.tables import format_table

Kept = dict[str, frozenset[int]]  # by module


def find_kept(model: str, dataset: Dataset, fields: dict[str, Any], dtype: str, threads: int, batch_size: int) -> Kept:
    """Prune a model and return the units that it keeps."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        oneshot(
            model=model,
            recipe=StruPruneModifier(**fields),
            dataset=dataset,
            output_dir=Path(folder) / "out",
            num_calibration_samples=len(dataset),
            batch_size=batch_size,
            shuffle_calibration_samples=False,
            precision=dtype,
        )
        groups = read_manifest(Path(folder) / "out").groups
    return {group.name: frozenset(group.keep) for group in groups}


def count_others(found: Kept, first: Kept) -> int:
    """Return how many units are kept in one run and not in the other."""
    return sum(len(found[name] ^ first[name]) for name in first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="model folder")
    parser.add_argument("--num-samples", type=int, default=32, metavar="N", help="calibration samples of 256 tokens")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--batch-sizes", default="1,2,4,8")
    args = parser.parse_args()
    threads, batches = ([int(part) for part in text.split(",")] for text in (args.threads, args.batch_sizes))
    dataset = make_calibration_dataset(DEMO_CALIBRATION, load_tokenizer(args.model), args.num_samples, 256)
    rows, different = [], 0
    for dtype in args.dtypes.split(","):
        first: Kept | None = None
        cells: dict[tuple[int, int], str] = {}
        for count, batch_size in itertools.product(threads, batches):
            found = find_kept(args.model, dataset, {"sparsity": args.sparsity}, dtype, count, batch_size)
            first = found if first is None else first
            others = count_others(found, first)
            different += others
            cells[count, batch_size] = "same" if not others else f"{others} others"
            kept = sum(map(len, first.values()))
            print(
                f"{dtype}, {count} threads, batches of {batch_size}: {cells[count, batch_size]} of {kept}", flush=True
            )
        rows += [[dtype, count, *(cells[count, size] for size in batches)] for count in threads]
    print(f"{args.model}, {args.num_samples} × 256 tokens, {args.sparsity:.0%}: kept units")
    print(format_table(["dtype", "threads", *(f"batch {size}" for size in batches)], rows))
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
