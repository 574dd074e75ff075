"""Budgets other than parameters: met in the saved model, alone and together; refused by name where they cannot be."""

import itertools

import pytest
import torch
from helpers.models import make_dataset, run_oneshot, save_wide_llama, save_wide_opt
from helpers.trials import watch_trials
from transformers import AutoModelForCausalLM

from struprune_plugin import SparsityAllocatorModifier, StruPruneModifier, read_manifest
from struprune_plugin.allocation.rules import Budget, GroupStatistics
from struprune_plugin.allocation.rules.error_curve import ErrorCurve
from struprune_plugin.allocation.rules.uniform import allocate_uniformly
from struprune_plugin.linalg.budget import allocate_error_curves
from struprune_plugin.linalg.knapsack import Limit
from struprune_plugin.linalg.rounding import GroupSize
from struprune_plugin.modifiers import planning
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.reporting.tables import measure_weight_bytes, summarize_manifest

DENSE_CACHE = 2 * 2 * (16 + 16) * 4  # llama: layers, KV heads, channels of keys and values, bytes of float32


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_wide_llama(tmp_path_factory.mktemp("llama"))


def run(model, out, recipe=None, **fields):
    fields = {} if recipe else {"allocation": {"rule": "error_curve", "trial_samples": 2}, **fields}
    return run_oneshot(str(model), recipe, make_dataset(16), num_calibration_samples=16, output_dir=str(out), **fields)


def read_limits(out):
    return {record.name: record for record in read_manifest(out).budget.limits}


def cache_bytes(model):
    """Count what a token really adds to the cache."""
    with torch.no_grad():
        layers = model(torch.arange(4, 12)[None], use_cache=True).past_key_values.layers
    return sum(part.shape[1] * part.shape[3] * 4 for layer in layers for part in (layer.keys, layer.values))


@pytest.mark.parametrize("rule", ["error_curve", "uniform"])
def test_bytes_are_those_of_the_saved_weights_to_within_a_unit(llama, tmp_path, rule):
    asked = round(0.88 * measure_weight_bytes(llama))
    rule = {"rule": rule, "trial_samples": 2} if rule == "error_curve" else rule
    run(llama, tmp_path / "out", budget={"bytes": asked}, allocation=rule)
    record, held = read_limits(tmp_path / "out")["bytes"], measure_weight_bytes(tmp_path / "out")
    unit = 3 * 64 * 4  # a channel of an FFN, or two value channels
    assert record.met == record.planned
    assert asked - unit <= record.planned <= asked
    assert abs(held - record.planned) < 0.01 * held, "the header's guess"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded(torch.arange(4, 20)[None]).logits.isfinite().all()


@pytest.mark.parametrize(("save", "asked"), [(save_wide_llama, 1_085_000), (save_wide_opt, 660_000)])
def test_bytes_count_the_bits_of_a_quantiser_that_follows(save, asked, tmp_path):
    model = save(tmp_path / "model")
    recipe = """
        prune_stage:
          prune_modifiers:
            StruPruneModifier: {{budget: {{bytes: {asked}}}, allocation: {{rule: error_curve, trial_samples: 0}}}}
        quant_stage:
          quant_modifiers:
            GPTQModifier:
              ignore: [lm_head]
              config_groups:
                g: {{targets: [Linear], weights: {{num_bits: 4, type: int, strategy: group, group_size: 16, symmetric: {sym}}}}}
    """
    for symmetric in ("true", "false"):
        out = tmp_path / f"out-{symmetric}"
        run(model, out, recipe.format(asked=asked, sym=symmetric))
        record = read_limits(out)["bytes"]
        assert record.planned <= asked
        assert abs(measure_weight_bytes(out) - record.planned) < 0.01 * record.planned


@pytest.mark.parametrize(("unit", "asked"), [("head", 0.5), ("value_channels", 0.75)])
def test_cache_is_the_fraction_asked_for_and_nothing_else_goes(llama, tmp_path, unit, asked):
    run(llama, tmp_path / "out", budget={"cache": asked}, attention_unit=unit)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    record, manifest = read_limits(tmp_path / "out")["cache"], read_manifest(tmp_path / "out")
    assert record.dense == DENSE_CACHE
    assert record.met == record.planned == cache_bytes(loaded) / DENSE_CACHE <= asked
    assert record.met > asked - 32 * 4 / DENSE_CACHE
    assert all(group.kept == group.num_units for group in manifest.groups if group.kind == "ffn")


def test_several_budgets_are_all_met(llama, tmp_path):
    asked = round(0.85 * measure_weight_bytes(llama))
    budgets = [{"bytes": asked, "cache": 0.8}, {"parameters": 0.25}]
    run(llama, tmp_path / "out", budget=budgets)
    limits, manifest = read_limits(tmp_path / "out"), read_manifest(tmp_path / "out")
    assert set(limits) == {"parameters", "bytes", "cache"}
    assert limits["bytes"].met <= asked
    assert limits["cache"].met <= 0.8
    assert limits["parameters"].met == pytest.approx(manifest.budget.met_sparsity, abs=1e-9)
    assert manifest.budget.met_sparsity >= 0.25
    told = summarize_manifest(manifest, tmp_path / "out")
    assert all(f"budget: {name}" in told for name in limits)
    totals = {name: record.fixed + sum(record.modules.values()) for name, record in limits.items()}
    assert totals["bytes"] == pytest.approx(limits["bytes"].planned)


def test_an_allocator_stage_takes_a_budget(llama, tmp_path):
    stages = [
        SparsityAllocatorModifier(budget={"cache": 0.75}, allocation="error_curve"),
        StruPruneModifier(budget={"cache": 0.75}),
    ]
    run(llama, tmp_path / "out", stages)
    assert read_limits(tmp_path / "out")["cache"].met <= 0.75


def test_parameters_in_a_budget_are_the_sparsity():
    assert StruPruneModifier(budget={"parameters": 0.3}).dump_fields() == StruPruneModifier(sparsity=0.3).dump_fields()
    both = StruPruneModifier(sparsity=0.3, budget={"parameters": 0.3, "cache": 0.5})
    assert both.sparsity == 0.3
    assert StruPruneModifier(**both.dump_fields()).dump_fields() == both.dump_fields()


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ({}, "must give at least one of parameters, bytes, cache and speedup, got none"),
        ({"cache": 0.5, "phase": "prompt"}, "phase has no effect without speedup. Remove it, or add speedup"),
        ({"bytes": "400MiB"}, "must be a number of bytes, e.g. 500MB or 4GB, got '400MiB'"),
        ({"speedup": 0.5}, "greater than or equal to 1"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(budget, told):
    with pytest.raises(ValueError, match=told):
        StruPruneModifier(budget=[budget])
    with pytest.raises(ValueError, match=r"sparsity 0\.2 and budget\.parameters 0\.3 are two values of one budget"):
        StruPruneModifier(sparsity=0.2, budget={"parameters": 0.3})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"budget": {"cache": 0.3}}, r"^budget: cache must be at least 0\.\d+, .*, got 0\.3\. Relax the budget"),
        ({"budget": {"bytes": 5000}}, r"^budget: bytes must be at least .* MB, .*, got 5 kB"),
        (
            {"budget": {"cache": 0.9}, "allocation": "owl"},
            "`allocation: owl` can meet a budget of parameters only, got cache",
        ),
        (
            {"budget": {"cache": 0.9, "bytes": 10**6}, "allocation": "softmax"},
            "`allocation: softmax` can meet a budget of parameters only, got bytes, cache",
        ),
        (
            {"budget": {"cache": 0.9}, "importance": "l0"},
            "`importance: l0` needs sparsity, on which its scores depend, got cache alone",
        ),
    ],
)
def test_what_cannot_be_met_is_refused_before_any_work(llama, tmp_path, fields, told):
    with pytest.raises(ValueError, match=told):
        run(llama, tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


def test_a_budget_on_the_command_line_replaces_the_recipes_sparsity():
    modifier = load_recipe("struprune", changes={"budget": {"cache": 0.5}}).modifiers[0]
    assert (modifier.sparsity, [part.cache for part in modifier.budget]) == (None, [0.5])
    both = load_recipe("struprune", changes={"budget": {"cache": 0.5}, "sparsity": 0.1}).modifiers[0]
    assert (both.sparsity, both.budget[0].cache) == (0.1, 0.5)


def test_trials_keep_to_the_budgets(llama, tmp_path, monkeypatch):
    """Allocations nearer to uniform are tried, too, and a search around the best; each must fit."""
    seen = watch_trials(monkeypatch)
    monkeypatch.setattr(planning, "FAR", 0.0)
    run(
        llama,
        tmp_path / "out",
        budget={"cache": 0.8, "parameters": 0.2},
        allocation={"rule": "error_curve", "trial_samples": 4},
    )
    groups = {group.name: group for group in read_manifest(tmp_path / "out").groups}
    trials = [[path.kept for path in trial._paths] for trial, _ in seen]
    _, proposed, searched, *_ = trials
    assert len(proposed) > 1
    assert len(searched) > 1
    for plan in itertools.chain(*trials[1:]):  # the blocks are modules tried alone
        values = sum(count * 4 for name, count in plan.items() if groups[name].kind == "value_channels")
        assert values + DENSE_CACHE / 2 <= 0.8 * DENSE_CACHE
        removed = sum((groups[name].num_units - count) * groups[name].unit_cost for name, count in plan.items())
        assert removed >= 0.2 * read_manifest(tmp_path / "out").budget.prunable_parameters
    assert len(list(itertools.groupby(map(str, proposed)))) == len(proposed)


def test_a_plan_by_parameters_keeps_the_most_that_meets_other_budgets():
    sizes = [
        GroupSize("cheap", "ffn", num_units=8, unit_cost=10, step=1),
        GroupSize("dear", "ffn", num_units=8, unit_cost=10, step=1),
    ]
    counts = torch.arange(9, dtype=torch.float64)
    curves = [(8 - counts) ** 2, 2 * (8 - counts) ** 2]
    measured = {
        size.name: GroupStatistics(1.0, curve, counts[:-1], torch.arange(8))
        for size, curve in zip(sizes, curves, strict=True)
    }
    limit = Limit("seconds", [counts, 3 * counts], 20.0)
    rule = ErrorCurve()
    kept = rule.decide_by_parameters(sizes, measured, Budget(0.0, 160, 0.4, "none", [limit]))
    plans = [allocate_error_curves(sizes, curves, 10.0 * units) for units in range(2, 17)]
    assert kept == [plan for plan in plans if limit.fits(plan)][-1]
    assert rule.decide_by_parameters(sizes, measured, Budget(0.4, 160, 0.4, "none")) is None


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_cache_budget_of_equal_layers_leaves_ffns_whole(llama, tmp_path, share):
    fields = {"output": "uniform", "attention_unit": "head", "budget": {"cache": share}}
    run_oneshot(str(llama), **fields, output_dir=str(tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    assert all(group.kept == group.num_units for group in manifest.groups if group.kind == "ffn")
    assert manifest.budget.limits[0].met <= share


def test_units_that_save_nothing_stay_in_whole_steps():
    """44 channels by 8: 40 stay, as no step holds all of them."""
    sizes = [GroupSize("a", "attention", 4, 10, 1), GroupSize("f", "ffn", 44, 3, 8)]
    nothing = torch.zeros(45, dtype=torch.float64)
    limit = Limit("cache", [torch.arange(5, dtype=torch.float64), nothing], 2.0)
    plan = allocate_uniformly(sizes, 0.5, lambda _kind, _count: True, [limit])
    assert plan.kept == {"a": 2, "f": 40}
