"""``struprune convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from struprune_plugin.cli.console import Screen
from struprune_plugin.cli.options import Folder, Overwrite, option
from struprune_plugin.reporting.tables import measure_weight_bytes
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.manifest import MANIFEST_NAME, read_manifest
from struprune_plugin.storage.verify import check_undamaged

_FORMS = Literal["uniform-padded", "masked", "block_configs", "static", "gguf"]  # of struprune_plugin.export.forms


def convert(
    path: Folder,
    to: Annotated[_FORMS, option("form to write")],
    output: Annotated[Path, option("folder to write; whole or not at all", "DIR")],
    screen: Screen,
    overwrite: Overwrite = False,
) -> None:
    """Write a pruned folder in a form that stock classes load.

    It is the same function in other shapes. uniform-padded: all layers padded with zeros to the largest, stock classes load it.
    masked: the dense model's shapes, zeros where units went. block_configs: every layer's own FFN width in the schema of Nemotron
    NAS models (LLaMA only). static: every layer's own sizes, linears that read the same input joined: the fewest steps in
    transformers. gguf: one file for llama.cpp, every layer of its own size (LLaMA only).
    """
    if not path.is_dir():
        raise ValueError(f"{path}: must be a pruned folder, got none. Correct the path.")
    check_undamaged(path)
    from struprune_plugin import registration  # noqa: F401
    from struprune_plugin.export.forms import convert_folder
    from struprune_plugin.reporting.model_card import try_write_card
    from struprune_plugin.storage.checkpoint import check_whole
    from struprune_plugin.storage.output_folder import write_folder

    screen.set_logging()
    if (path / "config.json").is_file():
        check_whole(str(path))
    with write_folder(output, overwrite, [path], measure_weight_bytes(path)) as partial:
        convert_folder(path, to, partial)
        base = read_manifest(path).model.base if (path / MANIFEST_NAME).is_file() else ""
        try_write_card(partial, base)
    how = "; load it with trust_remote_code=True" if any(output.glob("*.py")) else ""
    size = measure_weight_bytes(output)
    record = {"output": str(output), "form": to, "bytes": size}
    screen.show(record, f"wrote {output} ({format_bytes(size)} of weights{how})")
