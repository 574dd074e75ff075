"""``struprune inspect``: the content of a pruned folder."""

from __future__ import annotations

from struprune_plugin.cli.console import Screen, show_error
from struprune_plugin.cli.options import Folder, register_types
from struprune_plugin.reporting.tables import summarize_layers, summarize_manifest
from struprune_plugin.storage.manifest import read_manifest
from struprune_plugin.storage.verify import find_damage


def inspect(path: Folder, screen: Screen) -> int:
    """Show the content of a pruned folder, layer by layer.

    The figures come from the folder's manifest (struprune.json), which --json prints. Exit status 1 if a file is damaged.
    """
    manifest = read_manifest(path)
    folder = path if path.is_dir() else path.parent
    register_types(path)
    damage = find_damage(path) if path.is_dir() else []
    screen.show(manifest.model_dump(), summarize_layers(manifest), summarize_manifest(manifest, folder))
    for line in damage:
        show_error(f"damaged: {line}")
    return int(bool(damage))
