"""The same share of a whole model removed in three ways, in bits per byte: channels alone, rows then channels, COMPACT.

    python -m eval.whole_model --model MODEL --text books.jsonl --language en --score WikiText-2=DATA/wikitext2_test.jsonl \
        --share 0.3 --rows 65536

Ours: rows by the text and the word list, then units by the default. COMPACT: as many rows by the tokens' frequency in the text
alone, then FFN channels without repair. All read the same windows of the text. The table is printed after every way.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from eval.peers.compact import prune_by_plan
from eval.vocabulary import add_arguments, read_ranking, read_scored
from struprune_plugin import oneshot
from struprune_plugin.cli.options import read_changes
from struprune_plugin.evaluation.scoring import load_checkpoint, measure_bits
from struprune_plugin.evaluation.text import make_calibration_dataset
from struprune_plugin.model.layers import count_prunable_parameters
from struprune_plugin.reporting.tables import Table
from struprune_plugin.storage.checkpoint import load_tokenizer
from struprune_plugin.vocabulary.trim import write_trim
from struprune_plugin.vocabulary.trim_plan import TrimPlan, check_source, plan_trim

Bits = Mapping[str, float]


def show(scores: Mapping[str, tuple[Bits, float]]) -> Table:
    """Return one row per way: bits per byte by text, their increase over that of channels alone, seconds."""
    dense, channels = scores["dense"][0], scores["channels alone"][0]
    table = []
    for way, (bits, seconds) in scores.items():
        shares = " / ".join(f"{(bits[name] - dense[name]) / (channels[name] - dense[name]):.2f}" for name in dense)
        cells = [f"{value:.4f}" for value in bits.values()]
        table.append([way, *cells, shares if way != "dense" else "", f"{seconds:.0f}"])
    return Table(["", *dense, "of channels' increase", "seconds"], table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--share", type=float, default=0.3, help="of all parameters of the model, as stored")
    parser.add_argument("--rows", required=True, help="of the vocabulary that stay, or several: 65536,49152")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--set", action="append", help="a field of the recipe, e.g. effort=fast; may be repeated")
    parsed = parser.parse_args()
    texts, source = read_scored(parsed), check_source(parsed.model)
    scores: dict[str, tuple[Bits, float]] = {}
    with tempfile.TemporaryDirectory() as scratch, read_ranking(parsed) as ranking:
        sizes = [int(size) for size in parsed.rows.split(",")]
        plans = [plan_trim(source, replace(ranking, vocabulary=size)) for size in sizes]
        rare = plan_trim(source, replace(ranking, vocabulary=sizes[0], language=None))
        model, tokenizer = load_checkpoint(parsed.model, parsed.dtype)
        scores["dense"] = {n: measure_bits(model, tokenizer, text, parsed.window) for n, text in texts.items()}, 0.0
        print(scores, flush=True)
        prunable, whole = count_prunable_parameters(model), source.num_parameters
        del model

        def find_rest(plan: TrimPlan) -> float:
            """Return the share of the linears that goes besides a plan's rows."""
            return (parsed.share * whole - (whole - plan.estimate(plan.size).parameters)) / prunable

        ways = [("channels alone", parsed.model, parsed.share * whole / prunable)]
        for plan in plans:
            trimmed = Path(scratch) / str(plan.size)
            trimmed.mkdir()
            write_trim(plan, trimmed)
            ways.append((f"{plan.size:,} rows, then channels", str(trimmed), find_rest(plan)))
        for way, folder, sparsity in ways:
            start, out = time.perf_counter(), Path(scratch) / "out"
            smaller = load_tokenizer(folder)
            data = make_calibration_dataset(str(ranking.text), smaller, parsed.num_samples, parsed.window)
            changes = {**read_changes(parsed.set), "sparsity": sparsity}
            options = {"dataset": data, "num_calibration_samples": len(data), "shuffle_calibration_samples": False}
            oneshot(folder, "struprune", out, overwrite=True, changes=changes, batch_size=8, **options)
            seconds = time.perf_counter() - start
            model, smaller = load_checkpoint(str(out), parsed.dtype)
            scores[way] = {n: measure_bits(model, smaller, text, parsed.window) for n, text in texts.items()}, seconds
            print(f"{way}: {sparsity:.1%} of the linears", show(scores), sep="\n", flush=True)
            del model
        data = make_calibration_dataset(str(ranking.text), tokenizer, parsed.num_samples, parsed.window)
        model, windows = load_checkpoint(parsed.model, "auto")[0], torch.tensor(data["input_ids"])
        result = prune_by_plan(model, windows, parsed.share * whole, rare)
        bits = {n: measure_bits(model, result.tokenizer, text, parsed.window) for n, text in texts.items()}
        scores["COMPACT"] = bits, result.seconds
        print(show(scores))


if __name__ == "__main__":
    main()
