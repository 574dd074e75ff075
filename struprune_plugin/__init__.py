"""StruPrune: structured pruning of large language models, as a plugin for llm-compressor.

Importing this package registers its modifiers with llm-compressor and its model types with transformers. The command line
(the module ``struprune_cli``) registers later, when a command needs it. Without llm-compressor, beside an inference engine, only
the model types are registered.
"""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "LoRARecoveryModifier",
    "SparsityAllocatorModifier",
    "StruPruneModifier",
    "oneshot",
    "read_manifest",
    "trim_vocabulary",
]

if not TYPE_CHECKING and find_spec("llmcompressor") is None:
    from struprune_plugin.export.classes import register_auto_classes

    register_auto_classes()
elif TYPE_CHECKING or "struprune_cli" not in sys.modules:
    from struprune_plugin.registration import (
        LoRARecoveryModifier,
        SparsityAllocatorModifier,
        StruPruneModifier,
        oneshot,
        read_manifest,
        trim_vocabulary,
    )
