"""List of the files in an output folder, with digests. This module imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from pydantic import BaseModel, ValidationError

from struprune_plugin.storage.files import digest_file, digest_whole_file, write_whole
from struprune_plugin.storage.manifest import MANIFEST_NAME, read_manifest

FILES_NAME = "struprune_files.json"
_WRITTEN = (  # files that llm-compressor's own oneshot writes, in an output with a manifest but no list
    *(MANIFEST_NAME, "recipe.yaml", "config.json", "generation_config.json", "modeling_*.py", "model.safetensors"),
    *("model-?????-of-?????.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "spiece.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "chat_template.jinja", "chat_template.json"),
)


class Listing(BaseModel):
    """List of an output's files.

    :param files: digest of every file's size and samples, see :func:`~struprune_plugin.storage.files.digest_file`
    :param sha256: digest of every byte, by file
    """

    files: dict[str, str]
    sha256: dict[str, str]


@dataclass(frozen=True)
class Entry:
    """File of an output folder, or an empty folder in it.

    :param state: ``as written``, ``changed``, ``missing``, ``not ours``, or ``unlisted``: a file with a usual name in an output
        without a list, as llm-compressor's own ``oneshot`` writes it
    """

    name: str
    num_bytes: int
    state: str


def list_foreign(folder: Path) -> list[str]:
    """Return the entries of an earlier output that StruPrune did not write in this form: other files, changed files, links.

    :raises ValueError: as :func:`list_entries`
    """
    words = {"not ours": "", "changed": " (changed)"}
    return [entry.name + words[entry.state] for entry in list_entries(folder, whole=False) if entry.state in words]


def list_entries(folder: Path, whole: bool) -> list[Entry]:
    """Return the entries that an output folder holds or should hold.

    An output lists its files and their digests. One that llm-compressor's own ``oneshot`` wrote has only a manifest; files with
    the usual names beside it count as part of the output.

    :param whole: compare every byte; otherwise samples of large files
    :raises ValueError: not an output of StruPrune: it has neither a list nor a manifest, or one that cannot be read
    """
    listing = read_listing(folder)
    if listing is None:
        read_manifest(folder)
    entries = {}
    for path in sorted(folder.rglob("*")):
        name, is_folder = path.relative_to(folder).as_posix(), path.is_dir() and not path.is_symlink()
        if name != FILES_NAME and not (is_folder and any(path.iterdir())):
            size = path.stat().st_size if path.is_file() else 0
            ours = not is_folder and not path.is_symlink()
            entries[name] = Entry(name, size, _compare(path, name, listing, whole) if ours else "not ours")
    missing = [Entry(name, 0, "missing") for name in (listing.files if listing else ()) if name not in entries]
    return [*entries.values(), *missing]


def _compare(path: Path, name: str, listing: Listing | None, whole: bool) -> str:
    if listing is None:
        return "unlisted" if any(fnmatch(name, pattern) for pattern in _WRITTEN) else "not ours"
    if name not in listing.files:
        return "not ours"
    same = digest_file(path) == listing.files[name]
    if same and whole:
        same = digest_whole_file(path) == listing.sha256.get(name)
    return "as written" if same else "changed"


def read_listing(folder: Path) -> Listing | None:
    """Return an output's list of files; None if it has none.

    :raises ValueError: the list cannot be read
    """
    file = folder / FILES_NAME
    if not file.is_file():
        return None
    try:
        return Listing.model_validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        told = error.errors(include_url=False)[0]["msg"]
        raise ValueError(
            f"{file}: must be a list of an output's files, got other content: {told}. Restore the file, or prune again."
        ) from None


def write_listing(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the list of a finished output's files with their digests, which proves that the output is complete and unchanged.

    :param names: files that were rewritten; if the folder has a list, its other entries are kept. None lists all files
    """
    listing = Listing(files={}, sha256={}) if names is None else read_listing(folder)
    if listing is None:
        return
    if names is None:
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILES_NAME)
        names = [path.relative_to(folder).as_posix() for path in paths]
    for name in names:
        listing.files[name], listing.sha256[name] = digest_file(folder / name), digest_whole_file(folder / name)
    write_whole(folder / FILES_NAME, listing.model_dump_json(indent=1) + "\n")
