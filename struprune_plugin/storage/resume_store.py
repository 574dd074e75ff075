"""Store of a run's finished parts in a folder, from which a killed run continues.

A part is one safetensors file: a value of dataclasses, with its tensors apart from the rest, which is JSON in the metadata. It
reaches the disk before it gets its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from struprune_plugin.storage.files import check_place, is_empty, replace_file, write_whole

_RUN = "struprune_run.json"
_TENSOR = "__tensor__"


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

        :param identity: JSON values by topic (recipe, model, data, versions)
        :raises ValueError: the folder holds the parts of another run; the message says what differs
        """
        if self._is_open:
            return
        file, identity = self.folder / _RUN, json.loads(json.dumps(identity, default=str))
        if file.is_file():
            before = json.loads(file.read_text(encoding="utf-8"))
            changes = [name for name in identity if identity[name] != before.get(name)]
            if changes:
                raise ValueError(
                    f"checkpoint_dir: {self.folder} holds the checkpoint of another run, which differs in "
                    f"{', '.join(changes)}. Repeat that run, or choose another folder."
                )
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(identity, indent=1) + "\n")
        self._is_open = True

    def write(self, part: str, value: Any) -> None:
        """Write a part durably.

        :param value: dataclasses, mappings with string keys, lists, tuples, tensors and JSON values, nested
        """
        tensors: dict[str, Tensor] = {}

        def encode(inner: Any) -> dict[str, Any]:
            if isinstance(inner, Tensor):
                tensors[name := str(len(tensors))] = inner.detach().cpu().contiguous()
                return {_TENSOR: name}
            return {field.name: getattr(inner, field.name) for field in fields(inner)}

        record = json.dumps(value, default=encode)
        with replace_file(self.folder / f"{part}.safetensors") as partial:
            save_file(tensors, partial, metadata={"record": record})

    def read(self, part: str, kind: Any) -> Any:
        """Return the value of a part, of this kind, with its tensors on the host; None if there is none."""
        file = self.folder / f"{part}.safetensors"
        if not file.is_file():
            return None
        with safe_open(file, "pt") as opened:
            record = json.loads(
                opened.metadata()["record"],
                object_hook=lambda held: opened.get_tensor(held[_TENSOR]) if _TENSOR in held else held,
            )
        reader = TypeAdapter(list[kind], config=ConfigDict(arbitrary_types_allowed=True))  # a dataclass takes no config
        return reader.validate_python([record])[0]

    def clear(self) -> None:
        """Remove the files of the store, once the run is over."""
        for file in (*self.folder.glob("*.safetensors"), *self.folder.glob("*.partial"), self.folder / _RUN):
            file.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
