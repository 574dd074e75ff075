"""Files that are written whole or not at all, places, names and sizes. This module imports nothing heavy."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

ADAPTER = "adapter_config.json"
MERGE = "Merge the adapter into its model first (peft's merge_and_unload), and pass the merged model."


def is_empty(folder: Path) -> bool:
    """Return whether a folder holds nothing but files that a killed process was writing."""
    return all(path.suffix == ".partial" for path in folder.iterdir())


def write_whole(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with replace_file(file) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replace_file(file: Path) -> Iterator[Path]:
    """Yield a temporary path beside a file, which replaces the file once the block's writes have reached the disk."""
    partial = file.with_name(file.name + ".partial")
    try:
        yield partial
        flush(partial)
        partial.replace(file)
        flush(file.parent)  # the folder holds the name
    finally:
        partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk."""
    is_folder = path.is_dir()
    with suppress(OSError) if is_folder else nullcontext():  # some network disks cannot flush a folder, nor can Windows
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" and not is_folder else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_place(where: str, folder: Path) -> None:
    """Raise if a path is not a folder, or is one that cannot be created or written.

    :param where: name of the setting, for messages
    """
    place = next((path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path)), folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{where}: must be in a folder that can be written, got {place}. Choose another path.")


def check_room(wanted: Sequence[tuple[str, Path, int]]) -> None:
    """Raise if a disk lacks the room for what a run writes.

    :param wanted: name of the setting, for messages, its folder, which need not exist, and bytes
    """
    asked = Counter[int]()
    for where, folder, size in wanted:
        place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        asked[device := place.stat().st_dev] += size
        if asked[device] > (free := shutil.disk_usage(place).free):
            raise ValueError(
                f"{where}: the disk must have {format_bytes(asked[device])} free for what the run writes, got "
                f"{format_bytes(free)} at {place}. Free disk space, or choose a folder on another disk."
            )


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """Yield a new name in a folder for the block's files, which are removed at its end; those of killed processes are, too.

    Each process locks its own, as long as it lives.
    """
    from filelock import FileLock, Timeout

    def remove(folder: Path, lock: FileLock) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
        with suppress(OSError):
            Path(lock.lock_file).unlink(missing_ok=True)

    check_place("offload_folder", parent)
    for left in parent.glob("struprune-*.lock"):
        if not left.stem.removeprefix("struprune-").isdigit():
            continue  # a lock of somebody else's
        with suppress(Timeout):
            (lock := FileLock(left, blocking=False)).acquire()
            remove(left.with_suffix(""), lock)
    folder = parent / f"struprune-{os.getpid()}"
    parent.mkdir(parents=True, exist_ok=True)
    (lock := FileLock(f"{folder}.lock", blocking=False)).acquire()
    try:
        yield folder
    finally:
        remove(folder, lock)


def check_model(model: str) -> None:
    """Raise if a text is neither a model's folder nor may be its name on the hub."""
    place = Path(model)
    if place.is_dir():
        problem = "" if (place / "config.json").is_file() else "a folder without a config.json"
    else:
        problem = "a file" if place.is_file() else "" if is_hub_name(model) else "no such folder"
    remedy = "Correct the path or the name."
    if problem and (place.suffix == ".gguf" or any(place.glob("*.gguf"))):
        problem, remedy = "GGUF, which is for llama.cpp", "Pass the folder of safetensors that it was made from."
    elif problem and (place / ADAPTER).is_file():
        problem, remedy = "an adapter", MERGE
    elif (place / ADAPTER).is_file():
        problem, remedy = f"an adapter beside it ({ADAPTER})", f"{MERGE} If it is merged already, remove that file."
    if problem:
        raise ValueError(
            f"model: {model!r} must be a model folder or a hub name that can be loaded, got {problem}. {remedy}"
        )


def is_hub_name(name: str) -> bool:
    """Return whether a text may be the name of a model on the hub, with or without its owner."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def measure_weight_bytes(folder: str | Path) -> int:
    """Return the bytes of a folder's weight files, of those of several formats the one that is loaded; 0 if there are none."""
    names = "model.safetensors", "model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin", "*.gguf"
    files = next(filter(None, (list(Path(folder).glob(name)) for name in names)), [])
    return sum(file.stat().st_size for file in files)


def format_bytes(count: float) -> str:
    """Return a size as text in decimal units, with three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def shorten_error(error: BaseException) -> str:
    """Return the first line of an error's message, without full stop; with its class unless it is an OSError or ValueError."""
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".")[:300] if lines else ""
    return text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__}: {text}"
