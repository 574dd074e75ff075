"""Reading of recipes, by path or name, with changes, and with errors for parts that llm-compressor would silently ignore."""

from __future__ import annotations

import os
from typing import Annotated, Any

import yaml
from llmcompressor.modifiers import Modifier, ModifierFactory
from llmcompressor.recipe import Recipe
from pydantic import BaseModel, TypeAdapter, ValidationError

from struprune_plugin.modifiers import (
    LoRARecoveryModifier,
    RecoveryModifier,
    SparsityAllocatorModifier,
    StruPruneModifier,
)
from struprune_plugin.modifiers.stages import check_rounds
from struprune_plugin.recipes.shipped import find_recipe
from struprune_plugin.storage.registry import describe_error, show_name, suggest

_METHOD_KEYS = ("rule", "method")
_MAX_DEPTH = 50  # levels of YAML; a recipe has five
_OURS: dict[str, type[Modifier]] = {
    "StruPruneModifier": StruPruneModifier,
    "StructPruneModifier": StruPruneModifier,
    "SparsityAllocatorModifier": SparsityAllocatorModifier,
    "LoRARecoveryModifier": LoRARecoveryModifier,
    "RecoveryModifier": RecoveryModifier,
}
# fields on which an allocator stage and the pruning stage after it must agree: one change sets them in both
_AGREED = {
    "sparsity",
    "budget",
    "targets",
    "ignore",
    "attention_unit",
    "prune_ffn",
    "width_multiple",
    "effort",
    "memory_budget",
}


def load_recipe(
    recipe: str | os.PathLike | Modifier | list[Modifier] | Recipe, changes: dict[str, Any] | None = None
) -> Recipe:
    """Read a recipe, and raise on every part of it that llm-compressor would silently ignore.

    :param recipe: a YAML file, the name of a shipped recipe, a YAML text, or modifiers
    :param changes: fields to set, for recipes given as a file, a name or a text: ``Modifier.field`` in that modifier, a bare
        ``field`` in the StruPrune modifier that has it; ``allocation.temperature`` sets one field of a method
    :raises ValueError: the file is missing or is not a YAML mapping; a stage, a group or a modifier is not of the form
        ``<x>_stage: <y>_modifiers: <Modifier>: {fields}``; unknown modifiers or fields; a
        bare field that several modifiers have; several pruning stages that cannot be rounds
    """
    if recipe is None:
        raise ValueError(
            "recipe: none was given. Pass recipe=… with a YAML file, a YAML text, modifiers or the name of a shipped recipe."
        )
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
            raise ValueError(f"{where}: {error.title}: {describe_error(error, _OURS)}") from None
        except Exception as error:  # a modifier of llm-compressor, given what it does not expect
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ValueError(
                f"{where}: llm-compressor cannot read the recipe ({problem}). Correct the field that this error is about."
            ) from None
    if not loaded.modifiers:
        raise ValueError("recipe: must have at least one modifier, got none. Add a stage with a modifier.")
    check_rounds(loaded.modifiers)
    return loaded


def _read_recipe(recipe: str | os.PathLike) -> tuple[str, Any]:
    text = os.fspath(recipe)
    where = "recipe"
    if "\n" not in text:
        where = text
        try:
            text = find_recipe(text).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: must be a recipe in UTF-8, got {error}. Pass a YAML file.") from None
    try:
        return where, yaml.load(text, Loader=_RecipeLoader)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
        AttributeError,
        TypeError,
    ) as error:  # also for invalid dates and numbers
        raise ValueError(f"{where}: is not valid YAML: {' '.join(str(error).split())[:500]}. Correct it.") from None


class _RecipeLoader(yaml.SafeLoader):
    """YAML loader that raises on repeated keys (of which YAML keeps the last), on too many levels and on self-references."""

    def __init__(self, text: str):
        super().__init__(text)
        self._anchors: list[str | None] = []  # anchors of the open collections

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._anchors:
            raise yaml.YAMLError(f"*{event.anchor} refers to itself, line {line}")
        if not isinstance(event, yaml.CollectionStartEvent):
            return super().compose_node(parent, index)
        if len(self._anchors) == _MAX_DEPTH:
            raise yaml.YAMLError(f"more than {_MAX_DEPTH} nested levels, line {line}")
        self._anchors.append(event.anchor)
        node = super().compose_node(parent, index)
        self._anchors.pop()
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        named = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # `<<: *other` is merged below
        keys = [self.construct_object(key, deep=True) for key in named]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.YAMLError(
                f"repeated keys {', '.join(sorted(twice))} in one mapping, line {node.start_mark.line + 1}"
            )
        return super().construct_mapping(node, deep)


def _check_recipe_form(where: str, content: Any) -> None:
    form = "<x>_stage: <y>_modifiers: <Modifier>: {fields}"
    if not isinstance(content, dict) or not content:
        raise ValueError(
            f"{where}: must be a mapping of the form {form}, got {type(content).__name__}. `struprune recipes` lists examples."
        )
    for stage, groups in content.items():
        if stage == "args":
            raise ValueError(
                f"{where}: 'args' has no effect, as llm-compressor does not substitute its values. Write them in place."
            )
        if not str(stage).endswith("_stage") or not isinstance(groups, dict) or not groups:
            raise ValueError(
                f"{where}: {stage!r} must be a stage of the form {form}. Name it '…_stage', and nest groups of modifiers in it."
            )
        for group, modifiers in groups.items():
            if not str(group).endswith("_modifiers") or not isinstance(modifiers, dict) or not modifiers:
                raise ValueError(
                    f"{where}: {show_name(stage)}.{show_name(group)} must be a mapping of modifiers whose name ends in "
                    f"'_modifiers', got {type(modifiers).__name__}. Write it in the form {form}."
                )
            for name, fields in modifiers.items():
                if not isinstance(fields, dict) or not all(isinstance(field, str) for field in fields):
                    raise ValueError(
                        f"{where}: {show_name(stage)}.{show_name(group)}.{show_name(name)} must be a mapping of fields, "
                        f"got {fields!r}. Write {{}} for no fields."
                    )


def _check_modifiers(where: str, content: dict[str, Any]) -> None:
    """Raise on modifiers that neither StruPrune nor llm-compressor knows."""
    if not ModifierFactory._loaded:
        ModifierFactory.refresh()
    known = {*ModifierFactory._main_registry, *ModifierFactory._experimental_registry, *_OURS}
    known |= ModifierFactory._registered_registry.keys()
    for groups in content.values():
        for modifiers in groups.values():
            for name in modifiers:
                if name not in known and name not in ModifierFactory._errors:
                    remedy = suggest(str(name), known) or f"StruPrune's modifiers are {', '.join(_OURS)}."
                    raise ValueError(f"{where}: {name!r} is not a modifier of StruPrune or llm-compressor. {remedy}")


def _change_fields(where: str, content: dict[str, Any], changes: dict[str, Any]) -> None:
    """Set fields in place: ``Modifier.field`` in that modifier, a bare ``field`` in the StruPrune modifier that has it; both may
    continue with a dot and a field of the method that the field names."""
    present: dict[str, list[dict[str, Any]]] = {}
    for groups in content.values():
        for modifiers in groups.values():
            for name, fields in modifiers.items():
                present.setdefault(name, []).append(fields)
    split = {change: _split_change(change, list(present)) for change in changes}

    def order(item: tuple[str, tuple[str, str, list[str]]]) -> tuple[int, bool, bool]:
        """Return a sort key that puts more specific changes last, so that they take precedence."""
        name, _, inner = item[1]
        return len(inner), bool(inner) and inner[0] not in _METHOD_KEYS, name != ""

    for change, (name, field, inner) in sorted(split.items(), key=order):
        names = _find_holders(where, name, field, list(present)) if name else _find_owners(where, field, list(present))
        for holder in names:
            for fields in present[holder]:
                value = _set_inner((where, holder, field), fields, inner, changes[change]) if inner else changes[change]
                fields[field] = value
                other = {"budget": "sparsity", "sparsity": "budget"}.get(field)
                if other and other not in {told[1] for told in split.values()}:
                    fields.pop(other, None)  # sparsity and budget replace each other


def _split_change(change: str, present: list[str]) -> tuple[str, str, list[str]]:
    """Return (modifier or empty, field, nested fields) of a change."""
    first, *rest = change.split(".")
    if rest and (first in present or first in _OURS or first.endswith("Modifier")):
        return first, rest[0], rest[1:]
    return "", first, rest


def _set_inner(at: tuple[str, str, str], fields: dict[str, Any], inner: list[str], value: Any) -> dict[str, Any]:
    """Return a field's mapping with one nested field set; a field that the recipe leaves out starts from its default.

    :param at: recipe, modifier and field
    """
    where, holder, field = at
    if inner[0] in _METHOD_KEYS:  # another method has other fields
        return {inner[0]: value}
    known = _OURS[holder].model_fields.get(field) if holder in _OURS else None
    if known is None:
        whole = dict(fields.get(field) or {})
    else:  # a name or a number may be short for a mapping
        form: Any = Annotated[known.annotation, "field", *known.metadata]
        before = fields.get(field, known.get_default(call_default_factory=True))
        try:
            given = TypeAdapter(form).validate_python(before)
        except ValidationError as error:
            raise ValueError(f"{where}: {field} {describe_error(error, _OURS)}") from None
        whole = _dump_given(given) if isinstance(given, BaseModel) else {}
    part = whole
    for name in inner[:-1]:
        part[name] = dict(part.get(name) or {})
        part = part[name]
    part[inner[-1]] = value
    return whole


def _dump_given(given: BaseModel) -> dict[str, Any]:
    """Return the fields that were set, and the method's name; defaults are left out, as a modifier's short form has its own."""
    keys: dict[str, Any] = {name: getattr(given, name) for name in _METHOD_KEYS if name in type(given).model_fields}
    return {**keys, **given.model_dump(exclude_unset=True)}


def _find_holders(where: str, name: str, field: str, present: list[str]) -> list[str]:
    """Return the recipe's modifiers that a ``Modifier.field`` names, under either name of the class.

    :raises ValueError: the modifier is not in the recipe, or has no such field
    """
    names = [other for other in present if other == name or (name in _OURS and _OURS.get(other) is _OURS[name])]
    if not names:
        raise ValueError(f"{where}: the recipe has no modifier {name!r}. It has {', '.join(present)}.")
    if name in _OURS and field not in _OURS[name].model_fields:
        known = ", ".join(_list_fields(_OURS[name]))
        raise ValueError(f"{where}: {name} has no field {field!r}. Its fields are {known}.")
    return names


def _find_owners(where: str, field: str, present: list[str]) -> list[str]:
    """Return the StruPrune modifiers in which a bare field is to be set.

    :raises ValueError: no modifier has it, or several have it that need not agree on it
    """
    owners = [name for name in present if name in _OURS and field in _OURS[name].model_fields]
    if not owners:
        known = sorted({f for name in present if name in _OURS for f in _list_fields(_OURS[name])})
        raise ValueError(
            f"{where}: no modifier of the recipe has a field {field!r}. The fields are {', '.join(known) or 'none'}."
        )
    kinds = {_OURS[name] for name in owners}
    agreed = field in _AGREED and (field == "memory_budget" or not kinds & {LoRARecoveryModifier, RecoveryModifier})
    if len(kinds) > 1 and not agreed:
        forms = " or ".join(f"{name}.{field}" for name in owners)
        raise ValueError(f"{where}: {field!r} is a field of {' and '.join(owners)}. Set {forms}.")
    return owners


def _list_fields(kind: type[Modifier]) -> list[str]:
    return sorted(set(kind.model_fields) - set(Modifier.model_fields))
