"""Recovery of a pruned model: perplexity against tokens trained, and what a step under one layer costs.

    python -m eval.recovery --model MODEL --data DATA --tokens 400000 --output results/recovery
    python -m eval.recovery --model MODEL --data DATA --only steps --output results/recovery
    python -m eval.recovery --model MODEL --peers FASP --data DATA --train books_train.jsonl --items ITEMS \
        --rows "LoRA but on values, cross entropy" --only curves --output results/recovery

DATA holds the texts to train on (--train, in equal parts), to calibrate on and to score. MODEL is pruned once by the default,
unless --pruned names folders, and recovered anew for every row. Finished rows are read back, not computed again, and a row that
was killed goes on after its last checkpoint. Writes recovery.md and recovery.json; with one thread on a CPU, seconds are the
process' own.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from transformers import AutoTokenizer

from eval.ledger import EVAL, Ledger, describe_code, digest_text, identify_model, identify_text, read_names
from eval.measure import count_own_seconds
from eval.peers.fasp import prune_fasp
from eval.peers.osscar import prune_osscar
from eval.peers.saving import save_as_stock
from eval.recovery_steps import format_steps, measure_steps
from struprune_plugin import RecoveryModifier, StruPruneModifier, oneshot
from struprune_plugin.evaluation.scoring import load_checkpoint, measure_perplexity
from struprune_plugin.evaluation.text import make_calibration_dataset, read_texts, tokenize_texts
from struprune_plugin.layerwise.samples import Sample
from struprune_plugin.recovery.recovery_config import Holdout, Text
from struprune_plugin.reporting.tables import format_table

TEXTS = {"wikitext2": "wikitext2_test.jsonl", "books": "books_test.jsonl"}
TRAINING = "books_train.jsonl,wikitext2_valid.jsonl"
ITEMS = ("hellaswag.jsonl", "piqa.jsonl")  # zero-shot items, whose questions with the right answers are a text
ROWS: dict[str, dict[str, Any]] = {
    "LoRA, cross entropy": {"adapters": {}, "loss": {"cross_entropy": 1.0}},
    "LoRA but on values, cross entropy": {  # FASP leaves zeros in value channels, which must stay
        "adapters": {"targets": [r"re:.*((?<!\.v)_proj|\.fc\d)$"]},
        "loss": {"cross_entropy": 1.0},
    },
    "LoRA on consumers, cross entropy": {  # the linears whose inputs were removed
        "adapters": {"targets": [r"re:.*\.(o_proj|out_proj|down_proj|fc2)$"]},
        "loss": {"cross_entropy": 1.0},
    },
    "LoRA of rank 32, cross entropy": {"adapters": {"rank": 32, "alpha": 64.0}, "loss": {"cross_entropy": 1.0}},
    "LoRA, cross entropy + hidden": {"adapters": {}, "loss": {"cross_entropy": 1.0, "hidden": 1.0}},
    "full, cross entropy": {"loss": {"cross_entropy": 1.0}},
    "LoRA, KL": {"adapters": {}, "loss": {"kl": 1.0}},
    "full, KL": {"loss": {"kl": 1.0}},
    "full, KL + hidden": {"loss": {"kl": 1.0, "hidden": 1.0}},
}


PEERS = {"FASP": prune_fasp, "OSSCAR": prune_osscar}  # whose models their stock class loads


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
    memory: str
    points: int
    train: str
    items: Path | None
    learning_rate: float | None
    checkpoint_steps: int
    keep: bool

    @property
    def sources(self) -> list[str]:
        """Files to train on, in DATA or elsewhere."""
        named = [(self.data / name, name) for name in self.train.split(",")]
        return [str(here if here.is_file() else name) for here, name in named]

    @property
    def num_steps(self) -> int:
        """Steps of one pass over the training part, a twentieth held out."""
        count = len(self.sources)
        windows = count * (self.tokens // count // self.window)
        return math.ceil((windows - max(1, round(0.05 * windows))) / self.batch_size)

    def describe(self) -> dict[str, Any]:
        """Return everything that a row depends on beside its own fields."""
        texts = [*(str(self.data / name) for name in TEXTS.values()), *self.sources, str(self.calibration)]
        told = {name: getattr(self, name) for name in ("sparsity", "window", "num_samples", "tokens", "max_tokens")}
        told |= {name: getattr(self, name) for name in ("batch_size", "compute", "memory", "points", "learning_rate")}
        texts += [str(self.items / name) for name in ITEMS] if self.items else []
        return {
            "code": describe_code(Path(__file__), EVAL / "recovery_steps.py", EVAL / "ledger.py"),
            "model": identify_model(self.model),
            "texts": [identify_text(text) for text in texts],
            **told,
        }


def prune(work: Work) -> Path:
    """Return the folder of the model that the default prunes, made where it is not there."""
    folder = work.output / f"pruned-{_digest_pruning(work)}"
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


def prune_by_peer(work: Work, name: str) -> Path:
    """Return the folder of the model that a peer prunes on the same windows, made where it is not there."""
    folder = work.output / f"pruned-{name}-{_digest_pruning(work, EVAL / 'peers')}"
    if not folder.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(work.model)
        dataset = make_calibration_dataset(work.calibration, tokenizer, work.num_samples, work.window)
        result = PEERS[name](work.model, torch.tensor(dataset["input_ids"]), work.sparsity)
        with tempfile.TemporaryDirectory(dir=work.output) as made:
            save_as_stock(result.model, Path(made) / folder.name)
            tokenizer.save_pretrained(Path(made) / folder.name)
            (Path(made) / folder.name).rename(folder)
    return folder


def _digest_pruning(work: Work, *sources: Path) -> str:
    """Return the digest of everything that a pruned model depends on."""
    told = {name: getattr(work, name) for name in ("sparsity", "window", "num_samples")}
    told |= {"model": identify_model(work.model), "text": identify_text(str(work.calibration))}
    told["code"] = describe_code(Path(__file__), *sources)
    return digest_text(json.dumps(told, sort_keys=True))


def read_watched(work: Work) -> dict[str, list[Sample]]:
    """Return the windows of the texts to score."""
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    found = {}
    for name, file in TEXTS.items():
        tokens = tokenize_texts(tokenizer, read_texts(work.data / file), work.max_tokens)
        found[name] = cut_windows(tokens, work.window)
    if work.items is not None:
        items = [json.loads(line) for name in ITEMS for line in (work.items / name).read_text().splitlines()]
        texts = [f"{item['query']} {item['choices'][item['gold']]}" for item in items]
        found["items"] = cut_windows(tokenize_texts(tokenizer, texts, work.max_tokens), work.window)
    return found


def cut_windows(tokens: torch.Tensor, window: int) -> list[Sample]:
    """Return whole windows of a text's tokens."""
    return [Sample(row) for row in tokens[: len(tokens) // window * window].view(-1, window)]


def recover(work: Work, pruned: Path, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Recover a pruned model by one row; return the curve of perplexities against tokens and seconds of the steps."""
    folder = work.output / "-".join(re.findall(r"\w+", name)).lower()
    loss = fields["loss"] if set(fields["loss"]) == {"cross_entropy"} else {**fields["loss"], "teacher": work.model}
    modifier = RecoveryModifier(
        **{**fields, "loss": loss},
        schedule={"learning_rate": work.learning_rate},  # type: ignore[arg-type]  # pydantic makes the object
        memory=work.memory,  # type: ignore[arg-type]  # one of the choices on the command line
        data=Text(files=work.sources, tokens=work.tokens, window=work.window),
        batch_size=work.batch_size,
        micro_batch_size=work.batch_size,
        holdout=Holdout(steps=max(1, work.num_steps // work.points)),
        compute=work.compute,  # type: ignore[arg-type]  # one of the choices on the command line
        checkpoint_steps=work.checkpoint_steps,
    )
    watched = read_watched(work)
    modifier.watch(watched)
    oneshot(
        model=str(pruned),
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
            **{name: math.exp(row[name]) for name in watched},
            "holdout": row["loss"],
        }
        for row in record["holdout"]
    ]
    best = next(i for i, row in enumerate(record["holdout"]) if row["step"] == record["best_step"])
    told = {"steps": record["steps"], "best": best, "curve": curve, "stage_seconds": record["seconds"]}
    return {**told, "perplexity": {name: curve[best][name] for name in watched}}


def score_dense(work: Work) -> dict[str, Any]:
    """Return the dense model's perplexities."""
    model, _ = load_checkpoint(work.model, "auto")
    texts = {name: torch.cat([sample.tokens for sample in samples]) for name, samples in read_watched(work).items()}
    return {"perplexity": {name: measure_perplexity(model, text, work.window) for name, text in texts.items()}}


# -- report ---------------------------------------------------------------------------------------------------------


def format_curves(rows: dict[str, dict[str, Any]], dense: dict[str, float]) -> str:
    """Return the table of perplexities at every measurement, and the share of the pruned model's increase that is left."""
    texts = list(dense)
    lines = [["dense", "", *(f"{dense[text]:.2f}" for text in texts), *[""] * (len(texts) + 3)]]
    for name, row in rows.items():
        for index, point in enumerate(row["curve"]):
            mark = "kept" if index == row["best"] else ""
            left = [(point[text] - dense[text]) / (row["curve"][0][text] - dense[text]) for text in texts]
            cells = [
                f"{point['tokens']:,}",
                *(f"{point[text]:.2f}" for text in texts),
                *(f"{part:.2f}" for part in left),
            ]
            lines.append(
                [name if index == 0 else "", *cells, f"{point['holdout']:.4f}", f"{point['seconds']:.0f}", mark]
            )
    header = ["row", "tokens trained", *texts, *(f"{text}, left" for text in texts), "held-out loss", "seconds", ""]
    return format_table(header, lines)


def read_folders(given: str) -> dict[str, Path]:
    """Return folders by name.

    :raises SystemExit: not NAME=FOLDER, or no such folder
    """
    pairs = [part.partition("=") for part in given.split(",")]
    folders = {name: Path(folder) for name, _, folder in pairs}
    if not all(folder.is_dir() and name for name, folder in folders.items()) or len(folders) < len(pairs):
        raise SystemExit(
            f"--pruned: must be NAME=FOLDER,... of pruned models, each name once, got {given!r}. Correct it."
        )
    return folders


def finish_rows(ledger: Ledger, work: Work, folders: dict[str, Path], names: list[str]) -> dict[str, Any]:
    """Finish every row on every pruned model, and the dense model's perplexities."""
    began, curves = work.describe(), {}
    told = {"dense": ledger.finish("dense", began, partial(score_dense, work))["perplexity"]}
    for method, pruned in folders.items():
        for name in names:
            how = {**began, "pruned": identify_model(str(pruned)), "fields": ROWS[name]}
            key = f"{method} | {name}"
            curves[key] = ledger.finish(key, how, partial(recover, work, pruned, key, ROWS[name]))
    return {**told, "curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pruned", help="MODEL's pruned folders, NAME=FOLDER,...; the default's is made if unset")
    parser.add_argument("--peers", default="", help=f"prune and recover by {' and '.join(PEERS)}, too, comma-separated")
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
    parser.add_argument("--memory", default="layer", choices=("layer", "model"), help="what the device holds")
    parser.add_argument("--train", default=TRAINING, help="files to train on, in DATA or elsewhere, comma-separated")
    parser.add_argument("--items", type=Path, help="folder of zero-shot items, whose right answers are a text to score")
    parser.add_argument("--learning-rate", type=float, help="the modifier's default if unset")
    parser.add_argument("--only", default="curves,steps", help="parts of the report")
    parser.add_argument("--checkpoint-steps", type=int, default=10, help="steps between checkpoints of a row")
    parser.add_argument("--keep", action="store_true", help="keep the recovered models in OUTPUT, too")
    parser.add_argument("--rows", default=";".join(ROWS), help="separated by semicolons")
    parser.add_argument("--repeats", type=int, default=5, help="of a step that is timed")
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    args = vars(parser.parse_args())
    only, names, repeats = args.pop("only").split(","), args.pop("rows").split(";"), args.pop("repeats")
    given, peers = args.pop("pruned"), args.pop("peers")
    peers = read_names(parser, "--peers", peers, PEERS) if peers else []
    args["calibration"] = args["calibration"] or args["data"] / "books_calibration.jsonl"
    if unknown := sorted(set(names) - set(ROWS)):
        parser.error(f"--rows: must be of {'; '.join(ROWS)}, got {'; '.join(unknown)}. Correct the names.")
    work = Work(**args)
    work.output.mkdir(parents=True, exist_ok=True)
    logger.remove()
    warnings.filterwarnings("ignore")
    ledger = Ledger(work.output / "recovery-rows.json", {"model": Path(work.model).name, "sparsity": work.sparsity})
    parts = []
    told: dict[str, Any] = {}
    with count_own_seconds():
        folders = read_folders(given) if given else {"ours": prune(work)}
        folders |= {name: prune_by_peer(work, name) for name in peers}
        if "curves" in only:
            told |= finish_rows(ledger, work, folders, names)
            parts.append(format_curves(told["curves"], told["dense"]))
        if "steps" in only:
            pruned = next(iter(folders.values()))
            samples = read_watched(work)["books"][: work.batch_size]
            how = {**work.describe(), "pruned": identify_model(str(pruned)), "repeats": repeats}
            told["steps"] = ledger.finish("steps", how, lambda: measure_steps(pruned, samples, repeats))
            parts.append(format_steps(told["steps"]))
    text = (
        f"# Recovery of {Path(work.model).name}, {work.sparsity:.0%} removed\n\n```\n" + "\n\n".join(parts) + "\n```\n"
    )
    (work.output / "recovery.md").write_text(text, encoding="utf-8")
    (work.output / "recovery.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
