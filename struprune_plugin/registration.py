"""Everything that importing the package promises: modifiers known to the host, pruned model types to transformers."""

from struprune_plugin import _import_host  # noqa: F401  # isort: skip  (before anything that imports the host)

from llmcompressor.modifiers.factory import ModifierFactory

from struprune_plugin import paper  # noqa: F401  (registers the paper's methods)
from struprune_plugin.entrypoint import oneshot
from struprune_plugin.export.classes import register_auto_classes
from struprune_plugin.modifiers import (
    LoRARecoveryModifier,
    SparsityAllocatorModifier,
    StruPruneModifier,
)
from struprune_plugin.storage.manifest import read_manifest

__all__ = [
    "LoRARecoveryModifier",
    "SparsityAllocatorModifier",
    "StruPruneModifier",
    "oneshot",
    "read_manifest",
]

ModifierFactory.register("StruPruneModifier", StruPruneModifier)
ModifierFactory.register("StructPruneModifier", StruPruneModifier)
ModifierFactory.register("SparsityAllocatorModifier", SparsityAllocatorModifier)
ModifierFactory.register("LoRARecoveryModifier", LoRARecoveryModifier)
register_auto_classes()
