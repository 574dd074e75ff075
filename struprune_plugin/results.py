"""What was measured of an output, kept with it: in its manifest and on its card."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from struprune_plugin.card import CARD_NAME, write_card
from struprune_plugin.contents import list_entries, update_listing, write_whole
from struprune_plugin.manifest import DIGEST_KEY, MANIFEST_NAME, digest_manifest, read_manifest


def keep_results(folder: Path, found: Mapping[str, list[dict[str, Any]]]) -> str:
    """Add results to an output's manifest and card; the same measurement takes the place of an earlier one.

    :param found: ``perplexity`` and ``tasks``, entries as the manifest has them
    :return: why they were not kept; empty where they were
    """
    entries = {entry.name: entry.state for entry in list_entries(folder, whole=False)}
    if any(state in ("changed", "missing") for name, state in entries.items() if name != CARD_NAME):
        return f"{folder} is damaged (struprune verify {folder})"
    manifest = read_manifest(folder)
    held = dict(manifest.get("evaluation", {}))
    for kind, keys in (("perplexity", ("text", "sha256", "window", "stride")), ("tasks", ("task", "metric", "limit"))):
        fresh = found.get(kind, [])
        names = {tuple(entry[key] for key in keys) for entry in fresh}
        kept = [entry for entry in held.get(kind, []) if tuple(entry[key] for key in keys) not in names]
        held[kind] = kept + list(fresh)
    manifest["evaluation"] = held
    manifest[DIGEST_KEY] = digest_manifest(manifest)
    try:
        write_whole(folder / MANIFEST_NAME, json.dumps(manifest, indent=1) + "\n")
        written = [MANIFEST_NAME]
        if entries.get(CARD_NAME, "missing") in ("as written", "missing"):  # one that somebody has edited stays
            write_card(folder)
            written.append(CARD_NAME)
        update_listing(folder, written)
    except OSError as error:
        return f"{folder} cannot be written: {error}"
    return ""


def list_results(
    score: Mapping[str, Any], dense: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Return what one model scored, beside what the dense one did in the same command, as the manifest has it.

    :param score: by the names of ``struprune eval``'s columns
    :param dense: the same of the dense model; empty where it was not scored
    :param settings: of the command
    """
    found: dict[str, list[dict[str, Any]]] = {"perplexity": [], "tasks": []}
    if "perplexity" in score:
        told = {name: settings[name] for name in ("window", "stride", "max_tokens", "dtype")}
        values = {"value": score["perplexity"], "dense": dense.get("perplexity")}
        found["perplexity"].append(
            {**describe_text(Path(settings["text"])), **told, "tokens": score["tokens"], **values}
        )
    for column, value in score.items():
        task, _, metric = column.partition(" ")
        if f"{column}_stderr" in score or (metric and not metric.endswith(("_stderr", "sample_len", "name", "alias"))):
            entry = {"task": task, "metric": metric, "limit": settings["limit"], "value": float(value)}
            errors = {name: _read_error(part, column) for name, part in (("stderr", score), ("dense_stderr", dense))}
            found["tasks"].append({**entry, "dense": dense.get(column), **errors})
    return found


def _read_error(score: Mapping[str, Any], column: str) -> float | None:
    error = score.get(f"{column}_stderr")
    return float(error) if isinstance(error, int | float) and error == error else None


def describe_text(file: Path) -> dict[str, str]:
    """Return what a text is called, and its digest."""
    with file.open("rb") as opened:
        return {"text": file.name, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}
