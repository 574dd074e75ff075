"""Everything that importing the package promises: modifiers known to the host, pruned model types to transformers."""

from struprune_plugin import _import_host  # noqa: F401  # isort: skip  (before anything that imports the host)

from llmcompressor.modifiers.factory import ModifierFactory

from struprune_plugin.entrypoint import oneshot
from struprune_plugin.export import read_manifest, register_auto_classes
from struprune_plugin.modifiers import (
    LoRARecoveryModifier,
    RecoveryModifier,
    SparsityAllocatorModifier,
    StruPruneModifier,
)

__all__ = [
    "LoRARecoveryModifier",
    "RecoveryModifier",
    "SparsityAllocatorModifier",
    "StruPruneModifier",
    "oneshot",
    "read_manifest",
]

ModifierFactory.register("StruPruneModifier", StruPruneModifier)
ModifierFactory.register("StructPruneModifier", StruPruneModifier)
ModifierFactory.register("SparsityAllocatorModifier", SparsityAllocatorModifier)
ModifierFactory.register("LoRARecoveryModifier", LoRARecoveryModifier)
ModifierFactory.register("RecoveryModifier", RecoveryModifier)
register_auto_classes()
