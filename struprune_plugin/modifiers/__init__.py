"""The modifiers that recipes name."""

from struprune_plugin.modifiers.allocator import SparsityAllocatorModifier
from struprune_plugin.modifiers.lora import LoRARecoveryModifier
from struprune_plugin.modifiers.pruning import StruPruneModifier

__all__ = ["LoRARecoveryModifier", "SparsityAllocatorModifier", "StruPruneModifier"]
