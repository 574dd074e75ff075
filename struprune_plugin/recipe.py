"""The recipe: read, by path or by name, changed, and refused wherever the host would pass over a part of it in silence."""

from __future__ import annotations

import difflib
import os
import re
from typing import Any

import yaml
from llmcompressor.modifiers import Modifier, ModifierFactory
from llmcompressor.recipe import Recipe
from pydantic import ValidationError

from struprune_plugin.modifiers import (
    LoRARecoveryModifier,
    RecoveryModifier,
    SparsityAllocatorModifier,
    StruPruneModifier,
)
from struprune_plugin.modifiers.unused import check_used
from struprune_plugin.shipped import describe_recipe, find_recipe, list_recipes

__all__ = ["describe_recipe", "list_recipes", "load_recipe"]

_MAX_DEPTH = 50  # levels of YAML; a recipe has five
_OURS: dict[str, type[Modifier]] = {
    "StruPruneModifier": StruPruneModifier,
    "StructPruneModifier": StruPruneModifier,
    "SparsityAllocatorModifier": SparsityAllocatorModifier,
    "LoRARecoveryModifier": LoRARecoveryModifier,
    "RecoveryModifier": RecoveryModifier,
}
# what an allocation stage and the pruning stage after it must agree on, so that one change sets it in both
_AGREED = {"sparsity", "targets", "ignore", "attention_unit", "prune_ffn", "channel_multiple", "memory_budget"}


def load_recipe(
    recipe: str | os.PathLike | Modifier | list[Modifier] | Recipe, changes: dict[str, Any] | None = None
) -> Recipe:
    """Read a recipe, and refuse every part of it that the host would pass over in silence.

    :param recipe: a YAML file, the name of one that ships with the package, a YAML text, or modifiers
    :param changes: fields to set, for recipes given as a file, a name or a text: ``Modifier.field`` in that modifier, a bare
        ``field`` in the modifier of StruPrune's that has it
    :raises ValueError: the file is missing or is no YAML mapping; a stage, a group or a modifier is not of the form
        ``<x>_stage: <y>_modifiers: <Modifier>: {fields}``; unknown modifiers or fields; a
        bare field that several modifiers have; a field that the run would make no use of
    """
    if recipe is None:
        raise ValueError("recipe: must be a YAML file, a YAML text or modifiers, got None. Pass recipe=….")
    if not isinstance(recipe, (str, os.PathLike)):
        loaded = Recipe.create_instance(recipe)
    else:
        where, content = _read_recipe(recipe)
        _check_recipe_form(where, content)
        _change_fields(where, content, changes or {})
        _check_modifiers(where, content)
        try:
            loaded = Recipe.from_dict(content)
        except ValidationError as error:
            raise ValueError(f"{where}: {error.title} refuses the recipe: {_describe_errors(error)}") from None
        except Exception as error:  # a modifier of the host's, given what it does not expect
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ValueError(
                f"{where}: the host must be able to read the recipe, got {problem}. Correct its fields."
            ) from None
    if not loaded.modifiers:
        raise ValueError("recipe: must hold at least one modifier, got none. Add a stage with modifiers.")
    check_used(loaded.modifiers)
    return loaded


def _read_recipe(recipe: str | os.PathLike) -> tuple[str, Any]:
    text = os.fspath(recipe)
    where = "recipe"
    if "\n" not in text:
        where = text
        try:
            text = find_recipe(text).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: must be a text in UTF-8, got {error}. Is it a recipe?") from None
    try:
        _check_depth(text)
        return where, yaml.load(text, Loader=_UniqueKeyLoader)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
        AttributeError,
        TypeError,
    ) as error:  # dates and numbers that are none
        raise ValueError(f"{where}: must be valid YAML, got an error: {' '.join(str(error).split())[:500]}") from None


def _check_depth(text: str) -> None:
    """Refuse YAML that is nested deeper than any recipe, or that holds itself, before anybody follows it down."""
    depth, open_anchors = 0, list[tuple[int, str]]()
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if event.anchor is not None:
                open_anchors.append((depth, event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            if open_anchors and open_anchors[-1][0] == depth:
                open_anchors.pop()
            depth -= 1
        elif isinstance(event, yaml.AliasEvent) and any(event.anchor == anchor for _, anchor in open_anchors):
            raise yaml.YAMLError(
                f"*{event.anchor} inside itself, line {event.start_mark.line + 1 if event.start_mark else 1}"
            )
        if depth > _MAX_DEPTH:
            raise yaml.YAMLError(
                f"more than {_MAX_DEPTH} levels, line {event.start_mark.line + 1 if event.start_mark else 1}"
            )


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses the same key twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        named = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # `<<: *other` is merged below
        keys = [self.construct_object(key, deep=True) for key in named]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.YAMLError(f"{sorted(map(str, twice))} twice in one mapping, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def _check_recipe_form(where: str, content: Any) -> None:
    form = "<x>_stage: <y>_modifiers: <Modifier>: {fields}"
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{where}: must be a mapping of the form {form}, got {type(content).__name__}.")
    for stage, groups in content.items():
        if stage == "args":
            raise ValueError(
                f"{where}: 'args' must be left out, the host never substitutes them. Write values in place."
            )
        if not str(stage).endswith("_stage") or not isinstance(groups, dict) or not groups:
            raise ValueError(
                f"{where}: {stage!r} must be a stage of the form {form}. Name it '…_stage' and nest groups in it."
            )
        for group, modifiers in groups.items():
            if not str(group).endswith("_modifiers") or not isinstance(modifiers, dict) or not modifiers:
                raise ValueError(
                    f"{where}: {_show(stage)}.{_show(group)} must be a mapping of modifiers under a name that ends "
                    f"in '_modifiers', got {type(modifiers).__name__} (form {form})."
                )
            for name, fields in modifiers.items():
                if not isinstance(fields, dict) or not all(isinstance(field, str) for field in fields):
                    raise ValueError(
                        f"{where}: {_show(stage)}.{_show(group)}.{_show(name)} must be a mapping of fields, "
                        f"got {fields!r}. Write {{}} for none."
                    )


def _show(name: object) -> str:
    """Return a name for a message of one line."""
    return str(name) if str(name).isprintable() else repr(name)


def _check_modifiers(where: str, content: dict[str, Any]) -> None:
    """Refuse modifiers that neither we nor the host know.

    :raises ValueError: the same
    """
    if not ModifierFactory._loaded:
        ModifierFactory.refresh()
    known = {*ModifierFactory._main_registry, *ModifierFactory._experimental_registry, *_OURS}
    known |= ModifierFactory._registered_registry.keys()
    for groups in content.values():
        for modifiers in groups.values():
            for name in modifiers:
                if name not in known and name not in ModifierFactory._errors:
                    near = difflib.get_close_matches(str(name), known, n=1)
                    remedy = f"Did you mean {near[0]}?" if near else f"Ours are {', '.join(_OURS)}."
                    raise ValueError(
                        f"{where}: {name!r} must be a modifier of ours or of the host's, got no such. {remedy}"
                    )


def _describe_errors(error: ValidationError) -> str:
    """Return what pydantic found, in our words."""
    told = []
    for e in error.errors():
        field, message = ".".join(map(_show, e["loc"])) or error.title, e["msg"]
        given = repr(e["input"])
        given = given if len(given) <= 100 else f"{given[:97]}…"
        kind = _OURS.get(error.title)
        if e["type"] == "value_error":
            told.append(f"{field}: {message.removeprefix('Value error, ')}")
        elif e["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, _list_fields(kind) if kind else (), n=1)
            remedy = f"Did you mean {near[0]}?" if near else "Correct or remove it."
            told.append(f"{field} must be a field of {error.title}, got an unknown one. {remedy}")
        else:
            wanted = re.sub(r"^(Input|Field) should", "must", message)
            told.append(f"{field} {wanted if wanted != message else f'must be valid ({message})'}, got {given}")
    return "; ".join(told)


def _change_fields(where: str, content: dict[str, Any], changes: dict[str, Any]) -> None:
    """Set fields: ``Modifier.field`` in that modifier, a bare ``field`` in the one modifier of ours that has it."""
    present: dict[str, list[dict[str, Any]]] = {}
    for groups in content.values():
        for modifiers in groups.values():
            for name, fields in modifiers.items():
                present.setdefault(name, []).append(fields)
    for change in sorted(changes, key=lambda change: "." in change):  # the more precise one has the last word
        name, dot, field = change.rpartition(".")
        names = _find_holders(where, name, field, list(present)) if dot else _find_owners(where, field, list(present))
        for holder in names:
            for fields in present[holder]:
                fields[field] = changes[change]


def _find_holders(where: str, name: str, field: str, present: list[str]) -> list[str]:
    """Return the modifier of a ``Modifier.field``, by either of its names.

    :raises ValueError: it is not in the recipe, or has no such field
    """
    names = [other for other in present if other == name or (name in _OURS and _OURS.get(other) is _OURS[name])]
    if not names:
        raise ValueError(f"{where}: {name!r} must be a modifier of the recipe, which holds {', '.join(present)}.")
    if name in _OURS and field not in _OURS[name].model_fields:
        known = ", ".join(_list_fields(_OURS[name]))
        raise ValueError(f"{where}: {field!r} must be a field of {name}, known are {known}.")
    return names


def _find_owners(where: str, field: str, present: list[str]) -> list[str]:
    """Return the modifiers of ours in which a bare field is to be set.

    :raises ValueError: none has it, or several that need not agree on it do
    """
    owners = [name for name in present if name in _OURS and field in _OURS[name].model_fields]
    if not owners:
        known = sorted({f for name in present if name in _OURS for f in _list_fields(_OURS[name])})
        raise ValueError(
            f"{where}: {field!r} must be a field of one of its modifiers, known are {', '.join(known) or 'none'}."
        )
    kinds = {_OURS[name] for name in owners}
    agreed = field in _AGREED and (field == "memory_budget" or not kinds & {LoRARecoveryModifier, RecoveryModifier})
    if len(kinds) > 1 and not agreed:
        forms = " or ".join(f"{name}.{field}" for name in owners)
        raise ValueError(
            f"{where}: {field!r} must say which modifier it is set in, {' and '.join(owners)} have it. Give {forms}."
        )
    return owners


def _list_fields(kind: type[Modifier]) -> list[str]:
    return sorted(set(kind.model_fields) - set(Modifier.model_fields))
