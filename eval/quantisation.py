"""Measure perplexity and bytes of a model: dense, pruned, quantised, and pruned and quantised in one recipe.

    python -m eval.quantisation --model MODEL --data DATA \
        --sparsity 0.2,0.3 --output results/quantisation-opt-lab

The recipes are the shipped ones; the quantised row leaves out their pruning stage, the pruned row their quantiser. Where the
quantiser's groups rounded the widths, one more row has the combination's kept units and no quantiser: the loss by rounding alone.
The last columns give the combination's increase of perplexity as a share of the sum of the two single increases: above 1.2 the two
harm each other. After the slash, the same with that row as the pruned one. Finished rows are read back.
"""

from __future__ import annotations

import argparse
import json
import shutil
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

from eval.ledger import EVAL, Ledger, describe_code, digest_text, identify_text, resolve_fields
from eval.rows import Workload, add_workload_arguments, read_workload, score_dense, score_model
from struprune_plugin import oneshot, read_manifest
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.evaluation.text import make_calibration_dataset
from struprune_plugin.reporting.tables import format_table, measure_weight_bytes
from struprune_plugin.storage.manifest import MANIFEST_NAME

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


def make_replay(manifest: Path) -> str:
    """Return the text of a recipe that prunes as a manifest says, and does no more."""
    modifier = {"StruPruneModifier": {"replay": str(manifest)}}
    return yaml.safe_dump({"pruning_stage": {"pruning_modifiers": modifier}})


def describe_run(work: Workload, recipe: str, replayed: Path | None = None) -> dict[str, Any]:
    """Return everything that the result of :func:`compress_and_score` depends on.

    :param replayed: manifest that the recipe names: it counts, not its place
    """
    told = {
        **work.identify_row(),
        **work.identify_calibration(),
        "code": describe_code(EVAL / "rows.py", Path(__file__)),
    }
    if replayed is not None:
        return {**told, "replayed": identify_text(str(replayed))["digest"]}
    stages = yaml.safe_load(recipe)
    fields = stages.get("pruning_stage", {}).get("pruning_modifiers", {}).get("StruPruneModifier")
    return {**told, "recipe": stages, "fields": fields and resolve_fields(fields, fields["sparsity"])}


def compress_and_score(work: Workload, recipe: str, manifest: Path) -> dict[str, Any]:
    """Run one recipe into a scratch folder; return perplexities, what is gone, bytes and seconds.

    :param manifest: where to keep the manifest, if one is written
    """
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    dataset = make_calibration_dataset(work.calibration, tokenizer, work.num_samples, work.window)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        start = time.perf_counter()
        oneshot(
            model=work.model,
            recipe=recipe,
            output_dir=out,
            dataset=dataset,
            batch_size=8,
            num_calibration_samples=work.num_samples,
            shuffle_calibration_samples=False,
        )
        row: dict[str, Any] = {"removed": 0.0, "rounded": False, "seconds": time.perf_counter() - start}
        if (out / MANIFEST_NAME).exists():
            shutil.copyfile(out / MANIFEST_NAME, manifest)
            budget = read_manifest(out).budget
            row |= {"removed": budget.met_sparsity, "rounded": bool(budget.rounding)}
        perplexity = score_model(load_checkpoint(str(out))[0], tokenizer, work)
        return {"perplexity": perplexity, "bytes": measure_weight_bytes(out), **row}


def name_row(quantiser: str | None, sparsity: float) -> str:
    parts = [f"pruned {sparsity:.0%}"] * (sparsity > 0) + [quantiser] * (quantiser is not None)
    return " + ".join(map(str, parts)) or "dense"


def name_rounded(quantiser: str, sparsity: float) -> str:
    return f"{name_row(None, sparsity)}, widths for {quantiser}"


def compare_with_parts(rows: Mapping[str, Any], quantiser: str, sparsity: float, text: str) -> str:
    """Return the combination's increase of perplexity over dense, as a share of the two single increases added up.

    Where widths were rounded, a second time against the row pruned to the same widths.
    """
    dense = rows["dense"]["perplexity"][text]
    both, quantised = (rows[name_row(quantiser, s)]["perplexity"][text] - dense for s in (sparsity, 0.0))
    shares = []
    for name in (name_row(None, sparsity), name_rounded(quantiser, sparsity)):
        if name in rows:
            parts = quantised + rows[name]["perplexity"][text] - dense
            share = both / parts if parts > 0 else float("nan")
            shares.append(f"{share:.2f}{'' if share <= ALLOWED else ' (!)'}")
    return " / ".join(shares)


def make_table(rows: Mapping[str, Any], sparsities: Sequence[float]) -> str:
    texts = list(rows["dense"]["perplexity"])
    header = ["", *texts, "removed", "weights on disk", "seconds", *(f"of the sum, {name}" for name in texts)]
    combined = {name_row(q, s): (q, s) for q in QUANTISERS for s in sparsities}
    table = []
    for name, row in rows.items():
        shares = ["", ""]
        if name in combined:
            shares = [compare_with_parts(rows, *combined[name], text) for text in texts]
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
    args.output.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(args.output / "quantisation.json", work.describe())
    sparsities = [float(part) for part in args.sparsity.split(",")]
    rows = {"dense": ledger.finish("dense", work.identify_row(), lambda: score_dense(work))}

    def finish(name: str, recipe: str, replayed: Path | None = None) -> Path:
        how = describe_run(work, recipe, replayed)
        manifest = args.output / f"{name}-{digest_text(json.dumps(how))}.json"  # of this very row, for its replay
        rows[name] = ledger.finish(name, how, lambda: compress_and_score(work, recipe, manifest))
        if rows[name]["rounded"] and not manifest.exists():
            raise SystemExit(f"{manifest}: must be there, as its row in {ledger.file} is. Choose another --output.")
        return manifest

    for sparsity in (0.0, *sparsities):
        for quantiser in (None, *QUANTISERS):
            if quantiser is None and sparsity == 0:
                continue
            name = name_row(quantiser, sparsity)
            manifest = finish(name, make_recipe(quantiser, sparsity))
            if quantiser and rows[name]["rounded"]:
                finish(name_rounded(quantiser, sparsity), make_replay(manifest), manifest)
    text = make_table(rows, sparsities)
    (args.output / "quantisation.md").write_text(f"# {Path(work.model).name}\n\n```\n{text}\n```\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
