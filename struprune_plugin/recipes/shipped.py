"""Recipes that ship with the package, by name. This module imports nothing heavy."""

import itertools
import os
import re
from pathlib import Path

from struprune_plugin.settings.registry import suggest

_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "recipe_files", _PACKAGE.parent / "recipes")  # in the installed package; in a checkout


def list_recipes() -> dict[str, Path]:
    """Return the recipes that ship with the package, by name."""
    place = next((place for place in _PLACES if place.is_dir()), None)
    return {file.stem: file for file in sorted(place.glob("*.yaml"))} if place else {}


def describe_recipe(file: Path) -> str:
    """Return the first sentence of a recipe's leading comment."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.lstrip("# ") for line in comment)
    return re.split(r"(?<=[.])(?= |$)", text)[0]


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given by its path or by the name of a shipped recipe."""
    if os.path.isfile(name):
        return Path(name)
    known = list_recipes()
    if name in known:
        return known[name]
    remedy = suggest(Path(name).name.removesuffix(".yaml"), known)
    raise ValueError(
        f"recipe: {name!r} is neither an existing file nor the name of a shipped recipe. "
        f"{remedy or 'Correct the path, or take a name that `struprune recipes` lists.'}"
    )
