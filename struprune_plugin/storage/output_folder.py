"""Output folder of a run: it is complete or absent, and replaces nothing but an earlier output of StruPrune.

During the run, the output is written to ``.<name>.partial`` beside the folder. That folder is locked, and the lock ends with the
process; so the next run knows what a dead one left, and removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from compressed_tensors.distributed import is_source_process

from struprune_plugin.runtime.distributed import compute_on_rank0, wait_for_all
from struprune_plugin.storage.files import check_place, flush, format_bytes
from struprune_plugin.storage.manifest import MANIFEST_NAME, read_manifest

_NEW, _OLD = "new", "old"  # in the temporary folder: the output, and the earlier one between two renames
TEMPLATES = "additional_chat_templates"  # folder of a tokenizer's other templates
_CARRIED = """
    *token*.json vocab.* *vocab*.txt merges.txt bpe.codes dict.txt *.model *.spm *.tiktoken tekken.json normalizer.json
    special_tokens_map.json chat_template.* chat_template*.jinja *processor_config.json sentence*_config.json
    tokenization_*.py *processing_*.py LICENSE* NOTICE* USE_POLICY*
"""
_WRITTEN = (
    "recipe.yaml README.md *.py *.gguf model.safetensors* model-?????-of-?????.safetensors config.json *_config.json"
)
CARRIED = _CARRIED.split()  # what AutoTokenizer, AutoProcessor and llama.cpp's converter read, and an input's terms
_OURS = [MANIFEST_NAME, *_WRITTEN.split(), *CARRIED]  # what an output holds; anything else is somebody's own


def check_output(folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike] = (), num_bytes: int = 0) -> None:
    """Raise if a path cannot become the output folder, or if its content must not be replaced.

    :param inputs: other files and folders that the run reads or writes; strings that may be hub names count only if such a
        file exists
    :param num_bytes: lower bound on the size of the output
    :raises ValueError: a file or a mount point; the root, a home, the current folder or an input, or a folder that holds
        one; a folder with content that may not be overwritten, or that holds anything but an output of StruPrune; a place
        that cannot be written or lacks space
    """
    folder = folder.resolve()
    kept = [("current folder", Path.cwd()), ("home folder", Path.home()), ("root folder", Path(folder.anchor))]
    kept += [("input", Path(path)) for path in inputs if isinstance(path, Path) or os.path.lexists(path)]
    for what, path in kept:
        if path.resolve().is_relative_to(folder):
            raise ValueError(
                f"output_dir: must not be or hold the {what} {path}, got {folder}, which would be replaced. Choose another path."
            )
    check_place("output_dir", folder)
    check_place("output_dir", folder.parent)
    if os.path.ismount(folder):
        raise ValueError(
            f"output_dir: must not be a mount point, which cannot be replaced, got {folder}. Choose a folder inside it."
        )
    if folder.is_dir() and any(folder.iterdir()):
        _check_replaceable(folder, overwrite)
    parent = next(path for path in folder.parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ValueError(
            f"output_dir: {parent} must have room for at least {format_bytes(num_bytes)} of weights, got "
            f"{format_bytes(free)} free. Make room, or choose another disk."
        )


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    """Raise unless a folder may be overwritten, and holds an output of StruPrune and nothing else."""
    try:
        read_manifest(folder)
        is_ours = True
    except ValueError:
        is_ours = False
    if not overwrite:
        remedy = "another folder, or pass overwrite (--overwrite)" if is_ours else "another folder"
        raise ValueError(f"output_dir: must be empty or absent, {folder} is neither. Choose {remedy}.")
    if not is_ours:
        raise ValueError(
            f"output_dir: must be an earlier output of StruPrune to be overwritten, {folder} has no readable {MANIFEST_NAME}. "
            "Choose another path, or remove the folder yourself."
        )
    for path in sorted(folder.iterdir()):
        if path.name == TEMPLATES and path.is_dir() and all(file.suffix == ".jinja" for file in path.iterdir()):
            continue
        if path.is_symlink() or not path.is_file() or not any(fnmatch(path.name, name) for name in _OURS):
            raise ValueError(
                f"output_dir: must hold nothing but what StruPrune wrote to be overwritten, {folder} also holds {path.name}. "
                "Move that away, or choose another path."
            )


@contextmanager
def write_folder(
    folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike] = (), num_bytes: int = 0
) -> Iterator[Path]:
    """Yield a folder to write into, which replaces ``folder`` if the block ends without an error, and is removed otherwise.

    With several processes, the first one does all of this. Parameters as in :func:`check_output`.

    :raises ValueError: as :func:`check_output`; another run writes this folder now
    :raises OSError: the block ended without an error, but the folder cannot be moved to its place: it is kept, and the message
        says where
    """
    compute_on_rank0(lambda: check_output(folder, overwrite, inputs, num_bytes))
    folder = folder.resolve()
    scratch = folder.with_name(f".{folder.name}.partial")
    made = [path for path in folder.parents if not path.exists()]
    locks: list[int] = []

    def start() -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        locks.append(_lock(scratch))
        if _restore(scratch, folder):
            check_output(folder, overwrite)
        for left in scratch.iterdir():
            shutil.rmtree(left)
        (scratch / _NEW).mkdir()

    try:
        compute_on_rank0(start)
        yield scratch / _NEW
        wait_for_all()
        compute_on_rank0(lambda: _take_place(scratch, folder, overwrite, inputs))
    finally:
        for lock in locks:
            _restore(scratch, folder)
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(lock)
        for parent in made if is_source_process() else ():
            with suppress(OSError):  # it is no longer empty
                parent.rmdir()


def _lock(scratch: Path) -> int:
    """Return the descriptor that holds a folder's lock, which ends with this process."""
    lock = os.open(scratch, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(
            f"output_dir: must not be written by another run, got one that writes to {scratch}. Wait for it, or choose "
            "another folder."
        ) from None
    return lock


def _restore(scratch: Path, folder: Path) -> bool:
    """Move the earlier output back if nothing has taken its place; return whether that was so."""
    if not (scratch / _OLD).exists() or os.path.lexists(folder):
        return False
    (scratch / _OLD).rename(folder)
    return True


def _take_place(scratch: Path, folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike]) -> None:
    """Move the finished output to its place, which is checked again because it may have changed in the meantime."""
    new = scratch / _NEW
    for path in (*new.rglob("*"), new):  # on the disk before the folder that they replace is removed
        flush(path)
    try:
        if folder.exists():
            check_output(folder, overwrite, inputs)
            folder.rename(scratch / _OLD)
        new.rename(folder)
        flush(folder.parent)
    except (OSError, ValueError) as error:
        kept = new.rename(folder.with_name(f"{folder.name}.finished-{os.getpid()}"))
        failure = OSError(
            f"output_dir: the finished output cannot be moved to {folder}: {error} It is complete, in {kept}; move it yourself."
        )
        failure.errno = getattr(error, "errno", None) or errno.EEXIST
        raise failure from None
