"""Perplexity and bytes of a model dense, pruned, quantised, and pruned and quantised in one recipe.

    python -m eval.quantisation --model ../shared/testbed/opt-lab --data ../shared/testbed/data \
        --sparsity 0.2,0.3 --output results/quantisation-opt-lab

The recipes are the shipped ones; the quantised row leaves out their pruning stage, the pruned row their quantiser. The last
columns say what share of the two single increases of perplexity, added up, the combination shows: above 1.2 the two harm
each other. Finished rows are read back, not computed again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from loguru import logger
from transformers import AutoTokenizer

from eval.rows import Ledger, Workload, add_workload_arguments, read_workload, score_dense, score_model
from struprune_plugin import oneshot, read_manifest
from struprune_plugin.data import make_calibration_dataset
from struprune_plugin.evaluation import load_checkpoint
from struprune_plugin.export import MANIFEST_NAME
from struprune_plugin.report import format_table, measure_weight_bytes

RECIPES = Path(__file__).parents[1] / "recipes"
QUANTISERS = {"W8A8": "struprune_w8a8.yaml", "W4A16": "struprune_w4a16_gptq.yaml"}
ALLOWED = 1.2  # times the sum of the parts


def make_recipe(quantiser: str | None, sparsity: float) -> str:
    """Return the text of a shipped recipe at one sparsity, without its pruning stage at 0, without its quantiser at None."""
    content = yaml.safe_load((RECIPES / QUANTISERS[quantiser or "W8A8"]).read_text(encoding="utf-8"))
    content["pruning_stage"]["pruning_modifiers"]["StruPruneModifier"]["sparsity"] = sparsity
    for stage, unwanted in (("pruning_stage", sparsity == 0), ("quantisation_stage", quantiser is None)):
        if unwanted:
            del content[stage]
    return yaml.safe_dump(content, sort_keys=False)


def compress_and_score(work: Workload, quantiser: str | None, sparsity: float) -> dict[str, Any]:
    """Run one recipe into a scratch folder; return perplexities, what is gone, bytes and seconds."""
    if quantiser is None and sparsity == 0:
        return score_dense(work)
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    dataset = make_calibration_dataset(work.calibration, tokenizer, work.num_samples, work.window)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        start = time.perf_counter()
        oneshot(
            model=work.model,
            recipe=make_recipe(quantiser, sparsity),
            output_dir=out,
            dataset=dataset,
            batch_size=8,
            num_calibration_samples=work.num_samples,
            shuffle_calibration_samples=False,
        )
        seconds = time.perf_counter() - start
        pruned = read_manifest(out)["budget"] if (out / MANIFEST_NAME).exists() else {"met_sparsity": 0.0}
        return {
            "perplexity": score_model(load_checkpoint(str(out))[0], tokenizer, work),
            "removed": pruned["met_sparsity"],
            "bytes": measure_weight_bytes(out),
            "seconds": seconds,
        }


def name_row(quantiser: str | None, sparsity: float) -> str:
    parts = [f"pruned {sparsity:.0%}"] * (sparsity > 0) + [quantiser] * (quantiser is not None)
    return " + ".join(map(str, parts)) or "dense"


def compare_with_parts(rows: Mapping[str, Any], quantiser: str, sparsity: float, text: str) -> float:
    """Return the combination's increase of perplexity over dense, as a share of the two single increases added up."""
    dense = rows["dense"]["perplexity"][text]
    both, *parts = (
        rows[name_row(q, s)]["perplexity"][text] - dense
        for q, s in ((quantiser, sparsity), (quantiser, 0.0), (None, sparsity))
    )
    return both / sum(parts) if sum(parts) > 0 else float("nan")


def make_table(rows: Mapping[str, Any], sparsities: Sequence[float]) -> str:
    texts = list(rows["dense"]["perplexity"])
    header = ["", *texts, "removed", "weights on disk", "seconds", *(f"of the sum, {name}" for name in texts)]
    combined = {name_row(q, s): (q, s) for q in QUANTISERS for s in sparsities}
    table = []
    for name, row in rows.items():
        shares = ["", ""]
        if name in combined:
            found = [compare_with_parts(rows, *combined[name], text) for text in texts]
            shares = [f"{share:.2f}{'' if share <= ALLOWED else ' (!)'}" for share in found]
        table.append(
            [
                name,
                *(f"{row['perplexity'][text]:.2f}" for text in texts),
                f"{row['removed']:.2%}",
                f"{row['bytes']:,} ({row['bytes'] / rows['dense']['bytes']:.1%})",
                f"{row['seconds']:.1f}",
                *shares,
            ]
        )
    return format_table(header, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.add_argument("--sparsity", default="0.2,0.3")
    parser.add_argument("--output", type=Path, required=True, help="folder for quantisation.json and quantisation.md")
    args = parser.parse_args()
    logger.remove()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)

    work = read_workload(args)
    ledger = Ledger(args.output / "quantisation.json", work.describe())
    sparsities = [float(part) for part in args.sparsity.split(",")]
    rows = {}
    for sparsity in (0.0, *sparsities):
        for quantiser in (None, *QUANTISERS):
            name = name_row(quantiser, sparsity)
            how = {} if name == "dense" else {"recipe": make_recipe(quantiser, sparsity)}
            rows[name] = ledger.finish(name, how, lambda q=quantiser, s=sparsity: compress_and_score(work, q, s))  # type: ignore[misc]
    text = make_table(rows, sparsities)
    (args.output / "quantisation.md").write_text(f"# {Path(work.model).name}\n\n```\n{text}\n```\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
