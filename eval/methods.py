"""Perplexity of pruning methods side by side, and what they really remove.

    python -m eval.methods --model ../shared/testbed/opt-mini --data ../shared/testbed/data \
        --sparsity 0.1,0.2,0.3,0.5 --output results/methods-opt-mini

DATA holds books_calibration.jsonl and the texts to score. Finished rows are read back, not computed again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from transformers import AutoTokenizer

from struprune_plugin import StruPruneModifier, oneshot, read_manifest
from struprune_plugin.data import make_calibration_dataset, read_texts, tokenize_texts
from struprune_plugin.evaluation import load_checkpoint, measure_perplexity
from struprune_plugin.report import format_table, measure_weight_bytes

METHODS: dict[str, dict[str, Any]] = {
    "magnitude, head, deletion": {"importance": "magnitude", "attention_unit": "head", "restoration": "none"},
    "wanda, head, deletion": {"importance": "wanda", "attention_unit": "head", "restoration": "none"},
    "wanda, head, least squares": {"importance": "wanda", "attention_unit": "head", "target": "local"},
    "obs, head, local": {"importance": "obs", "attention_unit": "head", "target": "local"},
    "obs, head, residual": {"importance": "obs", "attention_unit": "head", "target": "residual"},
    "obs, vo, residual (default)": {"importance": "obs", "attention_unit": "vo", "target": "residual"},
}
_HEADS = {"attention_unit": "head"}
_LOCAL = {**_HEADS, "target": "local"}
_ADMM = {**_HEADS, "restoration": "admm"}
PAPER: dict[
    str, dict[str, Any]
] = {  # the rows of the paper's two perplexity tables, by its names; without FASP and SliceGPT
    "SNIP": {**_LOCAL, "importance": "snip", "restoration": "none"},
    "SNIP (w/ correction)": {**_LOCAL, "importance": "snip"},
    "L0": {**_LOCAL, "importance": "l0", "restoration": "none"},
    "L0 (w/ correction)": {**_LOCAL, "importance": "l0"},
    "Magnitude": {**_LOCAL, "importance": "magnitude", "restoration": "none"},
    "Magnitude (w/ correction)": {**_LOCAL, "importance": "magnitude"},
    "Closed form (Algorithm 1)": {**_ADMM, "importance": "closed_form", "allocation": "global_threshold"},
    "Asymptotics (Algorithm 2)": {**_ADMM, "importance": "wanda", "allocation": "softmax"},
    "Asymptotics (Algorithm 3)": {**_ADMM, "importance": "wanda", "allocation": "softmax_inverse"},
    "StruPrune, default": {},
}
TEXTS = {"WikiText-2": "wikitext2_test.jsonl", "books": "books_test.jsonl"}


def score_folder(folder: str, args: argparse.Namespace) -> dict[str, float]:
    """Return perplexity on every text, its first ``max_tokens`` tokens in fixed windows."""
    model, tokenizer = load_checkpoint(folder)
    return {
        name: measure_perplexity(
            model, tokenize_texts(tokenizer, read_texts(args.data / file), args.max_tokens), args.window, args.stride
        )
        for name, file in TEXTS.items()
    }


def prune_and_score(args: argparse.Namespace, fields: dict[str, Any], sparsity: float) -> dict[str, Any]:
    """Prune with one method into a scratch folder, and return perplexities, what is gone, and seconds."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dataset = make_calibration_dataset(args.data / "books_calibration.jsonl", tokenizer, args.num_samples, args.window)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        start = time.perf_counter()
        oneshot(
            model=args.model,
            recipe=StruPruneModifier(sparsity=sparsity, **fields),
            output_dir=out,
            dataset=dataset,
            batch_size=8,
            num_calibration_samples=args.num_samples,
            shuffle_calibration_samples=False,
        )
        seconds = time.perf_counter() - start
        budget = read_manifest(out)["budget"]
        return {
            "perplexity": score_folder(str(out), args),
            "removed": budget["met_sparsity"],
            "removed_parameters": budget["removed_parameters"],
            "bytes": measure_weight_bytes(out),
            "seconds": seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sparsity", default="0.1,0.2,0.3,0.5")
    parser.add_argument("--rows", choices=["ours", "paper"], default="ours", help="our ladder, or the paper's rows")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--stride", type=int, help="the window itself if unset")
    parser.add_argument("--max-tokens", type=int, default=60_000)
    parser.add_argument("--output", type=Path, required=True, help="folder for methods.json and methods.md")
    args = parser.parse_args()
    logger.remove()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)

    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "methods.json"
    settings = {
        "model": Path(args.model).name,
        "rows": args.rows,
        "num_samples": args.num_samples,
        "window": args.window,
        "stride": args.stride or args.window,
        "max_tokens": args.max_tokens,
        "version": version("struprune-plugin"),
    }
    stored = json.loads(file.read_text()) if file.exists() else {"settings": settings, "rows": {}}
    if stored["settings"] != settings:
        raise SystemExit(f"{file}: made with {stored['settings']}, not {settings}. Choose another --output.")
    rows: dict[str, Any] = stored["rows"]

    def finish(key: str, row: dict[str, Any]) -> None:
        rows[key] = row
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(stored, indent=1))
        partial.replace(file)

    if "dense" not in rows:
        perplexity = score_folder(args.model, args)
        finish(
            "dense",
            {"perplexity": perplexity, "removed": 0.0, "bytes": measure_weight_bytes(args.model), "seconds": 0.0},
        )
    for sparsity in map(float, args.sparsity.split(",")):
        for method, fields in (PAPER if args.rows == "paper" else METHODS).items():
            key = f"{sparsity:g} | {method}"
            if key not in rows:
                finish(key, prune_and_score(args, fields, sparsity))
                print(key, {k: round(v, 2) for k, v in rows[key]["perplexity"].items()}, flush=True)

    header = ["sparsity | method", *TEXTS, "removed", "weights on disk", "seconds"]
    table = [
        [
            key,
            *(f"{row['perplexity'][name]:.2f}" for name in TEXTS),
            f"{row['removed']:.2%}",
            f"{row['bytes']:,} ({row['bytes'] / rows['dense']['bytes']:.1%})",
            f"{row['seconds']:.1f}",
        ]
        for key, row in rows.items()
    ]
    text = format_table(header, table)
    (args.output / "methods.md").write_text(f"# {Path(args.model).name}\n\n```\n{text}\n```\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
