"""``struprune inspect``: the content of a pruned folder."""

from __future__ import annotations

from struprune_plugin.cli.console import Screen
from struprune_plugin.cli.options import Folder
from struprune_plugin.reporting.tables import summarize_layers, summarize_manifest
from struprune_plugin.storage.manifest import read_manifest


def inspect(path: Folder, screen: Screen) -> None:
    """Show the content of a pruned folder, layer by layer.

    The figures come from the folder's manifest (struprune.json), which --json prints.
    """
    manifest = read_manifest(path)
    folder = path if path.is_dir() else path.parent
    screen.show(manifest.model_dump(), summarize_layers(manifest), summarize_manifest(manifest, folder))
