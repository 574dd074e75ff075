"""Score a checkpoint: token perplexity in fixed windows, and lm-eval tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def measure_perplexity(
    model: PreTrainedModel, tokens: Tensor, window: int, stride: int | None = None, batch_size: int = 8
) -> float:
    """Return token perplexity in fixed windows, each scored on its own.

    With ``stride == window`` (the protocol of the pruning papers) every window gives ``window - 1`` predictions; with
    a smaller stride a window scores only what the one before it has not reached. A last, shorter window is dropped.

    :param tokens: shape [tokens], int64
    :param window: context length in tokens, at least 2
    :param stride: from 1 to ``window``; ``window`` where None
    :raises ValueError: the contract of window and stride, or fewer tokens than one window
    """
    stride = window if stride is None else stride
    if window < 2 or not 1 <= stride <= window:
        raise ValueError(f"window must be at least 2 and stride in [1, window], got window={window}, stride={stride}.")
    if len(tokens) < window:
        raise ValueError(f"text: must hold at least one window of {window} tokens, got {len(tokens)}. Lower window.")
    windows = tokens.unfold(0, window, stride)
    total, count = 0.0, 0
    for start in tqdm(range(0, len(windows), batch_size), desc="perplexity", leave=False):
        batch = windows[start : start + batch_size].to(model.device)
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
        if start == 0 and stride < window:  # the first window scores all it has, the others their last ``stride``
            total, count = losses[0, :-stride].double().sum().item(), window - 1 - stride
        losses = losses[:, -stride:]
        total += losses.double().sum().item()
        count += losses.numel()
    return math.exp(total / count)


def load_checkpoint(path: str, dtype: str = "float32") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a dense, pruned or quantised checkpoint and its tokenizer, on the accelerator where there is one.

    :raises ValueError: nothing to load there
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model: {path!r} must be a model folder or a hub name that can be loaded, got: {first}"
        ) from None
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return model.to(device).eval(), tokenizer


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    include_path: str | None = None,
    batch_size: int = 8,
    limit: int | None = None,
    bootstrap_iters: int = 0,
    include_defaults: bool = True,
) -> dict[str, dict[str, Any]]:
    """Run lm-eval tasks on a loaded model.

    :param include_path: folder with task YAML files of your own
    :param bootstrap_iters: draws for standard errors that have no formula; at 0 lm-eval gives none at all
    :param include_defaults: know lm-eval's own tasks, too, which takes it seconds to list
    :return: metrics by task, as lm-eval names them
    :raises ValueError: a task that lm-eval does not know
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path, include_defaults=include_defaults)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise ValueError(f"tasks: {unknown} must be known to lm-eval. Correct the names or give --include-path.")
    results = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal"),
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        log_samples=False,
        bootstrap_iters=bootstrap_iters,
    )
    return {
        task: {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in results["results"].items()
    }
