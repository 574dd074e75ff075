"""Allocation rules, which spread a budget over the groups: one file per rule; importing this package registers them."""

from struprune_plugin.allocation.rules import error_curve, uniform  # noqa: F401
from struprune_plugin.allocation.rules.rule import RULES, AllocationRule, Budget, GroupStatistics, Sizes, Subject

__all__ = ["RULES", "AllocationRule", "Budget", "GroupStatistics", "Sizes", "Subject"]
