"""What an output folder holds: which files are ours, and whether they are as we wrote them. Nothing heavy is imported here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from struprune_plugin.manifest import MANIFEST_NAME, read_manifest

FILES_NAME = "struprune_files.json"
_WHOLE = "sha256"  # of every byte; the digests under "files" are quick
_WRITTEN = (  # what an output without a list of its files may hold, beside its manifest: written through the host's oneshot
    *(MANIFEST_NAME, "recipe.yaml", "config.json", "generation_config.json", "modeling_*.py", "model.safetensors"),
    *("model-?????-of-?????.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "spiece.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "chat_template.jinja", "chat_template.json"),
)
_BLOCK, _NUM_BLOCKS = 1 << 16, 16  # of a large file, what its digest reads


@dataclass(frozen=True)
class Listing:
    """What an output's list of its files says.

    :param quick: digest of every file's size and samples, see :func:`digest_file`
    :param whole: SHA-256 of every byte, by file; empty in outputs of earlier versions
    """

    quick: dict[str, str]
    whole: dict[str, str]


@dataclass(frozen=True)
class Entry:
    """One file of an output folder.

    :param state: ``as written``, ``changed``, ``missing``, ``not ours``, or ``unlisted``: of a usual name, in an output that the
        host's own ``oneshot`` wrote, without a list
    """

    name: str
    num_bytes: int
    state: str


def list_foreign(folder: Path) -> list[str]:
    """Return the entries of an earlier output that are not as we wrote them: others', changed ones, links.

    An output lists its files and their digests; one that the host's own ``oneshot`` wrote has its manifest only, beside which
    files of the usual names count as ours.

    :raises ValueError: no output of ours: neither a list of its files nor a manifest, or one that cannot be read
    """
    listing = read_listing(folder)
    listed = None if listing is None else listing.quick
    if listed is None:
        read_manifest(folder)
    foreign = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            foreign.append(name)
        elif path.is_dir():
            if not any(other.startswith(name + "/") for other in listed or ()):
                foreign.append(name)
        elif listed is None:
            if not _is_written(name):
                foreign.append(name)
        elif name != FILES_NAME and (name not in listed or digest_file(path) != listed[name]):
            foreign.append(f"{name} (changed)" if name in listed else name)
    return foreign


def list_entries(folder: Path, whole: bool) -> list[Entry]:
    """Return every file that an output folder holds, or should.

    :param whole: compare every byte; samples of large files otherwise
    :raises ValueError: as :func:`list_foreign`
    """
    listing = read_listing(folder)
    if listing is None:
        read_manifest(folder)
    present = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    entries = []
    for path in present:
        name = path.relative_to(folder).as_posix()
        if name != FILES_NAME:
            size = path.stat().st_size if path.exists() else 0
            entries.append(Entry(name, size, _compare(path, name, listing, whole)))
    held = {entry.name for entry in entries}
    return entries + [Entry(name, 0, "missing") for name in (listing.quick if listing else ()) if name not in held]


def _compare(path: Path, name: str, listing: Listing | None, whole: bool) -> str:
    if listing is None:
        return "unlisted" if _is_written(name) and not path.is_symlink() else "not ours"
    if name not in listing.quick or path.is_symlink():
        return "not ours"
    if digest_file(path) != listing.quick[name]:
        return "changed"
    known = listing.whole.get(name) if whole else None
    return "changed" if known is not None and known != digest_whole_file(path) else "as written"


def _is_written(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _WRITTEN)


def read_listing(folder: Path) -> Listing | None:
    """Read an output's list of its files; None where it has none.

    :raises ValueError: it cannot be read
    """
    file = folder / FILES_NAME
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        parts = content["files"], content.get(_WHOLE, {})
        for part in parts:
            if not isinstance(part, dict) or not all(isinstance(digest, str) for digest in part.values()):
                raise TypeError(f"a {type(part).__name__}, not names and digests")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: must be a list of an output's files, got {error!r:.200}.") from None
    return Listing(*parts)


def write_listing(folder: Path) -> None:
    """List the files of a finished output folder in it, with their digests: the proof that it is ours, and whole."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILES_NAME)
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    listed = {
        "files": {name: digest_file(path) for name, path in names.items()},
        _WHOLE: {name: digest_whole_file(path) for name, path in names.items()},
    }
    _write(folder, listed)


def _write(folder: Path, listed: dict[str, dict[str, str]]) -> None:
    write_whole(folder / FILES_NAME, json.dumps(listed, indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with replace_file(file) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replace_file(file: Path) -> Iterator[Path]:
    """Give a file beside another, which takes its name once what the block wrote has reached the disk."""
    partial = file.with_name(file.name + ".partial")
    try:
        yield partial
        flush(partial)
        partial.replace(file)
        flush(file.parent)  # which holds the name
    finally:
        partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Let a file's bytes, or the names that a folder holds, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # which some network disks cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def update_listing(folder: Path, names: list[str]) -> None:
    """Take down files of an output that have been written anew; what is told of the others stays, and so does what it proves.

    Nothing happens where an output has no list.
    """
    listing = read_listing(folder)
    if listing is None:
        return
    fresh = {
        "files": listing.quick | {name: digest_file(folder / name) for name in names},
        _WHOLE: listing.whole | {name: digest_whole_file(folder / name) for name in names},
    }
    _write(folder, fresh)


def digest_whole_file(path: Path) -> str:
    """Return the SHA-256 of a file, as ``sha256sum`` has it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_file(path: Path) -> str:
    """Return a digest of a file's size and bytes; of a large one, of blocks spread over it, which no training leaves alone."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _BLOCK * _NUM_BLOCKS:
            digest.update(file.read())
        else:
            for block in range(_NUM_BLOCKS):
                file.seek((size - _BLOCK) * block // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
