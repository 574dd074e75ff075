"""A kind of units is known in its own file: no other file of the package names one."""

import ast
from pathlib import Path

import pytest
from helpers.models import ROOT

from struprune_plugin.model.unit_kind import UNIT_KINDS

PACKAGE = ROOT / "struprune_plugin"
FIELDS = {"attention_unit", "prune_ffn", "experts"}  # of a recipe, short forms of `units`
SHORT_FORMS = {"modifiers/fields.py"}  # the only one that says what these fields ask for
KEYS = {"model/structure/shrinking.py": {"heads"}}  # what keys of configurations are called
MANIFEST = {"storage/manifest.py": {"experts"}}  # a documented field: entries of lists that stay
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] != "units")


def list_kinds_named(file: Path, words: set[str], classes: set[str]) -> set[str]:
    """Return the kinds' names and labels among a file's texts, their classes, and the recipe's fields that it reads."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & words
        elif isinstance(node, ast.Name):
            found |= {node.id} & classes
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & FIELDS
    return found


def test_no_file_but_a_kind_s_own_names_a_kind():
    texts = [file.read_text(encoding="utf-8") for file in (PACKAGE / "units").glob("*.py")]
    classes = {node.name for text in texts for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    words = {*UNIT_KINDS, *(kind.label for kind in UNIT_KINDS.values())}
    found = {str(file.relative_to(PACKAGE)): list_kinds_named(file, words, classes) for file in FILES}
    known = dict.fromkeys(SHORT_FORMS, words | FIELDS) | KEYS | MANIFEST
    wrong = {name: names - known.get(name, set()) for name, names in found.items()}
    assert not {name: names for name, names in wrong.items() if names}
    assert all(found[name] for name in known)  # the list is not longer than it must be


@pytest.mark.parametrize("name", sorted(UNIT_KINDS))
def test_a_kind_says_what_the_other_rooms_ask(name):
    kind = UNIT_KINDS.parse(name)
    assert kind.kind == name
    assert kind.label
    assert kind.pool
    assert kind.parts
