"""The output folder: whole or absent, and in the place of nothing but an earlier output of ours.

While a run lasts, its output grows in ``.<name>.partial-*`` beside the folder: ``owner.json`` says which process writes there,
``new`` is what it writes and ``finished`` its name once it is whole, ``old`` is the folder that makes room for it, between two
renames. Whatever ends a run, :func:`_settle` puts that right, at once or in the next run: the earlier folder goes back, finished
work is kept, the rest goes.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from compressed_tensors.distributed import is_source_process
from loguru import logger

from struprune_plugin.contents import FILES_NAME, flush, list_foreign, write_listing
from struprune_plugin.device.ranks import do_once, wait_for_all
from struprune_plugin.report import format_bytes

_OWNER, _NEW, _DONE, _OLD = "owner.json", "new", "finished", "old"
_LONGER = 32  # bytes, of the name of a folder that is made beside the output
_SAME_START = 5.0  # seconds; two processes of one number that started closer together are taken for one


# -- what may become the folder -----------------------------------------------------------------------------------


def check_output(folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike] = (), num_bytes: int = 0) -> None:
    """Refuse an output path that cannot become the output folder, or whose content is not ours to replace.

    :param inputs: files and folders that the run reads or writes besides; names of the hub count for nothing
    :param num_bytes: what the output will take at least
    :raises ValueError: a file or a mount point; the root, a home, the current folder or an input, or a folder that holds
        one; a folder that holds something and may not be overwritten, or is no earlier output of ours, whole and
        unchanged; a place where nothing can be written, or not enough
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir: must be a folder, {folder} is a file. Choose another path.")
    replaces = folder.is_dir() and any(folder.iterdir())
    _check_overlap(folder, replaces, inputs)
    if _is_mount_point(folder):
        raise ValueError(
            f"output_dir: must not be a mount point, which cannot be replaced, got {folder}. Choose a folder inside it."
        )
    if replaces and not overwrite:
        raise ValueError(
            f"output_dir: must be empty or absent, {folder} is neither. Choose another, or pass overwrite."
        )
    if replaces:
        _check_replaceable(folder)
    _check_place(folder, num_bytes)


def check_apart(folder: Path, scratch: str | os.PathLike) -> None:
    """Refuse a place for offloaded weights, there or not, that is the output folder or lies in it.

    :raises ValueError: the same
    """
    if Path(scratch).resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"output_dir: must be apart from the folder of the offloaded weights, got {folder} and {scratch}. Choose another."
        )


def _check_overlap(folder: Path, replaces: bool, inputs: Sequence[str | os.PathLike]) -> None:
    """Refuse a folder that is or holds what must stay, or that would be replaced inside an input."""
    for what, path in (("current", Path.cwd()), ("home", Path(os.path.expanduser("~"))), ("root", Path(folder.anchor))):
        if path.resolve().is_relative_to(folder):
            raise ValueError(
                f"output_dir: must not be or hold the {what} folder {path}, got {folder}, which would be replaced. "
                "Choose another path."
            )
    for name in inputs:
        path = Path(name).resolve()
        inside = replaces and path.is_dir() and path in folder.parents
        if os.path.lexists(name) and (path.is_relative_to(folder) or inside):
            raise ValueError(
                f"output_dir: must not {'lie inside' if inside else 'be or hold'} an input of the run, got {folder} and the "
                f"input {path}. Choose another path."
            )


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace what is not, whole and unchanged, an earlier output of ours."""
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
    """Tell whether a folder is one; of a folder mounted from the same disk only the kernel's list knows."""
    if os.path.ismount(folder):
        return True
    mounts = Path("/proc/self/mountinfo")
    lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if mounts.is_file() else []
    points = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in lines)
    return str(folder) in points


def _check_place(folder: Path, num_bytes: int) -> None:
    """Refuse a folder that cannot be made, or moved away, or whose disk has no room."""
    parent = next(path for path in folder.parents if path.exists())
    longest = os.pathconf(parent, "PC_NAME_MAX") - _LONGER if hasattr(os, "pathconf") else 255 - _LONGER
    if len(os.fsencode(folder.name)) > longest:
        raise ValueError(
            f"output_dir: the folder's name must have at most {longest} bytes, so that one can be made beside it while the run "
            f"lasts, got {len(os.fsencode(folder.name))}. Choose a shorter name."
        )
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir: {parent} must be a folder that can be written, it is not. Choose another path.")
    if folder.is_dir() and parent.stat().st_mode & stat.S_ISVTX:  # as in /tmp: only the owner renames a folder
        owners = {0, parent.stat().st_uid, folder.stat().st_uid}
        if os.geteuid() not in owners:
            raise ValueError(
                f"output_dir: {folder} must be yours to be replaced, it is another user's. Choose another path."
            )
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ValueError(
            f"output_dir: {parent} must have room for at least {format_bytes(num_bytes)} of weights, got "
            f"{format_bytes(free)} free. Make room, or choose another disk."
        )


# -- how it is written --------------------------------------------------------------------------------------------


def prepare_output(folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike] = (), num_bytes: int = 0) -> None:
    """Put right what dead runs left at an output path, then check it; of several processes the first does, for all.

    :raises ValueError: as :func:`check_output`
    """

    def prepare() -> None:
        settle_leftovers(folder)
        check_output(folder, overwrite, inputs, num_bytes)

    do_once(prepare)


@contextmanager
def write_folder(
    folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike] = (), num_bytes: int = 0
) -> Iterator[Path]:
    """Give a folder to write into, which takes the place of ``folder`` when the block ends well, and vanishes otherwise.

    :param inputs: as in :func:`check_output`, and so is ``num_bytes``
    :raises ValueError: as :func:`check_output`
    :raises OSError: the block ended well, and yet the folder cannot take its place: it is kept, the message says where
    """
    prepare_output(folder, overwrite, inputs, num_bytes)
    folder = folder.resolve()
    made = [path for path in folder.parents if not path.exists()]
    scratch = Path(do_once(lambda: str(_make_scratch(folder))))
    try:
        yield scratch / _NEW
        wait_for_all()
        do_once(lambda: _take_place(scratch, folder, overwrite, inputs))
    finally:
        if is_source_process():
            for line in _settle(scratch, folder):
                logger.warning(line)
            for parent in made:
                with suppress(OSError):  # it holds something by now
                    parent.rmdir()


def _make_scratch(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    owner = {"folder": folder.name, **_describe_process()}
    (scratch / _OWNER).write_text(json.dumps(owner) + "\n", encoding="utf-8")
    (scratch / _NEW).mkdir()
    return scratch


def _take_place(scratch: Path, folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike]) -> None:
    """Move what was written to its place; what is there now is looked at again, for others may have been there meanwhile."""
    done, old = scratch / _DONE, scratch / _OLD
    (scratch / _NEW).rename(done)  # from here on it is kept, whatever happens
    try:
        write_listing(done)
        for path in (*done.rglob("*"), done):  # the folder that they replace is about to be removed
            flush(path)
        if folder.exists():
            check_output(folder, overwrite, inputs)
            if any(folder.iterdir()):
                folder.rename(old)
        done.rename(folder)
        flush(folder.parent)
    except (OSError, ValueError) as error:
        told = " ".join(_settle(scratch, folder))
        failure = OSError(f"output_dir: {folder} must be free to take the output, it is not: {error} {told}")
        failure.errno = getattr(error, "errno", None) or errno.EEXIST
        raise failure from None


# -- what dead runs leave -----------------------------------------------------------------------------------------


def settle_leftovers(folder: Path) -> None:
    """Put right what earlier runs for an output folder left beside it when they died, and say so.

    Only what a dead process of this machine made is touched; what another machine's may still be writing is named.
    """
    folder = folder.resolve()
    if not folder.parent.is_dir():
        return
    for scratch in sorted(folder.parent.glob(f".{glob.escape(folder.name)}.partial-*")):
        owner = _read_owner(scratch)
        if owner.get("folder", folder.name) != folder.name:
            continue  # of a folder whose name only begins like that
        alive = _is_alive(owner)
        if alive is None:
            logger.warning(f"{scratch} may belong to a run elsewhere that writes {folder}. Remove it if there is none.")
        elif not alive:
            done = scratch / _DONE
            if done.is_dir() and not (done / FILES_NAME).is_file():  # it died before it had listed its files
                with suppress(OSError):
                    write_listing(done)
            told = _settle(scratch, folder)
            state = "is still there" if scratch.exists() else "is removed"
            logger.warning(" ".join([f"{scratch}, left by a run that died, {state}.", *told]))


def _settle(scratch: Path, folder: Path) -> list[str]:
    """End a run's scratch folder in whatever state it is: put the earlier folder back, keep finished work, remove the rest.

    :return: what a person must know of it
    """
    done, old = scratch / _DONE, scratch / _OLD
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
        return [*told, f"{scratch} holds what must not be lost, in {_DONE} and {_OLD}, and cannot be moved: {error}."]
    shutil.rmtree(scratch, ignore_errors=True)
    return told


def _move_beside(path: Path, folder: Path, word: str) -> Path:
    return path.rename(folder.with_name(f"{folder.name}.{word}-{path.parent.name.rpartition('-')[2]}"))


def _read_owner(scratch: Path) -> dict[str, Any]:
    try:
        owner = json.loads((scratch / _OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Tell whether the process that a scratch folder names still runs; None where that cannot be known from here."""
    try:
        pid, start, place = int(owner["pid"]), float(owner["start"]), owner["place"]
    except (ValueError, KeyError, TypeError):
        return None
    if place != _describe_place():
        return None
    try:
        return abs(psutil.Process(pid).create_time() - start) < _SAME_START
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _describe_process() -> dict[str, object]:
    return {"pid": os.getpid(), "start": psutil.Process().create_time(), "place": _describe_place()}


def _describe_place() -> str:
    """Return what process numbers count in: this machine, since it was started, and on Linux this container."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname(), boot.read_text(encoding="utf-8").strip() if boot.is_file() else ""]
    return " ".join([*parts, os.readlink(space) if space.is_symlink() else ""])
