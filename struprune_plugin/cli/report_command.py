"""``struprune report``: one HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from struprune_plugin.cli.console import Screen
from struprune_plugin.cli.options import Device, Folder, check_device, flag, option, prepare, whole
from struprune_plugin.storage.files import write_whole
from struprune_plugin.storage.manifest import read_manifest


@dataclass(frozen=True)
class Page:
    """Settings of a report."""

    output: Annotated[Path | None, option("page to write [default: OUT.html beside the folder]", "FILE")] = None
    picture: Annotated[Path | None, option("also write the picture of the layers to this file, as SVG", "FILE")] = None
    prompt: Annotated[list[str] | None, option("prompt of a sample text; may be repeated", "TEXT")] = None
    tokens: Annotated[int, whole("tokens per sample text")] = 40
    no_samples: Annotated[bool, flag("--no-samples", "leave out sample texts, so that no model is loaded")] = False
    overwrite: Annotated[bool, flag("--overwrite", "replace existing files")] = False


def report(path: Folder, page: Page, screen: Screen, device: Device = "auto") -> None:
    """Write an HTML page about a pruned folder.

    The page shows the layers to scale, errors, allocation, quality, sample texts of the dense and the pruned model, and the recipe.
    It is one file without scripts and needs no network.
    """
    check_device(device)
    if not path.is_dir():
        raise ValueError(f"{path}: must be a pruned folder, got no folder. Correct the path.")
    manifest = read_manifest(path)
    output = page.output or path.resolve().with_name(f"{path.resolve().name}.html")
    for name, file in {"--output": output, "--picture": page.picture}.items():
        if file is not None:
            _check_new_file(name, file, page.overwrite)
    samples = []
    if not page.no_samples:
        prepare(device, screen)
        samples = _write_samples(path, manifest.model.base, page)
    from struprune_plugin.reporting.html_report import make_page
    from struprune_plugin.reporting.svg import draw_layers

    write_whole(output, make_page(path, manifest, samples))
    if page.picture is not None:
        write_whole(page.picture, draw_layers(manifest) + "\n")
    record = {"page": str(output), "picture": None if page.picture is None else str(page.picture)}
    screen.show(record, "\n".join(f"wrote {file}" for file in record.values() if file))


def _write_samples(path: Path, base: str, page: Page) -> list[Any]:
    """Return texts of the pruned model and, if it is available, of the dense model after the same prompts."""
    from struprune_plugin.evaluation.scoring import continue_texts, load_checkpoint
    from struprune_plugin.reporting.html_report import PROMPTS, Sample
    from struprune_plugin.storage.checkpoint import find_weights

    prompts = page.prompt or list(PROMPTS)
    pruned = continue_texts(*load_checkpoint(str(path)), prompts, page.tokens)
    dense: list[str] | list[None] = [None] * len(prompts)
    if (folder := find_weights(base)) is not None:
        dense = continue_texts(*load_checkpoint(str(folder)), prompts, page.tokens)
    return [Sample(*parts) for parts in zip(prompts, dense, pruned, strict=True)]


def _check_new_file(name: str, file: Path, overwrite: bool) -> None:
    """Raise if the file of an option exists and may not be replaced, or if its folder does not exist."""
    if file.is_dir() or (file.exists() and not overwrite):
        raise ValueError(f"{name}: {file} exists. Choose another path, or pass --overwrite.")
    if not file.parent.is_dir():
        raise ValueError(f"{name}: the folder {file.parent} does not exist. Create it, or choose another path.")
