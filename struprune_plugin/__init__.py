"""StruPrune: structured pruning of large language models, as a plugin for llm-compressor.

Importing this package registers its modifiers with llm-compressor and its model types with transformers. For the command line
the registration waits until a command needs it: help and early refusals need no torch. Without llm-compressor, beside an
inference engine, only the model types are registered.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LoRARecoveryModifier",
    "SparsityAllocatorModifier",
    "StruPruneModifier",
    "oneshot",
    "read_manifest",
]


def _is_command_line() -> bool:
    """Return whether this process was started as ``struprune``, or ``python -m struprune_plugin.cli`` is about to run.

    ``sys.argv[0]`` is ``-m`` while a module that is to be run is looked up, and its path as soon as it runs.
    """
    name = sys.argv[0] if sys.argv else ""
    return Path(name).name in ("struprune", "struprune.exe") or (
        name == "-m" and "struprune_plugin.cli" in sys.orig_argv
    )


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from struprune_plugin import registration

    return getattr(registration, name)


if not TYPE_CHECKING and find_spec("llmcompressor") is None:
    from struprune_plugin.export.classes import register_auto_classes

    register_auto_classes()
elif TYPE_CHECKING or not _is_command_line():
    from struprune_plugin.registration import (
        LoRARecoveryModifier,
        SparsityAllocatorModifier,
        StruPruneModifier,
        oneshot,
        read_manifest,
    )
