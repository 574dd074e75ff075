"""What we lean on inside the host is there, is listed, and its list tells the truth."""

import ast
import importlib
import inspect
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers.host_internals import INTERNALS, Internal

import struprune_plugin

PACKAGE = Path(struprune_plugin.__file__).parent
OWN_LISTS = {"llmcompressor", "compressed_tensors", "lm_eval"}  # packages of which every import counts as an internal
DOCUMENTED = {"transformers", "peft"}  # packages of which only submodules do
DISTRIBUTIONS = {"compressed_tensors": "compressed-tensors"}


def describe_move(entry: Internal, what: str) -> str:
    package = entry.where.split(":")[0].split(".")[0]
    found = version(DISTRIBUTIONS.get(package, package))
    return (
        f"{package} {found} moved {entry.where}: {what}; struprune_plugin/{entry.used_in} needs it ({entry.why}), as it has been "
        f"since {entry.since}. Adapt that file, or hold {package} back in pyproject.toml."
    )


def resolve(where: str) -> object:
    module, _, names = where.partition(":")
    found = importlib.import_module(module)
    for name in names.split(".") if names else ():
        found = getattr(found, name)
    return found


def find_move(entry: Internal) -> str | None:
    """Say in one sentence what has moved; None where nothing has."""
    try:
        found = resolve(entry.where)
    except (ImportError, AttributeError) as error:
        return describe_move(entry, f"it is gone ({error})")
    if entry.takes:
        names = set(getattr(found, "model_fields", None) or getattr(found, "__dataclass_fields__", None) or ())
        names |= set(inspect.signature(found).parameters)
        if missing := [name for name in entry.takes if name not in names]:
            if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(found).parameters.values()):
                return None
            return describe_move(entry, f"it takes no {', '.join(missing)} any more")
    if entry.says and (missing := [text for text in entry.says if text not in inspect.getsource(found)]):
        return describe_move(entry, f"its source no longer speaks of {', '.join(missing)}")
    return None


@pytest.mark.parametrize("entry", INTERNALS, ids=lambda entry: entry.where)
def test_host_internals_are_where_we_lean_on_them(entry):
    moved = find_move(entry)
    if moved is not None:
        pytest.fail(moved, pytrace=False)


@pytest.mark.parametrize(
    ("where", "says", "sentence"),
    [
        ("llmcompressor.core:no_such_thing", (), r"moved llmcompressor\.core:no_such_thing: it is gone"),
        ("llmcompressor.no_such_module:x", (), "it is gone"),
        ("compressed_tensors.utils:is_match", ("never said",), "no longer speaks of never said"),
    ],
)
def test_a_move_is_told_in_one_sentence(where, says, sentence):
    import re

    told = find_move(Internal(where, "modifiers/checks.py", "for a test", "0.1", says=says))
    assert told is not None
    assert re.search(sentence, told)
    assert "struprune_plugin/modifiers/checks.py needs it (for a test)" in told
    assert "\n" not in told


def list_imports() -> set[tuple[str, str, str]]:
    """Return (file, module, name) of every import of the host's."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                top = node.module.split(".")[0]
                if top in OWN_LISTS or (top in DOCUMENTED and "." in node.module):
                    found |= {(file.relative_to(PACKAGE).as_posix(), node.module, alias.name) for alias in node.names}
    return found


def test_every_import_from_the_host_is_listed():
    listed = {(module, names.split(".")[0]) for module, _, names in (e.where.partition(":") for e in INTERNALS)}
    missing = {(file, f"{module}:{name}") for file, module, name in list_imports() if (module, name) not in listed}
    assert not missing, "add these to tests/helpers/host_internals.py"


def test_every_listed_internal_is_used_where_the_list_says():
    for entry in INTERNALS:
        text = (PACKAGE / entry.used_in).read_text(encoding="utf-8")
        words = [part for part in entry.where.replace(":", ".").split(".") if part not in ("__init__", "__call__")]
        words += [*entry.takes, *entry.says, "per_layer_config" if "heterogeneity" in entry.where else words[-1]]
        assert any(word in text for word in words[-3:]), entry.where
    assert len({entry.where for entry in INTERNALS}) == len(INTERNALS)
