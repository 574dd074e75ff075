"""What a smaller vocabulary costs: bits per byte on several texts, at several sizes of a model in memory.

    python -m eval.vocabulary --model MODEL --text books.jsonl --text code.py --language en \
        --score WikiText-2=DATA/wikitext2_test.jsonl --score how-to=piqa.jsonl:query --sizes 0.8,0.6,0.4

The first column of scores is of the held-out tenth of the ranking text, whose growth is estimated. Texts are JSON lines
(``FILE:COLUMN``; the column is ``text`` if left out) or any other text file, read whole.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from struprune_plugin.evaluation.scoring import load_checkpoint, measure_bits
from struprune_plugin.evaluation.text import read_texts
from struprune_plugin.reporting.tables import Table
from struprune_plugin.vocabulary.trim_plan import Ranking, TrimPlan, check_source, plan_trim


def read_any(source: str) -> list[str]:
    """Return the texts of ``FILE``, ``FILE:COLUMN`` or any other text file."""
    name, _, column = source.partition(":")
    return read_texts(name, column or "text") if name.endswith(".jsonl") else [Path(name).read_text(encoding="utf-8")]


def take_bytes(texts: list[str], most: int) -> list[str]:
    """Return the first bytes of some texts."""
    joined = "\n".join(texts).encode()
    return [joined[:most].decode(errors="ignore")]


def measure_bytes(texts: list[str]) -> int:
    """Return the bytes of some texts."""
    return sum(len(text.encode("utf-8", "replace")) for text in texts)


def list_weights(model: PreTrainedModel) -> list[Any]:
    """Return the weights of a model's embeddings and head, which may be the same."""
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


def take_rows(model: PreTrainedModel, plan: TrimPlan, whole: list[Any]) -> PreTrainedTokenizerFast:
    """Leave a model in memory a plan's rows of its whole weights; return the tokenizer of these."""
    embeddings, head, loaded = model.get_input_embeddings(), model.get_output_embeddings(), plan.source.loaded
    rows = torch.tensor([number for number in plan.kept if number < plan.source.num_rows])
    weights = {weight: nn.Parameter(weight[rows.to(weight.device)]) for weight in whole}
    embeddings.weight, head.weight = (weights[weight] for weight in whole)
    embeddings.padding_idx = None  # of the whole vocabulary
    smaller = plan.source.tokenizer.make_smaller({old: new for new, old in enumerate(plan.kept)})
    names = {"bos_token": loaded.bos_token, "eos_token": loaded.eos_token}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(smaller), **names)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of what is ranked by and what is scored."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", action="append", required=True, help="what tokens are ranked by; may be repeated")
    parser.add_argument("--language")
    parser.add_argument("--score", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--bytes", type=int, default=12_000, help="scored of every text")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")


def read_scored(parsed: argparse.Namespace) -> dict[str, list[str]]:
    """Return the first bytes of the texts to score, by name."""
    named = (entry.partition("=") for entry in parsed.score)
    return {name: take_bytes(read_any(file), parsed.bytes) for name, _, file in named}


@contextmanager
def rank_by(texts: Iterable[str], **fields: Any) -> Iterator[Ranking]:
    """Yield a ranking by all texts together, which are in one file meanwhile; ``fields`` are its others."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        file.flush()
        yield Ranking(file.name, **fields)


def read_ranking(parsed: argparse.Namespace) -> AbstractContextManager[Ranking]:
    """Return a ranking by all texts of a command line, to enter."""
    return rank_by((text for name in parsed.text for text in read_any(name)), language=parsed.language, limit=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--sizes", default="0.8,0.6,0.4", help="shares of the rows, or numbers of rows")
    parsed = parser.parse_args()
    texts, source = read_scored(parsed), check_source(parsed.model)
    start = time.perf_counter()
    with read_ranking(parsed) as ranking:
        plan = plan_trim(source, ranking)
    print(f"ranked in {time.perf_counter() - start:.0f} s; at least {plan.least} rows", flush=True)
    model, tokenizer = load_checkpoint(parsed.model, parsed.dtype)
    texts = {"held-out": plan.held_out[:: math.ceil(measure_bytes(plan.held_out) / parsed.bytes)], **texts}
    whole_bits = {name: measure_bits(model, tokenizer, text, parsed.window) for name, text in texts.items()}
    scores = {source.num_rows: whole_bits}
    print(scores, flush=True)
    sizes = [float(size) for size in parsed.sizes.split(",")]
    rounded = [round((size * source.num_rows if size < 1 else size) / 64) * 64 for size in sizes]
    whole = list_weights(model)
    for size in rounded:
        smaller = take_rows(model, replace(plan, size=size), whole)
        scores[size] = {name: measure_bits(model, smaller, text, parsed.window) for name, text in texts.items()}
        print(size, scores[size], flush=True)
    print(show(plan, scores))


def show(plan: TrimPlan, scores: dict[int, dict[str, float]]) -> Table:
    """Return one row per size: share of the whole model, estimated growth of the held-out text's bits, bits per byte."""
    dense, whole = next(iter(scores.values())), plan.estimate(plan.source.num_rows).parameters
    rows = []
    for size, bits in scores.items():
        point = plan.estimate(size)
        cells = [f"{value:.4f} ({value / dense[name] - 1:+.2%})" for name, value in bits.items()]
        rows.append([f"{size:,}", f"{point.parameters / whole - 1:+.1%}", f"{point.bits_more:+.2%}", *cells])
    return Table(["rows", "whole model", "estimated", *dense], rows)


if __name__ == "__main__":
    main()
