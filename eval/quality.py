"""What every part of the method brings, and the peers, at equal parameters removed.

    python -m eval.quality --model MODEL --data DATA \
        --sparsity 0.1,0.2,0.3,0.5 --output results/quality-opt-mini

``--study data`` instead: the default against the number of calibration tokens, and calibrated on one corpus, scored on all.
Finished rows are read back, not computed again. Writes quality.json, <study>.md and <study>.png. With one thread on a CPU, the
seconds are the process' own.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from eval.ledger import Ledger
from eval.measure import count_own_seconds
from eval.methods import DISTILL, FASP, MORE_PEERS, SLICEGPT, spell
from eval.rows import Row, Workload, add_workload_arguments, list_refusals, read_workload, run_row, run_rows
from eval.zeroshot import METRICS, TASKS, format_scores
from struprune_plugin.reporting.tables import format_table

_VO = {"attention_unit": "value_channels"}
_CURVES = _VO | {"allocation": "error_curve"}
_FISHER = _CURVES | {"sensitivity": "fisher"}
_ROTATED = _FISHER | {"rotate_values": True}
_DAMPED = _ROTATED | {"dampening_frac": "auto"}
_HALF = _DAMPED | {"reconstruct": "half_residual"}
_WHOLE_LAYERS = {"rule": "whole_layers", "samples": 16, "trial_samples": 4}
_TUNED = _HALF | {"ffn_tuning": {"epochs": 6}}
BEST = "+ half of inherited errors (default)"  # the best rung without tuning and recovery
LADDER: dict[str, Row] = {  # each rung adds one thing to the one before
    "wanda, heads, least squares": Row(spell(importance="wanda", reconstruct="local")),
    "obs, vo, residual, uniform": Row(spell(**_VO)),
    "+ error curves": Row(spell(**_CURVES)),
    "+ Fisher sensitivity": Row(spell(**_FISHER)),
    "+ rotated values": Row(spell(**_ROTATED)),
    "+ dampening by held-out text": Row(spell(**_DAMPED)),
    BEST: Row(spell(**_HALF)),
    "+ FFN tuning": Row(spell(**_TUNED)),
    "+ LoRA with distillation": Row(spell(**_TUNED), DISTILL),
}
ASIDE: dict[str, Row] = {  # measured beside the ladder
    "uniform, rotated values": Row(spell(**_VO, rotate_values=True)),
    "default with ADMM": Row(spell(**_HALF, weight_update="admm")),
    "default with whole sublayers": Row(spell(**_HALF, sublayers="both")),
    "whole layers": Row(spell(**_HALF | {"allocation": _WHOLE_LAYERS}, sublayers="both")),
}
EFFORTS: dict[str, Row] = {  # and what uniform allocation leaves of the default
    "default with uniform allocation": Row({"allocation": "uniform"}),
    "effort: fast": Row({"effort": "fast"}),
    "default": Row(),
    "effort: best": Row({"effort": "best"}, text=4),
}
PARTS: dict[str, Row] = {  # the default without one of its parts
    "default": Row(),
    "uniform allocation": Row({"allocation": "uniform"}),
    "no trials": Row({"allocation": {"rule": "error_curve", "trial_samples": 0}}),
    "no rotation": Row({"rotate_values": False}),
    "no sensitivity": Row({"sensitivity": "none"}),
    "local targets": Row({"reconstruct": "local"}),
    "residual targets": Row({"reconstruct": "residual"}),
    "dampening 0.01": Row({"dampening_frac": 0.01}),
}
PEERS: dict[str, Row] = {"FASP": FASP, "SliceGPT": SLICEGPT, **MORE_PEERS}
ROWS: dict[str, dict[str, Row]] = {
    "ladder": {**PEERS, **LADDER},
    "peers": PEERS,
    "aside": {"FASP": FASP, **ASIDE},
    "efforts": {"FASP": FASP, **EFFORTS},
    "parts": PARTS,
    "all": {**PEERS, **LADDER, **ASIDE},
}
STUDY_TOKENS = (16_384, 32_768, 65_536, 131_072, 262_144)


def find_delta(row: Mapping[str, Any], dense: Mapping[str, Any], text: str) -> float:
    """Return the perplexity of a row above that of the dense model."""
    return float(row["perplexity"][text] - dense["perplexity"][text])


def interpolate_delta(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, Any], text: str, removed: float) -> float:
    """Return a method's delta at any fraction removed, linear between its rows and the dense model; NaN beyond them."""
    points = sorted([(0.0, 0.0), *((row["removed"], find_delta(row, dense, text)) for row in rows)])
    for (low, first), (high, second) in pairwise(points):
        if low <= removed <= high and high > low:
            return first + (second - first) * (removed - low) / (high - low)
    return math.nan


def format_quality(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line a row: perplexity, delta over dense and its ratio to FASP's a text; removed; seconds and their ratio.

    A column for peers: the least of (their delta / the default's at the same parameters removed) over the texts; above
    1 the default is ahead on all. Then accuracies, where they were measured. Below, why rows were refused.
    """
    done = _drop_refused(rows)
    dense = rows["dense"]
    ours = [row for key, row in done.items() if key.endswith(f" | {BEST}")]
    header = ["sparsity | method"]
    for text in dense["perplexity"]:
        header += [text, "delta", "of FASP's"]
    header += ["removed", "seconds", "of FASP's", "of the default's at its size"]
    tasks = list(dense.get("zeroshot", ()))
    names = [f"{task} {metric}" for task in tasks for metric in METRICS]
    names = [*(f"KL, {text}" for text in dense.get("divergence", ())), *names]
    table = []
    for key, row in rows.items():
        if "refused" in row:
            table.append([key, "refused", *[""] * (len(header) + len(names) - 2)])
            continue
        line = [key, *_list_figures(row, done.get(f"{key.split(' | ')[0]} | FASP"), dense)]
        line.append(_compare(key, row, dense, ours))
        line += [f"{value:.4f}" for value in row.get("divergence", {}).values()]
        table.append([*line, *(cell for task in tasks for cell in format_scores(row["zeroshot"][task]))])
    return "\n\n".join([format_table([*header, *names], table), *list_refusals(rows)])


def _drop_refused(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {key: row for key, row in rows.items() if "refused" not in row}


def _list_figures(row: Mapping[str, Any], fasp: Mapping[str, Any] | None, dense: Mapping[str, Any]) -> list[str]:
    """Return a row's cells up to its seconds, beside FASP's at the same sparsity where there are any."""
    cells = []
    for text in dense["perplexity"]:
        delta = find_delta(row, dense, text)
        ratio = f"{delta / find_delta(fasp, dense, text):.2f}" if fasp else ""
        cells += [f"{row['perplexity'][text]:.2f}", f"{delta:.2f}", ratio]
    seconds = row.get("method_seconds") or row["seconds"]
    return [*cells, f"{row['removed']:.2%}", f"{seconds:.1f}", f"{seconds / fasp['seconds']:.1f}" if fasp else ""]


def _compare(key: str, row: Mapping[str, Any], dense: Mapping[str, Any], ours: Sequence[Mapping[str, Any]]) -> str:
    if key.split(" | ")[-1] not in PEERS or not ours:
        return ""
    ratios = []
    for text in dense["perplexity"]:
        best = interpolate_delta(ours, dense, text, row["removed"])
        ratios.append(find_delta(row, dense, text) / best if best else math.nan)
    return "" if any(map(math.isnan, ratios)) else f"{min(ratios):.2f}"


def plot_quality(rows: Mapping[str, Mapping[str, Any]], title: str, file: Path) -> None:
    """Draw perplexity against the parameters left, one line a method, one panel a text."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {file.name}: matplotlib is not here (pip install -e '.[plots]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = _drop_refused(rows)
    dense = rows["dense"]
    methods = list(dict.fromkeys(key.split(" | ")[-1] for key in rows if key != "dense"))
    figure, panels = pyplot.subplots(
        1, len(dense["perplexity"]), figsize=(12, 4.5), layout="constrained", squeeze=False
    )
    for axes, text in zip(panels[0], dense["perplexity"], strict=True):
        for method in methods:
            mine = [row for key, row in rows.items() if key.endswith(f" | {method}")]
            points = sorted((1 - row["removed"], row["perplexity"][text]) for row in [dense, *mine])
            axes.plot(*zip(*points, strict=True), "--" if method in PEERS else "-", marker=".", label=method)
        axes.set(xlabel="decoder parameters left", ylabel=f"perplexity, {text}", yscale="log")
    panels[0][0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def run_data_study(
    ledger: Ledger, work: Workload, data: Path, sparsities: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """Run the default row on more and more calibration text, and calibrated on each corpus."""
    corpora = {"books": data / "books_calibration.jsonl", "WikiText-2": data / "wikitext2_valid.jsonl"}
    rows = run_rows(ledger, work, {}, [])
    row = LADDER[BEST]
    for sparsity in sparsities:
        for corpus, file in corpora.items():
            sizes = [n // work.window for n in STUDY_TOKENS] if corpus == "books" else [work.num_samples]
            for samples in sizes:
                key = f"{sparsity:g} | {corpus}, {samples * work.window:,} tokens"
                chosen = replace(work, calibration=str(file), num_samples=samples)
                how = chosen.identify_row(row, sparsity)
                rows[key] = ledger.finish(key, how, lambda s=sparsity, w=chosen: run_row(row, s, w))  # type: ignore[misc]
    return rows


def choose_rows(rows: Mapping[str, Row], names: str | None) -> dict[str, Row]:
    """Return the rows of some names, of all where None.

    :raises SystemExit: a name that none has
    """
    chosen = list(rows) if names is None else [name.strip() for name in names.split(",")]
    unknown = [name for name in chosen if name not in rows]
    if unknown:
        raise SystemExit(f"--only: must name rows of {', '.join(rows)}, got {', '.join(unknown)}. Correct the names.")
    return {name: rows[name] for name in chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.add_argument("--sparsity", default="0.1,0.2,0.3,0.5")
    parser.add_argument("--rows", choices=ROWS, default="ladder")
    parser.add_argument(
        "--zeroshot", action="store_true", help=f"accuracy, too, on local items of {' and '.join(TASKS)} (lm-eval)"
    )
    parser.add_argument("--only", help="some of these rows, comma-separated; their tables hold them alone")
    parser.add_argument("--study", choices=["methods", "data"], default="methods")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    args = parser.parse_args()
    logger.remove()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)

    work = read_workload(args)
    ledger = Ledger(args.output / "quality.json", work.describe())
    sparsities = [float(part) for part in args.sparsity.split(",")]
    if args.study == "data" and args.data is None:
        raise SystemExit("--study data: needs --data, a folder with texts of two corpora.")
    with count_own_seconds():
        if args.study == "data":
            rows, name = run_data_study(ledger, work, args.data, sparsities), "data"
        else:
            rows, name = run_rows(ledger, work, choose_rows(ROWS[args.rows], args.only), sparsities), args.rows
    text, title = format_quality(rows), Path(args.model).name
    (args.output / f"{name}.md").write_text(f"# {title}\n\n```\n{text}\n```\n", encoding="utf-8")
    plot_quality(rows, title, args.output / f"{name}.png")
    print(text)


if __name__ == "__main__":
    main()
