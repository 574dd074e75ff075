"""Store of a run's finished parts in a folder, from which a killed run continues.

A part is one safetensors file whose metadata hold its record and the digest of its content. It reaches the disk before it gets
its name. A part that is truncated, or has another digest, counts as missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from struprune_plugin.storage.files import check_place, is_empty, replace_file, shorten_value
from struprune_plugin.storage.registry import list_differences

_RUN = "struprune_run.json"
_PACKAGE = Path(__file__).parents[1]


class ResumeStore:
    """Store of the finished parts of one run.

    :param folder: folder of the store, created if absent
    :raises ValueError: the folder holds something else
    """

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self._is_open = False
        check_place("checkpoint_dir", self.folder)
        if self.folder.is_dir() and not is_empty(self.folder) and not (self.folder / _RUN).is_file():
            raise ValueError(
                f"checkpoint_dir: must be empty, absent or the checkpoint of an earlier run, {self.folder} is none of these. "
                "Choose another path."
            )

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin or resume the run that an identity describes.

        :param identity: JSON values by topic (recipe, model, data, versions, code)
        :raises ValueError: the folder holds the parts of another run; the message says what differs
        :raises OSError: the disk cannot be written
        """
        if self._is_open:
            return
        file, identity = self.folder / _RUN, json.loads(json.dumps(identity, default=str))
        if file.is_file():
            try:
                before = json.loads(file.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"checkpoint_dir: {file} must be as it was written, but cannot be read ({error!r}). Remove "
                    "the folder, and start again."
                ) from None
            changes = [
                f"{place} ({shorten_value(theirs, 40)}, now {shorten_value(ours, 40)})"
                for place, theirs, ours in list_differences(before, identity)
            ]
            if changes:
                raise ValueError(
                    f"checkpoint_dir: {self.folder} holds the checkpoint of another run, which differs in "
                    f"{'; '.join(changes[:3])}. Repeat that run, or choose another folder."
                )
            logger.info(
                f"checkpoint_dir: continuing after {len(list(self.folder.glob('*.safetensors')))} finished parts in {self.folder}"
            )
        else:
            with self._tell_of_refusals("the description of the run"):
                self.folder.mkdir(parents=True, exist_ok=True)
                with replace_file(file) as partial:
                    partial.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
        self._is_open = True

    def write(self, part: str, record: Any, tensors: Mapping[str, Tensor]) -> None:
        """Write a part durably.

        :param record: JSON value
        :raises OSError: the disk cannot be written; earlier parts are kept
        """
        with self._tell_of_refusals(part), replace_file(self.locate(part)) as partial:
            held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            text = json.dumps(record)
            save_file(held, partial, metadata={"record": text, "sha256": _digest(text, held)})

    @contextmanager
    def _tell_of_refusals(self, part: str) -> Iterator[None]:
        """Raise any error of the block as an OSError that names the part."""
        try:
            yield
        except Exception as error:  # safetensors has errors of its own for a full disk
            failure = OSError(
                f"checkpoint_dir: {part} cannot be written to {self.folder}: {error}. Free disk space; the same command then "
                "continues after the last finished part."
            )
            failure.errno = getattr(error, "errno", None) or 5
            raise failure from None

    def read(self, part: str) -> tuple[Any, dict[str, Tensor]] | None:
        """Return the record and the tensors of a part, on the host; None if it is missing or damaged."""
        file = self.locate(part)
        if not file.is_file():
            return None
        try:
            with safe_open(file, "pt") as opened:
                metadata, names = opened.metadata(), list(opened.keys())
                tensors = {name: opened.get_tensor(name) for name in names}
            if _digest(metadata["record"], tensors) == metadata["sha256"]:
                return json.loads(metadata["record"]), tensors
            error: Exception | str = "its digest is another"
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as failure:
            error = failure
        logger.warning(f"checkpoint_dir: {file} is damaged ({error}) and is computed again.")
        return None

    def list_parts(self, start: str) -> list[str]:
        """Return the sorted names of the parts that begin with ``start``; these may be damaged."""
        return sorted(file.stem for file in self.folder.glob(f"{start}*.safetensors"))

    def locate(self, part: str) -> Path:
        """Return the path of a part's safetensors file."""
        return self.folder / f"{part}.safetensors"

    def remove(self, part: str) -> None:
        """Remove a part."""
        self.locate(part).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the files of the store, once the run is over."""
        for file in (*self.folder.glob("*.safetensors"), *self.folder.glob("*.partial"), self.folder / _RUN):
            file.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def digest_package() -> str:
    """Return a digest of the package's sources, which may change while the version stays the same."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.relative_to(_PACKAGE).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _digest(record: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(record.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
