"""How the lead grows with the text that methods read: FASP's recipe and the default at several numbers of windows.

    python -m eval.growth --protocol long --model MODEL --data DATA --windows 8,16,32,64,128 --output results/growth

Finished rows are read back, not computed again. Writes rows.json, growth.md and growth.svg.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from eval.ledger import Ledger
from eval.measure import count_own_seconds
from eval.methods import DEFAULT, FASP, OURS
from eval.quality import draw_panels, find_delta
from eval.rows import make_parser, parse_quietly, read_workload, run_row, score_dense
from struprune_plugin.reporting.tables import Table

_METHODS = {"FASP": FASP, OURS: DEFAULT}
Rows = Mapping[str, Mapping[str, Any]]  # by method


def format_growth(dense: Mapping[str, Any], found: Mapping[int, Rows]) -> str:
    """Return one line per number of tokens: perplexities of both methods, and our increase over FASP's, by text."""
    texts = list(dense["perplexity"])
    table = []
    for tokens, rows in found.items():
        fasp, ours = (rows[name] for name in _METHODS)
        cells = [" / ".join(f"{row['perplexity'][text]:.2f}" for text in texts) for row in (fasp, ours)]
        share = " / ".join(f"{find_delta(ours, dense, text) / find_delta(fasp, dense, text):.2f}" for text in texts)
        seconds = f"{ours['method_seconds']:.0f}, {fasp['seconds']:.0f}"
        table.append([f"{tokens:,}", *cells, share, seconds])
    start = " / ".join(f"{value:.2f}" for value in dense["perplexity"].values())
    header = ["tokens", *_METHODS, "of FASP's increase", "seconds, ours and FASP's"]
    return f"{Table(header, table)}\n\n{' / '.join(texts)}; dense {start}; removed: {tell_shares(found)}"


def tell_shares(found: Mapping[int, Rows]) -> str:
    """Return what our rows remove, of the decoder's linears and of the whole model."""
    row = next(iter(found.values()))[OURS]
    return f"{row['removed']:.0%} of the decoder's linears, {row['removed_of_model']:.0%} of the whole model"


def plot_growth(dense: Mapping[str, Any], found: Mapping[int, Rows], title: str, file: Path) -> None:
    """Draw perplexity against tokens read, one panel per text, the dense model as a dotted line."""
    with draw_panels(dense["perplexity"], title, file) as panels:
        for text, axes in panels.items():
            for name, style in zip(_METHODS, ("s--", "o-"), strict=True):
                axes.plot(list(found), [rows[name]["perplexity"][text] for rows in found.values()], style, label=name)
            axes.axhline(dense["perplexity"][text], color="gray", linestyle=":", label="dense")
            axes.set(xscale="log", xlabel="calibration tokens")
            axes.set_xticks(list(found), [f"{tokens / 1000:.0f}k" for tokens in found])
            axes.minorticks_off()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--windows", default="8,16,32,64", help="numbers of calibration windows, comma-separated")
    args = parse_quietly(parser)

    work, ledger, found = read_workload(args), Ledger(args.output / "rows.json"), {}
    dense = ledger.finish("dense", work.identify_row(), lambda: score_dense(work))
    with count_own_seconds():
        for windows in map(int, args.windows.split(",")):
            own = replace(work, num_samples=windows)
            rows = found[windows * work.window] = dict[str, Any]()
            for name, row in _METHODS.items():
                how, make = own.identify_row(row, args.sparsity), partial(run_row, row, args.sparsity, own)
                rows[name] = ledger.finish(f"{windows} | {name}", how, make)
    text = format_growth(dense, found)
    (args.output / "growth.md").write_text(f"# {Path(args.model).name}\n\n```\n{text}\n```\n", encoding="utf-8")
    title = f"{Path(args.model).name}, removed: {tell_shares(found)}"
    plot_growth(dense, found, title, args.output / "growth.svg")
    print(text)


if __name__ == "__main__":
    main()
