"""Channels of the experts of a mixture: ours and other criteria, at equal shares of the routed experts' parameters removed.

    python -m eval.experts --model moe --data DATA --share 0.25,0.5 --output results/experts

Attention, shared experts and dense FFNs stay whole. Each criterion alone (channels are sliced) and with our solve of
the same channels; REAP drops whole experts, as some rows of ours do. Finished rows are read back.
Writes experts.json and experts-<rows>.md.
With one thread on a CPU, the seconds are the process' own.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from eval.ledger import EVAL, Ledger, digest_sources, read_names
from eval.measure import count_own_seconds
from eval.peers.experts import ActivationL2, ActivationMean, Camera, ExpertImportance, Heapr
from eval.peers.reap import count_experts
from eval.rows import Row, Workload, add_workload_arguments, list_refusals, read_workload, run_row, score_dense
from struprune_plugin.evaluation.scoring import load_checkpoint
from struprune_plugin.model.layers import count_prunable_parameters
from struprune_plugin.reporting.tables import format_table

CALIBRATION, TOKENS = "mixed_calibration.jsonl", 12_000
ALONE: dict[str, Any] = {"attention_unit": "none", "prune_ffn": False}
SOLVED = " + our solve"
OURS = "ours"


CRITERIA: dict[str, tuple[str, ExpertImportance]] = {  # the function that slices by it alone, and our importance
    "mean activation": ("slice_by_mean_activation", ActivationMean()),
    "L2 of activation": ("slice_by_l2_activation", ActivationL2()),
    "CAMERA": ("slice_by_camera", Camera()),
    "HEAPr": ("slice_by_heapr", Heapr()),
}
PEERS: dict[str, Row] = {  # slice or drop only
    "REAP": Row(peer="eval.peers.reap:prune_reap"),
    **{name: Row(peer=f"eval.peers.experts:{function}") for name, (function, _) in CRITERIA.items()},
}
PEERS_SOLVED: dict[str, Row] = {
    f"REAP{SOLVED}": Row(peer="eval.peers.reap:prune_reap_and_solve"),
    **{
        f"{name}{SOLVED}": Row({**ALONE, "importance": importance, "allocation": "uniform"})
        for name, (_, importance) in CRITERIA.items()
    },
}
OWN: dict[str, Row] = {
    OURS: Row(ALONE),
    f"{OURS} per layer": Row({**ALONE, "experts": {"widths": "per_layer"}}),
    f"{OURS} deletion only": Row({**ALONE, "weight_update": "none"}),
}
WHOLE: dict[str, Row] = {
    f"{OURS} whole experts": Row({**ALONE, "experts": "whole"}),
    f"{OURS} whole experts by REAP's score": Row({**ALONE, "experts": {"units": "whole", "criterion": "reap"}}),
    f"{OURS} whole experts deletion only": Row({**ALONE, "experts": "whole", "weight_update": "none"}),
    f"{OURS} whole experts and channels": Row({**ALONE, "experts": "both"}),
}
STUDY: dict[str, Row] = {  # what parts of ours bring: one thing is changed
    f"{OURS} block target": Row({**ALONE, "reconstruct": "block"}),
    f"{OURS} local target": Row({**ALONE, "reconstruct": "local"}),
    f"{OURS} residual target": Row({**ALONE, "reconstruct": "residual"}),
    f"{OURS} damping 0.01": Row({**ALONE, "dampening_frac": 0.01}),
    f"{OURS} no sensitivity": Row({**ALONE, "sensitivity": "none"}),
    f"{OURS} all tokens": Row({**ALONE, "experts": {"calibrate_all_experts": True}}),
}
ROWS: dict[str, dict[str, Row]] = {
    "all": {**PEERS, **PEERS_SOLVED, **OWN, **WHOLE},
    "main": {**PEERS, **OWN},
    "solved": PEERS_SOLVED,
    "whole": {"REAP": PEERS["REAP"], f"REAP{SOLVED}": PEERS_SOLVED[f"REAP{SOLVED}"], OURS: OWN[OURS], **WHOLE},
    "study": {OURS: OWN[OURS], **STUDY},
    "curve": {"REAP": PEERS["REAP"], OURS: OWN[OURS]},
}


def run_rows(
    ledger: Ledger, work: Workload, rows: Mapping[str, Row], shares: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """Finish the dense row and every row at every share; return them by ``<share> | <name>``."""
    finished = {"dense": ledger.finish("dense", work.identify_row(), lambda: score_dense(work))}
    experts_of_all = measure_share(work.model)
    for share in shares:
        for name, row in rows.items():
            scale = 1.0 if row.peer else experts_of_all  # ours counts attention and FFNs, too
            key, how = f"{share:g} | {name}", work.identify_row(row, share * scale)
            if isinstance(row.fields.get("importance"), ExpertImportance):
                how["code"]["sources"]["eval/peers"] = digest_sources(EVAL / "peers")
            finished[key] = ledger.finish(key, how, lambda r=row, s=share, k=scale: _attempt(r, s, k, work))  # type: ignore[misc]
    return finished


def measure_share(model: str) -> float:
    """Return the routed experts' share of the parameters that our sparsity counts."""
    loaded, _ = load_checkpoint(model, "auto")
    experts = count_experts(loaded)
    return experts / count_prunable_parameters(loaded, experts=True)


def _attempt(row: Row, share: float, scale: float, work: Workload) -> dict[str, Any]:
    """Return a row with the share of the experts' parameters that is gone, or why the method refuses."""
    try:
        made = run_row(row, share * scale, work)
    except ValueError as error:
        return {"refused": str(error)}
    return {**made, "removed": made["removed"] / scale}


def format_experts(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line a row: by text the perplexity, its increase over dense, and that over the best increase of a peer that
    slices or drops only; then the share that is gone, and seconds."""
    dense = rows["dense"]["perplexity"]
    header = ["share | method"]
    for text in dense:
        header += [text, "increase", "of the best peer's"]
    table = []
    for key, row in rows.items():
        if "refused" in row:
            table.append([key, "refused", *[""] * (3 * len(dense) + 1)])
            continue
        cells = [key]
        for text, value in row["perplexity"].items():
            increase, least = value - dense[text], _find_best(rows, key.split(" | ")[0], text)
            cells += [f"{value:.2f}", f"{increase:.2f}", f"{increase / least:.2f}" if least else ""]
        table.append([*cells, f"{row['removed']:.2%}", f"{row.get('method_seconds') or row['seconds']:.1f}"])
    return "\n\n".join([format_table([*header, "removed", "seconds"], table), *list_refusals(rows)])


def _find_best(rows: Mapping[str, Mapping[str, Any]], share: str, text: str) -> float | None:
    """Return the least increase of a peer that slices or drops only; None where there is none above zero."""
    found = [rows.get(f"{share} | {name}", {}).get("perplexity") for name in PEERS]
    increases = [perplexity[text] - rows["dense"]["perplexity"][text] for perplexity in found if perplexity]
    return min(increases) if increases and min(increases) > 0 else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.set_defaults(calibration=CALIBRATION, max_tokens=TOKENS)
    parser.add_argument("--share", default="0.25,0.5", help="of the routed experts' parameters")
    parser.add_argument("--rows", choices=ROWS, default="all")
    parser.add_argument("--only", help="some of these rows, comma-separated")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    args = parser.parse_args(arguments)
    logger.remove()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)

    work = read_workload(args)
    ledger = Ledger(args.output / "experts.json", work.describe())
    rows = ROWS[args.rows]
    if args.only:
        rows = {name: rows[name] for name in read_names(parser, "--only", args.only, rows)}
    with count_own_seconds():
        finished = run_rows(ledger, work, rows, [float(part) for part in args.share.split(",")])
    text = format_experts(finished)
    (args.output / f"experts-{args.rows}.md").write_text(
        f"# {Path(args.model).name}\n\n```\n{text}\n```\n", encoding="utf-8"
    )
    print(text)


if __name__ == "__main__":
    main()
