"""Passes inside a run: what is measured once, what stages must agree on."""

import pytest
from helpers.models import run_oneshot

from struprune_plugin import LoRARecoveryModifier, SparsityAllocatorModifier, StruPruneModifier, read_manifest
from struprune_plugin.allocation import sensitivity
from struprune_plugin.paper.snip import SNIP

FEW = {"num_calibration_samples": 8}


# -- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("importance", "where", "measure"), [("obs", sensitivity, "measure_fisher"), ("snip", SNIP, "measure")]
)
def test_an_allocator_stage_hands_its_signals_on(opt, monkeypatch, importance, where, measure):
    times, inner = [], getattr(where, measure)

    def count(*args):
        times.append(1)
        return inner(*args)

    monkeypatch.setattr(where, measure, count)
    stages = [SparsityAllocatorModifier(sparsity=0.3, importance=importance), StruPruneModifier(importance=importance)]
    run_oneshot(str(opt), recipe=stages, **FEW)
    assert len(times) == 1


# -- stages that must agree ---------------------------------------------------------------------------------------


CONTRADICTIONS = [  # fields of the allocator stage, of the pruning stage, and what the refusal says
    (
        {},
        {"allocation": "uniform"},
        "allocation.rule must be 'softmax' as in the SparsityAllocatorModifier stage before",
    ),
    ({}, {"allocation": {"rule": "softmax", "temperature": 2.0}}, "temperature must be .* remove it here"),
    ({"allocation": {"rule": "softmax", "as_printed": True}}, {"allocation": "softmax"}, "as_printed must be True"),
    ({"importance": "wanda"}, {}, "importance.method must be 'wanda' .* got 'obs'. Give both stages the same value"),
    ({"weight_update": "none"}, {}, "weight_update.method must be 'none'"),
    ({"rotate_values": False}, {}, "rotate_values must be False"),
    ({}, {"sparsity": 0.2}, "sparsity must be 0.3 as in the SparsityAllocatorModifier stage before, got 0.2"),
]


@pytest.mark.parametrize(("stage", "fields", "message"), CONTRADICTIONS)
def test_fields_that_contradict_the_allocator_stage_are_refused(opt, stage, fields, message):
    stages = [SparsityAllocatorModifier(sparsity=0.3, **stage), StruPruneModifier(**fields)]
    with pytest.raises(ValueError, match=message):
        run_oneshot(str(opt), recipe=stages, **FEW)


def test_admm_after_a_least_squares_allocator_is_no_contradiction_and_the_manifest_names_the_stage(opt, tmp_path):
    stage = SparsityAllocatorModifier(
        sparsity=0.3, allocation={"rule": "softmax_inverse", "gamma": 0.8}, attention_unit="none"
    )
    fields = {"attention_unit": "none", "sensitivity": "fisher", "weight_update": {"method": "admm", "steps": 1}}
    run_oneshot(str(opt), recipe=[stage, StruPruneModifier(**fields)], output_dir=str(tmp_path / "out"), **FEW)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.settings["allocation"]["rule"] == manifest.allocation.method == "softmax_inverse"
    assert manifest.settings["allocation"]["gamma"] == 0.8


# -- recovery in a run of its own ---------------------------------------------------------------------------------


def test_recovery_of_a_pruned_folder_reaches_its_manifest(opt, tmp_path):
    run_oneshot(str(opt), sparsity=0.3, allocation="uniform", output_dir=str(tmp_path / "pruned"), **FEW)
    recovery = LoRARecoveryModifier(adapters={"rank": 2}, schedule={"epochs": 1}, holdout=None)
    run_oneshot(str(tmp_path / "pruned"), recipe=recovery, output_dir=str(tmp_path / "out"), **FEW)
    before, after = read_manifest(tmp_path / "pruned"), read_manifest(tmp_path / "out")
    assert after.recovery.settings["adapters"]["rank"] == 2
    assert after.groups == before.groups
    assert before.recovery is None
