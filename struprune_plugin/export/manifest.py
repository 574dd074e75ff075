"""``struprune.json``: what was decided, layer by layer, and what a replay needs."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

MANIFEST_NAME = "struprune.json"
FORMAT_VERSION = 1
_KEYS = ("model", "settings", "calibration", "budget", "allocation", "stages", "groups")
_PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")


def describe_versions() -> dict[str, str]:
    """Return the versions that a bit-identical replay depends on."""
    return {
        "struprune": version("struprune-plugin"),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
    }


def write_manifest(manifest: dict[str, Any], folder: str | Path) -> Path:
    """Write the manifest into an output folder, whole or not at all."""
    path = Path(folder) / MANIFEST_NAME
    partial = path.with_suffix(".partial")
    content = {"format_version": FORMAT_VERSION, "versions": describe_versions(), **manifest}
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return partial.replace(path)


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read the manifest of an output folder, or the file itself.

    :raises ValueError: there is none, it is no manifest, or a later version wrote it
    """
    path = Path(path)
    file = path / MANIFEST_NAME if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path}: must be a pruned folder with a {MANIFEST_NAME}, or that file, got neither. Prune first."
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        found = manifest["format_version"]
        missing = [key for key in _KEYS if key not in manifest]
        if found == FORMAT_VERSION and missing:
            raise KeyError(*missing)
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file}: must be a StruPrune manifest, got {error!r}. Use the file as it was written."
        ) from None
    if found != FORMAT_VERSION:
        raise ValueError(
            f"{file}: format_version must be {FORMAT_VERSION}, got {found}. Use the version that wrote it."
        )
    return manifest
