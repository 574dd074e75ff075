"""Reproduce the paper's tables and its figure, with its own numbers beside ours.

    python -m eval.paper_tables --model facebook/opt-125m --output results/paper             # C4 and WikiText-2 from the hub
    python -m eval.paper_tables --model MODEL --data DATA --output results/opt-lab

`params` and `figure` need no model; `memory` makes random weights of the published shapes. Every table is written as
<table>.md and <table>.json (params: ratios too). Rows that prune are kept in rows.json, which `python -m eval.quality`
shares; what is finished is read back, not computed again.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eval.ledger import Ledger
from eval.memory import describe_measurement, has_room, measure_pruning_memory
from eval.methods import ALGORITHMS, DEFAULT, OTHERS, OURS, PAPERS_PEERS
from eval.paper_sizes import (
    MEMORY_MODELS,
    OPT_SIZES,
    PAPER_MEMORY,
    count_all,
    count_sizes,
    draw_figure,
    estimate_growth,
    make_opt_config,
)
from eval.rows import Row, list_refusals, make_parser, parse_quietly, read_workload, run_rows
from struprune_plugin.reporting import tables

SPARSITIES = (0.1, 0.2, 0.3)  # of the paper's tables
# method -> perplexity of OPT-125M on (WikiText-2, C4) at those sparsities
PAPER_PERPLEXITY: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "sliceGPT": ((29, 34, 45), (27, 34, 40)),
    "FASP": ((28, 30, 34), (26, 28, 37)),
    "SNIP": ((46, 126, 439), (39, 88, 264)),
    "SNIP (w/ correction)": ((42, 112, 386), (36, 80, 231)),
    "L0": ((101, 315, 677), (94, 297, 634)),
    "L0 (w/ correction)": ((93, 299, 633), (88, 281, 605)),
    "Magnitude": ((49, 133, 2084), (45, 101, 2197)),
    "Magnitude (w/ correction)": ((44, 125, 1997), (41, 93, 2007)),
    "Closed form (Algorithm 1)": ((31, 51, 83), (30, 45, 87)),
    "Asymptotics (Algorithm 2)": ((30, 46, 73), (28, 39, 57)),
    "Asymptotics (Algorithm 3)": ((29, 59, 93), (27, 55, 98)),
}
# model -> (total in billions, layers, parameters a layer in millions, megabytes a layer in float16)
PAPER_LAYERS: dict[str, tuple[float, int, float, float]] = {
    "OPT-125M": (0.125, 12, 10.4, 20.8),
    "OPT-350M": (0.350, 24, 14.6, 29.2),
    "OPT-1.3B": (1.3, 24, 54.2, 108.4),
    "OPT-2.7B": (2.7, 32, 84.4, 168.8),
    "OPT-6.7B": (6.7, 32, 209.4, 418.8),
    "OPT-13B": (13, 40, 325.0, 650.0),
    "OPT-30B": (30, 48, 625.0, 1250.0),
    "OPT-66B": (66, 64, 1031.2, 2062.4),
}
MAIN: dict[str, Row] = {**PAPERS_PEERS, **ALGORITHMS, OURS: DEFAULT}
METHODS: dict[str, Row] = {**OTHERS, **ALGORITHMS, OURS: DEFAULT}


@dataclass(frozen=True)
class Table:
    """What a table is written from.

    :param name: of its files
    :param notes: sentences under it
    :param data: for the JSON file, beside header and rows
    """

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    data: Any = None

    def write(self, folder: Path) -> None:
        """Write both files, and print the first."""
        notes = "\n".join(f"- {note}" for note in self.notes)
        text = f"# {self.title}\n\n```\n{tables.Table(self.header, self.rows)}\n```\n\n{notes}\n"
        (folder / f"{self.name}.md").write_text(text, encoding="utf-8")
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        print(text)


def make_perplexity_table(name: str, title: str, rows: Mapping[str, Row], args: argparse.Namespace) -> Table:
    """Prune and score every row at every sparsity; the paper's figures stand where it has one for that sparsity."""
    work = read_workload(args)
    sparsities = [float(part) for part in args.sparsity.split(",")]
    finished = run_rows(Ledger(args.output / "rows.json"), work, rows, sparsities)

    def join(values: Sequence[str]) -> str:
        return " / ".join(values)

    def tell_paper(method: str, text: int) -> str:
        told = dict(zip(SPARSITIES, PAPER_PERPLEXITY[method][text], strict=True)) if method in PAPER_PERPLEXITY else {}
        return join([str(told.get(sparsity, "–")) for sparsity in sparsities])

    def tell(method: str, show: Callable[[dict[str, Any]], str]) -> str:
        rows = [finished[f"{sparsity:g} | {method}"] for sparsity in sparsities]
        return join(["refused" if "refused" in row else show(row) for row in rows])

    def show_text(text: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row['perplexity'][text]:.2f}"

    model, dense = Path(work.model).name, finished["dense"]["perplexity"]
    blank = join(["–" for _ in sparsities])
    lines = [["dense", blank, blank, *(f"{dense[text]:.2f}" for text in work.texts), "", ""]]
    for method in rows:
        shows = [*map(show_text, work.texts), lambda row: f"{row['removed']:.1%}", lambda row: f"{row['seconds']:.0f}"]
        lines.append([method, *(tell_paper(method, text) for text in (0, 1)), *(tell(method, show) for show in shows)])
    at = join([f"{sparsity:g}" for sparsity in sparsities])
    header = ["method", "paper: WikiText-2", "paper: C4", *(f"{model}: {text}" for text in work.texts)]
    header += ["removed", "seconds"]
    notes = [
        f"Every cell: sparsity {at}. The paper's figures are for OPT-125M calibrated on C4 and are its own, not measured here.",
        f"{model}: calibrated on {work.num_samples} windows of {work.window} tokens of {Path(work.calibration).name}, scored in "
        f"windows of {work.window} tokens.",
        "removed: fraction of the parameters of the decoder layers' linears that is gone; for sliceGPT the asked number is the "
        "fraction of embedding channels to slice, and what its shortcuts add is counted against it.",
        *list_refusals(finished),
        *dict.fromkeys(f"{key.split(' | ')[1]}: {row['note']}." for key, row in finished.items() if row.get("note")),
    ]
    return Table(name, title, header, lines, notes, finished)


def make_params_table() -> Table:
    """Count every OPT: a layer's parameters and bytes, as counted and as the paper prints them."""
    sizes = [count_sizes(name, make_opt_config(name)) for name in OPT_SIZES]
    rows = []
    for size in sizes:
        total, layers, per_layer, megabytes = PAPER_LAYERS[size.name]
        pairs = [(f"{total:g}B", f"{size.total:,}"), (str(layers), str(size.num_layers))]
        averages = (f"{per_layer}M", f"{size.total / size.num_layers / 1e6:.1f}M", f"{size.layer:,}")
        rows.append([size.name, *(part for pair in pairs for part in pair), *averages])
        rows[-1] += [str(megabytes), f"{2 * size.layer / 1e6:.1f}"]
    header = [
        "model",
        "paper: total",
        "total",
        "paper: layers",
        "layers",
        "paper: a layer",
        "total over layers",
        "a layer",
    ]
    header += ["paper: MB a layer", "MB a layer"]
    notes = [
        "Counted on the published configurations, biases and norms too; bytes in float16.",
        "The paper's parameters a layer are the nominal total divided by the layers, so that a share of the embeddings is in "
        "them (compare 'total over layers'); a decoder layer itself is smaller.",
    ]
    return Table("params", "Parameters of OPT models", header, rows, notes, [asdict(size) for size in sizes])


def make_ratio_table() -> Table:
    """Count FFN and attention of every OPT, as counted and as the paper prints them."""
    sizes = [count_sizes(name, make_opt_config(name)) for name in OPT_SIZES]
    rows = []
    for size in sizes:
        printed = [f"{factor * size.hidden_size**2:,}" for factor in (8, 4)]
        ratio = f"{size.ffn / size.attention:.4f}"
        rows.append([size.name, printed[0], f"{size.ffn:,}", printed[1], f"{size.attention:,}", "2.00", ratio])
    header = ["model", "paper: FFN 8 d²", "FFN", "paper: MHA 4 d²", "MHA", "paper: ratio", "ratio"]
    note = "The paper leaves out biases, which add 5 d to the FFN and 4 d to attention."
    return Table("ratios", "FFN and attention of OPT models", header, rows, [note], [asdict(size) for size in sizes])


def make_memory_table(args: argparse.Namespace) -> Table:
    """Set the paper's gigabytes beside one layer's bytes and the measured peak of pruning a model of that width."""
    ledger = Ledger(args.output / "memory-rows.json")
    finished: dict[str, dict[str, Any]] = {}
    for name in args.memory_models.split(","):
        how = describe_measurement(name, DEFAULT.fields)
        if ledger.find(name, how) or has_room(name):
            finished[name] = ledger.finish(name, how, partial(measure_pruning_memory, name, DEFAULT.fields))
    rows = [[f"paper: {method}", *map(str, figures)] for method, figures in PAPER_MEMORY.items()]
    layers = [2 * count_sizes(name, make_opt_config(name)).layer / 1e9 for name in MEMORY_MODELS]
    rows.append(["one decoder layer's weights, 16 bit, counted", *(f"{layer:.3f}" for layer in layers)])

    def tell(name: str) -> str:
        return f"{finished[name]['peak_bytes'] / 1e9:.3f}" if name in finished else "not measured"

    rows.append(["StruPrune, default: peak while pruning, measured", *map(tell, MEMORY_MODELS)])
    notes = [
        "Gigabytes. The paper's figures for its own method equal the bytes of one layer's weights in float16 (its Table 1): they "
        "count weights alone, no activations, no Gram matrices, no solver (R14).",
        *dict.fromkeys(f"Measured as: {row['measure']}." for row in finished.values()),
        "Measured on random weights of the published width and vocabulary with two decoder layers, in bfloat16, pruned to 20% "
        "with one sequence of 2048 tokens at a time: "
        + ", ".join(f"{name} on {row['tokens']:,} tokens" for name, row in finished.items())
        + ".",
    ]
    return Table("memory", "Memory while pruning", ["", *MEMORY_MODELS], rows, notes, finished)


def make_figure_table(args: argparse.Namespace) -> Table:
    """Draw depth and width against the parameters of a model, and write the numbers."""
    sizes = count_all()
    draw_figure(sizes, args.output / "figure.png")
    families = {family: [size for size in sizes if size.name.startswith(family)] for family in ("OPT", "LLaMA-2")}
    growth = {family: estimate_growth(members) for family, members in families.items()}
    rows = [[s.name, f"{s.total:,}", str(s.num_layers), f"{s.layer:,}", f"{s.total**0.5:,.0f}"] for s in sizes]
    notes = ["figure.png: depth and width against N, logarithmic; dotted, a square root."]
    notes += [
        f"{family}: layers grow as N^{g['depth']:.2f}, parameters a layer as N^{g['width']:.2f} (fit); the paper says that "
        "both grow as N^0.5."
        for family, g in growth.items()
    ]
    header = ["model", "parameters N", "layers", "parameters a layer", "square root of N"]
    data = {"sizes": [asdict(size) for size in sizes], "growth": growth}
    return Table("figure", "Depth and width against parameters", header, rows, notes, data)


TABLES: dict[str, Sequence[Callable[[argparse.Namespace], Table]]] = {
    "params": (lambda args: make_params_table(), lambda args: make_ratio_table()),
    "figure": (make_figure_table,),
    "main": (lambda args: make_perplexity_table("main", "Perplexity after pruning", MAIN, args),),
    "methods": (lambda args: make_perplexity_table("methods", "Other structured methods", METHODS, args),),
    "memory": (make_memory_table,),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--table", choices=TABLES, help="tables to make [default: all]")
    parser.add_argument("--sparsity", default=",".join(map(str, SPARSITIES)))
    parser.add_argument("--memory-models", default=",".join(MEMORY_MODELS), help="of the memory table, with commas")
    args = parse_quietly(parser)
    args.output.mkdir(parents=True, exist_ok=True)
    for name in [args.table] if args.table else TABLES:
        for make in TABLES[name]:
            make(args).write(args.output)


if __name__ == "__main__":
    main()
