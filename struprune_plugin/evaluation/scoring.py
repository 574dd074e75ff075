"""Scores of a checkpoint: token perplexity in fixed windows, and lm-eval tasks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from struprune_plugin.model.structure.tiny import find_auto_class
from struprune_plugin.storage.checkpoint import load_tokenizer, load_whole, read_config

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

_BOOTSTRAP = 100  # draws; above 0 makes lm-eval return standard errors; those of means need no draws


@torch.no_grad()
def measure_perplexity(
    model: PreTrainedModel, tokens: Tensor, window: int, stride: int | None = None, batch_size: int = 8
) -> float:
    """Return token perplexity in fixed windows, each scored separately.

    With ``stride == window`` (the protocol of the pruning papers) every window gives ``window - 1`` predictions; with
    a smaller stride a window scores only the tokens beyond the previous window. A last, shorter window is dropped.

    :param tokens: shape [tokens], int64
    :param window: context length in tokens, at least 2
    :param stride: from 1 to ``window``; None means ``window``
    :raises ValueError: ``window`` or ``stride`` is out of range, a token has no embedding, or there are fewer tokens than a window
    """
    stride = window if stride is None else stride
    check_windows(len(tokens), window, stride)
    embeddings = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if embeddings is not None and int(tokens.max()) >= embeddings:
        raise ValueError(
            f"text: token ids must be below {embeddings}, the model's number of embeddings, got {int(tokens.max())}. Use the "
            "model's own tokenizer."
        )
    windows = tokens.unfold(0, window, stride)
    total, count = 0.0, 0
    for start in tqdm(range(0, len(windows), batch_size), desc="perplexity", leave=False):
        batch = windows[start : start + batch_size].to(model.device)
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
        if start == 0 and stride < window:  # the first window scores all tokens, the others their last ``stride``
            total, count = losses[0, :-stride].double().sum().item(), window - 1 - stride
        losses = losses[:, -stride:]
        total += losses.double().sum().item()
        count += losses.numel()
    return math.exp(total / count)


def load_checkpoint(
    path: str, dtype: str = "float32", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a dense, pruned or quantised checkpoint and its tokenizer, on the accelerator if there is one.

    :param trust_remote_code: run the code that comes with it
    :raises ValueError: nothing to load there; weight files that are broken, or that lack tensors of the configuration
    """
    auto = find_auto_class(read_config(path, trust_remote_code=trust_remote_code))
    model = load_whole(auto, path, dtype=dtype, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return model.to(device).eval(), tokenizer


def check_windows(num_tokens: int, window: int, stride: int, config: PretrainedConfig | None = None) -> None:
    """Raise if a text cannot be scored in such windows.

    :param config: configuration of the model, whose positions a window must not exceed
    :raises ValueError: in that case
    """
    if config is not None:
        positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or window
        if window > positions:
            raise ValueError(f"--window: must be at most the model's {positions} positions, got {window}. Lower it.")
    if window < 2 or not 1 <= stride <= window:
        raise ValueError(
            f"window must be at least 2 and stride in [1, window], got window={window}, stride={stride}. Raise window, or lower "
            "stride."
        )
    if num_tokens < window:
        raise ValueError(
            f"text: must hold at least one window of {window} tokens, got {num_tokens}. Use more text, or lower the window."
        )


@functools.cache
def _index_tasks(include_path: str | None, include_defaults: bool) -> TaskManager:
    """Return lm-eval's index of tasks, cached because it reads more than 10,000 files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=include_defaults)


def check_tasks(tasks: Sequence[str], include_path: str | None = None, include_defaults: bool = True) -> TaskManager:
    """Return lm-eval's index of tasks, for :func:`run_tasks`.

    :param include_path: folder with further task YAML files
    :param include_defaults: include lm-eval's own tasks, whose listing takes seconds
    :raises ValueError: a task is not in the index
    """
    manager = _index_tasks(None if include_path is None else str(Path(include_path).resolve()), include_defaults)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"tasks: {unknown} must be known to lm-eval. Correct the names, or give the folder of the tasks by --include-path."
        )
    return manager


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    manager: TaskManager,
    batch_size: int = 8,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Run lm-eval tasks on a loaded model.

    :param manager: as :func:`check_tasks` returns it
    :param limit: examples per task; None for all
    :return: metrics by task, as lm-eval names them (``metric,filter``), with standard errors
    """
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    # lm-eval's report on the installed software (pip, git, compilers) takes seconds and is not used.
    with patch_attr(evaluator, "add_env_info", lambda _results: None):
        results = evaluator.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal"),
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            log_samples=False,
            bootstrap_iters=_BOOTSTRAP,
        )
    return {
        task: {name: value for name, value in metrics.items() if "," in name and isinstance(value, int | float)}
        for task, metrics in results["results"].items()
    }
