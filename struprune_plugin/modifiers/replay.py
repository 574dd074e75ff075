"""Replay of a manifest: the same kept units, on the same calibration data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from loguru import logger
from pydantic import BaseModel

from struprune_plugin.modifiers.setup import RunSetup
from struprune_plugin.pruning.config import KeptExperts, UnitAllocation
from struprune_plugin.storage.manifest import Manifest, describe_versions, read_manifest
from struprune_plugin.storage.records import CalibrationRecord
from struprune_plugin.storage.registry import list_differences


@dataclass(frozen=True)
class Replay:
    """Manifest that a run repeats.

    :param path: path of the manifest
    :param plan: plan with its kept units
    :param calibration: its record of the calibration data
    """

    path: str
    plan: UnitAllocation
    calibration: CalibrationRecord

    def check(self, calibration: CalibrationRecord) -> None:
        """Raise if the calibration data are not those of the manifest.

        :raises ValueError: in that case
        """
        if calibration != self.calibration:
            raise ValueError(
                f"replay: the calibration batches must be those of {self.path}, {vars(self.calibration)}, got {vars(calibration)}. "
                "Pass the same text with the same number, length, order (shuffle_calibration_samples=False) and batch size of "
                "samples, in the same number of processes."
            )


def fill_from_replay(modifier: type[BaseModel], values: Any) -> Any:
    """Return the fields of a pruning stage filled from the manifest that it replays, with which its own fields must agree.

    :param values: fields of the recipe
    :raises ValueError: they do not agree; the manifest is one of several rounds
    """
    if not isinstance(values, dict) or not values.get("replay"):
        return values
    manifest = read_manifest(values["replay"])
    if manifest.rounds:
        raise ValueError(
            f"replay: must be of one pruning stage, got {values['replay']}, made in rounds. Run its recipe again."
        )
    settings = {name: v for name, v in manifest.settings.items() if name != "replay"}
    own = {name: value for name, value in values.items() if name != "replay"}
    given = modifier(**own).dump_fields()  # type: ignore[attr-defined]  # short forms spelled out
    for name in settings.keys() & own.keys():
        if given[name] != settings[name]:
            place, mine, theirs = next(list_differences(given[name], settings[name], name))
            raise ValueError(
                f"replay: {place} must be {theirs!r} as in {values['replay']}, got {mine!r}. Remove it from the recipe."
            )
    return {**settings, **values}


def read_replay(path: str, setup: RunSetup, weights_digest: str) -> Replay:
    """Return the replay of a manifest's kept units.

    :raises ValueError: the manifest was made from another model
    """
    manifest = read_manifest(path)
    sizes = {record.name: record.num_units for record in manifest.groups}
    kept = {record.name: record.keep for record in manifest.experts}
    known = {} if setup.mixture is None else {name: len(members) for name, members in setup.mixture.lists.items()}
    experts = KeptExperts(setup.mixture.routing, kept) if setup.mixture is not None and kept else None
    left = setup.groups if experts is None or kept.keys() != known.keys() else experts.list_left(setup.groups)
    if (
        sizes != {group.name: group.num_units for group in (*left, *setup.whole)}
        or (kept and {record.name: record.num_experts for record in manifest.experts} != known)
        or manifest.model.weights_sha256 != weights_digest
    ):
        raise ValueError(
            f"replay: the model must be the one that {path} was made from, got other modules, sizes, weights or dtype. "
            "Replay it on that dense model."
        )
    _warn_of_changes(path, manifest)
    units = {record.name: record.keep for record in manifest.groups}
    plan = UnitAllocation({name: len(keep) for name, keep in units.items()}, manifest.allocation, units, experts)
    return Replay(path, plan, manifest.calibration)


def _warn_of_changes(path: str, manifest: Manifest) -> None:
    """Warn of differences from the manifest's run that may change the weights' bytes."""
    now = {**describe_versions(), "seed": torch.initial_seed()}
    then = {**manifest.versions, "seed": manifest.seed}
    changes = [f"{name} {then.get(name)} -> {now.get(name)}" for name in now if then.get(name) != now.get(name)]
    if changes:
        logger.warning(
            f"replay: this run differs from the one of {path} in {', '.join(changes)}: the same units are kept, but weights may "
            "differ in the last bits. For the same bytes, replay with the versions and the seed that the manifest names."
        )
