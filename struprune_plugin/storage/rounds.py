"""One manifest for a recipe that prunes in rounds: kept units are those of the dense model."""

from __future__ import annotations

from dataclasses import replace

from struprune_plugin.storage.manifest import Manifest, RoundRecord
from struprune_plugin.storage.records import GroupRecord


def join_rounds(before: Manifest, own: Manifest) -> Manifest:
    """Return the manifest of all rounds, whose solves and allocation are those of the last one.

    :param before: manifest of the rounds before, with their recovery
    :param own: manifest of the last round alone, with units counted after the rounds before
    """
    earlier = {group.name: group for group in before.groups}
    removed = before.budget.removed_parameters + own.budget.removed_parameters
    prunable = before.budget.prunable_parameters
    told = RoundRecord(
        settings=before.settings, removed_parameters=before.budget.removed_parameters, recovery=before.recovery
    )
    number = len(before.rounds) + 1
    return own.model_copy(
        update={
            "model": replace(own.model, parameters_before=before.model.parameters_before),
            "budget": replace(
                own.budget, prunable_parameters=prunable, removed_parameters=removed, met_sparsity=removed / prunable
            ),
            "groups": [_join_groups(earlier[group.name], group) for group in own.groups],
            "stages": [
                *(replace(stage, name=_name_stage(stage.name, number)) for stage in before.stages),
                *own.stages,
            ],
            "rounds": [*before.rounds, told],
        }
    )


def _name_stage(name: str, number: int) -> str:
    return name if name.startswith("round ") else f"round {number}: {name}"


def _join_groups(before: GroupRecord, own: GroupRecord) -> GroupRecord:
    """Return a group's record with the units of the dense model."""
    return replace(
        own,
        num_units=before.num_units,
        keep=[before.keep[unit] for unit in own.keep],
        sparsity=1 - own.kept / before.num_units,
    )
