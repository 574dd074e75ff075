"""Reading of recipes, by path or name, with changes, and with errors for parts that llm-compressor would silently ignore."""

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
from struprune_plugin.modifiers.fields import list_short_forms
from struprune_plugin.recipes.shipped import find_recipe
from struprune_plugin.settings.registry import describe_error, shorten_value, show_name, suggest

_METHOD_KEYS = ("rule", "method")
_REPLACED = {"budget": ["sparsity"], "sparsity": ["budget"], "units": [*list_short_forms([])]}  # by a change
_FORM = "<x>_stage: <y>_modifiers: <Modifier>: {fields}"


def load_recipe(
    recipe: str | os.PathLike | Mapping[str, Any] | Modifier | list[Modifier] | Recipe,
    changes: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe, and raise on every part of it that llm-compressor would silently ignore.

    :param recipe: a YAML file, the name of a shipped recipe, a YAML text, its content as a mapping, or modifiers
    :param changes: fields to set, for recipes that are not modifiers: ``Modifier.field`` in that modifier, a bare ``field`` in the
        StruPrune modifiers that have it; ``allocation.temperature`` sets one field of a method, where the recipe names one
    :raises ValueError: the file is missing or is not a YAML mapping of the form
        ``<x>_stage: <y>_modifiers: <Modifier>: {fields}``; unknown modifiers or fields; several pruning stages; another type
    """
    if isinstance(recipe, Mapping | str | os.PathLike):
        loaded = _build_recipe(*_read_recipe(recipe), changes or {})
    elif changes:
        raise ValueError(f"changes: must be left out for modifiers, got {', '.join(changes)}. Set the fields in them.")
    else:
        parts = recipe if isinstance(recipe, list) else [recipe]
        if not parts or not all(isinstance(part, Modifier | Recipe) for part in parts):
            raise ValueError(
                f"recipe: must be a file, a name, a YAML text, a mapping or modifiers, got {shorten_value(recipe)}. Pass one "
                "of these."
            )
        loaded = Recipe.create_instance(recipe)
        if any(modifier.initialized_ for modifier in loaded.modifiers):
            raise ValueError("recipe: its modifiers have been in a run, and serve one run only. Make new ones.")
    count = sum(isinstance(modifier, StruPruneModifier) for modifier in loaded.modifiers)
    if count > 1:
        raise ValueError(
            f"recipe: must have one StruPruneModifier, got {count}. Prune the output again in a second run."
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
                text = f"{unknown[1]!r} is not a modifier of StruPrune or llm-compressor. {remedy}"
            else:
                text = f"llm-compressor cannot read the recipe ({type(error).__name__}: {problem}). Correct the field."
    except ValidationError as error:
        text = f"{error.title}: {describe_error(error, MODIFIERS).removeprefix(f'{error.title}: ')}"
        text += "" if text.endswith((".", "?")) else ". Correct it."
    raise ValueError(f"{where}: {text}")


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Write a recipe as plain YAML that loads again, a stage per modifier.

    llm-compressor's own file holds Python objects, which no safe loader reads, and stages that it passes over itself.
    """
    stages: dict[str, Any] = {}
    for modifier in recipe.modifiers:
        group = modifier.group or "default"
        fields = {name for name in type(modifier).model_fields.keys() - Modifier.model_fields if not name.endswith("_")}
        is_ours = type(modifier).__name__ in MODIFIERS  # `sensitivity: null` is not its default
        if is_ours:  # what a stage leaves out may come from another
            fields &= modifier.model_fields_set
        values = modifier.model_dump(mode="json", include=fields, exclude_none=not is_ours, fallback=str)
        places = (group, *(f"{group}_{number}" for number in range(1, len(stages) + 1)))
        place = next(name for name in places if f"{name}_stage" not in stages)
        stages[f"{place}_stage"] = {f"{group}_modifiers": {type(modifier).__name__: values}}
    text = yaml.safe_dump(stages, allow_unicode=True, sort_keys=False, default_flow_style=None, width=88)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")


class _Loader(yaml.SafeLoader):
    """YAML loader that raises on repeated keys, of which YAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [str(key.value) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # `<<: *other`
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise yaml.YAMLError(f"repeated keys {', '.join(twice)} in one mapping, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def _read_recipe(recipe: str | os.PathLike | Mapping[str, Any]) -> tuple[str, Any]:
    """Return the place of a recipe, for messages, and its content."""
    if isinstance(recipe, Mapping):
        return "recipe", copy.deepcopy(dict(recipe))
    text = os.fspath(recipe)
    where, content = ("recipe", text.encode()) if "\n" in text else (text, find_recipe(text).read_bytes())
    try:
        return where, yaml.load(content, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:  # also other encodings and invalid dates
        raise ValueError(f"{where}: is not valid YAML: {' '.join(str(error).split())[:500]}. Correct it.") from None


def _check_form(where: str, part: Any, path: tuple[str, ...] = ()) -> None:
    """Raise on parts of a recipe that llm-compressor would pass over."""
    is_mapping = isinstance(part, dict) and all(isinstance(name, str) for name in part)
    ending = ("_stage", "_modifiers", "", "")[len(path)]
    strange = [name for name in part if not name.endswith(ending)] if is_mapping else []
    if not is_mapping or (len(path) < 3 and not part) or strange:
        place = f"{'.'.join(map(show_name, path))} " if path else ""
        shown = shorten_value(strange[0] if strange else part)
        content = f" with names that end in '{ending}'" if ending else (" of modifiers", " of fields")[len(path) - 2]
        raise ValueError(
            f"{where}: {place}must be a mapping{content}, got {shown}. Write the recipe in the form {_FORM}."
        )
    for name, inner in part.items() if len(path) < 3 else ():
        _check_form(where, inner, (*path, name))


# -- changes --------------------------------------------------------------------------------------------------------


def _change_fields(where: str, content: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set fields in place, whole fields before fields within them, and a method's name before its fields."""
    held = [each for groups in content.values() for modifiers in groups.values() for each in modifiers.items()]
    for change in sorted(changes, key=lambda name: (name.count("."), not name.endswith(_METHOD_KEYS))):
        *path, last = change.split(".")
        name = path.pop(0) if path and path[0].endswith("Modifier") else ""
        field = (*path, last)[0]
        holders = _find_holders(where, name, field, held)
        if path and not name:  # of a method: the other stages take it from the one that names it
            holders = [(holder, fields) for holder, fields in holders if field in fields] or holders
        for holder, fields in holders:
            part = fields
            for inner in path:
                if last in _METHOD_KEYS:  # another method has other fields
                    part[inner] = {}
                elif isinstance(part.get(inner), dict):
                    part[inner] = dict(part[inner])  # a YAML alias may share it
                else:
                    part[inner] = _spell_out(holder, fields, inner) if part is fields else {}
                part = part[inner]
            part[last] = changes[change]
            for other in _REPLACED.get(field, ()):
                if other not in changes:
                    fields.pop(other, None)


def _find_holders(where: str, name: str, field: str, held: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
    """Return the recipe's modifiers in which a field is to be set, with their fields.

    :param name: modifier, under either name of its class; empty for every StruPrune modifier that has the field
    :raises ValueError: the recipe has no such modifier, or none that has the field
    """
    modifier = MODIFIERS.get(name, name)
    named = [each for each in held if (MODIFIERS.get(each[0], each[0]) == modifier if name else each[0] in MODIFIERS)]
    if name and not named:
        raise ValueError(f"{where}: the recipe has no modifier {name!r}. It has {', '.join(dict(held))}.")
    if name and name not in MODIFIERS:  # of llm-compressor, which says itself what it does not know
        return named
    holders = [each for each in named if field in MODIFIERS[each[0]].model_fields]
    if not holders:
        known = {f for other, _ in named for f in MODIFIERS[other].model_fields.keys() - Modifier.model_fields}
        remedy = suggest(field, known) or f"The fields are {', '.join(sorted(known)) or 'none'}."
        raise ValueError(
            f"{where}: {name or 'no modifier of the recipe'} has {'no' if name else 'a'} field {field!r}. {remedy}"
        )
    return holders


def _spell_out(holder: str, fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the mapping that a field of a modifier is short for; if the recipe leaves it out, the method of its default."""
    value = getattr(MODIFIERS[holder](**fields), name) if holder in MODIFIERS else None
    if not isinstance(value, BaseModel):
        return {}
    keys = {key: getattr(value, key) for key in _METHOD_KEYS if hasattr(value, key)}
    return {**keys, **value.model_dump(exclude_unset=True)} if name in fields else keys
