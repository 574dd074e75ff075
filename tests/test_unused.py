"""No field of a recipe is passed over in silence."""

import pytest
import yaml
from conftest import ROOT, make_dataset, run_oneshot
from llmcompressor import oneshot as host_oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

from struprune_plugin import LoRARecoveryModifier, SparsityAllocatorModifier, StruPruneModifier
from struprune_plugin.data import DEMO_CALIBRATION
from struprune_plugin.modifiers.unused import _USES, check_used, list_given
from struprune_plugin.recipe import load_recipe

ADMM = {"restoration": "admm"}
UNUSED = [  # fields, and what makes them count
    ({"max_sparsity": 0.1, "allocation": "uniform"}, {"allocation": "softmax", "max_sparsity": 0.9}),
    ({"temperature": 2.0}, {"allocation": "softmax"}),
    ({"gamma": 0.5, "allocation": "softmax"}, {"allocation": "softmax_inverse"}),
    ({"rho": 2.0}, {"allocation": "softmax_inverse"}),
    ({"alpha": 2.0}, ADMM),
    ({"beta": 2.0}, ADMM),
    ({"admm_steps": 2}, ADMM),
    ({"admm_inner_steps": 2, "attention_unit": "none", **ADMM}, {"attention_unit": "head"}),
    ({"admm_learning_rate": 0.1}, ADMM),
    ({"attention_method": 1}, ADMM),
    ({"tuning_learning_rate": 0.1}, {"tuning_epochs": 1}),
    ({"as_printed": True}, {"allocation": "block_influence"}),
    ({"max_swaps": 7, "importance": "wanda"}, {"importance": "obs"}),
    ({"allocation_samples": 4, "sensitivity": "none", "allocation": "uniform"}, {"sensitivity": "fisher"}),
    ({"trial_samples": 3, "allocation": "uniform"}, {"allocation": "error_curve"}),
    ({"channel_multiple": 2, "prune_ffn": False}, {"prune_ffn": True}),
]


@pytest.mark.parametrize(("fields", "uses"), UNUSED, ids=[next(iter(fields)) for fields, _ in UNUSED])
def test_a_field_without_use_is_refused_by_name(fields, uses):
    name = next(iter(fields))
    with pytest.raises(
        ValueError, match=rf"^StruPruneModifier: {name} must be left out where the run makes no use of it"
    ):
        load_recipe(StruPruneModifier(sparsity=0.3, **fields))
    load_recipe(StruPruneModifier(sparsity=0.3, **fields | uses))


def test_every_rule_is_of_a_field_and_is_tried():
    assert _USES.keys() <= StruPruneModifier.model_fields.keys()
    assert _USES.keys() == {next(iter(fields)) for fields, _ in UNUSED}


@pytest.mark.parametrize(
    "off", [{"sensitivity": "none"}, {"rotate_values": False}, {"max_swaps": 0}, {"temperature": [0.5, 1, 2, 4, 8, 16]}]
)
def test_what_is_off_or_the_default_is_not_refused(off):
    load_recipe(StruPruneModifier(sparsity=0.3, importance="magnitude", allocation="uniform", **off))


def test_a_stage_before_rules_what_it_plans():
    """What both stages say is compared in the run; what the allocator alone has no use for is refused."""
    check_used([SparsityAllocatorModifier(sparsity=0.3, temperature=2.0), StruPruneModifier(temperature=2.0)])
    stages = [SparsityAllocatorModifier(sparsity=0.3, restoration="admm", alpha=2.0), StruPruneModifier()]
    with pytest.raises(ValueError, match=r"^SparsityAllocatorModifier: alpha must be left out"):
        check_used(stages)


def test_the_host_s_own_oneshot_refuses_too(opt):
    with pytest.raises(ValueError, match=r"StruPruneModifier: gamma must be left out"):
        host_oneshot(model=str(opt), recipe=StruPruneModifier(sparsity=0.3, gamma=0.5), dataset=make_dataset())


def test_rotary_attention_has_no_use_for_admm_s_attention(save_family):
    fields = {"sparsity": 0.3, "attention_method": 1, **ADMM}
    with pytest.raises(ValueError, match=r"attention_method must be left out .* a model without rotary positions"):
        run_oneshot(str(save_family("llama")), **fields)


@pytest.mark.parametrize("name", ["distill_weight", "distill_temperature", "distill_top_k"])
def test_distillation_s_fields_need_it(name):
    with pytest.raises(ValueError, match=f"{name} must be left out where distill is none, got"):
        LoRARecoveryModifier(**{name: 0.5 if name != "distill_top_k" else 5})
    LoRARecoveryModifier(**{name: 0.5 if name != "distill_top_k" else 5}, distill="kl")


@pytest.mark.parametrize("name", ["struprune_opt", "struprune_opt_full", "paper_asymptotic_distribute", "paper_snip"])
def test_the_saved_recipe_of_a_run_runs_again(opt, name, tmp_path):
    """It spells every field."""
    run_oneshot(str(opt), recipe=name, output_dir=str(tmp_path / "out"))
    saved = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert len(load_recipe(str(tmp_path / "out" / "recipe.yaml")).modifiers) == len(load_recipe(name).modifiers)
    assert "admm_learning_rate" in str(saved)


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda f: f.stem)
def test_shipped_recipes_hold_nothing_without_use(file):
    assert load_recipe(str(file)).modifiers


QUANTISER = {"scheme": "W8A8", "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("modifier", "message"),
    [
        (QuantizationModifier(**QUANTISER, targets=["Linearr"]), "targets must match a module .*, got 'Linearr'"),
        (QuantizationModifier(**QUANTISER, targets=["Linear", "re:.*q_prj"]), r"got 're:\.\*q_prj'"),
        (
            QuantizationModifier(scheme="W8A8", targets=["re:.*fc1"], ignore=["re:.*"]),
            "must leave a module of its targets",
        ),
        (SparseGPTModifier(sparsity=0.5, targets=["re:nothing"]), "targets must match a module .*, got 're:nothing'"),
    ],
)
def test_a_later_modifier_whose_targets_match_nothing_is_refused(opt, modifier, message):
    with pytest.raises(ValueError, match=message):
        run_oneshot(str(opt), recipe=[StruPruneModifier(sparsity=0.3), modifier])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int3"}, "precision: must be auto, .*, got 'int3'"),
        ({"dataset": str(DEMO_CALIBRATION), "splits": "train"}, "splits: must be left out for a file"),
        ({"splits": {"calibration": "train"}}, "splits: must be left out for a file"),
        ({"dataset": ["x"]}, "dataset: must be .*, got list"),
        ({"dataset": 3}, "dataset: must be .*, got int"),
    ],
)
def test_arguments_that_the_host_would_pass_over_are_refused(opt, options, message):
    with pytest.raises(ValueError, match=message):
        run_oneshot(str(opt), sparsity=0.3, **options)


def test_list_given_leaves_defaults_out():
    assert list_given(StruPruneModifier(sparsity=0.3, gamma=0.9, rho=2.0)) == {"sparsity", "rho"}
