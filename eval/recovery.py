"""Recovery of a pruned model: perplexity against tokens trained, and what a step under one layer costs.

    python -m eval.recovery --model MODEL --data DATA --tokens 400000 --output results/recovery
    python -m eval.recovery --model MODEL --data DATA --only steps --output results/recovery
    python -m eval.recovery --model MODEL --pruned FOLDER --data DATA --rows "full, KL" --output results/recovery

DATA holds books_train.jsonl and wikitext2_valid.jsonl, in equal parts the training text, the text to calibrate on, and the texts
to score. MODEL is pruned once by the default, unless --pruned has it, and recovered anew for every row. Finished rows are read
back, not computed again, and a row that was killed goes on after its last checkpoint. Writes recovery.md and recovery.json; with
one thread on a CPU, seconds are the process' own.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from eval.account import count_memory
from eval.ledger import EVAL, Ledger, describe_code, digest_text, identify_model, identify_text
from eval.measure import count_live_bytes, count_own_seconds, time_side_by_side
from struprune_plugin import RecoveryModifier, StruPruneModifier, oneshot
from struprune_plugin.evaluation.text import make_calibration_dataset, read_texts, tokenize_texts
from struprune_plugin.layerwise.runner import LayerwiseRunner
from struprune_plugin.layerwise.samples import Sample
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.recovery.objective import Objective
from struprune_plugin.recovery.recovery_config import Holdout, Loss, Optimizer, RecoveryConfig, Text
from struprune_plugin.recovery.states import TrainedStates, list_trained
from struprune_plugin.recovery.step import Stepper
from struprune_plugin.reporting.tables import format_table
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.storage.files import format_bytes

TEXTS = {"wikitext2": "wikitext2_test.jsonl", "books": "books_test.jsonl"}
TRAINING = ("books_train.jsonl", "wikitext2_valid.jsonl")
ROWS: dict[str, dict[str, Any]] = {
    "LoRA, cross entropy": {"adapters": {}, "loss": {"cross_entropy": 1.0}},
    "LoRA, KL": {"adapters": {}, "loss": {"kl": 1.0}},
    "full, KL": {"loss": {"kl": 1.0}},
    "full, KL + hidden": {"loss": {"kl": 1.0, "hidden": 1.0}},
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Work:
    """What the rows share; see the command line."""

    model: str
    data: Path
    calibration: Path
    output: Path
    sparsity: float
    window: int
    num_samples: int
    tokens: int
    max_tokens: int
    batch_size: int
    compute: str
    points: int
    pruned: Path | None
    checkpoint_steps: int
    keep: bool

    @property
    def sources(self) -> list[str]:
        return [str(self.data / name) for name in TRAINING]

    @property
    def num_steps(self) -> int:
        """Steps of one pass over the training part, a twentieth held out."""
        windows = sum(self.tokens // len(TRAINING) // self.window for _ in TRAINING)
        return math.ceil((windows - max(1, round(0.05 * windows))) / self.batch_size)

    def describe(self) -> dict[str, Any]:
        """Return everything that a row depends on beside its own fields."""
        texts = [*(str(self.data / name) for name in TEXTS.values()), *self.sources, str(self.calibration)]
        told = {name: getattr(self, name) for name in ("sparsity", "window", "num_samples", "tokens", "max_tokens")}
        told |= {"batch_size": self.batch_size, "compute": self.compute, "points": self.points}
        return {
            "code": describe_code(Path(__file__), EVAL / "ledger.py"),
            "model": identify_model(self.model),
            **({} if self.pruned is None else {"pruned": identify_model(str(self.pruned))}),
            "texts": [identify_text(text) for text in texts],
            **told,
        }


def prune(work: Work) -> Path:
    """Return the folder of the pruned model, made where it is not there."""
    if work.pruned is not None:
        return work.pruned
    folder = work.output / f"pruned-{digest_text(json.dumps(work.describe(), sort_keys=True))}"
    if not folder.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(work.model)
        dataset = make_calibration_dataset(work.calibration, tokenizer, work.num_samples, work.window)
        given = {"dataset": dataset, "batch_size": 8, "num_calibration_samples": len(dataset)}
        modifier = StruPruneModifier(sparsity=work.sparsity)
        oneshot(
            model=work.model,
            recipe=modifier,
            output_dir=folder,
            tokenizer=work.model,
            shuffle_calibration_samples=False,
            checkpoint_dir=work.output / f"checkpoint-{folder.name}",
            **given,
        )
    return folder


def read_watched(work: Work) -> dict[str, list[Sample]]:
    """Return the windows of the texts to score."""
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    found = {}
    for name, file in TEXTS.items():
        tokens = tokenize_texts(tokenizer, read_texts(work.data / file), work.max_tokens)
        found[name] = [Sample(row) for row in tokens[: len(tokens) // work.window * work.window].view(-1, work.window)]
    return found


def recover(work: Work, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Recover the pruned model by one row; return the curve of perplexities against tokens and seconds of the steps."""
    folder = work.output / "-".join(re.findall(r"\w+", name)).lower()
    loss = fields["loss"] if set(fields["loss"]) == {"cross_entropy"} else {**fields["loss"], "teacher": work.model}
    modifier = RecoveryModifier(
        **{**fields, "loss": loss},
        data=Text(files=work.sources, tokens=work.tokens, window=work.window),
        batch_size=work.batch_size,
        micro_batch_size=work.batch_size,
        holdout=Holdout(steps=max(1, work.num_steps // work.points)),
        compute=work.compute,  # type: ignore[arg-type]  # one of the choices on the command line
        checkpoint_steps=work.checkpoint_steps,
    )
    modifier.watch(read_watched(work))
    oneshot(
        model=str(prune(work)),
        recipe=modifier,
        output_dir=folder if work.keep else None,
        tokenizer=work.model,
        checkpoint_dir=folder.with_name(f"checkpoint-{folder.name}"),
    )
    record = modifier.record
    seconds = [0.0, *record["train"]["seconds"]]
    curve = [
        {
            "tokens": row["tokens_seen"],
            "seconds": seconds[row["step"]],
            **{name: math.exp(row[name]) for name in TEXTS},
            "holdout": row["loss"],
        }
        for row in record["holdout"]
    ]
    best = next(i for i, row in enumerate(record["holdout"]) if row["step"] == record["best_step"])
    told = {"steps": record["steps"], "best": best, "curve": curve, "stage_seconds": record["seconds"]}
    return {**told, "perplexity": {name: curve[best][name] for name in TEXTS}}


def find_loss(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of sequences, summed over predicted tokens, by one pass over the whole model."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


# -- seconds and bytes of a step ------------------------------------------------------------------------------------


def measure_steps(work: Work, repeats: int) -> dict[str, Any]:
    """Return seconds and peak bytes of one full fine-tuning step on the pruned model: under one layer, with the whole model on
    the device, and by the ordinary loop (autograd over the model, torch's AdamW)."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(prune(work)).float().eval().requires_grad_(False)
    samples = read_watched(work)["books"][: work.batch_size]
    runs: dict[str, Callable[[], object]] = {}
    peaks: dict[str, int] = {}
    for name, resident in (("under one layer", False), ("RecoveryModifier, memory: model", True)):
        runs[name] = _make_step(model, samples, DeviceContext(), resident)
    with count_memory(), DeviceContext.open() as context, context.watch() as peak:
        _make_step(model, samples, context, resident=False)()
    peaks["under one layer"] = peak[0]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with _train_all(model):
        peaks["ordinary loop"] = weights + count_live_bytes(_make_plain_step(model, samples))
        model.zero_grad()
        runs["ordinary loop"] = _make_plain_step(model, samples)
        seconds = time_side_by_side(runs, repeats)
    layer = max(sum(p.numel() * 4 for p in layer.parameters()) for _, layer in find_decoder_layers(model))
    return {"seconds": seconds, "peak_bytes": peaks, "layer_bytes": layer, "model_bytes": weights}


class _train_all:  # used as a function
    """Let all weights of a model collect gradients while the block lasts."""

    def __init__(self, model: PreTrainedModel):
        self._model = model

    def __enter__(self) -> None:
        self._model.requires_grad_(True)

    def __exit__(self, *_: object) -> None:
        self._model.requires_grad_(False)
        self._model.zero_grad()


def _make_step(
    model: PreTrainedModel, samples: list[Sample], context: DeviceContext, resident: bool
) -> Callable[[], object]:
    runner = LayerwiseRunner(model, context, CPU, torch.float32, ahead=False, vocabulary=1024)
    with context.on_host():
        states = TrainedStates(list_trained(runner, "all"), Optimizer())
    config = RecoveryConfig(memory="model" if resident else "layer")
    stepper = Stepper(runner, states, Objective(runner, Loss(cross_entropy=1.0)), config, None if resident else 0)
    count = sum(sample.num_targets for sample in samples)
    return lambda: stepper.take([runner.embed([sample]) for sample in samples], count, 1, 1e-9)


def _make_plain_step(model: PreTrainedModel, samples: list[Sample]) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    count = sum(sample.num_targets for sample in samples)

    def step() -> None:
        optimizer.zero_grad()
        for sample in samples:
            (find_loss(model, sample.tokens[None]) / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


# -- report ---------------------------------------------------------------------------------------------------------


def format_curves(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table of perplexities at every measurement."""
    lines = []
    for name, row in rows.items():
        for index, point in enumerate(row["curve"]):
            mark = "kept" if index == row["best"] else ""
            cells = [f"{point['tokens']:,}", *(f"{point[text]:.2f}" for text in TEXTS), f"{point['holdout']:.4f}"]
            lines.append([name if index == 0 else "", *cells, f"{point['seconds']:.0f}", mark])
    return format_table(["row", "tokens trained", *TEXTS, "held-out loss", "seconds", ""], lines)


def format_steps(told: dict[str, Any]) -> str:
    """Return the table of what a step costs."""
    plain = told["seconds"]["ordinary loop"]
    lines = []
    for name, seconds in told["seconds"].items():
        peak = told["peak_bytes"].get(name)
        cells = ["", ""] if peak is None else [format_bytes(peak), f"{peak / told['layer_bytes']:.1f}"]
        lines.append([name, f"{seconds:.3f}", f"{seconds / plain:.2f} ×", *cells])
    header = ["one step", "seconds", "to the ordinary", "peak on the device", "in layers (float32)"]
    return format_table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pruned", type=Path, help="MODEL's pruned folder; made if unset")
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--calibration", type=Path, help="DATA/books_calibration.jsonl if unset")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--num-samples", type=int, default=64, help="windows of calibration")
    parser.add_argument("--tokens", type=int, default=400_000, help="of training text")
    parser.add_argument("--max-tokens", type=int, default=60_000, help="of each text to score")
    parser.add_argument("--batch-size", type=int, default=8, help="windows a step")
    parser.add_argument("--points", type=int, default=4, help="measurements of every row")
    parser.add_argument("--compute", default="model", choices=("model", "float32", "bfloat16"))
    parser.add_argument("--only", default="curves,steps", help="parts of the report")
    parser.add_argument("--checkpoint-steps", type=int, default=10, help="steps between checkpoints of a row")
    parser.add_argument("--keep", action="store_true", help="keep the recovered models in OUTPUT, too")
    parser.add_argument("--rows", default=";".join(ROWS), help="separated by semicolons")
    parser.add_argument("--repeats", type=int, default=5, help="of a step that is timed")
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    args = vars(parser.parse_args())
    only, names, repeats = args.pop("only").split(","), args.pop("rows").split(";"), args.pop("repeats")
    args["calibration"] = args["calibration"] or args["data"] / "books_calibration.jsonl"
    work = Work(**args)
    logger.remove()
    warnings.filterwarnings("ignore")
    ledger = Ledger(work.output / "recovery-rows.json", {"model": Path(work.model).name, "sparsity": work.sparsity})
    began, told = work.describe(), {}
    with count_own_seconds():
        if "curves" in only:
            hows = {name: {**began, "fields": ROWS[name]} for name in names}
            told["curves"] = {n: ledger.finish(n, how, partial(recover, work, n, ROWS[n])) for n, how in hows.items()}
        if "steps" in only:
            told["steps"] = ledger.finish("steps", {**began, "repeats": repeats}, lambda: measure_steps(work, repeats))
    parts = [format_curves(told["curves"])] if "curves" in told else []
    parts += [format_steps(told["steps"])] if "steps" in told else []
    text = (
        f"# Recovery of {Path(work.model).name}, {work.sparsity:.0%} removed\n\n```\n" + "\n\n".join(parts) + "\n```\n"
    )
    work.output.mkdir(parents=True, exist_ok=True)
    (work.output / "recovery.md").write_text(text, encoding="utf-8")
    (work.output / "recovery.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
