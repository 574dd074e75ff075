"""Output folder of a run: it is complete or absent, and replaces nothing but an earlier output of StruPrune.

Until it is complete it is ``.<name>.partial`` beside the folder, which is locked as long as the process lives.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock, Timeout
from loguru import logger

from struprune_plugin.runtime.distributed import compute_on_rank0, wait_for_all
from struprune_plugin.storage.files import check_place, flush
from struprune_plugin.storage.manifest import MANIFEST_NAME
from struprune_plugin.storage.vocabulary_record import VOCABULARY_NAME

_NEW, _OLD, _LOCK = "new", "old", "lock"  # in the temporary folder: the output, and the earlier one between two renames
TEMPLATES = "additional_chat_templates"  # folder of a tokenizer's other templates
_CARRIED = """
    *token*.json vocab.* *vocab*.txt merges.txt bpe.codes dict.txt *.model *.spm *.tiktoken tekken.json normalizer.json
    special_tokens_map.json chat_template.* chat_template*.jinja *processor_config.json sentence*_config.json
    tokenization_*.py *processing_*.py LICENSE* NOTICE* USE_POLICY*
"""
# what AutoTokenizer, AutoProcessor and llama.cpp's converter read, and an input's terms
CARRIED = [*_CARRIED.split(), VOCABULARY_NAME]
_WEIGHTS = ("*.gguf", "model.safetensors*", "model-?????-of-?????.safetensors")
_OURS = [*CARRIED, *_WEIGHTS, MANIFEST_NAME, "recipe.yaml", "README.md", "*.py", "config.json", "*_config.json"]


def check_output(folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike] = ()) -> None:
    """Raise if a path cannot become the output folder, or if its content must not be replaced.

    :param inputs: what else the run reads or writes; strings that may be hub names count only if such a file exists
    :raises ValueError: a file, a mount point or a root; a home, the current folder or an input, or a folder that holds one; a
        folder with content that may not be overwritten, or that holds anything but an output; a place that cannot be written
    """
    folder = folder.resolve()
    places = [("current folder", Path.cwd()), ("home folder", Path.home())]
    places += [("mount point", folder)] if os.path.ismount(folder) else []
    places += [("input", Path(path)) for path in inputs if isinstance(path, Path) or os.path.lexists(path)]
    for what, path in places:
        if path.resolve().is_relative_to(folder):
            raise ValueError(f"output_dir: must not be or hold the {what} {path}, got {folder}. Choose another path.")
    check_place("output_dir", folder)
    check_place("output_dir", folder.parent)
    content = sorted(folder.iterdir()) if folder.is_dir() else []
    if content and not overwrite:
        raise ValueError(
            f"output_dir: must be empty or absent, {folder} is neither. Choose another folder, or pass overwrite (--overwrite) to "
            "replace an earlier output."
        )
    strange = next((f"also {path.name}" for path in content if not _is_ours(path)), "")
    if strange or (content and not any((folder / name).is_file() for name in (MANIFEST_NAME, VOCABULARY_NAME))):
        raise ValueError(
            f"output_dir: must hold an earlier output of StruPrune and nothing else to be overwritten, {folder} holds "
            f"{strange or f'no {MANIFEST_NAME}'}. Choose another path, or move that away."
        )


def _is_ours(path: Path) -> bool:
    """Return whether an output may hold such a file, or such a folder, of a tokenizer's other templates."""
    if path.name == TEMPLATES and path.is_dir() and not path.is_symlink():
        return all(file.suffix == ".jinja" for file in path.iterdir())
    return path.is_file() and not path.is_symlink() and any(fnmatch(path.name, name) for name in _OURS)


def copy_templates(source: Path, folder: Path) -> None:
    """Copy a tokenizer's other templates, without the modes by which a source may be read-only: it could not be replaced later."""
    for file in (source / TEMPLATES).glob("*.jinja"):
        (folder / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(file, folder / TEMPLATES / file.name)


@contextmanager
def write_folder(folder: Path, overwrite: bool, inputs: Sequence[str | os.PathLike] = ()) -> Iterator[Path]:
    """Yield a folder to write into, which replaces ``folder`` if the block ends without an error, and is removed otherwise.

    With several processes, the first one does all of this. A finished output that cannot be moved to its place is kept, and the
    log says where. Parameters as in :func:`check_output`.

    :raises ValueError: as :func:`check_output`; another run writes this folder now
    """
    compute_on_rank0(lambda: check_output(folder, overwrite, inputs))
    folder = folder.resolve()
    scratch = folder.with_name(f".{folder.name}.partial")
    lock = FileLock(scratch / _LOCK, blocking=False)

    def start() -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(
                f"output_dir: must not be written by another run, got one that writes to {scratch}. Wait for it, or choose "
                "another folder."
            ) from None
        if _restore(scratch, folder):
            check_output(folder, overwrite)
        for left in (_NEW, _OLD):
            shutil.rmtree(scratch / left, ignore_errors=True)
        (scratch / _NEW).mkdir()

    try:
        compute_on_rank0(start)
        yield scratch / _NEW
        wait_for_all()
        compute_on_rank0(lambda: _take_place(scratch, folder, overwrite, inputs))
    except Exception as error:
        if "No space left" in str(error) and "checkpoint_dir" not in str(error):  # safetensors has errors of its own
            raise OSError(f"output_dir: {folder} cannot be written: the disk is full. Free disk space.") from None
        raise
    finally:
        if lock.is_locked:
            _restore(scratch, folder)
            for left in (_NEW, _OLD):
                shutil.rmtree(scratch / left, ignore_errors=True)
            with suppress(OSError):  # Windows removes no open file
                (scratch / _LOCK).unlink()
            lock.release()
            with suppress(OSError):
                (scratch / _LOCK).unlink(missing_ok=True)
                scratch.rmdir()  # unless another run has begun to write there


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
    except (OSError, ValueError):
        kept = new.rename(folder.with_name(f"{folder.name}.finished-{os.getpid()}"))
        logger.error(f"output_dir: the finished output cannot be moved to {folder}. It is whole, in {kept}; move it.")
        raise
