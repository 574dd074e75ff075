"""Scores of a checkpoint: token perplexity in fixed windows, and lm-eval tasks."""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from loguru import logger
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from struprune_plugin.layerwise.wide_layers import compute_wide
from struprune_plugin.model.layers import SOFT_CAP, find_decoder_layers
from struprune_plugin.model.structure.tiny import find_auto_class
from struprune_plugin.runtime.precision import describe_precision, find_widened
from struprune_plugin.storage.checkpoint import load_tokenizer, load_whole, read_config
from struprune_plugin.storage.files import shorten_error

_SCORED = 2048  # tokens whose logits are in memory at once: 1.2 GB for each copy where the vocabulary is 152,000


@torch.no_grad()
def measure_perplexity(model: PreTrainedModel, tokens: Tensor, window: int, batch_size: int = 8) -> float:
    """Return token perplexity, as the pruning papers: in consecutive windows, each of which gives ``window - 1`` predictions.

    :param tokens: shape [tokens], int64; a last, shorter window is dropped
    :param window: context length in tokens, at least 2
    :param batch_size: most windows in a batch, which has at most 2,048 tokens or one window
    :raises ValueError: a token has no embedding, or there are fewer tokens than a window
    """
    check_windows(tokens, window, model.config)
    embeddings = getattr(model.get_input_embeddings(), "num_embeddings", math.inf)
    if int(tokens.max()) >= embeddings:
        raise ValueError(
            f"text: token ids must be below {embeddings}, the model's number of embeddings, got {tokens.max()}. Use its tokenizer."
        )
    windows, losses = tokens.to(model.device).unfold(0, window, window), []
    for batch in tqdm(windows.split(max(min(batch_size, _SCORED // window), 1)), desc="perplexity", leave=False):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
        losses.append(loss.double())
    return torch.cat(losses).mean().exp().item()


@contextmanager
def compute_fast(model: PreTrainedModel) -> Iterator[None]:
    """Let a model's layers and head compute in float32 in the block if its device has no products of its dtype; not those of a
    quantised one, whose kernels unpack weights as they run, nor where the class has no list of decoder layers."""
    widened = () if hasattr(model.config, "quantization_config") else find_widened("auto", model.device)
    try:
        find_decoder_layers(model)
    except ValueError:
        widened = ()
    with compute_wide(model, widened):
        if model.dtype in widened:
            logger.info(f"layers compute in {describe_precision(model.dtype, 'auto', model.device)}")
        yield


@torch.no_grad()
def measure_bits(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], window: int, batch_size: int = 8
) -> float:
    """Return bits per byte of UTF-8, which compare models with different tokenizers, as their perplexity per token does not.

    Every text is cut at white space into pieces of about ``4 * window`` bytes, the same for every tokenizer. Each is read on its
    own, behind the tokenizer's first special token (its end-of-text token where it has no beginning), and all its tokens count.

    :raises ValueError: there is no text
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    first = [] if start is None else [start]
    most = (getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize) - 1
    pieces = [piece for text in texts for piece in cut_pieces(text, 4 * window)]
    rows: list[Tensor] = []
    for piece in pieces:
        ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        rows += (torch.tensor(first + ids[at : at + most], dtype=torch.int64) for at in range(0, len(ids), most))
    rows, total = sorted(rows, key=len, reverse=True), 0.0
    with tqdm(total=len(rows), desc="bits per byte", leave=False) as bar:
        while rows:
            many = max(min(batch_size, _SCORED // len(rows[0])), 1)
            batch, rows = rows[:many], rows[many:]
            tokens = pad_sequence(batch, batch_first=True).to(model.device)
            mask = pad_sequence([torch.ones_like(row) for row in batch], batch_first=True).to(model.device)
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
            total += float((loss.double() * mask[:, 1:]).sum())
            bar.update(len(batch))
    size = sum(len(piece.encode("utf-8", "replace")) for piece in pieces)
    if not size:
        raise ValueError("text: must hold at least one character, got none. Use more text.")
    return total / math.log(2) / size


def cut_texts(texts: Sequence[str], max_tokens: int | None) -> Sequence[str]:
    """Return the first of some texts, of four bytes for each of ``max_tokens``; all where it is None."""
    if max_tokens is None:
        return texts
    starts, left = [], 4 * max_tokens
    for text in texts:
        starts.append(text.encode("utf-8", "replace")[:left].decode("utf-8", "ignore"))
        left -= len(starts[-1].encode())
        if left <= 0:
            break
    return starts


def cut_pieces(text: str, size: int) -> Iterator[str]:
    """Yield the parts of a text of about ``size`` bytes, each of which ends before white space where there is some."""
    rest = text.encode("utf-8", "replace")
    while rest:
        space = re.compile(rb"\s").search(rest, size)
        end = space.start() if space else len(rest)
        yield rest[:end].decode("utf-8")
        rest = rest[end:]


def load_checkpoint(
    path: str, dtype: str = "float32", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a dense, pruned or quantised checkpoint and its tokenizer, on the accelerator if there is one.

    :raises ValueError: nothing to load there; weight files that are broken, or that lack tensors of the configuration
    """
    config = read_config(path, trust_remote_code=trust_remote_code)
    is_capped = getattr(config.get_text_config(decoder=True), SOFT_CAP, None) is not None
    kind = {"attn_implementation": "eager"} if is_capped else {}  # fused attention would leave the cap out
    model = load_whole(find_auto_class(config), path, dtype=dtype, trust_remote_code=trust_remote_code, **kind)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return model.to(device).eval(), load_tokenizer(path, trust_remote_code=trust_remote_code)


def check_windows(tokens: Tensor, window: int, config: PretrainedConfig) -> None:
    """Raise if a text cannot be scored in such windows by a model of a configuration."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or window
    if window > positions:
        raise ValueError(f"--window: must be at most the model's {positions} positions, got {window}. Lower it.")
    if len(tokens) < window:
        raise ValueError(
            f"text: must hold at least one window of {window} tokens, got {len(tokens)}. Use more text or "
            "tokens of it, or lower the window."
        )


def check_tasks(tasks: Sequence[str], include_path: str | Path | None = None, include_defaults: bool = True) -> Any:
    """Return lm-eval's index of tasks, for :func:`run_tasks`, once the tasks' data could be loaded.

    :param include_defaults: include lm-eval's own tasks, whose listing takes seconds
    :raises ValueError: a task is not in the index, or its data cannot be loaded
    """
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(Path(include_path).resolve())
    manager = TaskManager(include_path=folder, include_defaults=include_defaults)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"--tasks: {unknown} must be known to lm-eval. Correct the names, or give the folder of the tasks by --include-path."
        )
    try:
        manager.load(list(tasks))
    except Exception as error:  # of whatever library reads the data
        raise ValueError(
            f"--tasks: the data of {', '.join(tasks)} must be at hand, got {shorten_error(error)}. Load them once from the hub, or "
            "use tasks on files."
        ) from error
    return manager


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    manager: Any,
    batch_size: int = 8,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Run lm-eval tasks on a loaded model.

    :param manager: as :func:`check_tasks` returns it
    :return: metrics by task, as lm-eval names them (``metric,filter``), with standard errors
    """
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    # lm-eval's report on the installed software (pip, git, compilers) takes seconds and is not used; git complains in most folders
    nothing: Any = lambda *_: None  # noqa: E731
    with patch_attr(evaluator, "add_env_info", nothing), patch_attr(evaluator, "get_git_commit_hash", nothing):
        results = evaluator.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal"),
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            log_samples=False,
            bootstrap_iters=100,  # above 0: standard errors; those of means need no draws
        )
    return {
        task: {name: value for name, value in metrics.items() if "," in name and isinstance(value, int | float)}
        for task, metrics in results["results"].items()
    }
