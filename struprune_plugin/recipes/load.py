"""Reading of recipes, by path or name, with changes, and with errors for parts that llm-compressor would silently ignore."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from llmcompressor.modifiers import Modifier, ModifierFactory
from llmcompressor.recipe import Recipe
from loguru import logger
from pydantic import BaseModel, TypeAdapter, ValidationError

from struprune_plugin.modifiers import LoRARecoveryModifier, SparsityAllocatorModifier, StruPruneModifier
from struprune_plugin.recipes.shipped import find_recipe
from struprune_plugin.storage.files import shorten_value
from struprune_plugin.storage.registry import GONE, describe_error, show_name, suggest

_METHOD_KEYS = ("rule", "method")
RECIPE_NAME = "recipe.yaml"
_FORM = "<x>_stage: <y>_modifiers: <Modifier>: {fields}"
_OURS: dict[str, type[Modifier]] = {
    "StruPruneModifier": StruPruneModifier,
    "StructPruneModifier": StruPruneModifier,
    "SparsityAllocatorModifier": SparsityAllocatorModifier,
    "LoRARecoveryModifier": LoRARecoveryModifier,
}


def load_recipe(
    recipe: str | os.PathLike | Mapping[str, Any] | Modifier | list[Modifier] | Recipe,
    changes: dict[str, Any] | None = None,
) -> Recipe:
    """Read a recipe, and raise on every part of it that llm-compressor would silently ignore.

    :param recipe: a YAML file, the name of a shipped recipe, a YAML text, its content as a mapping, or modifiers
    :param changes: fields to set, for recipes that are not modifiers: ``Modifier.field`` in that modifier, a bare ``field`` in the
        StruPrune modifiers that have it; ``allocation.temperature`` sets one field of a method
    :raises ValueError: the file is missing or is not a YAML mapping; a stage, a group or a modifier is not of the form
        ``<x>_stage: <y>_modifiers: <Modifier>: {fields}``; unknown modifiers or fields;
        several pruning stages
    """
    if recipe is None:
        raise ValueError(
            "recipe: none was given. Pass recipe=… with a YAML file, a YAML text, modifiers or the name of a shipped recipe."
        )
    if isinstance(recipe, (str, os.PathLike, Mapping)):
        where, content = (
            ("recipe", copy.deepcopy(dict(recipe))) if isinstance(recipe, Mapping) else _read_recipe(recipe)
        )
        _check_form(where, content)
        _change_fields(where, content, changes or {})
        try:
            loaded = Recipe.from_dict(content)
        except ValidationError as error:
            raise ValueError(f"{where}: {error.title}: {describe_error(error, _OURS)}") from None
        except Exception as error:  # a modifier of llm-compressor, given what it does not expect
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ValueError(
                f"{where}: llm-compressor cannot read the recipe ({problem}). Correct the field that this error is about."
            ) from None
    else:
        loaded = Recipe.create_instance(recipe)
    if not loaded.modifiers:
        raise ValueError("recipe: must have at least one modifier, got none. Add a stage with a modifier.")
    count = sum(isinstance(modifier, StruPruneModifier) for modifier in loaded.modifiers)
    if count > 1:
        raise ValueError(
            f"recipe: must have one StruPruneModifier, got {count}. To prune further, prune the saved output in a second run."
        )
    return loaded


def write_recipe(recipe: Recipe, folder: Path, source: Path | None = None) -> None:
    """Write a recipe as plain YAML that loads again, a stage per modifier, after the stages that the model came from.

    llm-compressor's own file holds Python objects, which no safe loader reads, and stages that it passes over itself.

    :param source: folder of the model before the run; its recipe comes first, unless it does not load
    """
    stages: dict[str, Any] = {}
    if source is not None and (source / RECIPE_NAME).is_file():
        try:
            where, stages = _read_recipe(source / RECIPE_NAME)
            _check_form(where, stages)
        except ValueError as error:
            logger.warning(f"{error} {folder.name}/{RECIPE_NAME} holds the recipe of this run alone.")
            stages = {}
    for modifier in recipe.modifiers:
        group = modifier.group or "default"
        fields = {name for name in type(modifier).model_fields.keys() - Modifier.model_fields if not name.endswith("_")}
        told = modifier.model_dump(mode="json", include=fields, exclude_none=True, fallback=str)
        places = (group, *(f"{group}_{number}" for number in range(1, len(stages) + 1)))
        place = next(name for name in places if f"{name}_stage" not in stages)
        stages[f"{place}_stage"] = {f"{group}_modifiers": {type(modifier).__name__: told}}
    text = yaml.safe_dump(stages, allow_unicode=True, sort_keys=False, default_flow_style=None, width=88)
    (folder / RECIPE_NAME).write_text(text, encoding="utf-8")


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
    where = "recipe" if "\n" in text else text
    file = None if "\n" in text else find_recipe(text)
    try:
        return where, yaml.load(
            text if file is None else file.read_text(encoding="utf-8"), Loader=_RecipeLoader
        )  # a SafeLoader
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
        TypeError,
    ) as error:  # also for other encodings and invalid dates
        raise ValueError(f"{where}: is not valid YAML: {' '.join(str(error).split())[:500]}. Correct it.") from None


def _check_form(where: str, content: Any) -> None:
    """Raise on parts of a recipe that llm-compressor would pass over, and on modifiers that nobody knows."""
    if not isinstance(content, dict) or not content:
        raise ValueError(
            f"{where}: must be a mapping of the form {_FORM}, got {type(content).__name__}. `struprune recipes` lists examples."
        )
    if "args" in content:
        raise ValueError(
            f"{where}: 'args' has no effect, as llm-compressor does not substitute its values. Write them in place."
        )
    known = _list_modifiers()
    for stage, groups in content.items():
        _check_mapping(where, [stage], groups, "_stage")
        for group, modifiers in groups.items():
            _check_mapping(where, [stage, group], modifiers, "_modifiers")
            for name, fields in modifiers.items():
                _check_mapping(where, [stage, group, name], fields)
                if name not in known:
                    remedy = (
                        GONE.get(name) or suggest(str(name), known) or f"StruPrune's modifiers are {', '.join(_OURS)}."
                    )
                    raise ValueError(f"{where}: {name!r} is not a modifier of StruPrune or llm-compressor. {remedy}")


def _check_mapping(where: str, path: list[object], value: Any, ending: str = "") -> None:
    """Raise unless a part of a recipe has its ending, and holds a mapping of names, which only a modifier may leave empty."""
    is_mapping = isinstance(value, dict) and all(isinstance(name, str) for name in value)
    if not str(path[-1]).endswith(ending) or not is_mapping or (ending and not value):
        told = f" whose name ends in '{ending}'" if ending else " of fields, {} for none"
        raise ValueError(
            f"{where}: {'.'.join(map(show_name, path))} must be a mapping{told}, got {shorten_value(value)}. Write the recipe in "
            f"the form {_FORM}."
        )


def _list_modifiers() -> set[str]:
    """Return the names of all modifiers, including those of llm-compressor that cannot be imported, which it says itself."""
    if not ModifierFactory._loaded:
        ModifierFactory.refresh()
    registries = (
        ModifierFactory._main_registry,
        ModifierFactory._experimental_registry,
        ModifierFactory._registered_registry,
    )
    return {*_OURS, *ModifierFactory._errors}.union(*registries)


# -- changes --------------------------------------------------------------------------------------------------------


def _change_fields(where: str, content: dict[str, Any], changes: dict[str, Any]) -> None:
    """Set fields in place, whole fields before fields within them."""
    held = [each for groups in content.values() for modifiers in groups.values() for each in modifiers.items()]
    for change in sorted(changes, key=lambda name: name.count(".")):
        first, *rest = change.split(".")
        named = bool(rest) and (first.endswith("Modifier") or first in dict(held))
        field, inner = (rest[0], rest[1:]) if named else (first, rest)
        for holder, fields in _find_holders(where, first if named else "", field, held):
            fields[field] = _set_inner(holder, field, fields, inner, changes[change]) if inner else changes[change]
            other = {"budget": "sparsity", "sparsity": "budget"}.get(field)
            if other and other not in changes:
                fields.pop(other, None)  # sparsity and budget replace each other


def _find_holders(where: str, name: str, field: str, held: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
    """Return the recipe's modifiers in which a field is to be set, with their fields.

    :param name: modifier, under either name of its class; empty for every StruPrune modifier that has the field
    :raises ValueError: the recipe has no such modifier, or none that has the field
    """
    kind = _OURS.get(name)
    named = [each for each in held if each[0] == name or (_OURS.get(each[0]) is kind if name else each[0] in _OURS)]
    if name and not named:
        raise ValueError(f"{where}: the recipe has no modifier {name!r}. It has {', '.join(dict(held))}.")
    if name and kind is None:  # of llm-compressor, which says itself what it does not know
        return named
    found = [each for each in named if field in _OURS[each[0]].model_fields]
    if not found:
        known = sorted({f for other, _ in named for f in set(_OURS[other].model_fields) - set(Modifier.model_fields)})
        raise ValueError(
            f"{where}: {name or 'no modifier of the recipe'} has {'no' if name else 'a'} field {field!r}. The fields are "
            f"{', '.join(known) or 'none'}."
        )
    return found


def _set_inner(holder: str, field: str, fields: dict[str, Any], inner: list[str], value: Any) -> dict[str, Any]:
    """Return a field's mapping with one nested field set; a field that the recipe leaves out starts from its default."""
    if inner[0] in _METHOD_KEYS:  # another method has other fields
        return {inner[0]: value}
    whole: Any = fields.get(field)
    if holder in _OURS and field in _OURS[holder].model_fields and not isinstance(whole, dict):
        known = _OURS[holder].model_fields[field]  # a name or a number may be short for a mapping
        form: Any = Annotated[known.annotation, "field", *known.metadata]
        try:
            given = TypeAdapter(form).validate_python(fields.get(field, known.get_default(call_default_factory=True)))
        except ValidationError as error:
            raise ValueError(f"{holder}: {field} {describe_error(error, _OURS)}") from None
        keys = {name: getattr(given, name) for name in _METHOD_KEYS if hasattr(given, name)}
        whole = {**keys, **given.model_dump(exclude_unset=True)} if isinstance(given, BaseModel) else {}
    part = whole = dict(whole or {})
    for name in inner[:-1]:
        part[name] = dict(part.get(name) or {})
        part = part[name]
    part[inner[-1]] = value
    return whole
