"""The house's rooms: data flows one way (CONTRIBUTING.md)."""

import ast
import re
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
import yaml
from helpers.models import COMPRESSING, ROOT, run_oneshot
from transformers import AutoModelForCausalLM

from struprune_plugin import StruPruneModifier

PACKAGE = ROOT / "struprune_plugin"
# the rooms from the ground up: each imports only rooms before it; "" is the package's root, `units` and `paper` are guests
ORDER = [
    *(
        "linalg",
        "runtime",
        "settings",
        "model",
        "storage",
        "layerwise",
        "export",
        "reporting",
        "evaluation",
        "vocabulary",
        "recovery",
    ),
    *("pruning", "allocation", "units", "paper", "modifiers", "recipes", "", "cli"),
]


def read_imports(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def files_of(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py")) if room else sorted(PACKAGE.glob("*.py"))


def test_rooms_import_only_rooms_below_them():
    for index, room in enumerate(ORDER):
        for file in files_of(room):
            for name in read_imports(file):
                top, *rest = name.split(".")
                if top == "struprune_plugin" and rest:
                    assert (rest[0] if rest[0] in ORDER else "") in ORDER[: index + 1], f"{file} imports {name}"


@pytest.mark.parametrize("guest", ["paper", "units"])
def test_only_the_registration_imports_the_guests(guest):
    """The paper's methods, and the kinds of units, are registered as a third party's would be."""
    importing = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if any(name.startswith(f"struprune_plugin.{guest}") for name in read_imports(file))
        or re.search(rf"from struprune_plugin import .*\b{guest}\b", file.read_text(encoding="utf-8"))
    }
    assert {name for name in importing if not name.startswith(f"{guest}/")} == {"registration.py"}


def test_no_basename_stands_twice():
    names = [file.name for file in PACKAGE.rglob("*.py") if file.name not in ("__init__.py", "__main__.py")]
    assert sorted(names) == sorted(set(names))


def find_module(name: str) -> str:
    """Return the module that a dotted name stands in."""
    parts = name.split(".")
    while parts and not (ROOT / "/".join(parts)).with_suffix(".py").is_file() and len(parts) > 1:
        if (ROOT / "/".join(parts) / "__init__.py").is_file():
            break
        parts.pop()
    return ".".join(parts)


def test_no_module_imports_itself_by_way_of_others():
    """Imports for type checkers, and those inside functions, count, too; the root's lazy ones are how users reach the package."""
    graph: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("struprune_plugin."):
                found |= {find_module(f"{node.module}.{alias.name}") for alias in node.names}
        graph[name] = found - {name, "struprune_plugin"}
    graph.pop("struprune_plugin")
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


WIDE = {"oneshot"}  # llm-compressor's own has sixty


def test_files_are_not_long_and_functions_take_few_parameters():
    for file in PACKAGE.rglob("*.py"):
        text, place = file.read_text(encoding="utf-8"), str(file.relative_to(PACKAGE))
        assert text.count("\n") <= 400, place
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and not place.startswith("cli/"):  # a command's options are parameters
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
                assert len(names) <= 7 or node.name in WIDE, f"{place}: {node.name}"


def test_a_class_name_has_one_meaning():
    names = Counter(
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in names.items() if count > 1}


def test_nothing_in_the_package_imports_eval_or_tests():
    for file in PACKAGE.rglob("*.py"):
        assert not {name.split(".")[0] for name in read_imports(file)} & {"eval", "tests", "pickle"}, file


def test_nothing_is_sent_or_saved_by_pickle():
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not re.findall(r"torch\.(save|load)\(|broadcast_object_list|all_gather_object|gather_object", text), file


def test_every_room_is_in_the_order():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= {room for room in ORDER if room}


def test_linalg_holds_no_modules_and_no_io():
    for file in (PACKAGE / "linalg").glob("*.py"):
        assert not re.search(r"nn\.Module|print\(|open\(|logg", file.read_text()), file


@pytest.mark.parametrize("file", sorted((PACKAGE / "export").glob("modeling_*.py")), ids=lambda f: f.stem)
def test_modelling_files_are_self_contained(file):
    """They travel with checkpoints."""
    imports = read_imports(file)
    assert {name.split(".")[0] for name in imports} <= {
        *sys.stdlib_module_names,
        "torch",
        "transformers",
        "huggingface_hub",
    }


RECIPES = [  # those that a quantiser or the like follows run in test_quantisation.py
    file for file in sorted((ROOT / "recipes").glob("*.yaml")) if file.stem not in COMPRESSING
]


@pytest.mark.parametrize("recipe", RECIPES, ids=[file.stem for file in RECIPES])
def test_every_recipe_runs(recipe, save_family):
    folder = save_family("opt" if recipe.stem.startswith("paper") or recipe.stem.endswith("opt") else "llama")
    dense = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    pruned = run_oneshot(str(folder), recipe=str(recipe))
    assert pruned.num_parameters() < dense
    assert pruned(torch.arange(4, 20)[None]).logits.isfinite().all()


def test_the_default_recipe_spells_the_defaults():
    content = yaml.safe_load((ROOT / "recipes" / "struprune.yaml").read_text())
    fields = content["pruning_stage"]["pruning_modifiers"]["StruPruneModifier"]
    default = StruPruneModifier(sparsity=fields["sparsity"])
    assert default.dump_fields() == StruPruneModifier(**fields).dump_fields()
