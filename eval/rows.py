"""Rows of a comparison: ways to make a model smaller, run on one workload; every finished row is kept on disk."""

import argparse
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from eval.ledger import EVAL, Ledger, describe_code, identify_model, identify_text
from eval.zeroshot import TASKS, find_items, identify_tasks, read_items, score_tasks
from struprune_plugin import LoRARecoveryModifier, StruPruneModifier, oneshot, read_manifest
from struprune_plugin.evaluation.scoring import (
    check_windows,
    cut_texts,
    load_checkpoint,
    measure_bits,
    measure_perplexity,
)
from struprune_plugin.evaluation.text import make_calibration_dataset, read_texts, stream_texts, tokenize_texts
from struprune_plugin.model.experts import linearize_experts
from struprune_plugin.model.layers import count_parameters, count_prunable_parameters
from struprune_plugin.storage.files import measure_weight_bytes

_TEXTS = {"WikiText-2": "wikitext2_test.jsonl", "books": "books_test.jsonl"}
PROTOCOLS = {"short": (64, 256), "long": (64, 2048)}  # calibration windows, and tokens of these and of scored windows
ITEMS = "items"  # the right answers of the zero-shot items: text of neither kind that methods are calibrated on
HUB = ("wikitext2", "c4")
C4_TEXTS, C4_WINDOWS = 1100, 256  # of the validation file, as SparseGPT's scripts (and all who follow them) score C4


Score = Callable[[PreTrainedModel, PreTrainedTokenizerBase, "Workload"], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One way to make a model smaller: fields of our modifier, or a peer's function.

    :param fields: of :class:`StruPruneModifier`; empty for its defaults
    :param recovery: fields of a :class:`LoRARecoveryModifier` in a second run, on the pruned folder; no such run where None
    :param peer: ``module:function`` of type ``(folder, windows, sparsity) -> PeerResult``, a peer's or of several steps of ours;
        then there are no fields
    :param text: calibration windows, as a multiple of the workload's
    :param of_experts: the asked and the removed share are those of the routed experts' parameters
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    recovery: Mapping[str, Any] | None = None
    peer: str = ""
    text: int = 1
    of_experts: bool = False


@dataclass(frozen=True)
class Workload:
    """What all rows of a table share: the model, the calibration text and the texts to score.

    :param texts: name of a text -> its JSON-lines file, or ``wikitext2`` or ``c4`` on the hub, or :data:`ITEMS`
    :param recovery: text that recovery rows are trained on, a file or a hub name
    :param window: length of calibration samples and of scored windows, in tokens
    :param max_tokens: scored of every text; all of it where None
    :param tasks: zero-shot tasks to score, too, of :data:`eval.zeroshot.TASKS`
    :param divergence: measure KL(dense ‖ pruned) on the texts, too
    :param bits: measure bits per byte on the texts, too, which compare models with different tokenizers
    """

    model: str
    calibration: str
    texts: Mapping[str, str]
    recovery: str
    num_samples: int
    recovery_samples: int
    window: int
    max_tokens: int | None
    tasks: Sequence[str] = ()
    divergence: bool = False
    bits: bool = False

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model as it is, whose tokens perplexity counts."""
        return AutoTokenizer.from_pretrained(self.model)

    def identify_row(self, row: Row | None = None, sparsity: float = 0.0) -> dict[str, Any]:
        """Return everything that the result of a row depends on, of the dense one where None."""
        told: dict[str, Any] = {
            "code": describe_code(Path(__file__), *([EVAL / "peers"] if row is not None and row.peer else [])),
            "model": identify_model(self.model),
            "texts": {name: identify_text(s) for name, s in self.texts.items() if s != ITEMS},
            "items": [identify_text(str(file)) for file in find_items() if ITEMS in self.texts.values()],
            "scored": [self.window, self.window, self.max_tokens, self.divergence, self.bits],
            "tasks": identify_tasks(self.tasks),
        }
        if row is None:
            return told
        fields = {} if row.peer else StruPruneModifier(**{**row.fields, "sparsity": sparsity}).dump_fields()
        told |= {"asked": [row.peer, sparsity, row.of_experts, fields]}
        told |= {"calibration": identify_text(self.calibration), "num_samples": row.text * self.num_samples}
        if row.recovery is not None:
            told["recovery"] = [dict(row.recovery), identify_text(self.recovery), self.recovery_samples]
        return told


def make_parser(text: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of a command's folder of results and of what :func:`read_workload` reads."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--model", help="model folder or hub name")
    parser.add_argument(
        "--data",
        type=Path,
        help="folder with mixed_calibration.jsonl, wikitext2_test.jsonl, books_test.jsonl and books_train.jsonl (for "
        "recovery); C4 and WikiText-2 from the hub if unset",
    )
    parser.add_argument(
        "--protocol",
        choices=PROTOCOLS,
        default="short",
        help="of local text: short (64 windows of 256 tokens, quick) or long (64 of 2,048, as people prune)",
    )
    parser.add_argument(
        "--calibration", help="a JSON-lines file, in DATA or elsewhere: mixed_calibration.jsonl; C4 if no --data"
    )
    parser.add_argument("--num-samples", type=int, help="calibration windows: the protocol's; 128 of C4")
    parser.add_argument("--recovery-samples", type=int, default=896, help="training windows of recovery rows")
    parser.add_argument("--window", type=int, help="tokens: the protocol's; 2048 on the hub's text")
    parser.add_argument("--max-tokens", type=int, help="scored of every text: 60,000 of local ones, all of the hub's")
    parser.add_argument("--divergence", action="store_true", help="KL(dense || pruned) on the texts, too, in nats")
    return parser


def parse_quietly(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return a command's arguments; from here on it prints its own results alone, and torch draws as in every such command."""
    args = parser.parse_args()
    logger.remove()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    return args


def read_workload(args: argparse.Namespace) -> Workload:
    """Return the workload of a command line: local texts, or the paper's (128 windows of 2048 C4 tokens)."""
    if args.model is None:
        raise SystemExit("--model: must be a model folder or a hub name, got none.")
    if args.data is None:
        calibration, recovery = args.calibration or "c4", "c4"
        texts, samples, window, max_tokens = {"WikiText-2": "wikitext2", "C4": "c4"}, 128, 2048, None
    else:
        name, recovery = args.calibration or "mixed_calibration.jsonl", str(args.data / "books_train.jsonl")
        calibration = str(args.data / name if (args.data / name).is_file() else name)
        texts = {name: str(args.data / file) for name, file in _TEXTS.items()}
        if find_items():
            texts["how-to"] = ITEMS
        (samples, window), max_tokens = PROTOCOLS[args.protocol], 60_000
    return Workload(
        args.model,
        calibration,
        texts,
        recovery,
        num_samples=args.num_samples or samples,
        recovery_samples=args.recovery_samples,
        window=args.window or window,
        max_tokens=args.max_tokens or max_tokens,
        tasks=tuple(TASKS) if getattr(args, "zeroshot", False) else (),
        divergence=args.divergence,
    )


def run_rows(
    ledger: Ledger, work: Workload, rows: Mapping[str, Row], sparsities: Iterable[float]
) -> dict[str, dict[str, Any]]:
    """Finish the dense row and every row at every sparsity; return them by ``<sparsity> | <name>``."""
    finished = {"dense": ledger.finish("dense", work.identify_row(), lambda: score_dense(work))}
    for sparsity in sparsities:
        for name, row in rows.items():
            key, how = f"{sparsity:g} | {name}", work.identify_row(row, sparsity)
            finished[key] = ledger.finish(key, how, lambda r=row, s=sparsity: _attempt(r, s, work))  # type: ignore[misc]
    return finished


def _attempt(row: Row, sparsity: float, work: Workload) -> dict[str, Any]:
    """Return a row, or why the method refuses the work: one of them must not stop a long table."""
    try:
        return run_row(row, sparsity, work)
    except ValueError as error:
        return {"refused": str(error)}


def run_row(row: Row, sparsity: float, work: Workload, score: Score | None = None) -> dict[str, Any]:
    """Prune by one row into a scratch folder; return perplexities, what is gone, and seconds of the method alone.

    :param score: what is measured in place of :func:`score_all`
    """
    score = score or score_all
    dataset = make_calibration_dataset(work.calibration, work.tokenizer, row.text * work.num_samples, work.window)
    if row.peer:
        module, function = row.peer.split(":")
        result = getattr(import_module(module), function)(work.model, torch.tensor(dataset["input_ids"]), sparsity)
        of_model = result.removed * measure_base(work.model, row.of_experts) + result.removed_rows
        told = {"removed": result.removed, "removed_of_model": of_model, "bytes": None}
        told |= {"seconds": result.seconds, "note": result.note}
        return {**score(result.model.float(), result.tokenizer or work.tokenizer, work), **told}
    scale = measure_experts(work.model) if row.of_experts else 1.0
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "pruned"
        seconds = _run_stage(work.model, StruPruneModifier(sparsity=scale * sparsity, **row.fields), dataset, out)
        manifest = read_manifest(out)
        told = {
            "removed": manifest.budget.met_sparsity / scale,
            "removed_of_model": 1 - manifest.model.parameters_after / manifest.model.parameters_before,
            "parameters": manifest.model.parameters_after,
            "method_seconds": next(stage.seconds for stage in manifest.stages if stage.name == "whole pass"),
        }
        if row.recovery is not None:
            dataset = make_calibration_dataset(work.recovery, work.tokenizer, work.recovery_samples, work.window)
            pruned, out = out, Path(scratch) / "recovered"
            seconds += _run_stage(str(pruned), LoRARecoveryModifier(**row.recovery), dataset, out)
        told |= {"bytes": measure_weight_bytes(out), "seconds": seconds}
        return {**score(load_checkpoint(str(out))[0], work.tokenizer, work), **told}


def measure_experts(model: str) -> float:
    """Return the routed experts' share of the parameters that our sparsity counts."""
    loaded, _ = load_checkpoint(model, "auto")
    linearize_experts(loaded)
    return 1 - count_prunable_parameters(loaded) / count_prunable_parameters(loaded, mixtures=True)


def measure_base(model: str, of_experts: bool = False) -> float:
    """Return the share of a model's parameters that a row's ``removed`` is a share of."""
    loaded, _ = load_checkpoint(model, "auto")
    share = count_prunable_parameters(loaded, mixtures=True) / count_parameters(loaded)
    return share * (measure_experts(model) if of_experts else 1)


def _run_stage(model: str, modifier: StruPruneModifier | LoRARecoveryModifier, dataset: Any, out: Path) -> float:
    start = time.perf_counter()
    oneshot(
        model=model,
        recipe=modifier,
        output_dir=out,
        dataset=dataset,
        batch_size=8,
        num_calibration_samples=len(dataset),
        shuffle_calibration_samples=False,
    )
    return time.perf_counter() - start


def score_dense(work: Workload, score: Score | None = None) -> dict[str, Any]:
    """Return the row of the model as it is; ``score`` as in :func:`run_row`."""
    model, tokenizer = load_checkpoint(work.model)
    told = {"removed": 0.0, "removed_of_model": 0.0, "parameters": count_parameters(model), "seconds": 0.0}
    return {**(score or score_all)(model, tokenizer, work), **told, "bytes": measure_weight_bytes(work.model) or None}


def score_all(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, work: Workload) -> dict[str, Any]:
    """Return what is measured of a model: perplexity by text and, where tasks are asked for, accuracy by task."""
    texts = {name: read_tokens(source, work.tokenizer, work) for name, source in work.texts.items()}
    told: dict[str, Any] = {"perplexity": {n: measure_text(model, tokenizer, text, work) for n, text in texts.items()}}
    if work.bits:
        plain = {name: cut_texts(list_texts(source), work.max_tokens) for name, source in work.texts.items()}
        told["bits_per_byte"] = {n: measure_bits(model, tokenizer, part, work.window) for n, part in plain.items()}
    if work.divergence:
        dense = load_checkpoint(work.model)[0]
        told["divergence"] = {name: measure_divergence(dense, model, text, work.window) for name, text in texts.items()}
    return {**told, "zeroshot": score_tasks(model, tokenizer, work.tasks)} if work.tasks else told


@torch.no_grad()
def measure_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Tensor, work: Workload) -> float:
    """Return perplexity per token of the workload's model: :func:`measure_perplexity` where a model has as many.

    A smaller vocabulary reads the text of the same windows, one by one. The nats of all text behind a window's first token are
    divided by the whole vocabulary's tokens there.

    :param tokens: of the whole vocabulary, shape [tokens], int64
    :raises ValueError: as :func:`measure_perplexity`; such a window takes more tokens than the model has positions
    """
    if len(tokenizer) == len(work.tokenizer):
        return measure_perplexity(model, tokens, work.window)
    total, windows = 0.0, tokens.unfold(0, work.window, work.window)
    for ids in windows.tolist():
        texts = (work.tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in (ids[:1], ids[1:]))
        first, rest = (torch.tensor(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts)
        read = torch.cat([first, rest]).to(model.device)
        check_windows(read, len(read), model.config)
        logits = model(input_ids=read[None], use_cache=False).logits[0, len(first) - 1 : -1].float()
        total += float(torch.nn.functional.cross_entropy(logits, read[len(first) :], reduction="none").double().sum())
    return math.exp(total / windows[:, 1:].numel())


@torch.no_grad()
def measure_divergence(dense: PreTrainedModel, model: PreTrainedModel, tokens: Tensor, window: int) -> float:
    """Return KL(dense ‖ model) in nats, mean over the predictions of windows read one by one; NaN between vocabularies."""
    if len(model.get_input_embeddings().weight) < len(dense.get_input_embeddings().weight):
        return math.nan
    total, windows = 0.0, tokens.unfold(0, window, window)
    for batch in windows.split(max(1024 // window, 1)):
        wanted, found = (
            torch.log_softmax(m(input_ids=batch.to(m.device), use_cache=False).logits[:, :-1].float(), -1)
            for m in (dense, model)
        )
        total += float(torch.nn.functional.kl_div(found, wanted, reduction="sum", log_target=True))
    return total / windows[:, 1:].numel()


def read_tokens(source: str, tokenizer: PreTrainedTokenizerBase, work: Workload) -> Tensor:
    """Return the tokens of a text to score, shape [tokens], int64.

    A file's texts are tokenised one by one. The hub's are joined first, as the pruning papers do: WikiText-2's test lines
    by blank lines; the first 1,100 texts of C4's first validation file by blanks, of which 256 windows count. As there, their
    windows are cut from one stream; a file's each begin as the tokenizer begins a text.
    """
    if source in HUB:
        most = work.max_tokens or (C4_WINDOWS * work.window if source == "c4" else None)
        return tokenize_texts(tokenizer, list_texts(source), most)
    return tokenize_texts(tokenizer, list_texts(source), work.max_tokens, work.window)


def list_texts(source: str) -> list[str]:
    """Return a text to score as :func:`read_tokens` reads it, before it is cut."""
    if source == ITEMS:
        return ["\n\n".join(read_items())]
    return [read_hub_text(source)] if source in HUB else read_texts(source)


def read_hub_text(source: str) -> str:
    """Return a text of :data:`HUB`, from the hub or its cache, joined as the pruning papers do."""
    if source == "wikitext2":
        return "\n\n".join(stream_texts(source, split="test"))
    return " ".join(islice(stream_texts(source, split="validation"), C4_TEXTS))


def list_refusals(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one sentence a refused row."""
    return [f"{key}: refused, {row['refused']}" for key, row in rows.items() if "refused" in row]
