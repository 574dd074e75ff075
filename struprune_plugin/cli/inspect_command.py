"""``struprune inspect`` and ``struprune recipes``: the content of a pruned folder, the shipped recipes."""

from __future__ import annotations

from struprune_plugin.cli import options as opt
from struprune_plugin.cli.console import Screen
from struprune_plugin.recipes.shipped import describe_recipe, list_recipes
from struprune_plugin.reporting.tables import format_facts, summarize_layers, summarize_manifest
from struprune_plugin.storage.manifest import read_manifest


def inspect(path: opt.Folder, as_json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """Show the content of a pruned folder, layer by layer.

    The figures come from the folder's manifest (struprune.json), which --json prints.
    """
    screen, manifest = Screen(as_json, quiet), read_manifest(path)
    folder = path if path.is_dir() else path.parent
    screen.show(manifest.model_dump(), summarize_layers(manifest), summarize_manifest(manifest, folder))


def recipes(as_json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """List the shipped recipes, for `prune --recipe NAME`."""
    told = {name: describe_recipe(file) for name, file in list_recipes().items()}
    Screen(as_json, quiet).show(told, format_facts(list(told.items())))
