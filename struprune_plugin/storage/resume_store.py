"""Store of a run's finished parts in a folder, from which a killed run continues.

A part is one safetensors file: a value of dataclasses, with its tensors apart from the rest, which is JSON in the metadata. It
reaches the disk before it gets its name. A part that is truncated counts as missing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from loguru import logger
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from struprune_plugin.runtime.distributed import gather
from struprune_plugin.runtime.records import join_tensors, split_tensors
from struprune_plugin.storage.files import check_place, is_empty, replace_file, write_whole

_RUN, _LOCK = "struprune_run.json", "lock.partial"


class ResumeStore:
    """Store of the finished parts of one run, which no other run may use as long as its block lasts. If that ends without an error,
    the run is over, and the store's files are removed.

    :param folder: folder of the store, created if absent
    :param others: what the run reads and writes besides
    :raises ValueError: the folder holds something else, or overlaps one of the others
    """

    def __init__(self, folder: Path, others: Sequence[str | os.PathLike] = ()):
        self.folder = folder.resolve()
        for other in (Path(path).resolve() for path in others):
            if self.folder == other or self.folder in other.parents or other in self.folder.parents:
                raise ValueError(
                    f"checkpoint_dir: must be apart from what the run reads and writes, got {self.folder} beside {other}, one of "
                    "which holds the other. Choose another path."
                )
        check_place("checkpoint_dir", self.folder)
        if self.folder.is_dir() and not is_empty(self.folder) and not (self.folder / _RUN).is_file():
            raise ValueError(
                f"checkpoint_dir: must be empty, absent or the checkpoint of an earlier run, {self.folder} is none of these. "
                "Choose another path."
            )
        self._lock = FileLock(self.folder / _LOCK, blocking=False)

    def __enter__(self) -> ResumeStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._lock.is_locked:
            if kind is None:
                left = [file for file in self.folder.glob("*.partial") if file.name != _LOCK]
                for file in (*self.folder.glob("*.safetensors"), *left, self.folder / _RUN):
                    file.unlink(missing_ok=True)
            with suppress(OSError):  # Windows removes no open file
                (self.folder / _LOCK).unlink()
            self._lock.release()
            with suppress(OSError):
                self.folder.rmdir()  # unless it holds parts

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin or resume the run that an identity describes.

        :param identity: JSON values by topic (recipe, model, data, versions)
        :raises ValueError: the folder holds the parts of another run; the message says what differs. Another run is using it
        :raises OSError: the disk cannot be written
        """
        file, identity = self.folder / _RUN, json.loads(json.dumps(identity, default=str))
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(
                f"checkpoint_dir: must not be used by another run, got one that uses {self.folder}. Wait for it, or choose another "
                "folder."
            ) from None
        if file.is_file():
            before = json.loads(file.read_text(encoding="utf-8"))
            changes = [name for name in identity if identity[name] != before.get(name)]
            if changes:
                raise ValueError(
                    f"checkpoint_dir: {self.folder} holds the checkpoint of another run, which differs in "
                    f"{', '.join(changes)}. Repeat that run, or choose another folder."
                )
            count = len(list(self.folder.glob("*.safetensors")))
            logger.info(f"checkpoint_dir: continuing after {count} finished parts in {self.folder}")
        else:
            with self._writing("the description of the run"):
                write_whole(file, json.dumps(identity, indent=1) + "\n")

    def write(self, part: str, value: Any) -> None:
        """Write a part durably.

        :param value: as in :func:`~struprune_plugin.runtime.records.split_tensors`
        :raises OSError: the disk cannot be written; earlier parts are kept
        """
        record, tensors = split_tensors(value)
        held = {str(index): tensor.detach().cpu().contiguous() for index, tensor in enumerate(tensors)}
        with self._writing(part), replace_file(self.folder / f"{part}.safetensors") as partial:
            save_file(held, partial, metadata={"record": record})

    def read(self, part: str, value_type: Any) -> Any:
        """Return the value of a part, with its tensors on the host; None if it is missing or truncated.

        :param value_type: type of the value
        """
        file = self.folder / f"{part}.safetensors"
        if not file.is_file():
            return None
        try:
            with safe_open(file, "pt") as opened:
                record, read_tensor = opened.metadata()["record"], opened.get_tensor
                return join_tensors(record, value_type, lambda index: read_tensor(str(index)))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            logger.warning(f"checkpoint_dir: {file} is damaged ({error}) and is computed again.")
            return None

    def count_bytes(self) -> int:
        """Return the bytes of the finished parts."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    @contextmanager
    def _writing(self, part: str) -> Iterator[None]:
        """Raise any error of the block as an OSError that names the part."""
        try:
            yield
        except Exception as error:  # safetensors has errors of its own for a full disk
            failure = OSError(
                f"checkpoint_dir: {part} cannot be written to {self.folder}: {error}. Free disk space; the same command then "
                "continues after the last finished part."
            )
            failure.errno = getattr(error, "errno", None) or errno.EIO
            raise failure from None


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def describe_run(
    recipe: list[dict[str, Any]], versions: dict[str, str], model: PreTrainedModel, loader: Iterable[dict[str, Tensor]]
) -> dict[str, Any]:
    """Return the properties that must be unchanged for a run to resume, by topic."""
    parts = (batch[name] for batch in loader for name in ("input_ids", "attention_mask") if name in batch)
    return {
        "recipe": recipe,
        "model": describe_weights(model),
        "configuration": json.loads(model.config.to_json_string()),
        "data": digest_tokens(parts),
        "versions": versions,
        "threads": torch.get_num_threads(),
    }


def describe_weights(model: PreTrainedModel) -> str:
    """Return a digest of what a model saves (names, dtypes, shapes, sums) that distinguishes dense models.

    Weights are summed as integers, so that every device gives the same sums, and read once all are computed.
    """
    sums = []
    for path, module in model.named_modules():
        for key, weight in {**module._parameters, **module._buffers}.items():
            if weight is not None and key not in module._non_persistent_buffers_set:
                numbers = weight.detach().view(_INTEGERS[weight.itemsize])
                columns = numbers.reshape(-1, *weight.shape[-1:]).sum(0, dtype=torch.int64)
                places = torch.arange(1, columns.numel() + 1, device=columns.device)
                description = (f"{path}.{key}", str(weight.dtype), tuple(weight.shape))
                sums.append((description, columns.sum(), (columns * places).sum()))
    digest = hashlib.sha256()
    for description, *parts in sums:
        digest.update(repr((description, [int(part) for part in parts])).encode())
    return digest.hexdigest()


def digest_tokens(batches: Iterable[Tensor]) -> str:
    """Return the SHA-256 of all processes' token indices [sequences, tokens], in order, in hexadecimal."""
    digest = hashlib.sha256()
    for tokens in batches:
        tokens = tokens.detach().cpu().to(torch.int64)
        digest.update(repr(tuple(tokens.shape)).encode() + tokens.numpy().tobytes())
    digests = gather(digest.hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()
