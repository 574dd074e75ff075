"""What the command line can refuse before anything heavy is imported; whatever passes is looked at again by those who use it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from struprune_plugin.shipped import find_recipe

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def check_model_name(name: str) -> None:
    """Refuse what is neither a folder with a model nor, as far as can be told from here, a name of the hub.

    :raises ValueError: the same
    """
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            _refuse_model(name, "a folder without a config.json")
    elif not _HUB_NAME.fullmatch(name):
        _refuse_model(name, "no such folder")
    elif os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on") and not _find_cached(name).is_dir():
        _refuse_model(name, "no such folder, and nothing of that name in the hub's cache while HF_HUB_OFFLINE is set")


def _refuse_model(name: str, found: str) -> None:
    raise ValueError(
        f"model: {name!r} must be a model folder or a hub name that can be loaded, got {found}. Correct the path or the name."
    )


def _find_cached(name: str) -> Path:
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    return cache.expanduser() / f"models--{name.replace('/', '--')}"


def check_recipe_name(name: str) -> None:
    """Refuse a recipe that is neither a file nor a name that ships with the package.

    :raises ValueError: the same
    """
    if "\n" not in name:
        find_recipe(name)


def check_text_file(source: str | os.PathLike | None) -> None:
    """Refuse what is named like a file of texts and is not there.

    :raises ValueError: the same
    """
    if source is not None and Path(source).suffix in (".json", ".jsonl") and not Path(source).is_file():
        raise ValueError(f"text: must be an existing JSON-lines file, got {os.fspath(source)!r}. Correct the path.")


def check_place(where: str, folder: Path) -> None:
    """Refuse a folder that is none, cannot be made, or cannot be written.

    :param where: for messages
    :raises ValueError: the same
    """
    place = next((path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path)), folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(
            f"{where}: must be in a folder that can be written, got {place}, which is none. Choose another path."
        )


def check_device(device: str) -> None:
    """Refuse a word that names no device.

    :raises ValueError: the same
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ValueError(f"--device: must be auto, cpu, cuda or cuda:N, got {device!r}.")
