import copy
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml
from helpers.models import ROOT

from struprune_plugin import StruPruneModifier
from struprune_plugin.cli import main as cli
from struprune_plugin.recipes.load import load_recipe, write_recipe
from struprune_plugin.recipes.shipped import describe_recipe, list_recipes

GOOD = {"prune_stage": {"prune_modifiers": {"StruPruneModifier": {"sparsity": 0.3}}}}
FULL = {
    "a_stage": {"a_modifiers": {"SparsityAllocatorModifier": {"sparsity": 0.3}}},
    "b_stage": {"b_modifiers": {"StructPruneModifier": {}}},
    "c_stage": {"c_modifiers": {"LoRARecoveryModifier": {}}},
}


def modifier(**fields):
    return yaml.safe_dump({"prune_stage": {"prune_modifiers": {"StruPruneModifier": fields}}})


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("", "recipe: '' is neither an existing file nor the name of a shipped recipe"),
        ("no/such.yaml", "'no/such.yaml' is neither an existing file nor"),
        ("a: [\n", "recipe: is not valid YAML"),
        ("[]\n", r"must be a mapping with names .* got \[\]"),
        ("prune_modifiers:\n  StruPruneModifier: {sparsity: 0.3}\n", "a mapping with names that end in '_stage'"),
        ("prune_stage:\n  prune: {StruPruneModifier: {sparsity: 0.3}}\n", "prune_stage must be .* end in '_modifiers'"),
        (
            "prune_stage:\n  prune_modifiers: [StruPruneModifier]\n",
            "prune_stage.prune_modifiers must be a mapping of modifiers",
        ),
        (
            "x_stage:\n  x_modifiers:\n    StruPruneModifier: {sparsity: 0.3}\n    StruPruneModifier: {sparsity: 0.2}\n",
            "repeated keys StruPruneModifier in one mapping",
        ),
        ("prune_stage:\n  prune_modifiers: {StruPruneModifier: }\n", "StruPruneModifier must be a mapping of fields"),
        (
            "args: {s: 0.3}\nx_stage:\n  x_modifiers: {StruPruneModifier: {sparsity: 0.3}}\n",
            "a mapping with names that end in '_stage', got 'args'",
        ),
        (
            "x_stage:\n  x_modifiers: {PruneModifier: {sparsity: 0.3}}\n",
            "'PruneModifier' is not .* mean StruPruneModifier",
        ),
        ("x_stage:\n  x_modifiers: {RecoveryModifier: {}}\n", "is not a modifier .* Did you mean LoRARec"),
        (modifier(sparsity=0.3, sparsty=0.2), "sparsty is not a field of StruPruneModifier. Did you mean sparsity"),
        (modifier(sparsity=1.0), "sparsity must be less than 1, got 1.0. Correct it."),
        (modifier(sparsity=-0.1), "sparsity must be greater than or equal to 0, got -0.1"),
        (modifier(sparsity=float("nan")), "sparsity must be less than 1, got nan"),
        (modifier(sparsity=0.3, attention_unit="neuron"), "must be 'head', 'value_channels' or 'none', got 'neuron'"),
        (modifier(sparsity=0.3, allocation={"rule": "softmax", "temperature": []}), "temperature must be above 0"),
        (
            modifier(sparsity=0.3, allocation={"rule": "softmax", "temperature": [1.0, 0.0]}),
            "temperature must be above 0",
        ),
        (modifier(sparsity=0.3, dampening_frac=-1), "dampening_frac must be greater than or equal to 0, got -1"),
        (modifier(sparsity=0.3, width_multiple=0), "width_multiple must be greater than or equal to 1, got 0"),
    ],
)
def test_load_recipe_refuses(recipe, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe)


def test_load_recipe_sets_fields_in_our_modifiers_only():
    recipe = {**GOOD, "q_stage": {"q_modifiers": {"QuantizationModifier": {"targets": ["Linear"], "scheme": "W8A8"}}}}
    loaded = load_recipe(yaml.safe_dump(recipe), {"targets": ["re:.*fc2"], "sparsity": 0.1})
    assert loaded.modifiers[0].targets == ["re:.*fc2"]
    assert loaded.modifiers[0].sparsity == 0.1
    assert loaded.modifiers[1].targets == ["Linear"]
    with pytest.raises(ValueError, match=r"no modifier of the recipe has a field 'sparsty'. Did you mean sparsity\?"):
        load_recipe(yaml.safe_dump(recipe), {"sparsty": 0.1})


def load_full(changes):
    return load_recipe(yaml.safe_dump(FULL, sort_keys=False), changes).modifiers


def test_load_recipe_sets_a_method_s_own_field():
    """What the recipe leaves out of the method stays at its default; the method itself can be set beside."""
    changes = {
        "SparsityAllocatorModifier.allocation.temperature": [1.0, 2.0],
        "StruPruneModifier.weight_update.steps": 2,
    }
    changes["StruPruneModifier.weight_update"] = "admm"
    allocator, pruning, _ = load_full(changes)
    assert (allocator.allocation.rule, allocator.allocation.temperature) == ("softmax", [1.0, 2.0])
    assert (pruning.weight_update.method, pruning.weight_update.steps) == ("admm", 2)
    other = {"allocation.rule": "softmax_inverse", "allocation.temperature": 2.0}
    (alone,) = load_recipe("struprune", other).modifiers
    assert (alone.allocation.rule, alone.allocation.temperature) == ("softmax_inverse", 2.0)
    (alone,) = load_recipe("struprune", {"allocation.samples": 3, "sensitivity.samples": 2}).modifiers
    assert (alone.allocation.samples, alone.sensitivity.samples) == (3, 2)


def test_a_method_s_name_goes_before_its_fields_in_any_order():
    changes = {"allocation.temperature": 2, "allocation.rule": "softmax"}
    for order in (changes, dict(reversed(changes.items()))):
        (alone,) = load_recipe("struprune", order).modifiers
        assert (alone.allocation.rule, alone.allocation.temperature) == ("softmax", 2)


@pytest.mark.parametrize("recipe", ["struprune_softmax", "struprune_opt"])
def test_a_method_s_field_is_set_in_the_stage_that_names_the_method(recipe):
    allocator, pruning = load_recipe(recipe, {"allocation.temperature": 2, "sensitivity.samples": 3}).modifiers[:2]
    assert allocator.allocation.temperature == 2
    assert "allocation" not in pruning.model_fields_set
    assert allocator.sensitivity.samples == pruning.sensitivity.samples == 3, (
        "where no stage names it, it is set in all"
    )


def test_a_field_within_one_that_is_left_out_means_what_it_means_in_a_recipe():
    for changes in ({"experts.widths": "per_layer"}, {"experts": {"widths": "per_layer"}}):
        assert load_recipe("struprune", changes).modifiers[0].experts.units == "channels"
    assert load_recipe("struprune", {"allocation.samples": 8}).modifiers[0].allocation.rule == "error_curve"


def test_changes_are_for_recipes_that_are_not_modifiers():
    with pytest.raises(ValueError, match="changes: must be left out for modifiers, got sparsity"):
        load_recipe(StruPruneModifier(sparsity=0.3), {"sparsity": 0.1})


def test_load_recipe_sets_a_bare_field_in_every_modifier_that_has_it():
    changes = {"sparsity": 0.1, "attention_unit": "head", "StruPruneModifier.sparsity": 0.1}
    allocator, pruning, _ = load_full(changes)
    for name in ("sparsity", "attention_unit"):
        assert getattr(allocator, name) == getattr(pruning, name) == changes[name]


def test_named_units_take_the_place_of_a_recipe_s_short_forms():
    (pruning,) = load_recipe("struprune", {"units": ["head"]}).modifiers
    assert [kind.kind for kind in pruning.list_units()] == ["head"]
    with pytest.raises(ValueError, match=r"^struprune: StruPruneModifier: units and attention_unit are two choices"):
        load_recipe("struprune", {"units": ["head"], "attention_unit": "none"})


def test_the_more_precise_change_has_the_last_word():
    allocator, pruning, _ = load_full({"StruPruneModifier.width_multiple": 4, "width_multiple": 2})
    assert (allocator.width_multiple, pruning.width_multiple) == (2, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("LoRARecoveryModifier.sparsity", "LoRARecoveryModifier has no field 'sparsity'. The fields are adapters, "),
        ("LoraRecoveryModifier.alpha", "the recipe has no modifier 'LoraRecoveryModifier'. It has Sparsity"),
        ("QuantizationModifier.scheme", "the recipe has no modifier 'QuantizationModifier'"),
    ],
)
def test_load_recipe_refuses_changes_that_hit_nothing(change, message):
    with pytest.raises(ValueError, match=message):
        load_full({change: 1})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("struprune_lor", "Did you mean struprune_lora?"),
        ("recipes/struprune_optt.yaml", "Did you mean struprune_opt?"),
        ("nonsense", "a name that `struprune recipes` lists"),
    ],
)
def test_a_misspelt_name_gets_a_hint(name, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)):
        load_recipe(name)


def test_a_file_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "struprune").write_text(yaml.safe_dump(GOOD))
    assert load_recipe("struprune").modifiers[0].sparsity == 0.3
    assert len(load_recipe("struprune_opt").modifiers) == 3


def test_every_recipe_says_what_it_is(capsys):
    assert cli.main(["recipes"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml"))
    for file in list_recipes().values():
        assert len(describe_recipe(file)) > 20


def test_a_wheel_holds_the_package_and_its_recipes(tmp_path):
    """Built, installed and used away from the checkout."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "setup.py", "struprune_cli.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("struprune_plugin", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path / "dist"), str(tmp_path)]
    subprocess.run([*pip, *build], check=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("struprune_plugin/")}
    kinds = (".py", ".jinja", ".yaml", ".json", ".jsonl", ".safetensors", ".typed")
    package = [path for path in (tmp_path / "struprune_plugin").rglob("*") if path.suffix in kinds]
    wanted = {path.relative_to(tmp_path).as_posix() for path in package}
    wanted |= {f"struprune_plugin/recipe_files/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert wanted <= held
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(target)  # all that an installation does with a wheel of Python alone
    argv = [sys.executable, "-m", "struprune_cli", "recipes", "--json"]
    environment = os.environ | {"PYTHONPATH": str(target)}
    done = subprocess.run(argv, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    (recipe,) = target.rglob("struprune.yaml")
    assert type(load_recipe(recipe).modifiers[0]).__name__ == "StruPruneModifier"


def test_a_mapping_is_taken_and_stays_as_it_was():
    given = copy.deepcopy(FULL)
    assert [type(m).__name__ for m in load_recipe(given, {"sparsity": 0.1}).modifiers][1] == "StruPruneModifier"
    assert given == FULL
    with pytest.raises(ValueError, match="recipe: must be a mapping with names that end in '_stage'"):
        load_recipe({"prune": {}})


def test_a_written_recipe_loads_again_as_plain_yaml(tmp_path):
    quantiser = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "actorder": "static"}}}}
    ours = {"prune_stage": {"prune_modifiers": {"StruPruneModifier": {"sparsity": 0.3, "sensitivity": "none"}}}}
    both = {**ours, "q_stage": {"q_modifiers": {"GPTQModifier": {**quantiser, "ignore": ["lm_head"]}}}}
    first = load_recipe(both)
    write_recipe(first, tmp_path)
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["prune_stage"]["prune_modifiers"]
    again = load_recipe(tmp_path / "recipe.yaml")
    assert [m.model_dump() for m in again.modifiers] == [m.model_dump() for m in first.modifiers]
