"""Check of an output folder: files against digests, manifest, weights.

Nothing heavy is imported until weights are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from struprune_plugin.storage.files import digest_whole_file
from struprune_plugin.storage.listing import Entry, list_entries, read_listing
from struprune_plugin.storage.manifest import MANIFEST_NAME

_EXPORT = Path(__file__).parents[1] / "export"
_RELIED_ON = ("*.safetensors", "*.safetensors.index.json", "config.json", MANIFEST_NAME, "modeling_*.py")
_QUICK = 1 << 29  # bytes up to which a folder is read whole, in well under a second
_DAMAGED = {"changed": "is not as it was written", "missing": "is missing"}


@dataclass(frozen=True)
class Verdict:
    """Result of the check.

    :param entries: every file
    :param problems: damages, one line each
    :param notes: other remarks for the user, one line each
    """

    entries: list[Entry]
    problems: list[str]
    notes: list[str]


def verify_folder(folder: Path) -> Verdict:
    """Check every byte of an output folder against what was written, and whether its code is this package's own.

    :raises ValueError: not an output of StruPrune
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: must be a pruned folder, got no folder. Correct the path.")
    entries = list_entries(folder, whole=True)
    problems, notes = _list_changes(entries), list(_describe_code(folder, entries))
    if read_listing(folder) is None:
        notes.append(
            "the folder has no list of its files, because llm-compressor's own oneshot wrote it: bytes cannot be compared, and "
            "the weights were read instead"
        )
        problems += _check_weights(folder)
    return Verdict(entries, problems, notes)


def find_damage(folder: Path) -> list[str]:
    """Return the damages of an output folder, one line each; a large folder is checked by samples of its files.

    :raises ValueError: as :func:`verify_folder`
    """
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return verify_folder(folder).problems if size <= _QUICK else _list_changes(list_entries(folder, whole=False))


def check_undamaged(folder: Path) -> None:
    """Raise if the weights, configuration, code or manifest of an output are not as they were written.

    :raises ValueError: in that case; a folder without a list of files passes
    """
    if read_listing(folder) is None:
        return
    for entry in list_entries(folder, whole=False):
        if entry.state in _DAMAGED and any(fnmatch(entry.name, pattern) for pattern in _RELIED_ON):
            raise ValueError(
                f"{folder / entry.name}: must be as it was written, but is {entry.state}. Restore the file, or prune again."
            )


def _list_changes(entries: list[Entry]) -> list[str]:
    return [f"{entry.name} {_DAMAGED[entry.state]}" for entry in entries if entry.state in _DAMAGED]


def _describe_code(folder: Path, entries: list[Entry]) -> Iterator[str]:
    """Yield for every Python file whether it is this package's own, which the folder's list of files cannot prove."""
    for entry in entries:
        if entry.name.endswith(".py") and entry.state != "missing":
            own = _EXPORT / entry.name
            same = own.is_file() and digest_whole_file(own) == digest_whole_file(folder / entry.name)
            yield f"{entry.name} is {'' if same else 'not '}this package's own" + (
                "" if same else ": another version's, or changed; read it before you load it with trust_remote_code"
            )


def _check_weights(folder: Path) -> list[str]:
    """Return the problems of weights without digests: shapes that differ from the configuration, values that are not finite."""
    from safetensors import safe_open

    from struprune_plugin.storage.checkpoint import check_whole

    try:
        check_whole(str(folder))
    except ValueError as error:
        return [str(error)]
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and not tensor.float().isfinite().all():
                    found.append(f"{file.name}: {name} holds NaN or Inf")
    return found
