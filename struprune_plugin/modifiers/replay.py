"""Repeat what a manifest tells: the same kept units, on the same calibration data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from loguru import logger

from struprune_plugin.export import describe_versions, read_manifest
from struprune_plugin.layer.methods import Plan
from struprune_plugin.layer.records import AllocationRecord, CalibrationRecord
from struprune_plugin.modifiers.job import Job


@dataclass(frozen=True)
class Replay:
    """The manifest that a run repeats.

    :param path: where it lies
    :param plan: its kept units
    :param calibration: its record of the calibration data
    """

    path: str
    plan: Plan
    calibration: dict[str, Any]

    def check(self, calibration: CalibrationRecord) -> None:
        """Refuse to replay on other calibration data.

        :raises ValueError: the same
        """
        if asdict(calibration) != self.calibration:
            raise ValueError(
                f"replay: the calibration batches must be those of {self.path}, {self.calibration}, got {asdict(calibration)}. "
                "Pass the same text, number, length, order (shuffle_calibration_samples=False) and batch size of samples, and as "
                "many processes."
            )


def read_replay(path: str, job: Job, weights_digest: str) -> Replay:
    """Take the kept units of a manifest.

    :raises ValueError: it was made from another model
    """
    manifest = read_manifest(path)
    sizes = {entry["name"]: entry["num_units"] for entry in manifest["groups"]}
    if sizes != {group.name: group.num_units for group in job.groups} or (
        manifest["model"]["weights_sha256"] != weights_digest
    ):
        raise ValueError(
            f"replay: the model must be the one that {path} was made from, got other modules, sizes, weights or dtype. "
            "Replay it on that dense model."
        )
    _warn_of_changes(path, manifest)
    units = {entry["name"]: entry["keep"] for entry in manifest["groups"]}
    record = AllocationRecord.from_dict(manifest["allocation"])
    plan = Plan({name: len(keep) for name, keep in units.items()}, record, units=units)
    return Replay(path, plan, manifest["calibration"])


def _warn_of_changes(path: str, manifest: dict[str, Any]) -> None:
    """Say what differs between the run that a manifest tells of and this one, which may change its bytes."""
    now = {**describe_versions(), "seed": torch.initial_seed()}
    then = {**manifest.get("versions", {}), "seed": manifest.get("seed")}
    changes = [f"{name} {then.get(name)} -> {now.get(name)}" for name in now if then.get(name) != now.get(name)]
    if changes:
        logger.warning(
            f"replay: this run differs from the one of {path} in {', '.join(changes)}: the same units are kept, their weights may "
            "differ in the last bits. Replay with the versions and the seed that the manifest names for the same bytes."
        )
