"""The modifiers that recipes name."""

from struprune_plugin.modifiers.allocator import SparsityAllocatorModifier
from struprune_plugin.modifiers.pruning import StruPruneModifier
from struprune_plugin.modifiers.recovery import LoRARecoveryModifier

__all__ = ["MODIFIERS", "LoRARecoveryModifier", "SparsityAllocatorModifier", "StruPruneModifier"]

MODIFIERS = {
    "StruPruneModifier": StruPruneModifier,
    "StructPruneModifier": StruPruneModifier,
    "SparsityAllocatorModifier": SparsityAllocatorModifier,
    "LoRARecoveryModifier": LoRARecoveryModifier,
}
