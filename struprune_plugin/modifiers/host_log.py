"""Log of a run from Python: llm-compressor's warnings, each once, without its lifecycle steps, and the final table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from compressed_tensors.utils import patch_attr
from loguru import logger

from struprune_plugin.reporting.tables import summarize_layers, summarize_manifest
from struprune_plugin.storage.manifest import read_manifest

LOG_LEVEL = "LLM_COMPRESSOR_LOG_LEVEL"  # variable of llm-compressor; if it is set, its whole log is shown
_STEPS = ("llmcompressor.core.lifecycle", "llmcompressor.pipelines.independent.pipeline", "llmcompressor.recipe.recipe")
_STAGE = "struprune_plugin.modifiers.pruning"
_DEVICE = "llmcompressor.utils.dev"  # logs for every module that there is no accelerator


class _WithoutSteps:
    """Logger of llm-compressor with ``info`` disabled."""

    def info(self, *args: Any, **kwargs: Any) -> None:
        """Log nothing."""

    def patch(self, *args: Any) -> _WithoutSteps:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(logger, name)


@contextmanager
def quieten_host(summarises: bool) -> Iterator[None]:
    """Hide llm-compressor's lifecycle steps in the block, and log a missing accelerator only once.

    The loggers of its modules are replaced in the block. The user's handlers and levels stay unchanged.

    :param summarises: whether :func:`log_output` follows, which tells the removed parameters, too: then the pruning stage does
        not log them
    """
    with ExitStack() as stack:
        if summarises:
            stack.enter_context(patch_attr(import_module(_STAGE), "logger", _WithoutSteps()))
        if LOG_LEVEL not in os.environ:
            for name in _STEPS:
                stack.enter_context(patch_attr(import_module(name), "logger", _WithoutSteps()))
            stack.enter_context(patch_attr(import_module(_DEVICE), "logger", logger.bind(log_once=True)))
        yield


def log_output(folder: Path, pruned: bool) -> None:
    """Log the path of an output and, if it was pruned in this run, its summary."""
    parts = [f"wrote {folder}"]
    if pruned:
        manifest = read_manifest(folder)
        parts = [str(summarize_layers(manifest)), summarize_manifest(manifest, folder), *parts]
    logger.info("\n" * pruned + "\n\n".join(parts))
