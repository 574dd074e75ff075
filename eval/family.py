"""Is a pruned large model better than the small one of its family? Both at the same number of parameters, beside each other.

    python -m eval.family --model LARGE --small SMALL --data DATA --output OUT

LARGE is pruned by the default to the parameters of SMALL, embeddings and head counted, and all three are scored on the texts of
``eval.quality``: perplexity, and bits per byte, which compares where the vocabularies differ. Finished rows are read back, not
computed again. Writes rows.json and family.md.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from eval.ledger import Ledger
from eval.methods import DEFAULT
from eval.rows import make_parser, parse_quietly, read_workload, run_row, score_dense
from eval.zeroshot import TASKS, format_scores
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters
from struprune_plugin.reporting.tables import Table


def find_sparsity(large: str, small: str) -> float:
    """Return the share of the large model's decoder linears that must go for it to have the small one's parameters.

    :raises SystemExit: the small one is not smaller, or the linears hold less than must go
    """
    model, wanted = load_checkpoint(large, "auto")[0], count_parameters(load_checkpoint(small, "auto")[0])
    surplus, base = count_parameters(model) - wanted, count_prunable_parameters(model, mixtures=True)
    if not 0 < surplus < base:
        raise SystemExit(
            f"--small: must have fewer parameters than {large}, but more than its {count_parameters(model) - base:,} outside the "
            f"decoder's linears, got {wanted:,}. Choose another pair."
        )
    return surplus / base


def format_family(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line per model: parameters, shares removed, perplexity and bits per byte by text; then the answer."""
    small, pruned = rows["small"], rows["large, pruned"]
    texts, tasks = list(small["perplexity"]), list(small.get("zeroshot", ()))
    header = ["model", "parameters", "removed of the decoder's linears", "of the whole model"]
    header += [f"{text}, {what}" for text in texts for what in ("perplexity", "bits per byte")]
    header += [f"{task} {metric}" for task in tasks for metric in ("acc", "acc_norm")]
    table = []
    for name, row in rows.items():
        line = [name, f"{row['parameters']:,}", f"{row['removed']:.1%}", f"{row['removed_of_model']:.1%}"]
        for text in texts:
            line += [f"{row['perplexity'][text]:.2f}", f"{row['bits_per_byte'][text]:.4f}"]
        table.append([*line, *(cell for task in tasks for cell in format_scores(row["zeroshot"][task]))])
    better = [text for text in texts if pruned["bits_per_byte"][text] < small["bits_per_byte"][text]]
    answer = f"the pruned large model is better on {len(better)} of {len(texts)} texts{': ' if better else ''}{', '.join(better)}"
    return f"{Table(header, table)}\n\n{answer}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--small", required=True, help="the small model of the family, a folder or a hub name")
    parser.add_argument("--zeroshot", action="store_true", help=f"accuracy, too, on items of {' and '.join(TASKS)}")
    args = parse_quietly(parser)

    large = replace(read_workload(args), bits=True)
    small, sparsity = replace(large, model=args.small), find_sparsity(large.model, args.small)
    makes = {  # the pruned one first: it tells at once what cannot be
        "large, pruned": (large.identify_row(DEFAULT, sparsity), partial(run_row, DEFAULT, sparsity, large)),
        "small": (small.identify_row(), partial(score_dense, small)),
        "large": (large.identify_row(), partial(score_dense, large)),
    }
    ledger = Ledger(args.output / "rows.json")
    try:
        rows = {name: ledger.finish(name, how, make) for name, (how, make) in makes.items()}
    except ValueError as error:
        raise SystemExit(str(error)) from None
    text = f"{Path(large.model).name} at the size of {Path(args.small).name}\n\n{format_family(rows)}"
    (args.output / "family.md").write_text(f"```\n{text}\n```\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
