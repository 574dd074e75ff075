"""Output folder of a run: it is complete or absent, and replaces nothing but an earlier output of StruPrune.

During the run, the output is written to ``.<name>.partial-*`` beside the folder, see :mod:`~struprune_plugin.storage.leftovers`.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from compressed_tensors.distributed import is_source_process
from loguru import logger

from struprune_plugin.runtime.distributed import do_once, wait_for_all
from struprune_plugin.storage.files import check_place, flush, format_bytes
from struprune_plugin.storage.leftovers import DONE, NEW, OLD, make_scratch, settle_leftovers, settle_scratch
from struprune_plugin.storage.listing import list_foreign, write_listing

_LONGER = 32  # bytes by which names of folders beside the output are longer


# -- checks of the path -------------------------------------------------------------------------------------------


def check_output(folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike] = (), num_bytes: int = 0) -> None:
    """Raise if a path cannot become the output folder, or if its content must not be replaced.

    :param inputs: other files and folders that the run reads or writes; strings that may be hub names count only if such a
        file exists
    :param num_bytes: lower bound on the size of the output
    :raises ValueError: a file or a mount point; the root, a home, the current folder or an input, or a folder that holds
        one; a folder with content that may not be overwritten, or that is not a complete and unchanged output of
        StruPrune; a place that cannot be written or lacks space
    """
    folder = folder.resolve()
    replaces = folder.is_dir() and any(folder.iterdir())
    _check_overlap(folder, replaces, inputs)
    if _is_mount_point(folder):
        raise ValueError(
            f"output_dir: must not be a mount point, which cannot be replaced, got {folder}. Choose a folder inside it."
        )
    if replaces and not overwrite:
        raise ValueError(
            f"output_dir: must be empty or absent, {folder} is neither. Choose another folder, or pass overwrite."
        )
    if replaces:
        _check_replaceable(folder)
    _check_place(folder, num_bytes)


def _check_overlap(folder: Path, replaces: bool, inputs: Sequence[str | os.PathLike]) -> None:
    """Raise if a folder is or holds a path that must stay, or would be replaced inside an input."""
    for what, path in (("current", Path.cwd()), ("home", Path(os.path.expanduser("~"))), ("root", Path(folder.anchor))):
        if path.resolve().is_relative_to(folder):
            raise ValueError(
                f"output_dir: must not be or hold the {what} folder {path}, got {folder}, which would be replaced. "
                "Choose another path."
            )
    for name in inputs:
        path = Path(name).resolve()
        inside = replaces and path.is_dir() and path in folder.parents
        if (isinstance(name, Path) or os.path.lexists(name)) and (path.is_relative_to(folder) or inside):
            raise ValueError(
                f"output_dir: must not {'lie inside' if inside else 'be or hold'} an input of the run, got {folder} and the "
                f"input {path}. Choose another path."
            )


def _check_replaceable(folder: Path) -> None:
    """Raise unless a folder is a complete and unchanged earlier output of StruPrune."""
    try:
        foreign = list_foreign(folder)
    except ValueError as error:
        raise ValueError(
            f"output_dir: must be an earlier output of StruPrune to be overwritten, {folder} is not: {error} "
            "Choose another path, or remove the folder yourself."
        ) from None
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise ValueError(
            f"output_dir: must hold nothing but what StruPrune wrote to be overwritten, {folder} also holds "
            f"{', '.join(foreign[:3])}{more}. Move that away, or choose another path."
        )


def _is_mount_point(folder: Path) -> bool:
    """Return whether a folder is a mount point; only the kernel's list names folders mounted from the same disk."""
    partitions = psutil.disk_partitions(all=True)
    return os.path.ismount(folder) or str(folder) in {partition.mountpoint for partition in partitions}


def _check_place(folder: Path, num_bytes: int) -> None:
    """Raise if a folder cannot be created or renamed, or if its disk lacks space."""
    for place in (folder, folder.parent):
        check_place("output_dir", place)
    parent = next(path for path in folder.parents if path.exists())
    longest = os.pathconf(parent, "PC_NAME_MAX") - _LONGER if hasattr(os, "pathconf") else 255 - _LONGER
    if len(os.fsencode(folder.name)) > longest:
        raise ValueError(
            f"output_dir: the folder's name must have at most {longest} bytes, so that a temporary folder with a longer name fits "
            f"beside it, got {len(os.fsencode(folder.name))}. Choose a shorter name."
        )
    if folder.is_dir() and parent.stat().st_mode & stat.S_ISVTX:  # as in /tmp: only the owner may rename a folder
        owners = {0, parent.stat().st_uid, folder.stat().st_uid}
        if os.geteuid() not in owners:
            raise ValueError(
                f"output_dir: {folder} must be your own to be replaced, but belongs to another user. Choose another path."
            )
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ValueError(
            f"output_dir: {parent} must have room for at least {format_bytes(num_bytes)} of weights, got "
            f"{format_bytes(free)} free. Make room, or choose another disk."
        )


# -- writing ------------------------------------------------------------------------------------------------------


@contextmanager
def write_folder(
    folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike] = (), num_bytes: int = 0
) -> Iterator[Path]:
    """Yield a folder to write into, which replaces ``folder`` if the block ends without an error, and is removed otherwise.

    Leftovers of dead runs are cleaned up first. With several processes, the first one does all of this.

    :param inputs: as in :func:`check_output`
    :param num_bytes: as in :func:`check_output`
    :raises ValueError: as :func:`check_output`
    :raises OSError: the block ended without an error, but the folder cannot be moved to its place: it is kept, and the message
        says where
    """

    def prepare() -> None:
        settle_leftovers(folder)
        check_output(folder, overwrite, inputs, num_bytes)

    do_once(prepare)
    folder = folder.resolve()
    made = [path for path in folder.parents if not path.exists()]
    scratch = Path(do_once(lambda: str(make_scratch(folder))))
    try:
        yield scratch / NEW
        wait_for_all()
        do_once(lambda: _take_place(scratch, folder, overwrite, inputs))
    finally:
        if is_source_process():
            for line in settle_scratch(scratch, folder):
                logger.warning(line)
            for parent in made:
                with suppress(OSError):  # it is no longer empty
                    parent.rmdir()


def _take_place(scratch: Path, folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike]) -> None:
    """Move the finished output to its place, which is checked again because it may have changed in the meantime."""
    done, old = scratch / DONE, scratch / OLD
    (scratch / NEW).rename(done)  # from here on it is kept, whatever happens
    try:
        write_listing(done)
        for path in (*done.rglob("*"), done):  # before the folder that they replace is removed
            flush(path)
        if folder.exists():
            check_output(folder, overwrite, inputs)
            if any(folder.iterdir()):
                folder.rename(old)
        done.rename(folder)
        flush(folder.parent)
    except (OSError, ValueError) as error:
        told = " ".join(settle_scratch(scratch, folder))
        failure = OSError(f"output_dir: the finished output cannot be moved to {folder}: {error} {told}")
        failure.errno = getattr(error, "errno", None) or errno.EEXIST
        raise failure from None
