"""Finished rows on disk with what they depend on, so that a stale row is never taken for a fresh one."""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import struprune_plugin

PACKAGE = Path(struprune_plugin.__file__).parent
EVAL = Path(__file__).parent
_LIBRARIES = ("torch", "transformers", "llmcompressor", "compressed-tensors", "peft", "datasets")


class Ledger:
    """Rows in a JSON file. A row that is there, made in the same way, is not made again.

    :param file: holds one row per key, and in it ``how`` it was made
    """

    def __init__(self, file: Path):
        self.file = file

    def find(self, key: str, how: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the row that was made as ``how`` says, if there is one."""
        row = self._read().get(key)
        return row if row and row["how"] == json.loads(json.dumps(how)) else None

    def finish(self, key: str, how: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a row, from the file where it was made as ``how`` says, else made now and written."""
        found = self.find(key, how)
        if found is not None:
            return found
        start = time.process_time()
        made = make()
        row = {"how": how, **made, "cpu_seconds": time.process_time() - start}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps({**self._read(), key: row}, indent=1))  # another process may have added rows
        partial.replace(self.file)
        print(key, made.get("refused") or made.get("perplexity", ""), flush=True)
        return json.loads(json.dumps(row))

    def _read(self) -> dict[str, Any]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}


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


def describe_code(*sources: Path) -> dict[str, Any]:
    """Return what runs: digests of the package's sources and of others, versions of libraries, and the device."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    return {
        "sources": {source.name: digest_sources(source) for source in (PACKAGE, *sources)},
        "libraries": {name: version(name) for name in _LIBRARIES},
        "device": card,
    }


@cache  # what was imported is what runs, whatever becomes of the files
def digest_sources(source: Path) -> str:
    """Return the digest of a Python file, or of all below a folder, their names too."""
    files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    return digest_text("".join(f"{file.relative_to(source.parent)}\n{file.read_text()}\n" for file in files))


def identify_model(model: str) -> list[Any]:
    """Return what tells a model from others of its name: a folder's files; a hub model counts as its name says."""
    folder = Path(model)
    files = sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
    return [folder.name if files else model, *(identify_text(str(file)) for file in files)]


def identify_text(source: str) -> list[Any]:
    """Return what tells a text from others of its name: size and time of a file; a hub data set counts as its name says."""
    file = Path(source)
    return [file.name, file.stat().st_size, file.stat().st_mtime_ns] if file.is_file() else [source]


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
