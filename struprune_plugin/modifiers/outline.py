"""What a recipe's run will do, stage by stage, for who shows how far it is."""

from __future__ import annotations

from collections.abc import Sequence

from llmcompressor.modifiers import Modifier

from struprune_plugin.layer.criteria import CRITERIA
from struprune_plugin.modifiers.fields import StructuredModifier
from struprune_plugin.modifiers.pruning import StruPruneModifier
from struprune_plugin.modifiers.recovery_stage import RecoveryStage
from struprune_plugin.passes.rules import RULES

# shares of the time, roughly, as the default's run on a small model has them (docs/cost.md)
_SENSITIVITY, _ALLOCATION, _PRUNING, _LATER, _RECOVERY = 15.0, 20.0, 65.0, 30.0, 100.0


def list_stages(modifiers: Sequence[Modifier]) -> list[tuple[str, float, str]]:
    """Return (name, share of the time, progress bar that tells of it, empty for a pass over the layers) of every stage."""
    stages: list[tuple[str, float, str]] = []
    for modifier in modifiers:
        name = type(modifier).__name__
        if isinstance(modifier, StructuredModifier):
            stages += _list_own_stages(modifier, measured=bool(stages))
        elif isinstance(modifier, RecoveryStage):
            stages += [("teacher", _LATER, "teacher")] * modifier.asks_teacher
            stages += [("recovery", _RECOVERY, "recovery")]
        elif getattr(modifier, "requires_calibration_data", True):
            stages.append((name.removesuffix("Modifier"), _LATER, ""))
    return stages


def _list_own_stages(modifier: StructuredModifier, measured: bool) -> list[tuple[str, float, str]]:
    """Return the stages of a modifier of ours.

    :param measured: an allocator stage before it has measured the dense model
    """
    stages: list[tuple[str, float, str]] = []
    if CRITERIA[modifier.importance].gradients and not measured:
        stages.append(("gradients", _SENSITIVITY, "snip gradients"))
    if modifier.sensitivity_samples is not None and not measured:
        stages.append(("sensitivity", _SENSITIVITY, "sensitivity"))
    if modifier.allocation in RULES and not measured:
        stages.append(("allocation", _ALLOCATION, ""))
    rule = RULES.get(modifier.allocation)
    tries = isinstance(modifier, StruPruneModifier) and modifier.trial_samples > 0
    if tries and rule is not None and rule.propose is not None:
        stages.append(("trials", _ALLOCATION, ""))
    if modifier.search == "full":
        temperatures = modifier.temperature if isinstance(modifier.temperature, list) else [modifier.temperature]
        stages += [("search", _PRUNING, "")] * len(temperatures)
    if not modifier.only_plans:
        stages.append(("pruning", _PRUNING, ""))
    return stages
