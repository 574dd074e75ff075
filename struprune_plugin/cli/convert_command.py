"""``struprune convert``: other forms of a pruned folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen
from struprune_plugin.reporting.tables import measure_weight_bytes
from struprune_plugin.storage.files import format_bytes
from struprune_plugin.storage.manifest import carry_manifest

_FORMS = Literal["uniform-padded", "gguf"]  # of struprune_plugin.export.forms


def convert(
    path: opt.Folder,
    to: Annotated[_FORMS, opt.option("--to", "form to write")],
    output: Annotated[Path, opt.option("--output", "folder to write; it appears when it is complete", "DIR")],
    overwrite: opt.Overwrite = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Convert a pruned folder to another form, for stock classes or other engines.

    The model's outputs stay the same. uniform-padded: all layers padded with zeros to the largest, for stock classes. gguf: one
    file for llama.cpp, sizes per layer (LLaMA only).
    """
    screen = Screen(as_json, quiet)
    opt.check_folder(path)
    from struprune_plugin import registration  # noqa: F401
    from struprune_plugin.export.forms import convert_folder
    from struprune_plugin.reporting.model_card import write_card
    from struprune_plugin.storage.output_folder import write_folder

    screen.set_log()
    with write_folder(output, overwrite, [path], measure_weight_bytes(path)) as partial:
        convert_folder(path, to, partial, trust_remote_code)
        carry_manifest(path, partial)
        write_card(partial)
    how = "; load it with trust_remote_code=True" if any(output.glob("*.py")) else ""
    size = measure_weight_bytes(output)
    record = {"output": str(output), "form": to, "bytes": size}
    screen.show(record, f"wrote {output} ({format_bytes(size)} of weights{how})")
