"""README and docs/: what they promise is there, and what is there is described."""

import ast
import inspect
import json
import re
import shlex

import pytest
import typer
import yaml
from helpers.families import MODEL_TYPES
from helpers.models import ROOT
from llmcompressor import oneshot as host_oneshot
from llmcompressor.modifiers import Modifier

import struprune_plugin
from struprune_plugin import LoRARecoveryModifier, StruPruneModifier, oneshot
from struprune_plugin.allocation.rules import RULES
from struprune_plugin.cli import main as cli
from struprune_plugin.model.unit_kind import UNIT_KINDS
from struprune_plugin.modifiers.fields import BudgetConfig, Fisher
from struprune_plugin.pruning.importance import IMPORTANCES
from struprune_plugin.pruning.weight_update import WEIGHT_UPDATES
from struprune_plugin.recipes.load import load_recipe

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = {file.stem: file for file in (ROOT / "recipes").glob("*.yaml")}


def read_blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def read_commands(start):
    """Return (page, words) of every command that starts so, in code blocks and between backquotes."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = "\n".join(read_blocks(page, "bash")).replace("\\\n", " ").splitlines()
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
        found += [(page, shlex.split(line, comments=True)) for line in lines if line.startswith(start)]
    return found


def show(value):
    return value.name if hasattr(value, "name") else " ".join(value)[:60]


def test_every_recipe_is_in_a_table():
    pages = [page.read_text(encoding="utf-8") for page in (README, ROOT / "docs" / "recipes.md")]
    rows = [line for page in pages for line in page.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert RECIPES.keys() <= named


def test_every_type_that_is_tested_is_named():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert not [model_type for model_type in MODEL_TYPES if f"`{model_type}`" not in text]


def list_fields():
    """Return the fields of the recipe by the names that docs/recipes.md gives them, ADMM's without a method's name before them."""
    fields = {
        name: field for one in (StruPruneModifier, LoRARecoveryModifier) for name, field in one.model_fields.items()
    }
    groups = {name: [type(fields.pop(name).default)] for name in ("adapters", "schedule", "holdout")}
    groups |= {"budget": [BudgetConfig], "sensitivity": [Fisher], "": [admm := WEIGHT_UPDATES["admm"]]}
    groups |= {"importance": IMPORTANCES.values(), "allocation": RULES.values()}
    groups |= {name: [kind] for name, kind in UNIT_KINDS.items()}
    for group, classes in groups.items():
        fields |= {f"{group}.{n}".strip("."): f for one in classes for n, f in one.model_fields.items()}
    twice = {f"importance.{name}" for name in admm.model_fields} | Modifier.model_fields.keys()
    return {
        n: f for n, f in fields.items() if n not in twice and n.rpartition(".")[2] not in ("method", "rule", "kind")
    }


def test_every_field_of_a_recipe_has_a_row_with_its_default():
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").partition("## Every field")[2]
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \| ([^|]+) \|", text, re.MULTILINE)
    shown = {name: default for names, default in rows for name in re.findall(r"`([\w.]+)`", names)}
    fields = list_fields()
    assert shown.keys() == fields.keys()
    for name, field in fields.items():
        if isinstance(field.default, str | int | float):
            default = field.default if isinstance(field.default, str) else json.dumps(field.default)
            assert shown[name].startswith(f"`{default}`"), name


# -- code in the pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=show)
def test_recipes_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"\b(struprune(?:_\w+)?|paper_\w+)\.yaml", text)
    names = re.findall(r"(?:--recipe |recipe=\")(struprune\w*|paper_\w+)", text)
    assert {*files, *names} <= RECIPES.keys()


@pytest.mark.parametrize("page", [p for p in PAGES if read_blocks(p, "python")], ids=show)
def test_python_snippets_parse_and_name_what_there_is(page):
    taken = {*inspect.signature(oneshot).parameters, *inspect.signature(host_oneshot).parameters}
    for block in read_blocks(page, "python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "struprune_plugin":
                assert all(hasattr(struprune_plugin, alias.name) for alias in node.names)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "oneshot":
                assert {keyword.arg for keyword in node.keywords} <= taken


@pytest.mark.parametrize("page", [p for p in PAGES if read_blocks(p, "yaml")], ids=show)
def test_yaml_snippets_are_recipes(page):
    for block in read_blocks(page, "yaml"):
        assert load_recipe(yaml.safe_dump(yaml.safe_load(block))).modifiers


COMMANDS = [(page, words) for page, words in read_commands("struprune ") if len(words) > 2 and "COMMAND" not in words]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=show)
def test_command_lines_are_accepted(page, words, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "test.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    typer.main.get_command(cli.make_app()).commands[words[1]].make_context(words[1], words[2:])


TOOLS = read_commands("python -m eval.")


@pytest.mark.parametrize(("page", "words"), TOOLS, ids=show)
def test_tools_exist_and_have_the_flags(page, words):
    module = ROOT / words[2].replace(".", "/")
    file = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    shared = re.findall(r"from eval\.(\w+) import", source)  # where options that tools share are defined
    source += "".join((ROOT / "eval" / f"{name}.py").read_text(encoding="utf-8") for name in shared if name != "peers")
    assert '__name__ == "__main__"' in source
    for word in words[3:]:
        if word.startswith("--"):
            assert f'"{word}"' in source, word


def find_anchors(page):
    """Return the anchors of a page's headings, as forges make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=show)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), target
        assert not anchor or anchor in find_anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=show)
def test_files_that_are_named_exist(page):
    named = re.findall(r"`((?:tests|eval|struprune_plugin|recipes)/[\w./]+)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]


def read_messages():
    """Return all texts of the package as ``…`` stands for what they fill in."""
    texts = []
    for file in sorted((ROOT / "struprune_plugin").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
    return texts


def test_messages_that_are_explained_are_those_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|", page.partition("## Symptoms")[0], re.MULTILINE)
    texts = read_messages()
    for row in rows:
        pattern = ".*".join(re.escape(part) for part in row.split("…"))
        assert any(re.search(pattern, text, re.DOTALL) for text in texts), row


def test_every_page_is_linked_from_the_readme():
    text = README.read_text(encoding="utf-8")
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in text]


# -- the walk of docs/architecture.md -------------------------------------------------------------------------------


WALK = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STOPS = re.findall(r"^\d+\. \[`([\w.]+)`\]\(\.\./(struprune_plugin/[\w/]+\.py)\) ", WALK, re.MULTILINE)


@pytest.mark.parametrize(("name", "file"), STOPS, ids=[name for name, _ in STOPS])
def test_stops_are_defined_in_the_files_that_they_link_to(name, file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name.rpartition(".")[2] in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


# -- the site -------------------------------------------------------------------------------------------------------
