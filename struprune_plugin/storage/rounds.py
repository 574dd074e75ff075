"""One manifest for a recipe that prunes in rounds, with units numbered as in the dense model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from struprune_plugin.storage.manifest import Manifest, RoundRecord
from struprune_plugin.storage.records import GroupRecord, StageEntry


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
    return own.model_copy(
        update={
            "model": replace(own.model, parameters_before=before.model.parameters_before),
            "budget": replace(
                own.budget, prunable_parameters=prunable, removed_parameters=removed, met_sparsity=removed / prunable
            ),
            "groups": [_join_groups(earlier[group.name], group) for group in own.groups],
            "stages": _join_stages(before.stages, own.stages),
            "rounds": [*before.rounds, told],
        }
    )


def _join_stages(before: Sequence[StageEntry], own: Sequence[StageEntry]) -> list[StageEntry]:
    """Return the stages of all rounds: seconds are summed, the largest peak is kept."""
    earlier, joined = {stage.name: stage for stage in before}, list[StageEntry]()
    for stage in own:
        if (first := earlier.pop(stage.name, None)) is not None:
            peaks = [entry.peak_bytes for entry in (first, stage) if entry.peak_bytes is not None]
            stage = replace(stage, seconds=first.seconds + stage.seconds, peak_bytes=max(peaks, default=None))
        joined.append(stage)
    return [*earlier.values(), *joined]


def _join_groups(before: GroupRecord, own: GroupRecord) -> GroupRecord:
    """Return a group's record with units numbered as in the dense model; rotated values, as after their first rotation."""
    return replace(
        own,
        num_units=before.num_units,
        keep=[before.keep[unit] for unit in own.keep],
        sparsity=1 - own.kept / before.num_units,
    )
