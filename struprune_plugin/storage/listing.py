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
_WRITTEN = (  # what an output without a list of its files may hold, beside its manifest: written by llm-compressor's oneshot
    *(MANIFEST_NAME, "recipe.yaml", "config.json", "generation_config.json", "modeling_*.py", "model.safetensors"),
    *("model-?????-of-?????.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "spiece.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "chat_template.jinja", "chat_template.json"),
)


class Listing(BaseModel):
    """An output's list of its files.

    :param files: digest of every file's size and samples, see :func:`~struprune_plugin.storage.files.digest_file`
    :param sha256: of every byte, by file
    """

    files: dict[str, str]
    sha256: dict[str, str]


@dataclass(frozen=True)
class Entry:
    """One file of an output folder, or an empty folder in it.

    :param state: ``as written``, ``changed``, ``missing``, ``not ours``, or ``unlisted``: of a usual name, in an output that
        llm-compressor's own ``oneshot`` wrote, without a list
    """

    name: str
    num_bytes: int
    state: str


def list_foreign(folder: Path) -> list[str]:
    """Return the entries of an earlier output that are not as we wrote them: others', changed ones, links.

    :raises ValueError: as :func:`list_entries`
    """
    words = {"not ours": "", "changed": " (changed)"}
    return [entry.name + words[entry.state] for entry in list_entries(folder, whole=False) if entry.state in words]


def list_entries(folder: Path, whole: bool) -> list[Entry]:
    """Return all that an output folder holds, or should.

    An output lists its files and their digests; one that llm-compressor's own ``oneshot`` wrote has its manifest only, beside which
    files of the usual names count as ours.

    :param whole: compare every byte; samples of large files otherwise
    :raises ValueError: no output of ours: neither a list of its files nor a manifest, or one that cannot be read
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
    """Read an output's list of its files; None where it has none.

    :raises ValueError: it cannot be read
    """
    file = folder / FILES_NAME
    if not file.is_file():
        return None
    try:
        return Listing.model_validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        told = error.errors(include_url=False)[0]["msg"]
        raise ValueError(f"{file}: must be a list of an output's files, got another content: {told}.") from None


def write_listing(folder: Path, names: Iterable[str] | None = None) -> None:
    """List the files of a finished output folder in it, with their digests: the proof that it is ours, and whole.

    :param names: files that have been written anew, if the folder has a list: what it says of the others stays. All where None
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
