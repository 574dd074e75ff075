"""The scratch folder that an output grows in, beside its place, and what is put right when its run is over or dead.

``owner.json`` says which process writes there, ``new`` is what it writes and ``finished`` its name once it is whole, ``old`` is the
folder that makes room for it, between two renames. Whatever ends a run, :func:`settle_scratch` puts that right, at once or in the
next run: the earlier folder goes back, finished work is kept, the rest goes.
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
_SAME_START = 5.0  # seconds; two processes of one number that started closer together are taken for one


class Owner(BaseModel):
    """The process that writes an output folder.

    :param folder: its name
    :param start: seconds since the epoch
    :param place: what process numbers count in, see :func:`_describe_place`
    """

    folder: str
    pid: int
    start: float
    place: str


def make_scratch(folder: Path) -> Path:
    """Make the scratch folder of this process for an output folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    owner = Owner(folder=folder.name, pid=os.getpid(), start=psutil.Process().create_time(), place=_describe_place())
    (scratch / _OWNER).write_text(owner.model_dump_json() + "\n", encoding="utf-8")
    (scratch / NEW).mkdir()
    return scratch


def settle_leftovers(folder: Path) -> None:
    """Put right what earlier runs for an output folder left beside it when they died, and say so.

    Only what a dead process of this machine made is touched; what another machine's may still be writing is named.
    """
    folder = folder.resolve()
    if not folder.parent.is_dir():
        return
    for scratch in sorted(folder.parent.glob(f".{glob.escape(folder.name)}.partial-*")):
        owner = _read_owner(scratch)
        if owner is not None and owner.folder != folder.name:
            continue  # of a folder whose name only begins like that
        alive = None if owner is None else _is_alive(owner)
        if alive is None:
            logger.warning(f"{scratch} may belong to a run elsewhere that writes {folder}. Remove it if there is none.")
        elif not alive:
            done = scratch / DONE
            if done.is_dir() and not (done / FILES_NAME).is_file():  # it died before it had listed its files
                with suppress(OSError):
                    write_listing(done)
            told = settle_scratch(scratch, folder)
            state = "is still there" if scratch.exists() else "is removed"
            logger.warning(" ".join([f"{scratch}, left by a run that died, {state}.", *told]))


def settle_scratch(scratch: Path, folder: Path) -> list[str]:
    """End a run's scratch folder in whatever state it is: put the earlier folder back, keep finished work, remove the rest.

    :return: what a person must know of it
    """
    done, old = scratch / DONE, scratch / OLD
    told = []
    try:
        if old.exists() and not os.path.lexists(folder):
            old.rename(folder)
            told.append(f"{folder} is back as it was.")
        elif old.exists() and done.exists():  # somebody has made another folder there since
            told.append(f"What {folder} held before is in {_move_beside(old, folder, 'earlier')}.")
        if done.exists():
            told.append(f"The finished output is whole, in {_move_beside(done, folder, 'finished')}; move it yourself.")
    except OSError as error:
        return [*told, f"{scratch} holds what must not be lost, in {DONE} and {OLD}, and cannot be moved: {error}."]
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
    """Return whether a process still runs; None where that cannot be known from here."""
    if owner.place != _describe_place():
        return None
    try:
        return abs(psutil.Process(owner.pid).create_time() - owner.start) < _SAME_START
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _describe_place() -> str:
    """Return what process numbers count in: this machine, since it was started, and on Linux this container."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname(), boot.read_text(encoding="utf-8").strip() if boot.is_file() else ""]
    return " ".join([*parts, os.readlink(space) if space.is_symlink() else ""])
