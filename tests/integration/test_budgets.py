"""Budgets of bytes and of all parameters: met in the saved model; refused by name where they cannot be."""

import pytest
import torch
from helpers.models import make_dataset, run_oneshot, save_wide_llama
from transformers import AutoModelForCausalLM

from struprune_plugin import SparsityAllocatorModifier, StruPruneModifier, read_manifest
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.reporting.tables import summarize_manifest
from struprune_plugin.storage.files import measure_weight_bytes


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_wide_llama(tmp_path_factory.mktemp("llama"))


def run(model, out, recipe=None, **fields):
    fields = {} if recipe else {"allocation": {"rule": "error_curve", "trial_samples": 2}, **fields}
    return run_oneshot(str(model), recipe, make_dataset(16), num_calibration_samples=16, output_dir=str(out), **fields)


@pytest.mark.parametrize("rule", ["error_curve", "uniform"])
def test_bytes_are_those_of_the_saved_weights_to_within_a_unit(llama, tmp_path, rule):
    asked = round(0.88 * measure_weight_bytes(llama))
    rule = {"rule": rule, "trial_samples": 2} if rule == "error_curve" else rule
    run(llama, tmp_path / "out", budget={"bytes": asked}, allocation=rule)
    manifest, held = read_manifest(tmp_path / "out"), measure_weight_bytes(tmp_path / "out")
    record, unit = manifest.budget.limit, 3 * 64 * 4  # a channel of an FFN, or two value channels
    assert (record.name, record.asked) == ("bytes", asked)
    assert abs(record.planned - asked) <= unit
    assert abs(held - record.planned) < 0.01 * held, "the header's guess"
    assert "budget: bytes" in summarize_manifest(manifest, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded(torch.arange(4, 20)[None]).logits.isfinite().all()


def test_an_allocator_stage_takes_a_budget(llama, tmp_path):
    asked = round(0.9 * measure_weight_bytes(llama))
    stages = [
        SparsityAllocatorModifier(budget={"bytes": asked}, allocation="error_curve"),
        StruPruneModifier(budget={"bytes": asked}),
    ]
    run(llama, tmp_path / "out", stages)
    assert read_manifest(tmp_path / "out").budget.limit.planned <= asked


@pytest.mark.parametrize("form", ["share", "number"])
def test_parameters_are_those_of_the_whole_model(llama, tmp_path, form):
    whole = AutoModelForCausalLM.from_pretrained(llama).num_parameters()
    asked = 0.88 if form == "share" else int(0.88 * whole)
    run(llama, tmp_path / "out", budget={"parameters": asked}, allocation="uniform")
    manifest = read_manifest(tmp_path / "out")
    record, left = manifest.budget.limit, manifest.model.parameters_after
    assert (record.name, record.asked, record.planned) == ("parameters", int(0.88 * whole), left)
    assert abs(left - 0.88 * whole) <= 3 * 64 * 4
    assert f"asked {int(0.88 * whole):,}, planned {left:,}" in summarize_manifest(manifest, tmp_path / "out")


def test_a_budget_is_read_back():
    bytes_alone = StruPruneModifier(budget={"bytes": "4GB"})
    assert StruPruneModifier(**bytes_alone.dump_fields()).dump_fields() == bytes_alone.dump_fields()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"budget": {}}, "must give parameters or bytes, got none"),
        ({"budget": {"bytes": 9, "parameters": 0.2}}, "must give .*, got parameters, bytes"),
        ({"budget": {"bytes": "400XB"}}, "could not interpret byte unit: XB"),
        ({"budget": {"cache": 0.5}}, "cache\n.*not permitted"),
        ({"budget": [{"bytes": 9}, {"parameters": 0.2}]}, "budget\n.*should be a valid dictionary"),
        ({"budget": {"parameters": 0}}, "parameters\n.*greater than 0"),
        ({"budget": {"parameters": 7.5}}, "must be a share below 1 or a whole number, got 7.5"),
        ({"budget": {"parameters": 0.3}, "sparsity": 0.2}, "sparsity and budget are two budgets"),
        ({"budget": {"bytes": 9}, "sparsity": 0.2}, "sparsity and budget are two budgets"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(fields, told):
    with pytest.raises(ValueError, match=told):
        StruPruneModifier(**fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"budget": {"bytes": 5000}},
            r"budget.bytes: must be at least [\d,]+, .* got 5,000. Raise it, prune more kinds",
        ),
        (
            {"budget": {"parameters": 0.1}},
            r"budget.parameters: must be at least [\d,]+, .* let rows of the vocabulary go",
        ),
        ({"budget": {"parameters": 10**9}}, r"budget.parameters: must be below the [\d,]+ of the model"),
        (
            {"budget": {"bytes": "1GB"}},
            r"budget.bytes: must be below the [\d,]+ of the model before units go, got 1,000",
        ),
        ({"attention_unit": "none", "prune_ffn": False, "sparsity": 0.3}, "^targets: at least one module must be left"),
        ({"budget": {"bytes": 10**6}, "importance": "l0"}, "`importance: l0` needs sparsity"),
    ],
)
def test_what_cannot_be_met_is_refused_before_any_work(llama, tmp_path, fields, told):
    with pytest.raises(ValueError, match=told):
        run(llama, tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


def test_a_budget_on_the_command_line_replaces_the_recipes_sparsity():
    modifier = load_recipe("struprune", changes={"budget": {"bytes": 500}}).modifiers[0]
    assert (modifier.sparsity, modifier.budget.bytes) == (None, 500)
