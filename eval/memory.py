"""Measure the device memory of pruning against the size of the model, on shapes of OPT-125M to OPT-66B.

    python -m eval.memory --output results/memory                       # as far as this machine's memory goes
    python -m eval.memory --models OPT-125M,OPT-350M --modes offload --output results/memory

Weights are random; nothing is downloaded. A model has the published widths and vocabulary but few decoder layers, because the peak
does not grow with them. Without an accelerator the peak is an account of the memory that one would hold (``eval.account``).
Finished rows are read back, not measured again. Writes memory-growth.md, .json and .png.
"""

import argparse
import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from loguru import logger
from transformers import AutoModelForCausalLM, PreTrainedModel

from eval.account import count_memory
from eval.ledger import Ledger, describe_code, read_names
from eval.measure import fit_exponent
from eval.paper_sizes import MEMORY_MODELS, OPT_SIZES, PAPER_MEMORY, count_sizes, make_opt_config, prune_random
from struprune_plugin import StruPruneModifier
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.reporting.tables import Table

MODES: dict[str, dict[str, Any]] = {"default": {}, "offload": {"offload": True}}  # fields of the recipe
SPARSITY, LENGTH, LAYERS = 0.2, 2048, 2  # what is removed, tokens of a sequence, decoder layers of a model


def describe_measurement(
    name: str, fields: Mapping[str, Any], num_layers: int = LAYERS, length: int = LENGTH
) -> dict[str, Any]:
    """Return everything that :func:`measure_pruning_memory` of the same arguments depends on."""
    return {
        "code": describe_code(Path(__file__)),
        "shape": make_opt_config(name).to_diff_dict(),
        "asked": [dict(fields), num_layers, length, SPARSITY],
    }


def measure_pruning_memory(
    name: str, fields: Mapping[str, Any], num_layers: int = LAYERS, length: int = LENGTH
) -> dict[str, Any]:
    """Prune random weights of an OPT's shape; return the bytes of one layer, the peak on the device, and what led to it.

    The model has the published widths and vocabulary but few decoder layers, in bfloat16; calibration is as few sequences
    as the widest solve needs, one at a time.

    :param fields: of :class:`StruPruneModifier`
    :param length: tokens of a sequence
    :return: ``refused`` holds the reason where the fields are refused
    """
    config = make_opt_config(name, num_hidden_layers=num_layers, dtype="bfloat16")
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    layer = sum(p.numel() * p.element_size() for p in find_decoder_layers(model)[0][1].parameters())
    samples = config.ffn_dim // length + 1
    shown = {"layer_bytes": layer, "tokens": samples * length}
    try:
        with count_memory():
            manifest = prune_random(model, StruPruneModifier(sparsity=SPARSITY, **fields), samples, length)
    except ValueError as error:
        return {**shown, "refused": str(error)}
    whole = next(stage for stage in manifest.stages if stage.name == "whole pass")
    stages = {stage.name: stage.peak_bytes for stage in manifest.stages}
    told = {"peak_bytes": whole.peak_bytes, "seconds": whole.seconds, "stages": stages}
    return {**shown, **told, "measure": manifest.memory_measure}


def has_room(name: str, free: int | None = None) -> bool:
    """Return whether the host's memory holds a measurement: six float64 Gram matrices of the FFN and the weights.

    :param free: bytes to use; what is available where None
    """
    width = 4 * OPT_SIZES[name][0]
    needed = 6 * 8 * width**2 + 4 * 50272 * OPT_SIZES[name][0] * 2
    return (psutil.virtual_memory().available if free is None else free) > needed


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
    return "\n\n".join([str(Table(header, lines)), *notes])


def group_by_mode(rows: dict[str, dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return (parameters, peak bytes) of the measured rows, by mode."""
    points: dict[str, list[tuple[float, float]]] = {}
    for key, row in rows.items():
        if "refused" not in row:
            points.setdefault(key.split(" | ")[1], []).append((row["parameters"], row["peak_bytes"]))
    return points


def draw_figure(rows: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw measured peaks, the paper's figures, and the bytes of a layer and of a model, against N; both logarithmic."""
    from matplotlib.figure import Figure

    axis = (figure := Figure(figsize=(6, 4.5), layout="constrained")).add_subplot()
    for mode, points in group_by_mode(rows).items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", label=f"measured: {mode}")
    sizes = sorted((count_sizes(name, make_opt_config(name)) for name in OPT_SIZES), key=lambda size: size.total)
    totals = {size.name: size.total for size in sizes}
    for method, figures in PAPER_MEMORY.items():
        at = [totals[name] for name in MEMORY_MODELS]
        axis.plot(at, [1e9 * value for value in figures], marker="x", linestyle="none", label=f"paper: {method}")
    ordered = [size.total for size in sizes]
    axis.plot(ordered, [2 * size.layer for size in sizes], ":", color="grey", label="one layer, 16 bit, counted")
    axis.plot(ordered, [2 * size.total for size in sizes], "--", color="grey", label="model, 16 bit, counted")
    axis.set(xscale="log", yscale="log", xlabel="parameters N", ylabel="bytes on the device")
    axis.legend(fontsize="small")
    figure.savefig(file, dpi=150)


def write_report(rows: dict[str, dict[str, Any]], left_out: list[str], length: int, folder: Path) -> str:
    """Write the three files; return the text."""
    exponents = {mode: fit_exponent(*map(list, zip(*p, strict=True))) for mode, p in group_by_mode(rows).items()}
    measures = ", ".join(sorted({row["measure"] for row in rows.values() if "measure" in row}))
    notes = [
        f"Gigabytes, everything counted: {measures}. One sequence of {length} tokens at a time.",
        *(f"{mode}: peak ~ N^{e:.2f} (fit)" for mode, e in exponents.items() if e is not None),
        *(
            f"paper, its own figures on {', '.join(MEMORY_MODELS)}: {method} {' / '.join(map(str, figures))} GB"
            for method, figures in PAPER_MEMORY.items()
        ),
    ]
    if left_out:
        notes.append(f"Left out, this machine's memory does not hold the solves: {', '.join(left_out)}.")
    text = f"# Memory while pruning\n\n```\n{format_rows(rows)}\n```\n\n" + "\n".join(f"- {note}" for note in notes)
    (folder / "memory-growth.md").write_text(text + "\n", encoding="utf-8")
    data = {"rows": rows, "exponents": exponents, "left_out": left_out}
    (folder / "memory-growth.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draw_figure(rows, folder / "memory-growth.png")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(OPT_SIZES))
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}, separated by commas")
    parser.add_argument("--layers", type=int, default=1, help="decoder layers of every model")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of the one sequence in a batch")
    parser.add_argument("--memory", type=float, help="gigabytes of this machine to use [default: the free memory]")
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    args = parser.parse_args()
    modes = read_names(parser, "--modes", args.modes, MODES)
    logger.remove()
    warnings.filterwarnings("ignore")
    ledger = Ledger(args.output / "memory-growth-rows.json")
    rows: dict[str, dict[str, Any]] = {}
    left_out = []
    for name in args.models.split(","):
        if not has_room(name, None if args.memory is None else round(args.memory * 1e9)):
            left_out.append(name)
            continue
        size = count_sizes(name, make_opt_config(name))
        for mode in modes:
            part = (name, MODES[mode], args.layers, args.length)
            row = ledger.finish(f"{name} | {mode}", describe_measurement(*part), partial(measure_pruning_memory, *part))
            rows[f"{name} | {mode}"] = {**row, "parameters": size.total, "model_bytes": 2 * size.total}
    print(write_report(rows, left_out, args.length, args.output))


if __name__ == "__main__":
    main()
