"""Several pruning stages in one recipe: rounds of pruning and recovery, with one manifest."""

import re

import pytest
import torch
from helpers.models import make_dataset, run_oneshot, save_opt, save_wide_llama
from transformers import AutoModelForCausalLM

from struprune_plugin import RecoveryModifier, StruPruneModifier, read_manifest
from struprune_plugin.recipes.load import load_recipe
from struprune_plugin.reporting.tables import summarize_manifest

CURVES = {"rule": "error_curve", "trial_samples": 0}
KINDS = {"opt": ("value_channels", "per_layer"), "llama": ("head", "per_layer"), "llama-uniform": ("none", "uniform")}


@pytest.fixture(params=KINDS)
def case(request, opt, tmp_path):
    unit, output = KINDS[request.param]
    source = opt if request.param == "opt" else save_wide_llama(tmp_path / "dense")
    shape = {"allocation": CURVES} if output == "per_layer" else {"output": output}
    return source, {"attention_unit": unit, **shape}


def list_rounds(fields, *sparsities, between=None):
    stages = []
    for sparsity in sparsities:
        stages += [StruPruneModifier(sparsity=sparsity, **fields), *(between() if between and sparsity < 0.4 else [])]
    return stages


def test_rounds_give_what_separate_runs_give(case, tmp_path):
    source, fields = case
    both = run_oneshot(str(source), recipe=list_rounds(fields, 0.2, 0.4), output_dir=str(tmp_path / "both"))
    run_oneshot(str(source), sparsity=0.2, output_dir=str(tmp_path / "first"), **fields)
    budget = read_manifest(tmp_path / "first").budget
    left = 1 - 0.6 * budget.prunable_parameters / (budget.prunable_parameters - budget.removed_parameters)
    second = run_oneshot(
        str(tmp_path / "first"), sparsity=left, tokenizer=str(source), output_dir=str(tmp_path / "second"), **fields
    )
    assert {n: w.shape for n, w in both.state_dict().items()} == {n: w.shape for n, w in second.state_dict().items()}
    ids = torch.arange(4, 30)[None]
    # logits up to 4; the OPT case differs by rounding, which the second round's solves amplify
    torch.testing.assert_close(both(ids).logits, second(ids).logits, rtol=0, atol=1e-4)


def test_one_manifest_counts_from_the_dense_model(case, tmp_path):
    source, fields = case
    dense = AutoModelForCausalLM.from_pretrained(source)
    out = tmp_path / "out"
    run_oneshot(str(source), recipe=list_rounds(fields, 0.2, 0.3, 0.4), output_dir=str(out))
    manifest, first = read_manifest(out), tmp_path / "first"
    run_oneshot(str(source), sparsity=0.2, output_dir=str(first), **fields)
    assert [record.settings["sparsity"] for record in manifest.rounds] == [0.2, 0.3]
    assert manifest.settings["sparsity"] == manifest.budget.asked_sparsity == 0.4
    assert manifest.budget.met_sparsity == pytest.approx(0.4, abs=0.03)
    removed = [record.removed_parameters for record in manifest.rounds] + [manifest.budget.removed_parameters]
    assert removed == sorted(set(removed))
    assert manifest.budget.removed_parameters == sum(group.removed_parameters for group in manifest.groups)
    assert manifest.model.parameters_before == dense.num_parameters()
    assert manifest.model.parameters_after == manifest.model.parameters_before - manifest.budget.removed_parameters
    assert manifest.model.base == str(source)
    for once, group in zip(read_manifest(first).groups, manifest.groups, strict=True):
        assert (once.name, once.num_units) == (group.name, group.num_units)
        assert set(group.keep) <= set(once.keep), "kept after all rounds, so kept after the first"
    ids = torch.arange(4, 30)[None]
    loaded = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert torch.isfinite(loaded(ids).logits).all()


def test_every_round_has_its_recovery(opt, tmp_path):
    def recover():
        return [RecoveryModifier(loss={"cross_entropy": 1.0}, adapters={"rank": 2}, schedule={"max_steps": 1})]

    recipe = list_rounds({"allocation": CURVES}, 0.2, 0.4, between=recover)
    run_oneshot(str(opt), recipe=[*recipe, *recover()], output_dir=str(tmp_path / "out"))
    again = load_recipe(tmp_path / "out" / "recipe.yaml").modifiers
    assert [type(modifier) for modifier in again] == [StruPruneModifier, RecoveryModifier] * 2
    assert [again[0].sparsity, again[2].sparsity] == [0.2, 0.4]
    manifest = read_manifest(tmp_path / "out")
    names = [stage.name for stage in manifest.stages]
    assert len(names) == len(set(names))
    assert [record.recovery.steps for record in (*manifest.rounds, manifest)] == [1, 1]
    assert re.search(r"round 1 .*% removed, then 1 steps of recovery", summarize_manifest(manifest, tmp_path / "out"))


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        ([{"sparsity": 0.3}, {"sparsity": 0.2}], {}, r"sparsity: must grow .* got 0\.3 and 0\.2"),
        ([{"sparsity": 0.3}, {"sparsity": 0.301}], {}, r"sparsity: must grow by at least 0\.01"),
        (
            [{"sparsity": 0.2}, {"sparsity": 0.3, "attention_unit": "none"}],
            {},
            "attention_unit must be 'value_channels' as in",
        ),
        ([{"sparsity": 0.2}, {"budget": {"bytes": 100_000}}], {}, "and no `budget`"),
        ([{"sparsity": 0.2}, {"sparsity": 0.3}], {"checkpoint_dir": "parts"}, "checkpoint_dir: must be left out"),
    ],
)
def test_what_cannot_be_a_round_is_refused(opt, tmp_path, monkeypatch, stages, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        run_oneshot(str(opt), recipe=[StruPruneModifier(**fields) for fields in stages], output_dir="out", **options)
    assert not (tmp_path / "out").exists()


def test_rounds_are_checked_as_the_recipe_is_read():
    with pytest.raises(ValueError, match=r"got 0\.3 and 0\.3\. Give each stage its own value"):
        load_recipe("struprune_rounds", changes={"sparsity": 0.3})
    with pytest.raises(ValueError, match="no SparsityAllocatorModifier beside several"):
        load_recipe(
            "a_stage: {a_modifiers: {SparsityAllocatorModifier: {sparsity: 0.1}}}\n"
            "b_stage: {b_modifiers: {StruPruneModifier: {}}}\nc_stage: {c_modifiers: {StruPruneModifier: {}}}"
        )


def test_a_replay_of_rounds_is_refused(opt, tmp_path):
    run_oneshot(str(opt), recipe=list_rounds({"allocation": CURVES}, 0.2, 0.4), output_dir=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=r"made in rounds\. Run its recipe again"):
        StruPruneModifier(replay=str(tmp_path / "out"))


def test_widths_of_later_runs_are_rounded_as_those_of_the_first(tmp_path):
    """The width before any pruning decides: 512 channels are rounded, and so are the 4xx that a first run leaves."""
    dense = save_opt(tmp_path / "dense", ffn_dim=512, num_hidden_layers=2)
    data = {"dataset": make_dataset(24), "num_calibration_samples": 24}
    fields = {"attention_unit": "none", "allocation": "uniform", **data}
    run_oneshot(str(dense), sparsity=0.1, output_dir=str(tmp_path / "first"), **fields)
    run_oneshot(str(tmp_path / "first"), sparsity=0.15, output_dir=str(tmp_path / "second"), **fields)
    rounds = [StruPruneModifier(sparsity=share, attention_unit="none", allocation="uniform") for share in (0.1, 0.3)]
    run_oneshot(str(dense), recipe=rounds, output_dir=str(tmp_path / "rounds"), **data)
    for name in ("first", "second", "rounds"):
        manifest = read_manifest(tmp_path / name)
        assert all(group.kept % 8 == 0 and group.kept < 512 for group in manifest.groups), name
        assert manifest.budget.rounding[0].because == ["width_multiple: auto"]
