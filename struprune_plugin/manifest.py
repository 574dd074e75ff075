"""``struprune.json`` as it is read: checked before anybody relies on it. Nothing heavy is imported here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

MANIFEST_NAME = "struprune.json"
FORMAT_VERSION = 1
DIGEST_KEY = "sha256"
_MAX_COUNT = 1 << 63
_NUMBER = (int, float)
_MAYBE = (int, float, type(None))
_MODEL = {"base": str, "type": str, "weights_sha256": str, "parameters_before": int, "parameters_after": int}
_SETTINGS: dict[str, Any] = {
    **{"attention_unit": str, "importance": str, "restoration": str, "target": str, "prune_ffn": bool},
    **{"targets": [str], "ignore": [str]},
}
_BUDGET = {"prunable_parameters": int, "asked_sparsity": _NUMBER, "removed_parameters": int, "met_sparsity": _NUMBER}
_GROUP = {
    **{"name": str, "layer": int, "kind": str, "num_units": int, "num_blocks": int, "unit_cost": int, "kept": int},
    **{"sparsity": _NUMBER, "error_before": _NUMBER, "error_after": _NUMBER, "keep": [int]},
}
_FORM: dict[str, Any] = {  # what every reader relies on; a list has one form for all that it holds
    "format_version": int,
    "model": _MODEL,
    "settings": _SETTINGS,
    "calibration": {"num_sequences": int, "num_tokens": int, "sha256": str},
    "budget": _BUDGET,
    "allocation": {"method": str},
    "stages": [{"name": str, "seconds": _NUMBER, "peak_bytes": (int, type(None))}],
    "groups": [_GROUP],
}
_IF_THERE: dict[str, Any] = {
    "versions": {},
    "allocation": {"temperature": _NUMBER},
    "budget": {"rounding": [{"kind": str, "width_multiple": int, "because": [str], "modules": [str]}]},
    "sensitivity": {},
    "evaluation": {
        "perplexity": [{"text": str, "window": int, "stride": int, "value": _NUMBER, "dense": _MAYBE}],
        "tasks": [
            {"task": str, "metric": str, "limit": (int, type(None)), "value": _NUMBER, "stderr": _MAYBE}
            | {"dense": _MAYBE, "dense_stderr": _MAYBE}
        ],
    },
    "recovery": {"settings": {"rank": int}, "steps": int, "tokens_seen": int, "seconds": _NUMBER},
}
_WORDS = {
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    _NUMBER: "a number",
    _MAYBE: "a number, or null",
    (int, type(None)): "a whole number",
}


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read the manifest of an output folder, or the file itself.

    :raises ValueError: there is none, it is no manifest, a later version wrote it, or it is not as it was written: kept units
        that are not sorted, unique, in range and the same number in each block, or a content that its digest is not of
    """
    if not isinstance(path, (str, Path)):
        raise ValueError(f"manifest: must be a pruned folder or a {MANIFEST_NAME}, got {path!r}. Give its path.")
    path = Path(path)
    file = path / MANIFEST_NAME if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path}: must be a pruned folder with a {MANIFEST_NAME}, or that file, got neither. Prune first."
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            raise TypeError(f"a {type(manifest).__name__}")
        found = manifest["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{file}: must be a StruPrune manifest, got {_shorten(error)}. Use the file as it was written."
        ) from None
    if found != FORMAT_VERSION:
        raise ValueError(
            f"{file}: format_version must be {FORMAT_VERSION}, got {_shorten(found)}. Use the version that wrote it."
        )
    check_manifest(manifest, str(file))
    return manifest


def check_manifest(manifest: Mapping[str, Any], where: str) -> None:
    """Refuse a manifest that a reader could trip over, or that has been changed since it was written.

    :param where: for messages
    :raises ValueError: the same
    """
    _check_form(manifest, _FORM, where, "")
    for name, form in _IF_THERE.items():
        part = manifest.get(name)
        if part is not None:
            known = {
                key: value
                for key, value in form.items()
                if not isinstance(part, dict) or name == "recovery" or key in part
            }
            _check_form(part, known, where, name)
    for place, group in enumerate(manifest["groups"]):
        _check_units(group, f"{where}: groups[{place}]")
    before = manifest["model"]["parameters_before"]
    if before < 1 or manifest["model"]["parameters_after"] > before:
        _refuse(where, "model.parameters_before", "at least 1, and as many as after", before)
    names = [group["name"] for group in manifest["groups"]]
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: groups must have a name each, got one twice. Use the file as it was written.")
    digest = manifest.get(DIGEST_KEY)
    if digest is not None and digest != digest_manifest(manifest):
        raise ValueError(
            f"{where}: must be as it was written, got a content that its {DIGEST_KEY} is not of. Restore the file, or prune again."
        )


def digest_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's content, whatever the order of its keys; its own entry left out."""
    content = {name: value for name, value in manifest.items() if name != DIGEST_KEY}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_form(value: Any, form: Any, where: str, name: str) -> None:
    """Refuse a value of another form: a mapping of forms, a list of one form, a type or a choice of types."""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            _refuse(where, name, "a mapping", value)
        for key, inner in form.items():
            place = f"{name}.{key}" if name else key
            if key not in value:
                raise ValueError(
                    f"{where}: must be a StruPrune manifest, got none of {place}. Use the file as it was written."
                )
            _check_form(value[key], inner, where, place)
    elif isinstance(form, list):
        if not isinstance(value, list):
            _refuse(where, name, "a list", value)
        for place, item in enumerate(value):
            _check_form(item, form[0], where, f"{name}[{place}]")
    elif not isinstance(value, form) or (isinstance(value, bool) and form is not bool):
        _refuse(where, name, _WORDS[form], value)
    elif isinstance(value, int) and not 0 <= value < _MAX_COUNT:
        _refuse(where, name, "a count", value)


def _check_units(group: Mapping[str, Any], where: str) -> None:
    """Refuse kept units that no pruning leaves.

    :raises ValueError: the same
    """
    keep, units, blocks = group["keep"], group["num_units"], group["num_blocks"]
    if not 1 <= blocks <= units or units % blocks:
        raise ValueError(
            f"{where}: num_units must be a multiple of num_blocks, both at least 1, got {units} and {blocks}. Use the file as it "
            "was written."
        )
    ordered = all(first < second for first, second in pairwise(keep)) and keep and keep[0] >= 0 and keep[-1] < units
    per_block, size = [0] * (blocks if len(keep) >= blocks else 0), units // blocks  # no larger than what was read
    for unit in keep if ordered and per_block else ():
        per_block[unit // size] += 1
    if not ordered or len(set(per_block)) != 1 or group["kept"] != len(keep):
        raise ValueError(
            f"{where}: keep must be sorted, unique units from 0 to {units - 1}, the same number in each of {blocks} blocks and as "
            f"many as kept says, got {_shorten(keep)} and kept {group['kept']}. Use the file as it was written."
        )


def _refuse(where: str, name: str, wanted: str, value: object) -> None:
    raise ValueError(
        f"{where}: must be a StruPrune manifest, got {_shorten(value)} for {name}, which is {wanted}. Use the file as it "
        "was written."
    )


def _shorten(value: object) -> str:
    if isinstance(value, (list, dict)):  # whose text may be as long as the file, and as deep
        return f"a {type(value).__name__} of {len(value)}"
    try:
        text = repr(value)
    except ValueError:  # a number too long to write
        return f"a long {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}…"
