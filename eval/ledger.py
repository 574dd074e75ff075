"""Finished rows on disk with everything that they depend on, so that a stale row is never taken for a fresh one.

A row is read back only if its code, the libraries, the device, every field, the model's weights and every text are unchanged.
Stale rows are kept, and are used again when their dependencies are restored.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from llmcompressor.modifiers import Modifier
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

import struprune_plugin
from struprune_plugin import LoRARecoveryModifier, StruPruneModifier

PACKAGE = Path(struprune_plugin.__file__).parent
EVAL = Path(__file__).parent
_LIBRARIES = ("torch", "transformers", "llmcompressor", "compressed-tensors", "peft", "datasets")
_DIGITS = 16  # of a digest


class Ledger:
    """Finished rows in a JSON file. A row that is there, made in the same way, is not made again.

    ``cpu_seconds`` of a row are the processor's for all of it, loading and scoring too: steadier than ``seconds`` where other
    work runs beside.

    :param file: holds ``settings``, and ``rows``: a list by key, of every way that a row was made
    :param settings: what a person sees that all rows share; another is refused, since reports lie beside the file
    """

    def __init__(self, file: Path, settings: Mapping[str, Any]):
        self.file, self.settings = file, _to_json(settings)
        self._rows = self._read() if file.exists() else {}

    def find(self, key: str, how: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the row that was made as ``how`` says, if there is one."""
        wanted = _to_json(how)
        return next((row for row in reversed(self._rows.get(key, [])) if row["how"] == wanted), None)

    def finish(self, key: str, how: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a row, from the file where it was made as ``how`` says, else made now and written."""
        found = self.find(key, how)
        if found is not None:
            return found
        start = time.process_time()
        made = make()
        row = {"how": _to_json(how), **made, "cpu_seconds": time.process_time() - start}
        if self.file.exists():
            self._rows = self._read()  # another process may have written rows meanwhile
        self._rows.setdefault(key, []).append(row)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps({"settings": self.settings, "rows": self._rows}, indent=1))
        partial.replace(self.file)
        told = row.get("refused") or {name: round(value, 2) for name, value in made.get("perplexity", {}).items()}
        print(key, told, flush=True)
        return row

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        stored = json.loads(self.file.read_text())
        settings = stored.get("settings") if isinstance(stored, dict) else None
        if settings != self.settings:
            raise SystemExit(
                f"{self.file}: rows must be made with {self.settings}, got {settings}. Choose another --output."
            )
        return stored["rows"]


class Turn:
    """What one call makes of rows that several calls finish.

    :param seconds: begin no further row after so many
    """

    def __init__(self, seconds: float):
        self._end, self.left = time.monotonic() + seconds, 0

    def takes(self, found: object) -> bool:
        """Return whether a row is there already, or may still be begun; one that may not is left for the next call."""
        if found is not None or time.monotonic() <= self._end:
            return True
        self.left += 1
        return False

    def tell(self) -> None:
        if self.left:
            print(f"{self.left} rows are left. Run the same command again.")


def read_names(parser: argparse.ArgumentParser, option: str, text: str, known: Collection[str]) -> list[str]:
    """Return names with commas between them; leave the command where one is unknown."""
    names = text.split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"{option}: must be of {', '.join(known)}, got {', '.join(unknown)}. Correct it.")
    return names


def _to_json(value: Any) -> Any:
    """Return a value as it comes back from a JSON file."""
    return json.loads(json.dumps(value))


def describe_code(*sources: Path) -> dict[str, Any]:
    """Return what runs: digests of the package's sources and of others, versions of libraries, and the device.

    :param sources: files or folders of this repository that a row is made by, beside the package
    """
    return {
        "sources": {_name_source(source): digest_sources(source) for source in (PACKAGE, *sources)},
        "libraries": {name: version(name) for name in _LIBRARIES},
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"cpu, {torch.get_num_threads()} threads",
        "clock": "own seconds" if time.perf_counter is time.process_time else "wall",
    }


def _name_source(source: Path) -> str:
    return source.relative_to(EVAL.parent).as_posix() if source.is_relative_to(EVAL.parent) else source.name


@cache  # what was imported is what runs, whatever becomes of the files
def digest_sources(source: Path) -> str:
    """Return the digest of a Python file, or of all below a folder, their names too."""
    files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    return _join_digests((file.relative_to(source.parent).as_posix(), _digest_file(file)) for file in files)


def identify_model(model: str) -> dict[str, str]:
    """Return what tells a model from others of its name: the digest of a folder's files, or a hub model's commit.

    :raises ValueError: neither a folder nor a hub name that can be reached
    """
    folder = Path(model)
    if folder.is_dir():
        files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
        return {"name": folder.name, "digest": _join_digests((file.name, _digest_file(file)) for file in files)}
    try:
        commit = extract_commit_hash(cached_file(model, "config.json"), None)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model: {model!r} must be a model folder or a hub name that can be loaded, got: {first}"
        ) from None
    return {"name": model, "commit": str(commit)}


def identify_text(source: str) -> dict[str, str]:
    """Return what tells a text from others of its name: the digest of a file; a hub data set counts as its name says."""
    file = Path(source)
    return {"name": file.name, "digest": _digest_file(file)} if file.is_file() else {"name": source}


def resolve_fields(fields: Mapping[str, Any], sparsity: float) -> dict[str, Any]:
    """Return all fields of a :class:`StruPruneModifier`, defaults too, but what only bounds its memory."""
    return _list_fields(StruPruneModifier(**{**fields, "sparsity": sparsity}), "memory_budget")


def resolve_recovery(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of a :class:`LoRARecoveryModifier`, defaults too."""
    return _list_fields(LoRARecoveryModifier(**fields))


def _list_fields(modifier: Modifier, *left_out: str) -> dict[str, Any]:
    hosts = {*Modifier.model_fields, *left_out}
    return {name: value for name, value in modifier.model_dump().items() if name not in hosts}


def _digest_file(file: Path) -> str:
    stat = file.stat()
    return _digest_version(file, stat.st_mtime_ns, stat.st_size)


@cache
def _digest_version(file: Path, _modified: int, _size: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:_DIGITS]


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _join_digests(parts: Iterable[tuple[str, str]]) -> str:
    return digest_text("\n".join(" ".join(part) for part in parts))
