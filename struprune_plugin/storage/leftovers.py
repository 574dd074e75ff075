"""Scratch folder in which an output is written, beside its final place, and its cleanup after the run has ended or died.

``owner.json`` names the process that writes there. ``new`` holds its output, which is renamed to ``finished`` once complete.
``old`` holds the earlier folder between two renames. However a run ends, :func:`settle_scratch` cleans up, at once or in the
next run: the earlier folder is restored, finished work is kept, the rest is removed.
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
from loguru import logger
from pydantic import BaseModel

from struprune_plugin.storage.listing import FILES_NAME, write_listing

NEW, DONE, OLD = "new", "finished", "old"
_OWNER = "owner.json"
_SAME_START = 5.0  # seconds; processes with the same id and closer start times count as one


class Owner(BaseModel):
    """Process that writes an output folder.

    :param folder: name of the folder
    :param start: start of the process, in seconds since the epoch
    :param place: scope of process ids, see :func:`_describe_place`
    """

    folder: str
    pid: int
    start: float
    place: str


def make_scratch(folder: Path) -> Path:
    """Create the scratch folder of this process for an output folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    owner = Owner(folder=folder.name, pid=os.getpid(), start=psutil.Process().create_time(), place=_describe_place())
    (scratch / _OWNER).write_text(owner.model_dump_json() + "\n", encoding="utf-8")
    (scratch / NEW).mkdir()
    return scratch


def settle_leftovers(folder: Path) -> None:
    """Clean up the scratch folders of earlier runs that died while writing an output folder, and log it.

    Only folders of dead processes of this machine are touched; a folder that another machine may still write is only named.
    """
    folder = folder.resolve()
    if not folder.parent.is_dir():
        return
    for scratch in sorted(folder.parent.glob(f".{glob.escape(folder.name)}.partial-*")):
        owner = _read_owner(scratch)
        if owner is not None and owner.folder != folder.name:
            continue  # of another folder, whose name begins like this one
        alive = None if owner is None else _is_alive(owner)
        if alive is None:
            logger.warning(
                f"{scratch} may belong to a run on another machine that writes {folder}. Remove it if there is no such run."
            )
        elif not alive:
            done = scratch / DONE
            if done.is_dir() and not (done / FILES_NAME).is_file():  # it died before it had listed its files
                with suppress(OSError):
                    write_listing(done)
            told = settle_scratch(scratch, folder)
            state = "is still there" if scratch.exists() else "is removed"
            logger.warning(" ".join([f"{scratch}, left by a run that ended early, {state}.", *told]))


def settle_scratch(scratch: Path, folder: Path) -> list[str]:
    """Clean up a run's scratch folder in any state: restore the earlier folder, keep finished work, remove the rest.

    :return: messages for the user
    """
    done, old = scratch / DONE, scratch / OLD
    told = []
    try:
        if old.exists() and not os.path.lexists(folder):
            old.rename(folder)
            told.append(f"{folder} is restored.")
        elif old.exists() and done.exists():  # another folder was created there in the meantime
            told.append(f"The earlier content of {folder} is in {_move_beside(old, folder, 'earlier')}.")
        if done.exists():
            told.append(
                f"The finished output is complete, in {_move_beside(done, folder, 'finished')}; move it yourself."
            )
    except OSError as error:
        return [
            *told,
            f"{scratch} holds complete work in {DONE} and {OLD} that cannot be moved: {error}. Move it yourself.",
        ]
    shutil.rmtree(scratch, ignore_errors=True)
    return told


def _move_beside(path: Path, folder: Path, word: str) -> Path:
    return path.rename(folder.with_name(f"{folder.name}.{word}-{path.parent.name.rpartition('-')[2]}"))


def _read_owner(scratch: Path) -> Owner | None:
    try:
        return Owner.model_validate_json((scratch / _OWNER).read_bytes())
    except (OSError, ValueError):
        return None


def _is_alive(owner: Owner) -> bool | None:
    """Return whether a process still runs; None if that cannot be known from here."""
    if owner.place != _describe_place():
        return None
    try:
        return abs(psutil.Process(owner.pid).create_time() - owner.start) < _SAME_START
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _describe_place() -> str:
    """Return the scope of process ids: this machine since its last boot and, on Linux, this container."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname(), boot.read_text(encoding="utf-8").strip() if boot.is_file() else ""]
    return " ".join([*parts, os.readlink(space) if space.is_symlink() else ""])
