"""Reading of recipes, by path or name, with changes, and with errors for parts that llm-compressor would silently ignore."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from llmcompressor.modifiers import Modifier
from llmcompressor.recipe import Recipe
from pydantic import BaseModel, ValidationError

from struprune_plugin.modifiers import MODIFIERS, StruPruneModifier
from struprune_plugin.recipes.shipped import find_recipe
from struprune_plugin.storage.files import shorten_value
from struprune_plugin.storage.registry import describe_error, refuse_gone, show_name, suggest

_METHOD_KEYS = ("rule", "method")
_FORM = "<x>_stage: <y>_modifiers: <Modifier>: {fields}"


def load_recipe(
    recipe: str | os.PathLike | Mapping[str, Any] | Modifier | list[Modifier] | Recipe,
    changes: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe, and raise on every part of it that llm-compressor would silently ignore.

    :param recipe: a YAML file, the name of a shipped recipe, a YAML text, its content as a mapping, or modifiers
    :param changes: fields to set, for recipes that are not modifiers: ``Modifier.field`` in that modifier, a bare ``field`` in the
        StruPrune modifiers that have it; ``allocation.temperature`` sets one field of a method
    :raises ValueError: the file is missing or is not a YAML mapping; a stage, a group or a modifier is not of the form
        ``<x>_stage: <y>_modifiers: <Modifier>: {fields}``; unknown modifiers or fields;
        several pruning stages; another type
    """
    if recipe is None:
        raise ValueError(
            "recipe: none was given. Pass recipe=… with a YAML file, a YAML text, modifiers or the name of a shipped recipe."
        )
    if isinstance(recipe, Mapping):
        loaded = _build_recipe("recipe", copy.deepcopy(dict(recipe)), changes or {})
    elif isinstance(recipe, (str, os.PathLike)):
        loaded = _build_recipe(*_read_recipe(recipe), changes or {})
    elif changes:
        raise ValueError(f"changes: must be left out for modifiers, got {', '.join(changes)}. Set the fields in them.")
    else:
        for part in recipe if isinstance(recipe, list) else [recipe]:
            if not isinstance(part, Modifier | Recipe):
                raise ValueError(
                    f"recipe: must be a file, a name, a YAML text, a mapping or modifiers, got {shorten_value(part)}. "
                    "Pass one of these."
                )
        loaded = Recipe.create_instance(recipe)
    if not loaded.modifiers:
        raise ValueError("recipe: must have at least one modifier, got none. Add a stage with a modifier.")
    count = sum(isinstance(modifier, StruPruneModifier) for modifier in loaded.modifiers)
    if count > 1:
        raise ValueError(
            f"recipe: must have one StruPruneModifier, got {count}. To prune further, prune the saved output in a second run."
        )
    return loaded


def _build_recipe(where: str, content: Any, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a YAML content, which is changed in place."""
    _check_form(where, content)
    try:
        _change_fields(where, content, changes)
        try:
            return Recipe.from_dict(content)
        except ValidationError:
            raise
        except Exception as error:  # a modifier of llm-compressor, given what it does not expect, or of nobody
            problem = " ".join(str(error).split())[:300]
            if unknown := re.match("No modifier of type '(.*)'", problem):
                remedy = suggest(unknown[1], MODIFIERS) or f"StruPrune's modifiers are {', '.join(MODIFIERS)}."
                problem = f"{unknown[1]!r} is not a modifier of StruPrune or llm-compressor. {remedy}"
            else:
                problem = (
                    f"llm-compressor cannot read the recipe ({type(error).__name__}: {problem}). Correct the field."
                )
            raise ValueError(f"{where}: {problem}") from None
    except ValidationError as error:
        told = describe_error(error, MODIFIERS)
        remedy = "" if told.endswith((".", "?")) else ". Correct it."
        raise ValueError(f"{where}: {error.title}: {told}{remedy}") from None


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Write a recipe as plain YAML that loads again, a stage per modifier.

    llm-compressor's own file holds Python objects, which no safe loader reads, and stages that it passes over itself.
    """
    stages: dict[str, Any] = {}
    for modifier in recipe.modifiers:
        group = modifier.group or "default"
        fields = {name for name in type(modifier).model_fields.keys() - Modifier.model_fields if not name.endswith("_")}
        told = modifier.model_dump(mode="json", include=fields, exclude_none=True, fallback=str)
        places = (group, *(f"{group}_{number}" for number in range(1, len(stages) + 1)))
        place = next(name for name in places if f"{name}_stage" not in stages)
        stages[f"{place}_stage"] = {f"{group}_modifiers": {type(modifier).__name__: told}}
    text = yaml.safe_dump(stages, allow_unicode=True, sort_keys=False, default_flow_style=None, width=88)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")


class _RecipeLoader(yaml.SafeLoader):
    """YAML loader that raises on repeated keys, of which YAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [str(key.value) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # `<<: *other`
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"repeated keys {', '.join(twice)} in one mapping, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def _read_recipe(recipe: str | os.PathLike) -> tuple[str, Any]:
    """Return the place of a recipe, for messages, and its content."""
    text = os.fspath(recipe)
    where, file = ("recipe", None) if "\n" in text else (text, find_recipe(text))
    try:
        content = text if file is None else file.read_text(encoding="utf-8")
        return where, yaml.load(content, Loader=_RecipeLoader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:  # also other encodings and invalid dates
        raise ValueError(f"{where}: is not valid YAML: {' '.join(str(error).split())[:500]}. Correct it.") from None


def _check_form(where: str, content: Any) -> None:
    """Raise on parts of a recipe that llm-compressor would pass over, and on modifiers that are gone."""
    if not isinstance(content, dict) or not content:
        raise ValueError(
            f"{where}: must be a mapping of the form {_FORM}, got {type(content).__name__}. `struprune recipes` lists examples."
        )
    if "args" in content:
        raise ValueError(
            f"{where}: 'args' has no effect, as llm-compressor does not substitute its values. Write them in place."
        )
    for stage, groups in content.items():
        _check_mapping(where, [stage], groups, "_stage")
        for group, modifiers in groups.items():
            _check_mapping(where, [stage, group], modifiers, "_modifiers")
            refuse_gone(modifiers)
            for name, fields in modifiers.items():
                _check_mapping(where, [stage, group, name], fields)


def _check_mapping(where: str, path: list[object], value: Any, ending: str = "") -> None:
    """Raise unless a part of a recipe has its ending, and holds a mapping of names, which only a modifier may leave empty."""
    is_mapping = isinstance(value, dict) and all(isinstance(name, str) for name in value)
    if not str(path[-1]).endswith(ending) or not is_mapping or (ending and not value):
        told = f" whose name ends in '{ending}'" if ending else " of fields, {} for none"
        raise ValueError(
            f"{where}: {'.'.join(map(show_name, path))} must be a mapping{told}, got {shorten_value(value)}. Write the recipe in "
            f"the form {_FORM}."
        )


# -- changes --------------------------------------------------------------------------------------------------------


def _change_fields(where: str, content: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set fields in place, whole fields before fields within them."""
    held = [each for groups in content.values() for modifiers in groups.values() for each in modifiers.items()]
    for change in sorted(changes, key=lambda name: name.count(".")):
        *path, last = change.split(".")
        name = path.pop(0) if path and path[0].endswith("Modifier") else ""
        field = (*path, last)[0]
        other = {"budget": "sparsity", "sparsity": "budget"}.get(field)  # they replace each other
        for holder, fields in _find_holders(where, name, field, held):
            part = fields
            for depth, inner in enumerate(path):
                is_method = last in _METHOD_KEYS  # another method has other fields
                part[inner] = {} if is_method else _expand(holder, part, inner, depth == 0)
                part = part[inner]
            part[last] = changes[change]
            if other and other not in changes:
                fields.pop(other, None)


def _find_holders(where: str, name: str, field: str, held: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
    """Return the recipe's modifiers in which a field is to be set, with their fields.

    :param name: modifier, under either name of its class; empty for every StruPrune modifier that has the field
    :raises ValueError: the recipe has no such modifier, or none that has the field
    """
    kind = MODIFIERS.get(name)
    named = [
        each for each in held if each[0] == name or (MODIFIERS.get(each[0]) is kind if name else each[0] in MODIFIERS)
    ]
    if name and not named:
        raise ValueError(f"{where}: the recipe has no modifier {name!r}. It has {', '.join(dict(held))}.")
    if name and kind is None:  # of llm-compressor, which says itself what it does not know
        return named
    found = [each for each in named if field in MODIFIERS[each[0]].model_fields]
    if not found:
        refuse_gone([field])
        known = {f for other, _ in named for f in set(MODIFIERS[other].model_fields) - set(Modifier.model_fields)}
        remedy = suggest(field, known) or f"The fields are {', '.join(sorted(known)) or 'none'}."
        raise ValueError(
            f"{where}: {name or 'no modifier of the recipe'} has {'no' if name else 'a'} field {field!r}. {remedy}"
        )
    return found


def _expand(holder: str, fields: dict[str, Any], name: str, is_field: bool) -> dict[str, Any]:
    """Return a copy of the mapping that a modifier's fields hold under a name.

    A name or a number may be short for a mapping, and a field that the recipe leaves out has its default.

    :param is_field: whether ``fields`` are those of the modifier itself
    """
    held = fields.get(name)
    if not isinstance(held, dict) and is_field and holder in MODIFIERS:
        given = getattr(MODIFIERS[holder](**fields), name)
        keys = {key: getattr(given, key) for key in _METHOD_KEYS if hasattr(given, key)}
        held = {**keys, **given.model_dump(exclude_unset=True)} if isinstance(given, BaseModel) else {}
    return dict(held or {})
