"""``struprune verify``: files against their digests."""

from __future__ import annotations

from dataclasses import asdict

from struprune_plugin.cli.console import Screen
from struprune_plugin.cli.options import Folder, register_types
from struprune_plugin.reporting.tables import Table
from struprune_plugin.storage.verify import verify_folder


def verify(path: Folder, screen: Screen) -> int:
    """Check every byte of a pruned folder against the digests that were written with it.

    This covers weights, configuration, modelling file and manifest. Exit status 1 if a file is damaged or missing.
    """
    register_types(path)
    verdict = verify_folder(path)
    rows = [[entry.name, f"{entry.num_bytes:,}", entry.state] for entry in verdict.entries]
    state = "damaged" if verdict.problems else "whole"
    lines = [*verdict.notes, *(f"damaged: {line}" for line in verdict.problems), f"{path} is {state}"]
    record = {"path": str(path), "state": state, **asdict(verdict)}
    screen.show(record, Table(["file", "bytes", "state"], rows), "\n".join(lines))
    return int(bool(verdict.problems))
