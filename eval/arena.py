"""The protocol of LowRankArena (github.com/Zishan-Shao/lowrankarena): one row per share of the decoder's linears that stays.

    python -m eval.arena --model MODEL --keep 0.8,0.6 --output OUT

WikiText-2's test split and the first 1,100 texts of C4's validation split, each in contiguous windows of 2,048 tokens without
special tokens; BoolQ, ARC, WinoGrande, PIQA, HellaSwag and OpenBookQA without examples by lm-eval 0.4.11 or newer,
length-normalised accuracy where a task has one. In a folder given by ``--data``, wikitext2_test.jsonl and c4_validation.jsonl
stand in for the hub's; the items of PIQA and HellaSwag that ``eval/tasks`` names stand in where the hub's are not at hand. What
stands in, and what is left out and why, is in the row and below the table. Calibration is as ``eval.quality``'s; the board's
own methods read WikiText-2. Finished rows are read back, not computed again. Writes arena.json and arena.md.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.ledger import Ledger, read_names
from eval.methods import OURS, SETS
from eval.rows import (
    C4_WINDOWS,
    HUB,
    Workload,
    make_parser,
    measure_text,
    parse_quietly,
    read_hub_text,
    read_workload,
    run_row,
    score_dense,
)
from eval.zeroshot import TASKS as LOCAL_TASKS
from eval.zeroshot import TASKS_FOLDER, identify_tasks
from struprune_plugin.evaluation.scoring import check_tasks, run_tasks
from struprune_plugin.evaluation.text import read_texts
from struprune_plugin.reporting.tables import Table
from struprune_plugin.storage.files import shorten_error

TASKS = {  # by what the board's tables call them
    **{"BoolQ": "boolq", "ARC-e": "arc_easy", "ARC-c": "arc_challenge", "WinoGrande": "winogrande", "PIQA": "piqa"},
    **{"HellaSwag": "hellaswag", "OBQA": "openbookqa"},
}
# the hub's; a file's
TEXTS = {"WikiText-2": ("wikitext2", "wikitext2_test.jsonl"), "C4": ("c4", "c4_validation.jsonl")}
OLDEST = (0, 4, 11)  # lm-eval of the board


@dataclass(frozen=True)
class Board:
    """What lies at hand of the board's data.

    :param texts: by name, joined as the pruning papers join them
    :param tasks: (task of lm-eval, its index of tasks) by name
    :param notes: what stands in for the board's data, by name
    :param missing: why others are left out, by name
    :param limit: items of each task; all where None
    """

    texts: dict[str, str] = field(default_factory=dict)
    tasks: dict[str, tuple[str, Any]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    limit: int | None = None


def find_sources(data: Path | None) -> dict[str, str]:
    """Return the file or the hub's name of each text."""
    return {n: str(data / file) if data and (data / file).is_file() else hub for n, (hub, file) in TEXTS.items()}


def find_board(sources: Mapping[str, str], limit: int | None = None) -> Board:
    """Load the texts and tasks that can be had, from files, the hub or its cache.

    :raises SystemExit: an older lm-eval, or nothing to score
    """
    if tuple(int(part) for part in version("lm-eval").split(".")[:3]) < OLDEST:
        raise SystemExit(f"lm-eval: must be 0.4.11 or newer, got {version('lm-eval')}. Install it.")
    board = Board(limit=limit)
    for name, source in sources.items():
        try:
            board.texts[name] = read_hub_text(source) if source in HUB else "\n\n".join(read_texts(source))
        except Exception as error:  # of whatever library reads the hub
            board.missing[name] = shorten_error(error)
        else:
            if source not in HUB:
                board.notes[name] = f"{Path(source).name} in place of the hub's"
    for name, task in TASKS.items():
        try:
            board.tasks[name] = task, check_tasks([task])
        except ValueError as error:
            try:
                identify_tasks([name])
                local = LOCAL_TASKS[name]
                board.tasks[name] = local, check_tasks([local], str(TASKS_FOLDER), include_defaults=False)
                board.notes[name] = f"{local} of eval/tasks in place of the hub's"
            except (KeyError, ValueError, SystemExit):
                board.missing[name] = str(error)
    if not board.texts and not board.tasks:
        raise SystemExit(
            "--data: must hold a text of the board, got none, nor any from the hub. Load them once from the hub."
        )
    return board


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str, most: int | None) -> Tensor:
    """Return the tokens of a whole text, without special ones, shape [tokens], int64."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:most])


def score_board(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, work: Workload, board: Board
) -> dict[str, Any]:
    """Return perplexity by text, accuracy by task, and what stands in or is left out."""
    most = {name: work.max_tokens or (C4_WINDOWS * work.window if name == "C4" else None) for name in board.texts}
    accuracy, perplexity = {}, {}
    for name, text in board.texts.items():
        tokens = tokenize(work.tokenizer, text, most[name])
        perplexity[name] = measure_text(model, tokenizer, tokens, work)
    for name, (task, manager) in board.tasks.items():
        found = run_tasks(model, tokenizer, [task], manager, limit=board.limit)[task]
        accuracy[name] = float(found.get("acc_norm,none", found.get("acc,none", math.nan)))
    return {"perplexity": perplexity, "accuracy": accuracy, "notes": board.notes, "missing": board.missing}


def format_board(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line per row, then what stands in for the board's data and what is left out."""
    header = ["keep | method", *TEXTS, *TASKS, "mean", "removed of the decoder's linears", "of the whole model"]
    table = []
    for key, row in rows.items():
        line = [key, *(f"{row['perplexity'][name]:.2f}" if name in row["perplexity"] else "–" for name in TEXTS)]
        line += [f"{row['accuracy'][name]:.3f}" if name in row["accuracy"] else "–" for name in TASKS]
        mean = f"{statistics.fmean(row['accuracy'].values()):.3f}" if row["accuracy"] else "–"
        table.append([*line, mean, f"{row['removed']:.1%}", f"{row['removed_of_model']:.1%}"])
    first = next(iter(rows.values()))
    lines = [f"{name}: {note}" for name, note in first["notes"].items()]
    if 0 < len(first["accuracy"]) < len(TASKS):
        lines.append(f"mean: of {len(first['accuracy'])} of {len(TASKS)} tasks")
    lines += [f"{name}: left out, {why}" for name, why in first["missing"].items()]
    return "\n".join([str(Table(header, table)), "", *lines])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--keep", default="0.8,0.6", help="shares of the decoder's linears that stay, comma-separated")
    parser.add_argument("--methods", default=OURS, help=f"comma-separated, of {', '.join(SETS['peers'])}")
    parser.add_argument("--limit", type=int, help="items of each task, for a trial; the row says so")
    args = parse_quietly(parser)
    args.window = args.window or 2048
    chosen = read_names(parser, "--methods", args.methods, SETS["peers"])
    keeps = [float(keep) for keep in args.keep.split(",")]
    if not all(0 < keep < 1 for keep in keeps):
        parser.error(f"--keep: must be shares above 0 and below 1, got {args.keep}. Correct it.")

    work = replace(read_workload(args), texts=find_sources(args.data), max_tokens=args.max_tokens)
    board = find_board(work.texts, args.limit)
    if args.limit or args.max_tokens:
        limits = f"{args.limit or 'all'} items of each task, {args.max_tokens or 'all'} tokens of each text"
        board.notes["trial"] = limits
    score, ledger = partial(score_board, board=board), Ledger(args.output / "arena.json")
    hand = {"board": [sorted(board.texts), sorted(board.tasks), board.notes, sorted(board.missing), version("lm-eval")]}
    rows = {"1 | dense": ledger.finish("1 | dense", work.identify_row() | hand, lambda: score_dense(work, score))}
    for keep in keeps:
        for name in chosen:
            row, sparsity = SETS["peers"][name], round(1 - keep, 6)
            how = work.identify_row(row, sparsity) | hand
            key = f"{keep:g} | {name}"
            rows[key] = ledger.finish(key, how, partial(run_row, row, sparsity, work, score))
    text = format_board(rows)
    (args.output / "arena.md").write_text(f"# {Path(args.model).name}\n\n```\n{text}\n```\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
