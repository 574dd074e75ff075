"""``struprune inspect``, ``report`` and ``recipes``: the content of a pruned folder, a page about it, the shipped recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen
from struprune_plugin.recipes.shipped import describe_recipe, list_recipes
from struprune_plugin.reporting.tables import format_facts, summarize_layers, summarize_manifest
from struprune_plugin.storage.files import write_whole
from struprune_plugin.storage.manifest import read_manifest

_PAGE = "page to write [default: OUT.html beside the folder]"


def inspect(path: opt.Folder, as_json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """Show the content of a pruned folder, layer by layer.

    The figures come from the folder's manifest (struprune.json), which --json prints.
    """
    screen, manifest = Screen(as_json, quiet), read_manifest(path)
    folder = path if path.is_dir() else path.parent
    screen.show(manifest.model_dump(), summarize_layers(manifest), summarize_manifest(manifest, folder))


def report(
    path: opt.Folder,
    output: Annotated[Path | None, opt.option("--output", _PAGE, "FILE")] = None,
    overwrite: Annotated[bool, opt.option("--overwrite", "replace an existing page")] = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Write an HTML page about a pruned folder.

    The page shows sizes, what was removed where, errors, quality and the recipe. It is one file without scripts and needs no
    network.
    """
    screen = Screen(as_json, quiet)
    opt.check_folder(path)
    manifest, page = read_manifest(path), output or path.resolve().with_name(f"{path.resolve().name}.html")
    if page.is_dir() or (page.exists() and not overwrite):
        raise ValueError(f"--output: {page} exists. Choose another path, or pass --overwrite.")
    if not page.parent.is_dir():
        raise ValueError(f"--output: the folder {page.parent} does not exist. Create it, or choose another path.")
    from struprune_plugin.reporting.pages import make_page

    write_whole(page, make_page(path, manifest))
    screen.show({"page": str(page)}, f"wrote {page}")


def recipes(as_json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """List the shipped recipes, for `prune --recipe NAME`."""
    told = {name: describe_recipe(file) for name, file in list_recipes().items()}
    Screen(as_json, quiet).show(told, format_facts(list(told.items())))
