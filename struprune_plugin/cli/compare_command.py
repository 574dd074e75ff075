"""``struprune compare``: comparison of outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from struprune_plugin.cli.console import Screen
from struprune_plugin.cli.options import flag


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="OUT", help="pruned folders, two or more")],
    screen: Screen,
    every: Annotated[bool, flag("--all", "list all modules, not only those that differ")] = False,
) -> None:
    """Show two or more outputs side by side: kept units, size, time and quality."""
    if len(paths) < 2:
        raise ValueError(f"compare: must be given two or more outputs, got {len(paths)}. Add one.")
    from struprune_plugin.reporting.compare import compare_outputs, format_comparison

    found = compare_outputs(paths)
    screen.show(found, *format_comparison(found, every))
