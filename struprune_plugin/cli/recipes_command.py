"""``struprune recipes``: the shipped recipes."""

from __future__ import annotations

from struprune_plugin.cli.console import Screen
from struprune_plugin.recipes.shipped import describe_recipe, list_recipes
from struprune_plugin.reporting.tables import format_facts


def recipes(screen: Screen) -> None:
    """List the shipped recipes, for `prune --recipe NAME`."""
    told = {name: describe_recipe(file) for name, file in list_recipes().items()}
    screen.show(told, format_facts(list(told.items())))
