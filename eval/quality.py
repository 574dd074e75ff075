"""Perplexity of pruning methods, ours and peers', and the share that they really remove.

    python -m eval.quality --model MODEL --data DATA --rows peers --sparsity 0.1,0.2,0.3,0.5 --output results/quality

DATA has mixed_calibration.jsonl and the texts to score; how-to's are the zero-shot items with their right answers, where these
are at hand. ``--rows`` names a set of :data:`eval.methods.SETS`: peers, parts (the default without one), efforts, families (what
the default must be ahead of on every kind of model), paper (both of the paper's perplexity tables), printed (its algorithms as
printed and as corrected), admm (against the least squares alone), recovery (LoRA), experts (of a mixture; the sparsity is then
that of the experts). MODEL may be several, comma-separated, each with a folder of its own in the output; as many sparsities as
models are then taken in pairs. Finished rows are read back, not computed again. Writes rows.json, ROWS.md and ROWS.svg.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from eval.ledger import Ledger, read_names
from eval.measure import count_own_seconds
from eval.methods import OURS, PEERS, SETS
from eval.rows import list_refusals, make_parser, parse_quietly, read_workload, run_rows
from eval.zeroshot import METRICS, TASKS, format_scores
from struprune_plugin.reporting.tables import Table


def find_delta(row: Mapping[str, Any], dense: Mapping[str, Any], text: str) -> float:
    """Return the perplexity of a row above that of the dense model."""
    return float(row["perplexity"][text] - dense["perplexity"][text])


def interpolate_delta(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, Any], text: str, removed: float) -> float:
    """Return a method's delta at any share of the whole model removed, linear between its rows and the dense model; NaN beyond."""
    points = sorted([(0.0, 0.0), *((row["removed_of_model"], find_delta(row, dense, text)) for row in rows)])
    for (low, first), (high, second) in pairwise(points):
        if low <= removed <= high + 1e-4 and high > low:  # of one sparsity, but rounded to other units
            return first + (second - first) * (removed - low) / (high - low)
    return math.nan


def format_quality(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line per row: by text perplexity and its increase over dense; removed of the decoder's linears (of the routed
    experts where those are pruned alone) and of the whole model; seconds.

    A column for peers: the least of (their increase / the default's at the same parameters removed) over the texts; above 1 the
    default is ahead on all. Then divergences and accuracies, where they were measured. Below, why rows were refused.
    """
    dense = rows["dense"]
    ours = [row for key, row in rows.items() if key.endswith(f" | {OURS}") and "refused" not in row]
    header = ["sparsity | method", *(name for text in dense["perplexity"] for name in (text, "increase"))]
    header += ["removed", "of the model", "seconds", "of the default's at its size"]
    tasks = list(dense.get("zeroshot", ()))
    header += [f"KL, {text}" for text in dense.get("divergence", ())]
    header += [f"{task} {metric}" for task in tasks for metric in METRICS]
    table = []
    for key, row in rows.items():
        if "refused" in row:
            table.append([key, "refused", *[""] * (len(header) - 2)])
            continue
        line = [key]
        for text, value in row["perplexity"].items():
            line += [f"{value:.2f}", f"{find_delta(row, dense, text):.2f}"]
        line += [f"{row['removed']:.2%}", f"{row['removed_of_model']:.2%}"]
        line.append(f"{row.get('method_seconds') or row['seconds']:.1f}")
        line.append(_compare(row, dense, ours) if key.split(" | ")[-1] in PEERS and ours else "")
        line += [f"{value:.4f}" for value in row.get("divergence", {}).values()]
        table.append([*line, *(cell for task in tasks for cell in format_scores(row["zeroshot"][task]))])
    return "\n\n".join([str(Table(header, table)), *list_refusals(rows)])


def describe_lead(rows: Mapping[str, Mapping[str, Any]], title: str) -> list[str]:
    """Return one sentence per sparsity and other row: on how many texts the default's perplexity is lower."""
    told, texts = [], list(rows["dense"]["perplexity"])
    for key, row in rows.items():
        sparsity, _, name = key.partition(" | ")
        ours = rows.get(f"{sparsity} | {OURS}", {})
        if name in ("", OURS) or "perplexity" not in ours or "perplexity" not in row:
            continue
        ahead = [text for text in texts if ours["perplexity"][text] < row["perplexity"][text]]
        told.append(f"{title}, {sparsity}: {OURS} is ahead of {name} on {len(ahead)} of {len(texts)} texts.")
    return told


def _compare(row: Mapping[str, Any], dense: Mapping[str, Any], ours: Sequence[Mapping[str, Any]]) -> str:
    ratios = []
    for text in dense["perplexity"]:
        best = interpolate_delta(ours, dense, text, row["removed_of_model"])
        ratios.append(find_delta(row, dense, text) / best if best else math.nan)
    return "" if any(map(math.isnan, ratios)) else f"{min(ratios):.2f}"


@contextmanager
def draw_panels(texts: Collection[str], title: str, file: Path) -> Iterator[dict[str, Any]]:
    """Yield one panel (matplotlib axes) by text, drawn to a file after the block; nothing is drawn where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {file.name}: matplotlib is not here (pip install -e '.[plots]')")
        yield {}
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (4 * len(texts), 4.0)
    figure, panels = pyplot.subplots(1, len(texts), figsize=size, layout="constrained", squeeze=False)
    yield dict(zip(texts, panels[0], strict=True))
    panels[0][0].set_ylabel("perplexity")
    panels[0][0].legend(fontsize="small")
    for text, axes in zip(texts, panels[0], strict=True):
        axes.set_title(text)
    figure.suptitle(title)
    figure.savefig(file)
    pyplot.close(figure)


def plot_quality(rows: Mapping[str, Mapping[str, Any]], title: str, file: Path) -> None:
    """Draw perplexity against the share of the whole model that is gone, one line per method, one panel per text; rows that grew
    the model are left out."""
    dense = rows["dense"]
    rows = {key: row for key, row in rows.items() if "refused" not in row and row["removed_of_model"] >= 0}
    methods = list(dict.fromkeys(key.split(" | ")[-1] for key in rows if key != "dense"))
    with draw_panels(dense["perplexity"], title, file) as panels:
        for text, axes in panels.items():
            for method in methods:
                mine = [row for key, row in rows.items() if key.endswith(f" | {method}")]
                points = sorted((100 * row["removed_of_model"], row["perplexity"][text]) for row in [dense, *mine])
                axes.plot(*zip(*points, strict=True), "--" if method in PEERS else "-", marker=".", label=method)
            axes.axhline(dense["perplexity"][text], color="gray", linestyle=":", label="dense")
            axes.set(xlabel="removed of the whole model, %", yscale="log")
            for axis in "major", "minor":
                axes.tick_params(axis="y", which=axis, labelsize="small")
                getattr(axes.yaxis, f"set_{axis}_formatter")("{x:g}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sparsity", default="0.1,0.2,0.3,0.5")
    parser.add_argument("--rows", choices=SETS, default="peers")
    parser.add_argument(
        "--zeroshot", action="store_true", help=f"accuracy, too, on local items of {' and '.join(TASKS)} (lm-eval)"
    )
    parser.add_argument("--only", help="some of these rows, comma-separated; their tables hold them alone")
    args = parse_quietly(parser)

    chosen, sparsities, models = SETS[args.rows], args.sparsity.split(","), (args.model or "").split(",")
    if args.only:
        chosen = {name: chosen[name] for name in read_names(parser, "--only", args.only, chosen)}
    by_model = len(models) > 1 and len(sparsities) == len(models)
    for place, model in enumerate(models):
        args.model, title = model or None, Path(model).name
        output = args.output / title if len(models) > 1 else args.output
        asked = sparsities[place : place + 1] if by_model else sparsities
        with count_own_seconds():
            rows = run_rows(Ledger(output / "rows.json"), read_workload(args), chosen, map(float, asked))
        text = "\n\n".join([format_quality(rows), *describe_lead(rows, title)])
        (output / f"{args.rows}.md").write_text(f"# {title}\n\n```\n{text}\n```\n", encoding="utf-8")
        plot_quality(rows, title, output / f"{args.rows}.svg")
        print(text)


if __name__ == "__main__":
    main()
