"""The house's rooms: data flows one way (CONTRIBUTING.md)."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, run_oneshot, save_model, save_wide_opt
from families import make_model
from test_quantisation import RECIPES as COMPRESSING
from transformers import AutoModelForCausalLM

from struprune_plugin import StruPruneModifier
from struprune_plugin.model.families import find_family
from struprune_plugin.model.layers import find_decoder_layers, find_linear, list_linears

PACKAGE = ROOT / "struprune_plugin"
BELOW = [
    "maths",
    "device",
    "model",
    "layer",
    "passes",
    "export",
    "recovery",
    "modifiers",
]  # each builds on those before it
MAY_IMPORT = {  # room -> (rooms, third parties) that it may import
    "maths": (set(), {"torch"}),
    "device": ({"maths"}, {"torch", "compressed_tensors", "llmcompressor", "psutil"}),
    "model": ({"maths", "device"}, {"torch", "compressed_tensors", "transformers"}),
    "layer": ({"maths", "device", "model"}, {"torch", "compressed_tensors", "llmcompressor", "loguru", "tqdm"}),
    "passes": (
        {"maths", "device", "model", "layer", "contents", "early"},
        {"torch", "transformers", "llmcompressor", "loguru", "psutil", "safetensors", "tqdm"},
    ),
    "export": (
        {"device", "model", "layer", "contents", "manifest"},
        {"torch", "transformers", "huggingface_hub", "compressed_tensors", "loguru", "yaml", "gguf"},
    ),
    "recovery": (
        {"maths", "device", "model", "layer", "passes"},
        {"torch", "transformers", "compressed_tensors", "peft", "safetensors", "tqdm", "loguru"},
    ),
    "modifiers": (
        {*BELOW, "checkpoint", "data"},
        {"torch", "transformers", "compressed_tensors", "llmcompressor", "loguru", "pydantic"},
    ),
    "data": (set(), {"torch", "transformers", "datasets"}),
    "checkpoint": (
        {"model", "export"},
        {"torch", "transformers", "safetensors", "compressed_tensors", "huggingface_hub"},
    ),
    "evaluation": ({"checkpoint", "data"}, {"torch", "transformers", "tqdm", "lm_eval"}),
    "report": (set(), set()),
    "progress": (set(), {"tqdm"}),
    "console": (set(), {"tqdm"}),
    "arguments": ({"early", "shipped"}, {"torch", "transformers", "loguru", "yaml"}),
    "commands": (
        {
            "_register",
            "arguments",
            "checkpoint",
            "compare",
            "console",
            "contents",
            "data",
            "early",
            "evaluation",
            "forecast",
            "manifest",
        }
        | {"modifiers", "page", "picture", "progress", "recipe", "shipped", "sweep", "verify"},
        set(),
    ),
    "compare": ({"manifest", "report"}, set()),
    "hub": (set(), {"huggingface_hub"}),
    "picture": (set(), set()),
    "card": ({"checkpoint", "manifest", "report"}, {"huggingface_hub", "loguru"}),
    "page": ({"card", "picture", "report"}, set()),
    "results": ({"card", "contents", "manifest"}, set()),
    "forecast": (
        {*BELOW, "checkpoint", "data", "entrypoint", "report"},
        {"torch", "transformers", "compressed_tensors", "llmcompressor", "datasets", "psutil"},
    ),
    "sweep": (
        {*BELOW, "checkpoint", "contents", "data", "entrypoint", "evaluation", "folder", "picture", "recipe", "report"}
        | {"shipped"},
        {"torch", "transformers", "llmcompressor", "datasets"},
    ),
    "folder": ({"contents", "device", "report"}, {"compressed_tensors", "psutil", "loguru"}),
    "recipe": ({"modifiers", "shipped"}, {"llmcompressor", "pydantic", "yaml"}),
    "manifest": (set(), set()),  # from here on, what the command line reads before torch is there
    "contents": ({"manifest"}, set()),
    "verify": ({"contents", "manifest", "checkpoint"}, {"safetensors"}),
    "shipped": (set(), set()),
    "early": ({"shipped"}, set()),
    "entrypoint": (
        {*BELOW, "card", "checkpoint", "data", "early", "folder", "manifest", "recipe", "report"},
        {"torch", "transformers", "compressed_tensors", "datasets", "llmcompressor"},
    ),
    "serving": ({"export"}, {"vllm"}),
    "cli": (
        {*BELOW, "_register", "arguments", "card", "checkpoint", "commands", "console", "data", "early", "entrypoint"}
        | {"evaluation", "folder", "hub", "manifest", "recipe", "report", "results", "shipped", "verify"},
        {"torch", "transformers", "loguru", "yaml", "argcomplete"},
    ),
    "__init__": ({"_register", "export"}, set()),
    "_register": ({"_import_host", "entrypoint", "export", "modifiers"}, {"llmcompressor"}),
    "_import_host": (set(), {"llmcompressor"}),
}
STANDARD = sys.stdlib_module_names


def read_imports(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def files_of(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py")) if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_room_imports_only_what_it_may(room):
    rooms, parties = MAY_IMPORT[room]
    for file in files_of(room):
        for name in read_imports(file):
            top, *rest = name.split(".")
            if top == "struprune_plugin":
                assert not rest or rest[0] in rooms | {room}, f"{file.name} imports {name}"
            else:
                assert top in parties or top in STANDARD, f"{file.name} imports {name}"


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_nothing_in_the_package_imports_eval_or_tests(file):
    assert not {name.split(".")[0] for name in read_imports(file)} & {"eval", "tests", "pickle"}


def test_every_room_has_its_line():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert rooms - {"demo"} == set(MAY_IMPORT)


@pytest.mark.parametrize("file", sorted((PACKAGE / "maths").glob("*.py")), ids=lambda f: f.stem)
def test_maths_holds_no_modules_and_no_io(file):
    text = file.read_text()
    assert not re.search(r"nn\.Module|print\(|open\(|logg", text)


@pytest.mark.parametrize("file", sorted((PACKAGE / "export").glob("modeling_*.py")), ids=lambda f: f.stem)
def test_modelling_files_are_self_contained(file):
    """They travel with checkpoints."""
    imports = read_imports(file)
    assert {name.split(".")[0] for name in imports} <= {*STANDARD, "torch", "transformers", "huggingface_hub"}


FAMILIES_OF = {  # recipe -> model types that it is for; OPT where it is not here
    "struprune_llama": ["llama", "mistral"],
    "struprune_llama_recover": ["llama", "mistral"],
    "struprune_llama_uniform": ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"],
    "struprune_qwen": ["qwen2", "qwen3", "qwen3_moe"],
    "struprune_gemma": ["gemma", "gemma2", "gemma3_text"],
    "struprune_phi": ["phi", "phi3"],
    "struprune_neox": ["gpt_neox"],
}
RECIPES = [  # those that a quantiser or the like follows run in test_quantisation.py
    (file, model_type)
    for file in sorted((ROOT / "recipes").glob("*.yaml"))
    if file.stem not in COMPRESSING
    for model_type in FAMILIES_OF.get(file.stem, ["opt"])
]


@pytest.mark.parametrize(("recipe", "model_type"), RECIPES, ids=[f"{file.stem}-{name}" for file, name in RECIPES])
def test_every_recipe_runs(recipe, model_type, tmp_path):
    folder = save_wide_opt(tmp_path) if model_type == "opt" else save_model(make_model(model_type), tmp_path)
    dense = sum(weight.numel() for weight in list_weights(AutoModelForCausalLM.from_pretrained(folder)))
    pruned = run_oneshot(str(folder), recipe=str(recipe))
    assert sum(weight.numel() for weight in list_weights(pruned)) < dense
    assert pruned(torch.arange(4, 20)[None]).logits.isfinite().all()


def list_weights(model):
    layers = [layer for _, layer in find_decoder_layers(model)]
    family = find_family(model)
    return [find_linear(layer, name).weight for layer in layers for name in list_linears(family, layer)]


def test_the_default_recipe_spells_the_defaults():
    content = yaml.safe_load((ROOT / "recipes" / "struprune_opt.yaml").read_text())
    fields = content["pruning_stage"]["pruning_modifiers"]["StruPruneModifier"]
    default = StruPruneModifier(sparsity=fields["sparsity"])
    assert {name: getattr(default, name) for name in fields} == fields


@pytest.mark.parametrize("task", sorted((ROOT / "eval" / "tasks").glob("*.yaml")), ids=lambda f: f.stem)
def test_tasks_name_their_hub_twin(task):
    text = task.read_text()
    assert "Hub twin" in text
    assert task.stem in text
