"""Measure the device memory of pruning against the size of the model, on shapes of OPT-125M to OPT-66B.

    python -m eval.memory --output results/memory                       # as far as this machine's memory goes
    python -m eval.memory --models OPT-125M,OPT-350M --modes "no budget;4 layers" --output results/memory
    python -m eval.memory --models OPT-125M,OPT-1.3B --modes "recovery;recovery, 5 layers" --output results/memory

Weights are random; nothing is downloaded. A model has the published widths and vocabulary but few decoder layers, because the peak
does not grow with them. Without an accelerator the peak is an account of the memory that one would hold.
Finished rows are read back, not measured again. Writes memory-growth.md, .json and .png.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from loguru import logger
from transformers import AutoModelForCausalLM

from eval.account import count_memory
from eval.ledger import EVAL, Ledger, describe_code
from eval.measure import fit_exponent
from eval.methods import DEFAULT
from eval.paper_sizes import (
    OPT_SIZES,
    count_least_budget,
    count_sizes,
    describe_measurement,
    has_room,
    make_opt_config,
    measure_pruning_memory,
)
from eval.paper_tables import MEMORY_MODELS, PAPER_MEMORY
from struprune_plugin import RecoveryModifier, oneshot
from struprune_plugin.evaluation.text import DEMO_MODEL
from struprune_plugin.model.footprint import read_sizes
from struprune_plugin.recovery.memory import BACKWARD_COPIES
from struprune_plugin.recovery.recovery_config import Loss
from struprune_plugin.reporting.tables import format_table

# mode -> memory budget in decoder layers; 0 is the least possible
MODES: dict[str, float | None] = {"no budget": None, "4 layers": 4.0, "1 layer": 1.0, "least": 0.0}
# modes of a recovery of all weights under one layer -> the budget in layers, beside the activations of a micro-batch; with five,
# float32 gradients of a layer lie on the device
RECOVERY: dict[str, float | None] = {"recovery": None, "recovery, 5 layers": 5.0}


def measure_recovery_memory(name: str, budget_layers: float | None, num_layers: int, length: int) -> dict[str, Any]:
    """Train random weights of an OPT's shape for one step of two sequences, one at a time; return the peak on the device.

    All weights of the decoder layers, in bfloat16, by their cross entropy; float32 copies and moments lie on the host.

    :param budget_layers: ``memory_budget`` in bytes of one decoder layer, the activations of a micro-batch beside them
    """
    torch.manual_seed(0)
    config = make_opt_config(name, num_hidden_layers=num_layers, dtype="bfloat16")
    model: Any = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    sizes = read_sizes(model, [], torch.Size([1, length]))
    activations = BACKWARD_COPIES * sizes.activations
    budget = None if budget_layers is None else round(budget_layers * sizes.layer) + activations
    modifier = RecoveryModifier(
        loss=Loss(cross_entropy=1.0),
        batch_size=2,
        micro_batch_size=1,
        holdout=None,
        memory_budget=budget,
    )
    ids = torch.randint(4, config.vocab_size, (2, length))
    dataset = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    with tempfile.TemporaryDirectory() as scratch, count_memory():
        model.config._name_or_path = scratch
        (Path(scratch) / "config.json").write_text(json.dumps(model.config.to_dict()))
        options: dict[str, Any] = {"tokenizer": str(DEMO_MODEL), "batch_size": 1, "num_calibration_samples": 2}
        oneshot(model=model, recipe=modifier, dataset=dataset, shuffle_calibration_samples=False, **options)
    training = next(stage for stage in modifier.record["stages"] if stage["name"] == "training")
    return {
        **{"layer_bytes": sizes.layer, "activation_bytes": activations, "budget_bytes": budget, "tokens": 2 * length},
        **{"peak_bytes": training["peak_bytes"], "seconds": training["seconds"], "stages": modifier.record["stages"]},
        "measure": modifier.record["memory_measure"],
    }


def format_rows(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table, a line a shape and mode, and below it why rows are refused."""
    header = ["model", "mode", "model, 16 bit", "one layer", "peak", "peak / layer", "peak / model", "seconds"]
    lines, notes = [], []
    for key, row in rows.items():
        name, mode = key.split(" | ")
        told = [name, mode, f"{row['model_bytes'] / 1e9:.3f}", f"{row['layer_bytes'] / 1e9:.4f}"]
        if "refused" in row:
            notes.append(f"{key}: refused, {row['refused']}")
            lines.append([*told, "refused", "", "", ""])
            continue
        peak = row["peak_bytes"]
        told += [f"{peak / 1e9:.3f}", f"{peak / row['layer_bytes']:.2f}", f"{peak / row['model_bytes']:.3f}"]
        lines.append([*told, f"{row['seconds']:.0f}"])
    return "\n\n".join([format_table(header, lines), *notes])


def count_budgets(length: int) -> str:
    """Return a table of what every shape asks for at least, counted from its sizes alone."""
    lines = []
    for name in OPT_SIZES:
        with torch.device("meta"):
            config = make_opt_config(name, num_hidden_layers=1, dtype="bfloat16")
            model: Any = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        layer = 2 * count_sizes(name, config).layer
        least = [count_least_budget(model, DEFAULT.fields, tokens) for tokens in (length, length // 4)]
        cells = [f"{bytes_ / 1e9:.3f} ({bytes_ / layer:.2f} layers)" for bytes_ in least]
        lines.append([name, f"{layer / 1e9:.4f}", *cells])
    return format_table(["model", "one layer", f"least budget, {length} tokens", f"{length // 4} tokens"], lines)


def group_by_mode(rows: dict[str, dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return (parameters, peak bytes) of the measured rows, by mode."""
    points: dict[str, list[tuple[float, float]]] = {}
    for key, row in rows.items():
        if "refused" not in row:
            points.setdefault(key.split(" | ")[1], []).append((row["parameters"], row["peak_bytes"]))
    return points


def draw_figure(rows: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw measured peaks, the paper's figures, and the bytes of a layer and of a model, against N; both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4.5), layout="constrained")
    for mode, points in group_by_mode(rows).items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", label=f"measured: {mode}")
    sizes = [count_sizes(name, make_opt_config(name)) for name in OPT_SIZES]
    totals = {size.name: size.total for size in sizes}
    for method, figures in PAPER_MEMORY.items():
        at = [totals[name] for name in MEMORY_MODELS]
        axis.plot(at, [1e9 * value for value in figures], marker="x", linestyle="none", label=f"paper: {method}")
    ordered = sorted(sizes, key=lambda size: size.total)
    axis.plot(
        [s.total for s in ordered],
        [2 * s.layer for s in ordered],
        ":",
        color="grey",
        label="one layer, 16 bit, counted",
    )
    axis.plot(
        [s.total for s in ordered], [2 * s.total for s in ordered], "--", color="grey", label="model, 16 bit, counted"
    )
    axis.set(xscale="log", yscale="log", xlabel="parameters N", ylabel="bytes on the device")
    axis.legend(fontsize="small")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def write_report(rows: dict[str, dict[str, Any]], left_out: list[str], length: int, folder: Path) -> str:
    """Write the three files; return the text."""
    exponents = {mode: fit_exponent(*map(list, zip(*p, strict=True))) for mode, p in group_by_mode(rows).items()}
    measures = {row["measure"] for row in rows.values() if "measure" in row}
    notes = [
        f"Gigabytes, everything counted: {', '.join(sorted(measures))}. Models of {{}} decoder layers; one sequence of {length} "
        "tokens at a time.".format("/".join(sorted({str(row["num_layers"]) for row in rows.values()}))),
        *(f"{mode}: peak ~ N^{e:.2f} (fit)" for mode, e in exponents.items() if e is not None),
        *(
            f"paper, its own figures on {', '.join(MEMORY_MODELS)}: {method} {' / '.join(map(str, figures))} GB"
            for method, figures in PAPER_MEMORY.items()
        ),
    ]
    if left_out:
        notes.append(f"Left out, this machine's memory does not hold the solves: {', '.join(left_out)}.")
    text = f"# Memory while pruning\n\n```\n{format_rows(rows)}\n```\n\n" + "\n".join(f"- {note}" for note in notes)
    text += f"\n\nCounted from sizes, for every shape:\n\n```\n{count_budgets(length)}\n```"
    (folder / "memory-growth.md").write_text(text + "\n", encoding="utf-8")
    data = {"rows": rows, "exponents": exponents, "left_out": left_out}
    (folder / "memory-growth.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draw_figure(rows, folder / "memory-growth.png")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(OPT_SIZES))
    parser.add_argument(
        "--modes", default=";".join((*MODES, *RECOVERY)), help="memory budgets or recoveries, separated by semicolons"
    )
    parser.add_argument("--layers", type=int, default=1, help="decoder layers of every model")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the one sequence in a batch")
    parser.add_argument("--memory", type=float, help="gigabytes of this machine to use [default: the free memory]")
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    args = parser.parse_args()
    logger.remove()
    warnings.filterwarnings("ignore")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    settings = {"layers": args.layers, "length": args.length, "device": device}
    ledger = Ledger(args.output / "memory-growth-rows.json", settings)
    rows: dict[str, dict[str, Any]] = {}
    left_out = []
    for name in args.models.split(","):
        if not has_room(name, None if args.memory is None else round(args.memory * 1e9)):
            left_out.append(name)
            continue
        size = count_sizes(name, make_opt_config(name))
        for mode in args.modes.split(";"):
            if mode in RECOVERY:
                part = (name, RECOVERY[mode], max(2, args.layers), args.length)
                measure: Callable[[], dict[str, Any]] = partial(measure_recovery_memory, *part)
                how: dict[str, Any] = {"code": describe_code(EVAL / "paper_sizes.py", Path(__file__)), "part": part}
            else:
                rest = (name, DEFAULT.fields, MODES[mode], args.layers)
                measure = partial(measure_pruning_memory, *rest, length=args.length)
                how = describe_measurement(*rest, length=args.length)
            row = ledger.finish(f"{name} | {mode}", how, measure)
            counted = {"parameters": size.total, "model_bytes": 2 * size.total, "num_layers": args.layers}
            rows[f"{name} | {mode}"] = {**row, **counted}
    print(write_report(rows, left_out, args.length, args.output))


if __name__ == "__main__":
    main()
